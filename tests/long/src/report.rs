//! The results of a check: text for people, a line of JSON for programs.

use serde_json::{Map, Value};

/// Whether everything required holds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Passed(pub(crate) bool);

/// The facts of one check, and the conditions that failed.
#[derive(Debug)]
pub(crate) struct Report {
    facts: Map<String, Value>,
    failures: Vec<String>,
}

impl Report {
    pub(crate) fn new(check: &str, server: &str) -> Self {
        let mut report = Self { facts: Map::new(), failures: Vec::new() };
        report.note("check", check);
        report.note("server", server);
        report
    }

    /// Records a fact that the text shows elsewhere.
    pub(crate) fn note(&mut self, name: &str, value: impl Into<Value>) {
        self.facts.insert(name.to_owned(), value.into());
    }

    /// Records a fact and prints it on one line.
    pub(crate) fn fact(&mut self, name: &str, value: impl Into<Value>) {
        let value = value.into();
        println!("  {}: {value}", name.replace('_', " "));
        self.note(name, value);
    }

    /// Records and prints a failure, unless the condition holds.
    pub(crate) fn expect(&mut self, holds: bool, otherwise: impl Into<String>) {
        if !holds {
            let failure = otherwise.into();
            println!("  FAILED: {failure}");
            self.failures.push(failure);
        }
    }

    /// Prints the line of JSON.
    pub(crate) fn finish(mut self) -> Passed {
        let passed = self.failures.is_empty();
        self.note("passed", passed);
        let failures = std::mem::take(&mut self.failures);
        self.note("failures", failures);
        println!("{}", Value::Object(self.facts));
        Passed(passed)
    }
}

/// The value below which `share` of the sorted values are; 0 when there are none.
pub(crate) fn percentile(sorted: &[f64], share: f64) -> f64 {
    let last = sorted.len().saturating_sub(1);
    sorted.get((last as f64 * share).round() as usize).copied().unwrap_or_default()
}

/// Rounds a number for people and for JSON.
pub(crate) fn rounded(value: f64, digits: i32) -> f64 {
    let unit = 10_f64.powi(digits);
    (value * unit).round() / unit
}
