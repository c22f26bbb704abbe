//! A store in the memory of one process: for tests, and for tools that may lose their records.

use std::collections::HashMap;
use std::fmt;
use std::num::{NonZeroU32, NonZeroUsize};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use async_trait::async_trait;

mod clock;

pub use clock::{Clock, ManualClock, SystemClock};

use crate::machine::{
    self, Acquire, AcquireOutcome, Erase, EraseOutcome, Lease, OwnerAction, OwnerOutcome, Resolve, ResolveOutcome,
    Settlement, Term,
};
use crate::record::{Checkpoint, OwnerToken, Record};
use crate::record_id::RecordId;
use crate::store::{
    Capabilities, CountPage, Durability, DurableStore, IdempotencyStore, Inspect, Inspection, LeaseRenewer, LiveRecord,
    Operate, Purge, RecordCounts, RecordFilter, RecordPage, RecordSummary, Repair, RepairNote, ScanPosition,
    SettlementListener, StoreError, StoreErrorKind,
};

/// Enough that requests on different cores seldom wait for each other, few enough to walk them all in a purge.
const SHARDS: usize = 64;

/// The state machine under a lock, one lock per shard of the record ids.
///
/// Nothing survives the process. Memory is bounded: a full shard purges its expired records, and if there are none, it
/// refuses a new key with [`StoreErrorKind::Capacity`]. It never evicts a live record, because the operation would then
/// run again.
pub struct MemoryStore {
    shards: Box<[Mutex<HashMap<RecordId, Record>>]>,
    records_per_shard: usize,
    clock: Arc<dyn Clock>,
    identity: OwnerToken,
    repairs: Mutex<Vec<Repair>>,
}

impl MemoryStore {
    /// A store for at least `max_records` records, on the system's clock.
    ///
    /// The limit is kept per shard, so up to `max_records` + 64 fit; ids are digests, so the shards fill evenly.
    #[must_use]
    pub fn new(max_records: NonZeroUsize) -> Self {
        Self::with_clock(max_records, Arc::new(SystemClock))
    }

    /// The same on the caller's clock, so that tests can inject time.
    #[must_use]
    pub fn with_clock(max_records: NonZeroUsize, clock: Arc<dyn Clock>) -> Self {
        let shards = (0..SHARDS).map(|_| Mutex::default()).collect();
        let records_per_shard = max_records.get().div_ceil(SHARDS);
        Self { shards, records_per_shard, clock, identity: OwnerToken::random(), repairs: Mutex::default() }
    }

    /// How many records there are, expired ones among them.
    #[must_use]
    pub fn record_count(&self) -> usize {
        self.shards.iter().map(|shard| shard.lock().unwrap_or_else(PoisonError::into_inner).len()).sum()
    }

    fn shard(&self, id: &RecordId) -> MutexGuard<'_, HashMap<RecordId, Record>> {
        let first = usize::from(id.as_bytes()[0]);
        // A panic cannot leave a shard half changed: every change is one insert or one remove.
        self.shards[first % SHARDS].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next records in the order of ids, and where the part after them begins.
    fn part(&self, from: Option<&ScanPosition>, limit: NonZeroU32) -> (Vec<RecordSummary>, Option<ScanPosition>) {
        let is_after = |id: &RecordId| from.is_none_or(|from| id.as_bytes().as_slice() > from.as_bytes());
        let mut records = Vec::new();
        for shard in &self.shards {
            let shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            let after = shard.iter().filter(|(id, _)| is_after(id));
            records.extend(after.map(|(id, record)| RecordSummary::new(*id, None, record)));
        }
        records.sort_by_key(|record| record.id);
        let is_last = records.len() <= limit.get() as usize;
        records.truncate(limit.get() as usize);
        let next = records.last().filter(|_| !is_last).map(|record| ScanPosition::after(&record.id));
        (records, next)
    }

    fn apply(&self, lease: &Lease, action: OwnerAction<'_>) -> OwnerOutcome {
        let mut shard = self.shard(&lease.id);
        let (next, outcome) = machine::apply(shard.get(&lease.id), lease.owner, action, self.clock.now());
        put(&mut shard, lease.id, next);
        outcome
    }
}

fn put(shard: &mut HashMap<RecordId, Record>, id: RecordId, next: Option<Record>) {
    match next {
        Some(record) => shard.insert(id, record),
        None => shard.remove(&id),
    };
}

/// Removes expired records until `limit` are gone, and says how many were.
fn purge_shard(shard: &mut HashMap<RecordId, Record>, now: crate::Timestamp, limit: usize) -> usize {
    let expired = shard.iter().filter(|(_, record)| machine::current(Some(record), now).is_none());
    let expired: Vec<RecordId> = expired.map(|(id, _)| *id).take(limit).collect();
    for id in &expired {
        shard.remove(id);
    }
    expired.len()
}

#[async_trait]
impl IdempotencyStore for MemoryStore {
    async fn acquire(&self, request: &Acquire) -> Result<AcquireOutcome, StoreError> {
        let mut shard = self.shard(&request.id);
        let now = self.clock.now();
        if !shard.contains_key(&request.id)
            && shard.len() >= self.records_per_shard
            && purge_shard(&mut shard, now, usize::MAX) == 0
        {
            return Err(StoreError::new(
                StoreErrorKind::Capacity,
                "the memory store is full of live records; give it a larger limit or a shorter retention",
            ));
        }
        let before = shard.get(&request.id);
        let (next, outcome) = machine::acquire(before, request, now);
        if next.as_ref() != before {
            put(&mut shard, request.id, next);
        }
        Ok(outcome)
    }

    async fn renew(&self, lease: &Lease, term: Term) -> Result<OwnerOutcome, StoreError> {
        Ok(self.apply(lease, OwnerAction::Renew(term)))
    }

    async fn checkpoint(&self, lease: &Lease, checkpoint: &Checkpoint) -> Result<OwnerOutcome, StoreError> {
        Ok(self.apply(lease, OwnerAction::Checkpoint(checkpoint)))
    }

    async fn settle(
        &self,
        lease: &Lease,
        settlement: &Settlement,
        retention: Duration,
    ) -> Result<OwnerOutcome, StoreError> {
        Ok(self.apply(lease, OwnerAction::Settle(settlement, retention)))
    }

    async fn peek(&self, id: &RecordId) -> Result<Option<Record>, StoreError> {
        Ok(machine::current(self.shard(id).get(id), self.clock.now()).cloned())
    }

    fn on_settled(&self, _: Weak<dyn SettlementListener>) {
        // No other process settles these records, and an engine wakes its own waiters.
    }

    fn renewer(&self) -> Option<Arc<dyn LeaseRenewer>> {
        None
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::new("memory", Durability::Process, false)
    }
}

/// For tests: a record ends with the process that ran its operation.
#[async_trait]
impl DurableStore for MemoryStore {
    async fn live_record(&self, id: &RecordId) -> Result<Option<LiveRecord>, StoreError> {
        let record = self.shard(id).get(id).cloned();
        Ok(record.and_then(|record| LiveRecord::at(record, self.clock.now())))
    }

    fn identity(&self) -> [u8; 16] {
        *self.identity.as_bytes()
    }

    fn may_be_copied(&self) -> bool {
        true
    }
}

#[async_trait]
impl Operate for MemoryStore {
    async fn resolve(&self, request: &Resolve) -> Result<ResolveOutcome, StoreError> {
        let mut shard = self.shard(&request.id);
        let (next, outcome) = machine::resolve(shard.get(&request.id), request, self.clock.now());
        put(&mut shard, request.id, next);
        Ok(outcome)
    }

    async fn erase(&self, request: &Erase) -> Result<EraseOutcome, StoreError> {
        let outcome = {
            let mut shard = self.shard(&request.id);
            let (next, outcome) = machine::erase(shard.get(&request.id), request, self.clock.now());
            put(&mut shard, request.id, next);
            outcome
        };
        if let (EraseOutcome::Erased, Some(principal)) = (outcome, &request.principal) {
            let mut repairs = self.repairs.lock().unwrap_or_else(PoisonError::into_inner);
            for repair in repairs.iter_mut().filter(|repair| repair.note.record == request.id) {
                if let Some(reason) = repair.note.reason_without(principal) {
                    repair.note.reason = reason;
                }
            }
        }
        Ok(outcome)
    }

    async fn note(&self, note: &RepairNote) -> Result<(), StoreError> {
        let mut repairs = self.repairs.lock().unwrap_or_else(PoisonError::into_inner);
        match repairs.iter_mut().find(|repair| repair.note.action == note.action) {
            Some(repair) if !repair.note.is_of_the_same_repair(note) => return Err(RepairNote::action_is_taken()),
            Some(Repair { note: known, .. }) => {
                known.outcome = RepairNote::outcome_after(known.outcome.take(), note.outcome.clone());
            }
            None => repairs.push(Repair { at: self.clock.now(), note: note.clone() }),
        }
        Ok(())
    }

    async fn repairs(&self, limit: NonZeroU32) -> Result<Vec<Repair>, StoreError> {
        let repairs = self.repairs.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(repairs.iter().rev().take(limit.get() as usize).cloned().collect())
    }
}

/// It keeps no origins.
#[async_trait]
impl Inspect for MemoryStore {
    async fn inspect(&self, id: &RecordId) -> Result<Inspection, StoreError> {
        let now = self.clock.now();
        let record = machine::current(self.shard(id).get(id), now).cloned();
        Ok(Inspection { record, origin: None, runs_in_transaction: false, now })
    }

    async fn list(
        &self,
        filter: &RecordFilter,
        from: Option<&ScanPosition>,
        limit: NonZeroU32,
    ) -> Result<RecordPage, StoreError> {
        filter.expect_no_origin("memory")?;
        let now = self.clock.now();
        let (mut records, next) = self.part(from, limit);
        let scanned = records.len() as u64;
        records.retain(|record| filter.selects(record, now));
        let progress = Some(next.as_ref().map_or(1.0, ScanPosition::progress));
        Ok(RecordPage { records, scanned, unreadable: 0, next, progress, now })
    }

    async fn count(&self, from: Option<&ScanPosition>, limit: NonZeroU32) -> Result<CountPage, StoreError> {
        let now = self.clock.now();
        let (records, next) = self.part(from, limit);
        let mut counts = RecordCounts::default();
        records.iter().for_each(|record| counts.add(record, now));
        let progress = Some(next.as_ref().map_or(1.0, ScanPosition::progress));
        Ok(CountPage { counts, next, progress, now })
    }
}

#[async_trait]
impl Purge for MemoryStore {
    async fn purge(&self, limit: NonZeroU32) -> Result<u32, StoreError> {
        let now = self.clock.now();
        let mut left = limit.get();
        for shard in &self.shards {
            let mut shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            let purged = purge_shard(&mut shard, now, left as usize);
            left = left.saturating_sub(u32::try_from(purged).unwrap_or(u32::MAX));
        }
        Ok(limit.get() - left)
    }

    async fn maintain(&self, limit: NonZeroU32) -> Result<u32, StoreError> {
        self.purge(limit).await
    }
}

impl fmt::Debug for MemoryStore {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("MemoryStore")
            .field("records_per_shard", &self.records_per_shard)
            .field("clock", &self.clock)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
