//! Runs all cases on one server.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use crate::cases::{CASES, Case};
use crate::exchange::Protocol;
use crate::target::{Contract, Target};
use crate::transcript::Entry;

/// The number of concurrent cases; most of their time is waiting.
const AT_ONCE: usize = 8;

/// The results of all cases.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct Report {
    /// The names of cases that passed, by protocol.
    pub passed: Vec<(Protocol, &'static str)>,
    /// The cases that failed, and why.
    pub failed: Vec<(String, String)>,
    /// The answers, by case and protocol.
    pub transcripts: BTreeMap<(&'static str, Protocol), Vec<Entry>>,
}

impl Report {
    /// How many cases passed out of how many, over HTTP/1.1 and over HTTP/2.
    #[must_use]
    pub fn score(&self) -> String {
        let of = |protocol| {
            let passed = self.passed.iter().filter(|(by, _)| *by == protocol).count();
            format!("{passed}/{}", CASES.iter().filter(|case| case.runs_over(protocol)).count())
        };
        Protocol::ALL.map(of).join(" + ")
    }

    /// The answers that differ between the protocols, by case.
    #[must_use]
    pub fn differences_of_protocols(&self) -> Vec<String> {
        let [one, other] = Protocol::ALL;
        let both = CASES.iter().filter(|case| case.only.is_none()).map(|case| case.name);
        both.flat_map(|case| differences_in(case, self.of(case, one), self.of(case, other))).collect()
    }

    fn of(&self, case: &'static str, protocol: Protocol) -> &[Entry] {
        self.transcripts.get(&(case, protocol)).map_or(&[], Vec::as_slice)
    }
}

/// Runs every case over each protocol that can express it, a few at a time.
#[must_use]
pub fn run(address: SocketAddr, contract: Contract) -> Report {
    let (next, report) = (AtomicUsize::new(0), Mutex::new(Report::default()));
    let of = |protocol| CASES.iter().filter(move |case| case.runs_over(protocol)).map(move |case| (case, protocol));
    let all: Vec<(&Case, Protocol)> = Protocol::ALL.into_iter().flat_map(of).collect();
    thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                while let Some(&(case, protocol)) = all.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let target = Target::new(address, contract, protocol);
                    let outcome = catch_unwind(AssertUnwindSafe(|| (case.run)(&target)));
                    let mut report = report.lock().unwrap_or_else(PoisonError::into_inner);
                    match outcome {
                        Ok(()) => report.passed.push((protocol, case.name)),
                        Err(panic) => {
                            let name = format!("{} over {}", case.name, protocol.name());
                            report.failed.push((name, message(panic.as_ref())));
                        }
                    }
                    report.transcripts.insert((case.name, protocol), target.into_transcript());
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

/// The answers that differ between two reports, by case.
#[must_use]
pub fn differences(one: &Report, other: &Report) -> Vec<String> {
    let mut differences = Vec::new();
    let cases: BTreeSet<_> = one.transcripts.keys().chain(other.transcripts.keys()).collect();
    for &(case, protocol) in cases {
        let name = format!("{case} over {}", protocol.name());
        differences.extend(differences_in(&name, one.of(case, protocol), other.of(case, protocol)));
    }
    differences
}

fn differences_in(name: &str, entries: &[Entry], others: &[Entry]) -> Vec<String> {
    let counts =
        (entries.len() != others.len()).then(|| format!("{name}: {} answers and {}", entries.len(), others.len()));
    let pairs = entries.iter().zip(others).enumerate().filter(|(_, (one, other))| one != other);
    let pairs = pairs.map(|(at, (one, other))| format!("{name}, answer {at}:\n{one}\n---\n{other}"));
    counts.into_iter().chain(pairs).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::Answer;

    fn report(case: &'static str, answers: &[(u16, &str)]) -> Report {
        let entry = |&(status, body): &(u16, &str)| Entry::of(&Answer::new(status, Vec::new(), body.into()), "tenant");
        let transcripts = BTreeMap::from([((case, Protocol::Http1), answers.iter().map(entry).collect())]);
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
