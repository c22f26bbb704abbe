//! Duplicates that wait in this process for the run of their key.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use crate::record_id::RecordId;
use crate::store::SettlementListener;

/// Who waits for which record, bounded per record.
pub(super) struct Waiters {
    limit: usize,
    waiting: Mutex<HashMap<RecordId, Waiting>>,
}

struct Waiting {
    count: usize,
    settled: Arc<Notify>,
}

impl Waiters {
    pub(super) fn new(limit: NonZeroUsize) -> Self {
        Self { limit: limit.get(), waiting: Mutex::default() }
    }

    fn waiting(&self) -> MutexGuard<'_, HashMap<RecordId, Waiting>> {
        // Every change is one step on one entry, so a panic leaves the map whole.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a place among those who wait for `id`; `None` when they are too many.
    pub(super) fn enter(&self, id: RecordId) -> Option<Place<'_>> {
        let mut waiting = self.waiting();
        let entry = waiting.entry(id).or_insert_with(|| Waiting { count: 0, settled: Arc::default() });
        if entry.count == self.limit {
            return None;
        }
        entry.count += 1;
        Some(Place { waiters: self, id, settled: Arc::clone(&entry.settled) })
    }

    /// How many wait, for whatever.
    pub(super) fn count(&self) -> usize {
        self.waiting().values().map(|waiting| waiting.count).sum()
    }

    /// Wakes everyone who waits for `id`.
    pub(super) fn wake(&self, id: &RecordId) {
        if let Some(waiting) = self.waiting().get(id) {
            waiting.settled.notify_waiters();
        }
    }
}

/// Settlements of other processes, as far as the store is told of them.
impl SettlementListener for Waiters {
    fn settled(&self, id: &RecordId) {
        self.wake(id);
    }
}

/// A place among the waiting, given back when dropped.
pub(super) struct Place<'a> {
    waiters: &'a Waiters,
    id: RecordId,
    pub(super) settled: Arc<Notify>,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        if let Entry::Occupied(mut entry) = self.waiters.waiting().entry(self.id) {
            entry.get_mut().count -= 1;
            if entry.get().count == 0 {
                entry.remove();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_bounded_per_record_and_given_back() {
        let waiters = Waiters::new(NonZeroUsize::new(2).unwrap());
        let (one, other) = (RecordId::from_bytes([1; 32]), RecordId::from_bytes([2; 32]));
        let first = waiters.enter(one).unwrap();
        let _second = waiters.enter(one).unwrap();
        assert!(waiters.enter(one).is_none());
        assert_eq!(waiters.count(), 2);
        assert!(waiters.enter(other).is_some());
        drop(first);
        assert!(waiters.enter(one).is_some());
        assert_eq!(waiters.waiting().len(), 1, "a record that nobody waits for takes no room");
    }
}
