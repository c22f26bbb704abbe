//! What everybody in a round shares.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use idem_core::{RecordId, StoreError};
use tokio::sync::watch;
use tokio::time::Instant;

/// How many keys with an owner are remembered for those who wake up late.
const RECENT: usize = 256;

/// What clients do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// All of them work.
    Work,
    /// Those of one process are as silent as if it were suspended.
    Sleep,
    /// Nobody begins anything.
    Over,
}

/// An error, and when it came.
#[derive(Debug)]
pub(super) struct Trouble {
    pub(super) at: Instant,
    pub(super) said: String,
}

/// What everybody in a round shares.
#[derive(Debug)]
pub(super) struct World {
    phase: watch::Sender<Phase>,
    facts: AtomicU64,
    book: Mutex<Book>,
}

#[derive(Debug)]
struct Book {
    last_success: Instant,
    longest_outage: Duration,
    troubles: Vec<Trouble>,
    recent: VecDeque<RecordId>,
    intruded: BTreeSet<RecordId>,
}

impl World {
    pub(super) fn new() -> Self {
        let book = Book {
            last_success: Instant::now(),
            longest_outage: Duration::ZERO,
            troubles: Vec::new(),
            recent: VecDeque::new(),
            intruded: BTreeSet::new(),
        };
        Self { phase: watch::Sender::new(Phase::Work), facts: AtomicU64::new(0), book: Mutex::new(book) }
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn enter(&self, phase: Phase) {
        self.phase.send_replace(phase);
    }

    pub(super) fn phase(&self) -> watch::Receiver<Phase> {
        self.phase.subscribe()
    }

    pub(super) fn is_over(&self) -> bool {
        *self.phase.borrow() == Phase::Over
    }

    /// How many facts were acknowledged.
    pub(super) fn facts(&self) -> u64 {
        self.facts.load(Ordering::Relaxed)
    }

    /// Counts the facts that have to last.
    pub(super) fn fact(&self, is_one: bool) {
        self.facts.fetch_add(u64::from(is_one), Ordering::Relaxed);
    }

    /// Takes what is of no interest besides the outcome: when an answer came, or what was said instead.
    pub(super) fn hear<T>(&self, answer: Result<T, StoreError>) -> Option<T> {
        let (now, mut book) = (Instant::now(), self.book());
        match answer {
            Ok(outcome) => {
                let since = now - book.last_success;
                book.longest_outage = book.longest_outage.max(since);
                book.last_success = now;
                Some(outcome)
            }
            Err(error) => {
                let said = format!("{:?}: {error}", error.kind());
                book.troubles.push(Trouble { at: now, said });
                None
            }
        }
    }

    /// A key has an owner, who was told so.
    pub(super) fn owned(&self, id: RecordId) {
        let mut book = self.book();
        book.recent.truncate(RECENT - 1);
        book.recent.push_front(id);
    }

    /// Keys that have had an owner for a short time, the newest first.
    pub(super) fn recent(&self) -> Vec<RecordId> {
        self.book().recent.iter().copied().collect()
    }

    /// Somebody was told to run a key that has an owner.
    pub(super) fn intruded(&self, id: RecordId) {
        self.book().intruded.insert(id);
    }

    /// The longest time without an answer, the errors, and the keys that were intruded upon, after it is over.
    pub(super) fn told(&self) -> (Duration, Vec<Trouble>, BTreeSet<RecordId>) {
        let mut book = self.book();
        let (troubles, intruded) = (std::mem::take(&mut book.troubles), std::mem::take(&mut book.intruded));
        (book.longest_outage, troubles, intruded)
    }
}

/// Counts errors by what they say.
pub(super) fn by_kind(troubles: &[Trouble], into: &mut BTreeMap<String, u64>) {
    for trouble in troubles {
        *into.entry(trouble.said.clone()).or_default() += 1;
    }
}
