//! Records the answers that clients got.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;

use super::service::Answer;

#[derive(Debug, Default)]
pub(super) struct Ledger(Mutex<Book>);

#[derive(Debug, Default)]
pub(super) struct Book {
    /// The first answer of each key, by its number.
    pub(super) ends: Vec<Option<End>>,
    /// Keys that got different answers, or whose operation ran more than once.
    pub(super) differing: Vec<u64>,
    pub(super) answers: BTreeMap<&'static str, u64>,
    /// Requests without a correct answer: what they got, and when they began and ended.
    pub(super) failures: Vec<Failure>,
    /// How long requests took.
    pub(super) took: BTreeMap<&'static str, Vec<f64>>,
}

#[derive(Debug, Clone)]
pub(super) struct Failure {
    pub(super) what: String,
    pub(super) began: Duration,
    pub(super) ended: Duration,
}

/// A definite answer.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct End {
    body: Bytes,
    location: Option<Bytes>,
    attempt: Option<Bytes>,
    /// Whether a client saw the first answer itself, and not only a replay.
    is_first: bool,
}

impl Ledger {
    pub(super) fn book(&self) -> MutexGuard<'_, Book> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn keys(&self) -> u64 {
        self.book().ends.len() as u64
    }

    /// A fresh key.
    pub(super) fn new_key(&self) -> u64 {
        let mut book = self.book();
        book.ends.push(None);
        book.ends.len() as u64 - 1
    }

    pub(super) fn requests(&self) -> u64 {
        let book = self.book();
        book.answers.values().sum::<u64>() + book.failures.len() as u64
    }

    pub(super) fn count(&self, what: &'static str, took: Duration) {
        let mut book = self.book();
        *book.answers.entry(what).or_default() += 1;
        book.took.entry(what).or_default().push(took.as_secs_f64() * 1_000.0);
    }

    pub(super) fn failed(&self, failure: Failure) {
        self.book().failures.push(failure);
    }

    /// Records a definite answer to `key` and compares it with the first one.
    pub(super) fn answered(&self, key: u64, answer: &Answer) {
        let field = |name: &str| answer.headers.get(name).map(|value| Bytes::copy_from_slice(value.as_bytes()));
        let is_first = field("idempotency-replayed").is_none();
        let end = End { body: answer.body.clone(), location: field("location"), attempt: field("x-attempt"), is_first };
        let mut book = self.book();
        let differs = match book.ends.get_mut(key as usize) {
            Some(Some(known)) => {
                let both_ran = known.is_first && is_first;
                known.is_first |= is_first;
                both_ran || (&known.body, &known.location, &known.attempt) != (&end.body, &end.location, &end.attempt)
            }
            Some(nothing) => {
                *nothing = Some(end);
                false
            }
            None => true,
        };
        if differs {
            book.differing.push(key);
        }
    }
}
