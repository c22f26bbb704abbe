//! Duplicates that wait in this process for the run of their key.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use crate::record_id::RecordId;
use crate::store::SettlementListener;

/// The duplicates that wait, by record; bounded per record and in all.
pub(super) struct Waiters {
    most_per_record: usize,
    most: usize,
    waiting: Mutex<ByRecord>,
}

#[derive(Default)]
struct ByRecord {
    count: usize,
    records: HashMap<RecordId, Waiting>,
}

struct Waiting {
    count: usize,
    settled: Arc<Notify>,
}

impl Waiters {
    pub(super) fn new(most_per_record: NonZeroUsize, most: NonZeroUsize) -> Self {
        Self { most_per_record: most_per_record.get(), most: most.get(), waiting: Mutex::default() }
    }

    fn waiting(&self) -> MutexGuard<'_, ByRecord> {
        // Nothing panics while it is held.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Joins the waiters of `id`; `None` when they are too many, of this record or in all.
    pub(super) fn enter(&self, id: RecordId) -> Option<Waiter<'_>> {
        let mut waiting = self.waiting();
        if waiting.count == self.most {
            return None;
        }
        let entry = waiting.records.entry(id).or_insert_with(|| Waiting { count: 0, settled: Arc::default() });
        if entry.count == self.most_per_record {
            return None;
        }
        entry.count += 1;
        let settled = Arc::clone(&entry.settled);
        waiting.count += 1;
        Some(Waiter { waiters: self, id, settled })
    }

    /// How many wait, over all records.
    pub(super) fn count(&self) -> usize {
        self.waiting().count
    }

    /// Wakes everyone who waits for `id`.
    pub(super) fn wake(&self, id: &RecordId) {
        if let Some(waiting) = self.waiting().records.get(id) {
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

/// One of those that wait, until dropped.
pub(super) struct Waiter<'a> {
    waiters: &'a Waiters,
    id: RecordId,
    pub(super) settled: Arc<Notify>,
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        let mut waiting = self.waiters.waiting();
        waiting.count -= 1;
        if let Entry::Occupied(mut entry) = waiting.records.entry(self.id) {
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
    fn places_are_bounded_per_record_and_in_all_and_given_back() {
        let waiters = Waiters::new(NonZeroUsize::new(2).unwrap(), NonZeroUsize::new(3).unwrap());
        let (one, other) = (RecordId::from_bytes([1; 32]), RecordId::from_bytes([2; 32]));
        let first = waiters.enter(one).unwrap();
        let _second = waiters.enter(one).unwrap();
        assert!(waiters.enter(one).is_none());
        assert_eq!(waiters.count(), 2);
        let third = waiters.enter(other).unwrap();
        assert!(waiters.enter(other).is_none(), "three wait in all");
        drop((first, third));
        assert!(waiters.enter(one).is_some());
        assert_eq!(waiters.count(), 1);
        assert_eq!(waiters.waiting().records.len(), 1, "a record that nobody waits for takes no room");
    }
}
