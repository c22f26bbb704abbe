//! Runs all cases on one server.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use crate::cases::CASES;
use crate::target::{Contract, Target};
use crate::transcript::Entry;

/// Cases that run at once. Most of them wait for something most of the time.
const AT_ONCE: usize = 8;

/// What all cases found.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct Report {
    /// The names of those that passed.
    pub passed: Vec<&'static str>,
    /// The names of those that failed, and why.
    pub failed: Vec<(&'static str, String)>,
    /// What was answered, by case.
    pub transcripts: BTreeMap<&'static str, Vec<Entry>>,
}

impl Report {
    /// How many cases passed of how many.
    #[must_use]
    pub fn score(&self) -> String {
        format!("{}/{}", self.passed.len(), CASES.len())
    }
}

/// Runs every case, a few at a time.
#[must_use]
pub fn run(address: SocketAddr, contract: Contract) -> Report {
    let (next, report) = (AtomicUsize::new(0), Mutex::new(Report::default()));
    thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                while let Some(&(name, case)) = CASES.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let target = Target::new(address, contract);
                    let outcome = catch_unwind(AssertUnwindSafe(|| case(&target)));
                    let mut report = report.lock().unwrap_or_else(PoisonError::into_inner);
                    match outcome {
                        Ok(()) => report.passed.push(name),
                        Err(panic) => report.failed.push((name, message(panic.as_ref()))),
                    }
                    report.transcripts.insert(name, target.into_transcript());
                }
            });
        }
    });
    report.into_inner().unwrap_or_else(PoisonError::into_inner)
}

fn message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
    text.unwrap_or("it panicked").to_owned()
}

/// The answers in which two reports differ, case by case.
#[must_use]
pub fn differences(one: &Report, other: &Report) -> Vec<String> {
    let mut differences = Vec::new();
    let cases: BTreeSet<_> = one.transcripts.keys().chain(other.transcripts.keys()).collect();
    for case in cases {
        let [entries, others] = [one, other].map(|report| report.transcripts.get(case).map_or(&[][..], Vec::as_slice));
        if entries.len() != others.len() {
            differences.push(format!("{case}: {} answers and {}", entries.len(), others.len()));
        }
        let pairs = entries.iter().zip(others).enumerate().filter(|(_, (one, other))| one != other);
        differences.extend(pairs.map(|(at, (one, other))| format!("{case}, answer {at}:\n{one}\n---\n{other}")));
    }
    differences
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::Answer;

    fn report(case: &'static str, answers: &[(u16, &str)]) -> Report {
        let entry = |&(status, body): &(u16, &str)| Entry::of(&Answer::new(status, Vec::new(), body.into()), "tenant");
        let transcripts = BTreeMap::from([(case, answers.iter().map(entry).collect())]);
        Report { transcripts, ..Report::default() }
    }

    #[test]
    fn answers_that_differ_are_told_and_equal_ones_are_not() {
        let one = report("case", &[(201, "a"), (201, "b")]);
        assert!(differences(&one, &report("case", &[(201, "a"), (201, "b")])).is_empty());
        for (other, count) in [
            (report("case", &[(201, "a"), (200, "b")]), 1),
            (report("case", &[(200, "a"), (201, "c")]), 2),
            (report("case", &[(201, "a")]), 1),
            (report("another", &[(201, "a"), (201, "b")]), 2),
        ] {
            assert_eq!(differences(&one, &other).len(), count);
            assert_eq!(differences(&other, &one).len(), count);
        }
    }
}
