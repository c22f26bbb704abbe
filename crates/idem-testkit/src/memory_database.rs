//! A database in memory: business data and records, and transactions that change both.

use std::any::Any;
use std::collections::HashSet;
use std::fmt;
use std::num::{NonZeroU32, NonZeroUsize};
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use async_trait::async_trait;
use idem_core::memory::{Clock, SystemClock};
use idem_core::{
    Acquire, AcquireOutcome, Begin, Capabilities, Checkpoint, DurableStore, IdempotencyStore, Lease, LeaseRenewer,
    LiveRecord, MemoryStore, OwnerOutcome, Purge, Record, RecordId, Settlement, SettlementListener, StoreError,
    StoreTransaction, Term, TransactionalStore, Writes, machine,
};
use tokio::sync::OwnedMutexGuard;

/// The answer for a key whose transaction is open. A transaction has no lease.
const IN_PROGRESS: AcquireOutcome =
    AcquireOutcome::InProgress { lease_left: Duration::from_secs(1), age: Duration::ZERO };

/// A double for a database with transactions, for tests of handlers: `T` is the business data, such as a `Vec` of payments.
///
/// A handler changes a copy of the data, which becomes the data when the transaction commits. Dropping the transaction leaves
/// nothing. Clones are the same database, as for several processes.
///
/// What real databases do and this one does not: several writers at a time (here other keys wait), constraints, commits
/// that fail, and isolation levels.
pub struct MemoryDatabase<T> {
    shared: Arc<Shared<T>>,
}

struct Shared<T> {
    records: MemoryStore,
    clock: Arc<dyn Clock>,
    /// The operations whose transactions are open or wait to open.
    running: Mutex<HashSet<RecordId>>,
    data: Mutex<T>,
    writer: Arc<tokio::sync::Mutex<()>>,
}

impl<T> MemoryDatabase<T> {
    /// A database with this business data, on the system's clock.
    #[must_use]
    pub fn new(data: T) -> Self {
        Self::with_clock(data, Arc::new(SystemClock))
    }

    /// Like [`new`](Self::new), on another clock, such as a [`ManualClock`](idem_core::memory::ManualClock).
    #[must_use]
    pub fn with_clock(data: T, clock: Arc<dyn Clock>) -> Self {
        let records = MemoryStore::with_clock(NonZeroUsize::MAX, Arc::clone(&clock));
        let (running, data, writer) = (Mutex::default(), Mutex::new(data), Arc::default());
        Self { shared: Arc::new(Shared { records, clock, running, data, writer }) }
    }
}

impl<T: Clone> MemoryDatabase<T> {
    /// A copy of the committed data.
    #[must_use]
    pub fn data(&self) -> T {
        lock(&self.shared.data).clone()
    }
}

impl<T> MemoryDatabase<T> {
    /// Changes the data outside of the transactions of runs, as a handler of a leased contract does. Waits for the open transaction.
    pub async fn change<R>(&self, change: impl FnOnce(&mut T) -> R) -> R {
        let _writer = self.shared.writer.lock().await;
        change(&mut lock(&self.shared.data))
    }
}

impl<T> Clone for MemoryDatabase<T> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared) }
    }
}

impl<T> fmt::Debug for MemoryDatabase<T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("MemoryDatabase").field("records", &self.shared.records).finish_non_exhaustive()
    }
}

/// No code panics while it holds these locks, except perhaps a `clone` of the data, which leaves the data as it was.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<T> Shared<T> {
    fn is_running(&self, id: &RecordId) -> bool {
        lock(&self.running).contains(id)
    }

    async fn answer_while_running(&self, request: &Acquire) -> Result<AcquireOutcome, StoreError> {
        let before = self.records.peek(&request.id).await?;
        let (_, outcome) = machine::acquire(before.as_ref(), request, self.clock.now());
        let may_run = matches!(outcome, AcquireOutcome::Acquired(_));
        Ok(if may_run { IN_PROGRESS } else { outcome })
    }
}

/// Marks an operation as running, until dropped.
struct Running<T> {
    shared: Arc<Shared<T>>,
    id: RecordId,
}

impl<T> Running<T> {
    fn mark(shared: &Arc<Shared<T>>, id: RecordId) -> Option<Self> {
        lock(&shared.running).insert(id).then(|| Self { shared: Arc::clone(shared), id })
    }
}

impl<T> Drop for Running<T> {
    fn drop(&mut self) {
        lock(&self.shared.running).remove(&self.id);
    }
}

/// A transaction of a [`MemoryDatabase`]. It dereferences to the data as the handler has changed it so far.
pub struct MemoryTransaction<T> {
    data: T,
    request: Acquire,
    running: Running<T>,
    writer: OwnedMutexGuard<()>,
}

impl<T> Deref for MemoryTransaction<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.data
    }
}

impl<T> DerefMut for MemoryTransaction<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.data
    }
}

impl<T> fmt::Debug for MemoryTransaction<T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("MemoryTransaction").field("id", &self.request.id).finish_non_exhaustive()
    }
}

#[async_trait]
impl<T: Clone + Send + 'static> StoreTransaction for MemoryTransaction<T> {
    async fn finish(
        self: Box<Self>,
        settlement: &Settlement,
        retention: Duration,
        writes: Writes,
    ) -> Result<OwnerOutcome, StoreError> {
        let Self { data, request, running, writer } = *self;
        let shared = &running.shared;
        // The store in memory answers without waiting, so nothing comes between the record and the data.
        let AcquireOutcome::Acquired(lease) = shared.records.acquire(&request).await? else {
            return Ok(OwnerOutcome::LeaseLost);
        };
        let settled = shared.records.settle(&lease, settlement, retention).await?;
        if settled == OwnerOutcome::Applied && writes == Writes::Keep {
            *lock(&shared.data) = data;
        }
        drop(writer);
        Ok(settled)
    }

    fn as_any_mut(&mut self) -> &mut (dyn Any + Send) {
        self
    }
}

#[async_trait]
impl<T: Clone + Send + 'static> TransactionalStore for MemoryDatabase<T> {
    async fn begin(&self, request: &Acquire) -> Result<Begin, StoreError> {
        let Some(running) = Running::mark(&self.shared, request.id) else {
            return Ok(Begin::Answered(self.shared.answer_while_running(request).await?));
        };
        let records = &self.shared.records;
        let writer = Arc::clone(&self.shared.writer).lock_owned().await;
        loop {
            let before = records.peek(&request.id).await?;
            let (_, outcome) = machine::acquire(before.as_ref(), request, self.shared.clock.now());
            if let AcquireOutcome::Acquired(lease) = outcome {
                let data = self.data();
                let transaction = MemoryTransaction { data, request: request.clone(), running, writer };
                return Ok(Begin::Acquired { lease, transaction: Box::new(transaction), renew: false });
            }
            match records.acquire(request).await? {
                // A lease or a backoff has ended since.
                AcquireOutcome::Acquired(lease) => {
                    records.settle(&lease, &Settlement::Released, Duration::ZERO).await?;
                }
                outcome => return Ok(Begin::Answered(outcome)),
            }
        }
    }
}

#[async_trait]
impl<T: Send + 'static> IdempotencyStore for MemoryDatabase<T> {
    async fn acquire(&self, request: &Acquire) -> Result<AcquireOutcome, StoreError> {
        if self.shared.is_running(&request.id) {
            return self.shared.answer_while_running(request).await;
        }
        self.shared.records.acquire(request).await
    }

    async fn renew(&self, lease: &Lease, term: Term) -> Result<OwnerOutcome, StoreError> {
        self.shared.records.renew(lease, term).await
    }

    async fn checkpoint(&self, lease: &Lease, checkpoint: &Checkpoint) -> Result<OwnerOutcome, StoreError> {
        self.shared.records.checkpoint(lease, checkpoint).await
    }

    async fn settle(
        &self,
        lease: &Lease,
        settlement: &Settlement,
        retention: Duration,
    ) -> Result<OwnerOutcome, StoreError> {
        self.shared.records.settle(lease, settlement, retention).await
    }

    async fn peek(&self, id: &RecordId) -> Result<Option<Record>, StoreError> {
        self.shared.records.peek(id).await
    }

    fn on_settled(&self, listener: Weak<dyn SettlementListener>) {
        self.shared.records.on_settled(listener);
    }

    fn renewer(&self) -> Option<Arc<dyn LeaseRenewer>> {
        self.shared.records.renewer()
    }

    fn capabilities(&self) -> Capabilities {
        self.shared.records.capabilities()
    }
}

#[async_trait]
impl<T: Send + 'static> DurableStore for MemoryDatabase<T> {
    async fn live_record(&self, id: &RecordId) -> Result<Option<LiveRecord>, StoreError> {
        self.shared.records.live_record(id).await
    }

    fn identity(&self) -> [u8; 16] {
        self.shared.records.identity()
    }

    fn may_be_copied(&self) -> bool {
        true
    }
}

#[async_trait]
impl<T: Send + 'static> Purge for MemoryDatabase<T> {
    async fn purge(&self, limit: NonZeroU32) -> Result<u32, StoreError> {
        self.shared.records.purge(limit).await
    }

    async fn maintain(&self, limit: NonZeroU32) -> Result<u32, StoreError> {
        self.purge(limit).await
    }
}
