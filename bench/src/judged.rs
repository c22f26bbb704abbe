//! A goal and its figure.

use serde::Serialize;

use crate::contest::Spread;

/// Which side of the figure is good.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) enum Goal {
    AtLeast(f64),
    AtMost(f64),
    Between(f64, f64),
}

impl Goal {
    pub(crate) fn is_met(self, figure: f64) -> bool {
        self.reached(figure) >= 1.0
    }

    /// How far it is reached: at 1 it is just met.
    pub(crate) fn reached(self, figure: f64) -> f64 {
        match self {
            Self::AtLeast(least) => figure / least,
            Self::AtMost(most) => most / figure,
            Self::Between(least, most) => (figure / least).min(most / figure),
        }
    }

    fn shown(self) -> String {
        match self {
            Self::AtLeast(least) => format!("≥ {least:.2}×"),
            Self::AtMost(most) => format!("≤ {most:.2}×"),
            Self::Between(least, most) => format!("{least:.2}–{most:.2}×"),
        }
    }
}

#[derive(Debug, Serialize)]
pub(crate) struct Judged {
    pub(crate) what: String,
    pub(crate) goal: Goal,
    /// `None` if it could not be measured.
    pub(crate) figure: Option<Spread>,
    pub(crate) met: bool,
}

impl Judged {
    /// A row of the table of goals.
    pub(crate) fn row(&self) -> String {
        let (figure, extremes) = self.figure.map_or(("not measured".to_owned(), "–".to_owned()), |figure| {
            (format!("{:.2}×", figure.median), format!("{:.2} – {:.2}", figure.min, figure.max))
        });
        let met = if self.met { "yes" } else { "no" };
        format!("| {} | {} | {figure} | {extremes} | {met} |", self.what, self.goal.shown())
    }
}
