//! The hybrid store: it asks the fast store first, and the durable store decides.

use std::fmt;
use std::num::NonZeroU32;
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use idem_core::{
    Acquire, AcquireOutcome, Begin, Capabilities, Checkpoint, CountPage, DurableStore, Erase, EraseOutcome, FastStore,
    IdempotencyStore, Inspect, Inspection, Lease, LeaseRenewer, LiveRecord, Operate, OwnerOutcome, Record,
    RecordFilter, RecordId, RecordPage, Repair, RepairNote, Resolve, ResolveOutcome, ScanPosition, SelfTestError,
    Settlement, SettlementListener, StoreError, Term, TransactionalStore,
};
use tokio::time::Instant;

use crate::config::HybridConfig;
use crate::metrics::HybridMetrics;
use crate::shared::{FastDecision, Shared};
use crate::transaction::HybridTransaction;

/// How long the lock of a transaction without a lease lasts.
///
/// The key is free as soon as the process dies, so the lock must not turn callers away for much longer. Most transactions
/// end sooner; during longer ones, duplicates ask the durable store.
const TRANSACTION_LOCK: Duration = Duration::from_secs(1);

/// A durable store with a fast one in front. Clones share everything.
///
/// `D` may be a trait object: `HybridStore<dyn TransactionalStore>`. It needs a tokio runtime with time enabled.
///
/// # Cancellation safety
/// As that of the durable store. A lock that is left behind ends no later than the lease.
pub struct HybridStore<D: ?Sized> {
    pub(crate) shared: Arc<Shared<D>>,
}

/// The state of the fast store, and the counters.
#[derive(Debug)]
#[non_exhaustive]
pub struct HybridHealth {
    /// Whether the fast store works now, even if the breaker is open.
    pub fast: Result<(), StoreError>,
    /// The counters so far.
    pub metrics: HybridMetrics,
}

impl<D: DurableStore + ?Sized> HybridStore<D> {
    /// Puts `fast` in front of `durable`.
    ///
    /// If the records of `durable` [may not be copied](DurableStore::may_be_copied), the fast store keeps locks only, as
    /// [`HybridConfig::without_cache`] says, and a warning is logged.
    #[must_use]
    pub fn new(durable: Arc<D>, fast: Arc<dyn FastStore>, config: HybridConfig) -> Self {
        let config = if config.caches && !durable.may_be_copied() {
            tracing::warn!(
                "the cache of a hybrid store is off, because the records of its durable store may not be copied; to encrypt them, \
                 wrap the hybrid store in the encrypted one"
            );
            config.without_cache()
        } else {
            config
        };
        Self { shared: Arc::new(Shared::new(durable, fast, config)) }
    }

    /// The store that decides.
    #[must_use]
    pub fn durable(&self) -> &Arc<D> {
        &self.shared.durable
    }

    /// The counters since the store was made, for metrics.
    #[must_use]
    pub fn metrics(&self) -> HybridMetrics {
        self.shared.metrics()
    }

    /// Puts, reads and removes an entry in the fast store, and reads the counters. The durable store has a separate `health`.
    pub async fn health(&self) -> HybridHealth {
        HybridHealth { fast: self.shared.cache.try_out().await, metrics: self.metrics() }
    }

    /// Tests that both stores together keep the promises of one, and that the durable one keeps them alone. Reports the state of
    /// the fast store.
    ///
    /// It uses separate records (see [`idem_core::self_test`]). A fast store that does not answer is no failure.
    ///
    /// # Errors
    /// [`SelfTestError`] says which promise does not hold.
    pub async fn self_test(&self) -> Result<HybridHealth, SelfTestError> {
        idem_core::self_test(self).await?;
        // A lock in the fast store would turn the second request away, whatever the durable store says.
        let Shared { durable, cache, config, .. } = &*self.shared;
        let config = config.clone().without_locks().without_cache();
        let alone = Self::new(Arc::clone(durable), Arc::clone(cache.fast()), config);
        idem_core::self_test(&alone).await?;
        Ok(self.health().await)
    }
}

#[async_trait]
impl<D: DurableStore + ?Sized> IdempotencyStore for HybridStore<D> {
    async fn acquire(&self, request: &Acquire) -> Result<AcquireOutcome, StoreError> {
        let fast = match self.shared.ask(request).await {
            FastDecision::Given(outcome) => return Ok(outcome),
            FastDecision::Undecided(fast) => fast,
        };
        let run = self.shared.runs.ask(request, fast.seen_at);
        let outcome = self.shared.admit(request, fast, run, self.shared.durable.acquire(request)).await?;
        match &outcome {
            AcquireOutcome::Acquired(lease) => self.shared.lock(request, lease, fast, run, Duration::MAX).await,
            outcome => self.shared.learn(request, outcome, run, fast.seen_at).await,
        }
        Ok(outcome)
    }

    async fn renew(&self, lease: &Lease, term: Term) -> Result<OwnerOutcome, StoreError> {
        self.shared.renew(lease, term).await
    }

    async fn checkpoint(&self, lease: &Lease, checkpoint: &Checkpoint) -> Result<OwnerOutcome, StoreError> {
        self.shared.decide(self.shared.durable.checkpoint(lease, checkpoint)).await
    }

    async fn settle(
        &self,
        lease: &Lease,
        settlement: &Settlement,
        retention: Duration,
    ) -> Result<OwnerOutcome, StoreError> {
        let outcome = self.shared.decide(self.shared.durable.settle(lease, settlement, retention)).await?;
        self.shared.ended(lease, settlement, outcome).await;
        Ok(outcome)
    }

    async fn peek(&self, id: &RecordId) -> Result<Option<Record>, StoreError> {
        self.shared.decide(self.shared.durable.peek(id)).await
    }

    fn on_settled(&self, listener: Weak<dyn SettlementListener>) {
        self.shared.durable.on_settled(listener.clone());
        self.shared.cache.on_settled(listener);
    }

    /// The renewer of the durable store. It does not extend the lock in the fast store: when that ends, repeats ask the
    /// durable store.
    fn renewer(&self) -> Option<Arc<dyn LeaseRenewer>> {
        self.shared.durable.renewer()
    }

    fn capabilities(&self) -> Capabilities {
        let durable = self.shared.durable.capabilities();
        Capabilities::new("hybrid", durable.durability, durable.shared)
    }
}

#[async_trait]
impl<D: DurableStore + Operate + ?Sized> Operate for HybridStore<D> {
    /// The fast store answers by final answers and by locks of live runs only, so that no entry of it hides a resolution.
    async fn resolve(&self, request: &Resolve) -> Result<ResolveOutcome, StoreError> {
        self.shared.decide(self.shared.durable.resolve(request)).await
    }

    /// The fast store takes a tombstone first, which no copy of the answer can replace any more. If the fast store does not answer,
    /// nothing is erased: a copy could still be read. If the durable store then refuses the erasure, the tombstone is taken back.
    ///
    /// # Errors
    /// Also if the fast store does not answer. Clients may get 410 from then on, until the erasure is repeated or the record expires.
    ///
    /// # Cancellation safety
    /// If the future is dropped, clients may get 410 from then on. Repeat the erasure.
    async fn erase(&self, request: &Erase) -> Result<EraseOutcome, StoreError> {
        let tombstone = self.shared.begin_erasure(request).await?;
        let decision = self.shared.decide(self.shared.durable.erase(request)).await;
        match tombstone {
            Some(tombstone) => self.shared.end_erasure(&request.id, &tombstone, decision).await,
            None => decision,
        }
    }

    async fn note(&self, note: &RepairNote) -> Result<(), StoreError> {
        self.shared.durable.note(note).await
    }

    async fn repairs(&self, limit: NonZeroU32) -> Result<Vec<Repair>, StoreError> {
        self.shared.durable.repairs(limit).await
    }
}

/// The durable store answers: it has every record.
#[async_trait]
impl<D: DurableStore + Inspect + ?Sized> Inspect for HybridStore<D> {
    async fn inspect(&self, id: &RecordId) -> Result<Inspection, StoreError> {
        self.shared.durable.inspect(id).await
    }

    async fn list(
        &self,
        filter: &RecordFilter,
        from: Option<&ScanPosition>,
        limit: NonZeroU32,
    ) -> Result<RecordPage, StoreError> {
        self.shared.durable.list(filter, from, limit).await
    }

    async fn count(&self, from: Option<&ScanPosition>, limit: NonZeroU32) -> Result<CountPage, StoreError> {
        self.shared.durable.count(from, limit).await
    }
}

#[async_trait]
impl<D: DurableStore + ?Sized> DurableStore for HybridStore<D> {
    async fn live_record(&self, id: &RecordId) -> Result<Option<LiveRecord>, StoreError> {
        self.shared.decide(self.shared.durable.live_record(id)).await
    }

    fn identity(&self) -> [u8; 16] {
        self.shared.durable.identity()
    }

    fn may_be_copied(&self) -> bool {
        self.shared.durable.may_be_copied()
    }
}

#[async_trait]
impl<D: TransactionalStore + ?Sized> TransactionalStore for HybridStore<D> {
    async fn begin(&self, request: &Acquire) -> Result<Begin, StoreError> {
        let fast = match self.shared.ask(request).await {
            FastDecision::Given(outcome) => return Ok(Begin::Answered(outcome)),
            FastDecision::Undecided(fast) => fast,
        };
        let asked_at = Instant::now();
        let run = self.shared.runs.ask(request, fast.seen_at);
        match self.shared.admit(request, fast, run, self.shared.durable.begin(request)).await? {
            Begin::Acquired { lease, transaction, renew } => {
                let transaction = HybridTransaction::new(transaction, Arc::clone(&self.shared), lease.clone());
                // The lock counts from the question, and the transaction may have waited for a connection since.
                let at_most = if renew { Duration::MAX } else { TRANSACTION_LOCK + asked_at.elapsed() };
                self.shared.lock(request, &lease, fast, run, at_most).await;
                Ok(Begin::Acquired { lease, transaction: Box::new(transaction), renew })
            }
            Begin::Answered(outcome) => {
                self.shared.learn(request, &outcome, run, fast.seen_at).await;
                Ok(Begin::Answered(outcome))
            }
        }
    }
}

impl<D: ?Sized> Clone for HybridStore<D> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared) }
    }
}

impl<D: fmt::Debug + ?Sized> fmt::Debug for HybridStore<D> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("HybridStore")
            .field("durable", &self.shared.durable)
            .field("cache", &self.shared.cache)
            .field("config", &self.shared.config)
            .finish_non_exhaustive()
    }
}
