//! Counters of answers and failures, and the state of the breaker.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counters since the store was made, for a bridge to a metrics library.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct HybridMetrics {
    /// Repeats that the fast store answered with the settled record, or with a mismatch.
    pub fast_replays: u64,
    /// Duplicates that the fast store turned away.
    pub fast_in_progress: u64,
    /// Repeats that got the settled record from the durable store.
    pub durable_replays: u64,
    /// Duplicates that the durable store turned away, each time that they asked.
    pub durable_in_progress: u64,
    /// Calls to the fast store that failed or timed out, background calls included.
    pub fast_failures: u64,
    /// Calls to the fast store that were skipped, since it had failed before.
    pub fast_skipped: u64,
    /// Entries that could not be decoded or authenticated.
    pub unreadable: u64,
    /// Copies of settled records that an erasure has replaced by tombstones.
    pub erased_copies: u64,
    /// Times that the breaker opened after it had been closed.
    pub opened: u64,
    /// Whether the breaker is open. It closes when the fast store has answered a caller that tried.
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
