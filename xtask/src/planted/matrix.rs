//! Shows which suites noticed which bugs.

use std::fmt;

use super::bugs::Bug;
use super::suites::Suite;
use super::trial::Outcome;

/// The outcomes, a row for each bug and a column for each suite.
pub(super) struct Matrix {
    suites: Vec<&'static str>,
    rows: Vec<Row>,
}

struct Row {
    bug: &'static str,
    outcomes: Vec<(&'static str, Outcome)>,
}

impl Matrix {
    pub(super) fn new(suites: &[&Suite]) -> Self {
        Self { suites: suites.iter().map(|suite| suite.name).collect(), rows: Vec::new() }
    }

    /// Adds the outcomes of a bug. Suites that did not run have none.
    pub(super) fn add(&mut self, bug: &Bug, outcomes: Vec<(&'static str, Outcome)>) {
        self.rows.push(Row { bug: bug.name, outcomes });
    }

    /// The bugs that some suite did not notice, with those suites.
    pub(super) fn survivors(&self) -> Vec<String> {
        self.rows.iter().filter_map(Row::survivor).collect()
    }
}

impl Row {
    /// The suites that did not notice the bug; `None` if all did.
    fn survivor(&self) -> Option<String> {
        let blind = self.outcomes.iter().filter(|(_, outcome)| !outcome.is_killed());
        let blind: Vec<&str> = blind.map(|(suite, _)| *suite).collect();
        (!blind.is_empty()).then(|| format!("{} ({})", self.bug, blind.join(", ")))
    }

    /// The letter for the outcome of a suite; a blank if it did not run.
    fn cell(&self, suite: &str) -> char {
        match self.outcomes.iter().find(|(name, _)| *name == suite) {
            None => ' ',
            Some((_, Outcome::Survived)) => 'S',
            Some((_, Outcome::TimedOut)) => 'T',
            Some((_, Outcome::Killed(_))) => 'K',
        }
    }
}

impl fmt::Display for Matrix {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let first = self.rows.iter().map(|row| row.bug.len()).max().unwrap_or_default();
        write!(formatter, "| {:first$} |", "bug")?;
        for (number, _) in (1..).zip(&self.suites) {
            write!(formatter, " {number:2} |")?;
        }
        write!(formatter, "\n|{}|{}", "-".repeat(first + 2), "----|".repeat(self.suites.len()))?;
        for row in &self.rows {
            write!(formatter, "\n| {:first$} |", row.bug)?;
            for suite in &self.suites {
                write!(formatter, "  {} |", row.cell(suite))?;
            }
        }
        formatter.write_str("\n\nK killed, S survived, T timed out, empty: not run. The suites:")?;
        for (number, suite) in (1..).zip(&self.suites) {
            write!(formatter, " {number} {suite}{}", if number == self.suites.len() { "." } else { "," })?;
        }
        let killed = self.rows.len() - self.survivors().len();
        write!(formatter, "\n{killed} of {} planted bugs are killed by each of their suites", self.rows.len())
    }
}
