//! The state that all tasks of a round share.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::error::Error as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use idem_core::{Lease, OwnerOutcome, RecordId, StoreError};
use tokio::sync::watch;
use tokio::time::Instant;

/// How many recent leases of each kind are kept for the process that wakes up late.
const RECENT: usize = 256;

/// The phases of a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// All clients work.
    Work,
    /// The clients of one process are silent, as if it were suspended.
    Sleep,
    /// No client begins anything.
    Over,
}

/// An error, and when it came.
#[derive(Debug)]
pub(super) struct Trouble {
    pub(super) at: Instant,
    pub(super) said: String,
}

/// The observations of a round besides the keys.
#[derive(Debug)]
pub(super) struct Told {
    /// The longest time without any answer.
    pub(super) longest_outage: Duration,
    pub(super) troubles: Vec<Trouble>,
    /// Keys that had an owner when another client was allowed to run them.
    pub(super) intruded: BTreeSet<RecordId>,
    /// Keys whose owner was answered that the lease is lost.
    pub(super) denied: BTreeSet<RecordId>,
}

/// The state that all tasks of a round share.
#[derive(Debug)]
pub(super) struct World {
    /// The number of the round.
    pub(super) round: u64,
    phase: watch::Sender<Phase>,
    facts: AtomicU64,
    book: Mutex<Book>,
}

#[derive(Debug)]
struct Book {
    last_success: Instant,
    longest_outage: Duration,
    troubles: Vec<Trouble>,
    recent: VecDeque<Lease>,
    held: VecDeque<Lease>,
    intruded: BTreeSet<RecordId>,
    denied: BTreeSet<RecordId>,
}

impl World {
    pub(super) fn new(round: u64) -> Self {
        let book = Book {
            last_success: Instant::now(),
            longest_outage: Duration::ZERO,
            troubles: Vec::new(),
            recent: VecDeque::new(),
            held: VecDeque::new(),
            intruded: BTreeSet::new(),
            denied: BTreeSet::new(),
        };
        Self { round, phase: watch::Sender::new(Phase::Work), facts: AtomicU64::new(0), book: Mutex::new(book) }
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

    /// The number of acknowledged facts.
    pub(super) fn facts(&self) -> u64 {
        self.facts.load(Ordering::Relaxed)
    }

    /// Counts a fact if `is_one`.
    pub(super) fn fact(&self, is_one: bool) {
        self.facts.fetch_add(u64::from(is_one), Ordering::Relaxed);
    }

    /// Records when an answer came, or its error, and returns the outcome.
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
                let said = format!("{:?}: {error}{}", error.kind(), cause(&error));
                book.troubles.push(Trouble { at: now, said });
                None
            }
        }
    }

    /// Records a lease that its owner got.
    pub(super) fn owned(&self, lease: Lease) {
        let mut book = self.book();
        book.recent.truncate(RECENT - 1);
        book.recent.push_front(lease);
    }

    /// Leases that were given a short time ago, the newest first.
    pub(super) fn recent(&self) -> Vec<Lease> {
        self.book().recent.iter().cloned().collect()
    }

    /// Records that another client was allowed to run a key that has an owner.
    pub(super) fn intruded(&self, id: RecordId) {
        self.book().intruded.insert(id);
    }

    /// Records a lease that will never be settled.
    pub(super) fn held(&self, lease: Lease) {
        let mut book = self.book();
        book.held.truncate(RECENT - 1);
        book.held.push_front(lease);
    }

    /// Leases that will never be settled, the newest first.
    pub(super) fn recently_held(&self) -> Vec<Lease> {
        self.book().held.iter().cloned().collect()
    }

    /// Records a renewal by an owner over a connection from before the failover.
    pub(super) fn renewed(&self, id: RecordId, outcome: OwnerOutcome) {
        if outcome == OwnerOutcome::LeaseLost {
            self.book().denied.insert(id);
        }
    }

    /// The observations, once the round is over.
    pub(super) fn told(&self) -> Told {
        let mut book = self.book();
        Told {
            longest_outage: book.longest_outage,
            troubles: std::mem::take(&mut book.troubles),
            intruded: std::mem::take(&mut book.intruded),
            denied: std::mem::take(&mut book.denied),
        }
    }
}

/// The cause of an error, without digits, so that similar errors are counted together.
fn cause(error: &StoreError) -> String {
    match error.source() {
        Some(source) => format!(" ({})", source.to_string().replace(|letter: char| letter.is_ascii_digit(), "")),
        None => String::new(),
    }
}

/// Counts errors by their text.
pub(super) fn by_kind(troubles: &[Trouble], into: &mut BTreeMap<String, u64>) {
    for trouble in troubles {
        *into.entry(trouble.said.clone()).or_default() += 1;
    }
}
