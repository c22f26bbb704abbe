//! Contestants that take turns.

use std::pin::Pin;

use crate::error::Error;

/// The figures of one turn.
#[derive(Debug, Clone, Copy, Default, PartialEq, serde::Serialize)]
pub(crate) struct Sample {
    pub(crate) per_second: f64,
    /// Microseconds, if the measuring program reports them.
    pub(crate) p50: Option<f64>,
    pub(crate) p99: Option<f64>,
    /// Microseconds of the server's processor time for each request, if the server is a separate process.
    pub(crate) cpu: Option<f64>,
}

/// One turn. Its argument is its number, by which it can choose unused keys.
pub(crate) type Turn<'a> =
    Box<dyn FnMut(usize) -> Pin<Box<dyn Future<Output = Result<Sample, Error>> + Send + 'a>> + Send + 'a>;

pub(crate) struct Contestant<'a> {
    pub(crate) name: &'static str,
    pub(crate) turn: Turn<'a>,
}

impl<'a> Contestant<'a> {
    pub(crate) fn new<F, W>(name: &'static str, mut turn: F) -> Self
    where
        F: FnMut(usize) -> W + Send + 'a,
        W: Future<Output = Result<Sample, Error>> + Send + 'a,
    {
        Self { name, turn: Box::new(move |number| Box::pin(turn(number))) }
    }
}

/// All turns of all contestants.
#[derive(Debug, serde::Serialize)]
pub(crate) struct Outcome {
    pub(crate) name: String,
    pub(crate) rows: Vec<Row>,
}

#[derive(Debug, serde::Serialize)]
pub(crate) struct Row {
    pub(crate) contestant: &'static str,
    pub(crate) samples: Vec<Sample>,
}

/// The median of all rounds, and the extremes.
#[derive(Debug, Clone, Copy, serde::Serialize)]
pub(crate) struct Spread {
    pub(crate) median: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
}

impl Spread {
    pub(crate) fn of(mut values: Vec<f64>) -> Option<Self> {
        values.sort_by(f64::total_cmp);
        let (min, max) = (*values.first()?, *values.last()?);
        let (low, high) = (values.get((values.len() - 1) / 2)?, values.get(values.len() / 2)?);
        Some(Self { median: (low + high) / 2.0, min, max })
    }
}

/// Lets every contestant warm up, then gives turns in rounds: A B A B.
pub(crate) async fn hold(name: &str, rounds: usize, mut contestants: Vec<Contestant<'_>>) -> Result<Outcome, Error> {
    println!("\n{name}");
    let mut rows: Vec<Row> =
        contestants.iter().map(|contestant| Row { contestant: contestant.name, samples: Vec::new() }).collect();
    for round in 0..=rounds {
        for (contestant, row) in contestants.iter_mut().zip(&mut rows) {
            let sample =
                (contestant.turn)(round).await.map_err(|error| format!("{name}: {}: {error}", contestant.name))?;
            // The first round fills caches, opens connections, and lets files grow.
            if round > 0 {
                row.samples.push(sample);
            }
        }
    }
    let outcome = Outcome { name: name.to_owned(), rows };
    outcome.print();
    Ok(outcome)
}

impl Outcome {
    fn samples(&self, contestant: &str) -> &[Sample] {
        self.rows.iter().find(|row| row.contestant == contestant).map_or(&[], |row| &row.samples)
    }

    /// The spread of a contestant's turns, as `of` reads them.
    pub(crate) fn spread(&self, contestant: &str, of: impl Fn(&Sample) -> Option<f64>) -> Option<Spread> {
        Spread::of(self.samples(contestant).iter().filter_map(of).collect())
    }

    /// The ratio of one contestant to another one, round by round.
    pub(crate) fn ratio(&self, one: &str, other: &str, of: impl Fn(&Sample) -> Option<f64>) -> Option<Spread> {
        let pairs = self.samples(one).iter().zip(self.samples(other));
        Spread::of(pairs.filter_map(|(one, other)| Some(of(one)? / of(other)?)).collect())
    }

    pub(crate) fn print(&self) {
        println!("| contestant | per second | min – max | p50 µs | p99 µs | server's CPU µs |");
        println!("|---|---|---|---|---|---|");
        for row in &self.rows {
            let Some(rate) = self.spread(row.contestant, per_second) else { continue };
            let shown = |of: fn(&Sample) -> Option<f64>, digits: usize| {
                self.spread(row.contestant, of).map_or("–".to_owned(), |spread| format!("{:.digits$}", spread.median))
            };
            println!(
                "| {} | {:.0} | {:.0} – {:.0} | {} | {} | {} |",
                row.contestant,
                rate.median,
                rate.min,
                rate.max,
                shown(p50, 0),
                shown(p99, 0),
                shown(|sample| sample.cpu, 1)
            );
        }
    }
}

#[expect(clippy::unnecessary_wraps, reason = "as the other readings, which may be missing")]
pub(crate) fn per_second(sample: &Sample) -> Option<f64> {
    Some(sample.per_second)
}

pub(crate) fn p50(sample: &Sample) -> Option<f64> {
    sample.p50
}

pub(crate) fn p99(sample: &Sample) -> Option<f64> {
    sample.p99
}

/// The name of a figure, and how to read it from a turn.
pub(crate) type Figure = (&'static str, fn(&Sample) -> Option<f64>);

/// Prints the ratio of one contestant to the other, if both took part.
pub(crate) fn say(outcome: &Outcome, one: &str, other: &str, (figure, of): Figure) {
    if let Some(ratio) = outcome.ratio(one, other, of) {
        println!("{figure} of {one} against {other}: {:.2}x ({:.2} – {:.2})", ratio.median, ratio.min, ratio.max);
    }
}
