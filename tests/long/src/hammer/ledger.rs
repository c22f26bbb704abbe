//! Records the answers that clients got.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use idem_core::{Replay, ReplayKind, StoredResponse};

/// A definite answer.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct End {
    pub(super) kind: ReplayKind,
    pub(super) response: StoredResponse,
}

impl From<Replay> for End {
    fn from(replay: Replay) -> Self {
        Self { kind: replay.kind, response: replay.response }
    }
}

/// The answers so far.
#[derive(Debug, Default)]
pub(super) struct Ledger(Mutex<Book>);

#[derive(Debug, Default)]
pub(super) struct Book {
    /// The first definite answer of each key, by the number of the key.
    pub(super) ends: Vec<Option<End>>,
    /// Keys that got different answers.
    pub(super) differing: Vec<u64>,
    pub(super) counts: BTreeMap<&'static str, u64>,
    pub(super) errors: BTreeMap<String, u64>,
    /// The longest time from the first request of an operation to its definite answer.
    pub(super) slowest: Duration,
    pub(super) slowest_key: u64,
}

impl Ledger {
    pub(super) fn book(&self) -> MutexGuard<'_, Book> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of keys.
    pub(super) fn keys(&self) -> u64 {
        self.book().ends.len() as u64
    }

    /// A fresh key.
    pub(super) fn new_key(&self) -> u64 {
        let mut book = self.book();
        book.ends.push(None);
        book.ends.len() as u64 - 1
    }

    pub(super) fn count(&self, what: &'static str) {
        *self.book().counts.entry(what).or_default() += 1;
    }

    pub(super) fn error(&self, kind: String) {
        *self.book().errors.entry(kind).or_default() += 1;
    }

    /// Records a definite answer to `key` and compares it with the first one.
    pub(super) fn answered(&self, key: u64, end: &End, after: Duration) {
        let mut book = self.book();
        if after > book.slowest {
            (book.slowest, book.slowest_key) = (after, key);
        }
        let differs = match book.ends.get_mut(key as usize) {
            Some(Some(first)) => first != end,
            Some(nothing) => {
                *nothing = Some(end.clone());
                false
            }
            None => true,
        };
        if differs {
            book.differing.push(key);
        }
    }
}
