//! COMMIT gets no answer, and the record says how it ended.

use std::any::Any;
use std::num::NonZeroUsize;
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use idem_core::engine::{ExecuteError, Idempotency};
use idem_core::{
    Acquire, AcquireOutcome, Begin, Capabilities, Checkpoint, DurableStore, IdempotencyStore, Lease, LeaseRenewer,
    LiveRecord, MemoryStore, OwnerOutcome, Record, RecordId, Settlement, SettlementListener, StoreError,
    StoreErrorKind, StoreTransaction, Term, TransactionalStore, Writes,
};

use crate::support::{World, assert_ran, assert_replays, done};

/// A store that marks its records before a transaction begins. COMMIT gets no answer; by then the record is settled as this says, or
/// as the run wanted it.
#[derive(Debug, Clone)]
struct Unanswered {
    records: Arc<MemoryStore>,
    settled: Option<Settlement>,
}

#[derive(Debug)]
struct Open {
    store: Unanswered,
    lease: Lease,
}

#[async_trait]
impl StoreTransaction for Open {
    async fn finish(
        self: Box<Self>,
        settlement: &Settlement,
        retention: Duration,
        _: Writes,
    ) -> Result<OwnerOutcome, StoreError> {
        let settled = self.store.settled.as_ref().unwrap_or(settlement);
        let outcome = self.store.records.settle(&self.lease, settled, retention).await?;
        assert_eq!(outcome, OwnerOutcome::Applied);
        Err(StoreError::new(StoreErrorKind::Unavailable, "the connection ended").indeterminate())
    }

    fn as_any_mut(&mut self) -> &mut (dyn Any + Send) {
        self
    }
}

#[async_trait]
impl TransactionalStore for Unanswered {
    async fn begin(&self, request: &Acquire) -> Result<Begin, StoreError> {
        Ok(match self.records.acquire(request).await? {
            AcquireOutcome::Acquired(lease) => {
                let transaction = Box::new(Open { store: self.clone(), lease: lease.clone() });
                Begin::Acquired { lease, transaction, renew: true }
            }
            outcome => Begin::Answered(outcome),
        })
    }
}

#[async_trait]
impl DurableStore for Unanswered {
    async fn live_record(&self, id: &RecordId) -> Result<Option<LiveRecord>, StoreError> {
        self.records.live_record(id).await
    }

    fn identity(&self) -> [u8; 16] {
        self.records.identity()
    }

    fn may_be_copied(&self) -> bool {
        self.records.may_be_copied()
    }
}

#[async_trait]
impl IdempotencyStore for Unanswered {
    async fn acquire(&self, request: &Acquire) -> Result<AcquireOutcome, StoreError> {
        self.records.acquire(request).await
    }

    async fn renew(&self, lease: &Lease, term: Term) -> Result<OwnerOutcome, StoreError> {
        self.records.renew(lease, term).await
    }

    async fn checkpoint(&self, lease: &Lease, checkpoint: &Checkpoint) -> Result<OwnerOutcome, StoreError> {
        self.records.checkpoint(lease, checkpoint).await
    }

    async fn settle(
        &self,
        lease: &Lease,
        settlement: &Settlement,
        retention: Duration,
    ) -> Result<OwnerOutcome, StoreError> {
        self.records.settle(lease, settlement, retention).await
    }

    async fn peek(&self, id: &RecordId) -> Result<Option<Record>, StoreError> {
        self.records.peek(id).await
    }

    fn on_settled(&self, listener: Weak<dyn SettlementListener>) {
        self.records.on_settled(listener);
    }

    fn renewer(&self) -> Option<Arc<dyn LeaseRenewer>> {
        self.records.renewer()
    }

    fn capabilities(&self) -> Capabilities {
        self.records.capabilities()
    }
}

fn engine(world: &World, settled: Option<Settlement>) -> Idempotency {
    let records = Arc::new(MemoryStore::new(NonZeroUsize::MAX));
    Idempotency::transactional(Arc::new(Unanswered { records, settled }), world.settings())
}

#[tokio::test(start_paused = true)]
async fn a_record_with_the_settlement_of_the_run_says_that_it_was_committed() {
    let world = World::new();
    let engine = engine(&world, None);
    assert_ran(&world.run(&engine, Duration::ZERO, done()).await);
    assert_replays(&world.run(&engine, Duration::ZERO, done()).await, "paid");
    assert_eq!(world.runs(), 1);
}

/// After a deployment that changed the contract, a caller of the other version found the lease over, and settled the record. The
/// record keeps the owner of the run, whose transaction the server had rolled back.
#[tokio::test(start_paused = true)]
async fn a_record_that_another_caller_settled_does_not_say_that_the_run_was_committed() {
    let world = World::new();
    let engine = engine(&world, Some(Settlement::OutcomeUnknown));
    let unclear = world.run(&engine, Duration::ZERO, done()).await;
    assert!(matches!(unclear, Err(ExecuteError::CommitUnclear(_))), "{unclear:?}");
}
