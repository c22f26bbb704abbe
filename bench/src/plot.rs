//! The plots of `docs/performance.md`.

use std::path::Path;

use plotters::prelude::*;

use crate::contest::{Outcome, Spread, per_second};
use crate::error::Error;
use crate::judged::Judged;

const OURS: RGBColor = RGBColor(0x1f, 0x77, 0xb4);
const OTHERS: RGBColor = RGBColor(0xa0, 0xa0, 0xa0);
const ROW: u32 = 34;

/// Room for the names of contestants, and for those of goals, which are sentences.
const NAMES: u32 = 300;
const SENTENCES: u32 = 600;
/// Room for the bars, and for the text behind the longest.
const BARS: u32 = 350;
const SHOWN: u32 = 110;

/// A bar for the rate of each contestant.
pub(crate) fn contest(folder: &Path, outcome: &Outcome) -> Result<(), Error> {
    let bars =
        outcome.rows.iter().filter_map(|row| Some((row.contestant, outcome.spread(row.contestant, per_second)?)));
    let bars: Vec<(&str, Spread)> = bars.collect();
    let ours = |name: &str| matches!(name, "idem" | "memory" | "postgres" | "actix-memory" | "hybrid");
    let rows: Vec<Bar> = bars
        .iter()
        .map(|(name, spread)| Bar {
            label: (*name).to_owned(),
            spread: *spread,
            colour: if ours(name) { OURS } else { OTHERS },
            shown: format!("{:.0}/s", spread.median),
        })
        .collect();
    let file = outcome.name.chars().map(|character| if character.is_alphanumeric() { character } else { '-' });
    let file = file.collect::<String>().to_lowercase();
    draw(&folder.join(format!("{file}.svg")), &outcome.name, NAMES, None, &rows)
}

/// How far each goal is reached. A goal beyond the line at 1 is met, whichever side of the figure is good.
pub(crate) fn goals(path: &Path, goals: &[Judged]) -> Result<(), Error> {
    let bar = |judged: &Judged| {
        let figure = judged.figure?;
        let reached = [figure.median, figure.min, figure.max].map(|figure| judged.goal.reached(figure));
        let [median, one, other] = reached;
        Some(Bar {
            label: judged.what.clone(),
            // If a figure can be too small and too large, both extremes may be on the wrong side.
            spread: Spread { median, min: one.min(other).min(median), max: one.max(other).max(median) },
            colour: if judged.met { OURS } else { OTHERS },
            shown: format!("{:.2}×", figure.median),
        })
    };
    let rows: Vec<Bar> = goals.iter().filter_map(bar).collect();
    draw(path, "Goals: how far each is reached, and the figure", SENTENCES, Some(1.0), &rows)
}

struct Bar {
    label: String,
    spread: Spread,
    colour: RGBColor,
    shown: String,
}

fn draw(path: &Path, title: &str, left: u32, line: Option<f64>, bars: &[Bar]) -> Result<(), Error> {
    let rows = u32::try_from(bars.len())?;
    let most = bars.iter().map(|bar| bar.spread.max).chain(line).fold(f64::MIN_POSITIVE, f64::max);
    let height = 48 + rows * ROW;
    let drawing = SVGBackend::new(path, (left + BARS + SHOWN, height)).into_drawing_area();
    let failed = |error: &dyn std::fmt::Display| Error::from(format!("{}: {error}", path.display()));
    drawing.fill(&WHITE).map_err(|error| failed(&error))?;
    let text = ("sans-serif", 15).into_font();
    drawing
        .draw(&Text::new(title.to_owned(), (12, 12), ("sans-serif", 18).into_font()))
        .map_err(|error| failed(&error))?;
    let left = i32::try_from(left)?;
    let along = |value: f64| left + (f64::from(BARS) * value / most) as i32;
    for (row, bar) in (0_i32..).zip(bars) {
        let top = 44 + row * ROW as i32;
        let middle = top + 9;
        let shapes: [(i32, i32); 2] = [(left, top), (along(bar.spread.median), top + 18)];
        drawing.draw(&Rectangle::new(shapes, bar.colour.filled())).map_err(|error| failed(&error))?;
        let extremes = vec![(along(bar.spread.min), middle), (along(bar.spread.max), middle)];
        drawing.draw(&PathElement::new(extremes, BLACK)).map_err(|error| failed(&error))?;
        drawing.draw(&Text::new(bar.label.clone(), (12, top + 2), text.clone())).map_err(|error| failed(&error))?;
        let shown = Text::new(bar.shown.clone(), (along(bar.spread.max) + 8, top + 2), text.clone());
        drawing.draw(&shown).map_err(|error| failed(&error))?;
    }
    if let Some(line) = line {
        let line = vec![(along(line), 40), (along(line), i32::try_from(height)?)];
        drawing.draw(&PathElement::new(line, BLACK)).map_err(|error| failed(&error))?;
    }
    drawing.present().map_err(|error| failed(&error))
}
