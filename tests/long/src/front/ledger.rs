//! What clients were answered.

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
    /// Keys whose answers were not the same, or whose operation ran more than once.
    pub(super) differing: Vec<u64>,
    pub(super) answers: BTreeMap<&'static str, u64>,
    /// Requests without a correct answer: what they got, and from when to when they were under way.
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
    /// Whether the first answer itself was seen, and not only a replay of it.
    is_first: bool,
}

impl Ledger {
    pub(super) fn book(&self) -> MutexGuard<'_, Book> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn keys(&self) -> u64 {
        self.book().ends.len() as u64
    }

    /// A key that nobody has used.
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

    /// A definite answer to `key`: the first one, or the same as that.
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
