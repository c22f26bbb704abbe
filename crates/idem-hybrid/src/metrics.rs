//! What was spared, and what went wrong on the way.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counters since the store was made, for a bridge to a metrics library.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct HybridMetrics {
    /// Repeats that the fast store answered with the settled record, the wrong ones with a mismatch.
    pub fast_replays: u64,
    /// Duplicates that the fast store turned away.
    pub fast_in_progress: u64,
    /// Repeats that got the settled record from the durable store.
    pub durable_replays: u64,
    /// Duplicates that the durable store turned away, each time that they asked.
    pub durable_in_progress: u64,
    /// Times that the fast store failed, or was too slow, whoever asked it for whatever.
    pub fast_failures: u64,
    /// Times that the fast store was not asked, since it had failed before.
    pub fast_skipped: u64,
    /// Entries that were no such.
    pub unreadable: u64,
    /// Times that the breaker opened after it had been closed.
    pub opened: u64,
    /// Whether the breaker is open. It is until the fast store has answered somebody who tried.
    pub is_open: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn count(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn total(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
