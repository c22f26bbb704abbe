//! The store that injects faults.

use std::fmt;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use async_trait::async_trait;
use idem_core::{
    Acquire, AcquireOutcome, Begin, Capabilities, Checkpoint, DurableStore, Erase, EraseOutcome, IdempotencyStore,
    Lease, LeaseRenewer, LiveRecord, Operate, OwnerOutcome, Record, RecordId, Repair, RepairNote, Resolve,
    ResolveOutcome, Settlement, SettlementListener, StoreError, Term, TransactionalStore,
};

use super::plan::{Fault, Plan, Verb};
use super::transaction::FaultyTransaction;

/// A store whose calls fail by a script or by chance.
///
/// Without a script every call goes through. `S` may be a trait object: `FaultyStore<dyn IdempotencyStore>`. If `S` is a
/// [`TransactionalStore`], so is the wrapper. Its transactions fail by the same script ([`Verb::Finish`]), and show the
/// handler the inner transaction.
pub struct FaultyStore<S: ?Sized> {
    inner: Arc<S>,
    plan: Arc<Plan>,
    listeners: Mutex<Vec<Weak<dyn SettlementListener>>>,
}

/// The script of the stores that it wraps. Clones share the script.
#[derive(Debug, Clone, Default)]
pub struct Faults(Arc<Plan>);

impl Faults {
    /// Wraps `inner`.
    #[must_use]
    pub fn wrap<S: ?Sized>(&self, inner: Arc<S>) -> FaultyStore<S> {
        FaultyStore { inner, plan: Arc::clone(&self.0), listeners: Mutex::default() }
    }

    /// Appends `fault` to the script of `verb`.
    pub fn next(&self, verb: Verb, fault: Fault) {
        self.0.script(verb, [fault]);
    }

    /// How many faults have fired. A lost answer counts only when its call is done.
    #[must_use]
    pub fn fired(&self) -> u64 {
        self.0.fired()
    }

    /// How often `verb` was called, with or without a fault.
    #[must_use]
    pub fn calls(&self, verb: Verb) -> u64 {
        self.0.calls(verb)
    }
}

impl<S: fmt::Debug + ?Sized> fmt::Debug for FaultyStore<S> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = formatter.debug_struct("FaultyStore");
        shown.field("inner", &&*self.inner).field("plan", &self.plan).finish_non_exhaustive()
    }
}

impl<S: ?Sized> FaultyStore<S> {
    /// Wraps `inner`; nothing fails yet.
    #[must_use]
    pub fn new(inner: Arc<S>) -> Self {
        Faults::default().wrap(inner)
    }

    /// Appends `faults` to the script of `verb`: one for each of its next calls.
    #[must_use]
    pub fn script(self, verb: Verb, faults: impl IntoIterator<Item = Fault>) -> Self {
        self.plan.script(verb, faults);
        self
    }

    /// Lets one in `one_in` calls of any verb fail by one of `faults`, unless a script decides about the call. The same seed
    /// gives the same faults for the same calls.
    #[must_use]
    pub fn random(self, seed: u64, one_in: u32, faults: impl IntoIterator<Item = Fault>) -> Self {
        self.plan.random(seed, one_in, faults.into_iter().collect());
        self
    }

    /// Appends `fault` to the script of `verb`, while the store is in use.
    pub fn next(&self, verb: Verb, fault: Fault) {
        self.plan.script(verb, [fault]);
    }

    /// Tells the listeners that a record was settled, as the server of some stores does.
    pub fn announce(&self, id: &RecordId) {
        let listeners = self.listeners.lock().unwrap_or_else(PoisonError::into_inner).clone();
        listeners.iter().filter_map(Weak::upgrade).for_each(|listener| listener.settled(id));
    }

    /// Removes all scripts and random faults: from now on, calls go through.
    pub fn heal(&self) {
        self.plan.heal();
    }

    /// How many faults have fired. A lost answer counts only when its call is done.
    #[must_use]
    pub fn fired(&self) -> u64 {
        self.plan.fired()
    }

    /// How often `verb` was called, with or without a fault.
    #[must_use]
    pub fn calls(&self, verb: Verb) -> u64 {
        self.plan.calls(verb)
    }

    /// The inner store, to check what really happened.
    #[must_use]
    pub fn inner(&self) -> &Arc<S> {
        &self.inner
    }
}

#[async_trait]
impl<S: IdempotencyStore + ?Sized> IdempotencyStore for FaultyStore<S> {
    async fn acquire(&self, request: &Acquire) -> Result<AcquireOutcome, StoreError> {
        let (inner, request) = (Arc::clone(&self.inner), request.clone());
        self.plan.call(Verb::Acquire, async move { inner.acquire(&request).await }).await
    }

    async fn renew(&self, lease: &Lease, term: Term) -> Result<OwnerOutcome, StoreError> {
        let (inner, lease) = (Arc::clone(&self.inner), lease.clone());
        self.plan.call(Verb::Renew, async move { inner.renew(&lease, term).await }).await
    }

    async fn checkpoint(&self, lease: &Lease, checkpoint: &Checkpoint) -> Result<OwnerOutcome, StoreError> {
        let (inner, lease, checkpoint) = (Arc::clone(&self.inner), lease.clone(), checkpoint.clone());
        self.plan.call(Verb::Checkpoint, async move { inner.checkpoint(&lease, &checkpoint).await }).await
    }

    async fn settle(
        &self,
        lease: &Lease,
        settlement: &Settlement,
        retention: Duration,
    ) -> Result<OwnerOutcome, StoreError> {
        let (inner, lease, settlement) = (Arc::clone(&self.inner), lease.clone(), settlement.clone());
        self.plan.call(Verb::Settle, async move { inner.settle(&lease, &settlement, retention).await }).await
    }

    async fn peek(&self, id: &RecordId) -> Result<Option<Record>, StoreError> {
        let (inner, id) = (Arc::clone(&self.inner), *id);
        self.plan.call(Verb::Peek, async move { inner.peek(&id).await }).await
    }

    fn on_settled(&self, listener: Weak<dyn SettlementListener>) {
        self.listeners.lock().unwrap_or_else(PoisonError::into_inner).push(listener.clone());
        self.inner.on_settled(listener);
    }

    /// There is no separate renewer, so that renewals meet their faults.
    fn renewer(&self) -> Option<Arc<dyn LeaseRenewer>> {
        None
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }
}

#[async_trait]
impl<S: DurableStore + ?Sized> DurableStore for FaultyStore<S> {
    async fn live_record(&self, id: &RecordId) -> Result<Option<LiveRecord>, StoreError> {
        let (inner, id) = (Arc::clone(&self.inner), *id);
        self.plan.call(Verb::LiveRecord, async move { inner.live_record(&id).await }).await
    }

    fn identity(&self) -> [u8; 16] {
        self.inner.identity()
    }

    fn may_be_copied(&self) -> bool {
        self.inner.may_be_copied()
    }
}

/// Notes do not fail.
#[async_trait]
impl<S: Operate + ?Sized> Operate for FaultyStore<S> {
    async fn resolve(&self, request: &Resolve) -> Result<ResolveOutcome, StoreError> {
        let (inner, request) = (Arc::clone(&self.inner), request.clone());
        self.plan.call(Verb::Resolve, async move { inner.resolve(&request).await }).await
    }

    async fn erase(&self, request: &Erase) -> Result<EraseOutcome, StoreError> {
        let (inner, request) = (Arc::clone(&self.inner), request.clone());
        self.plan.call(Verb::Erase, async move { inner.erase(&request).await }).await
    }

    async fn note(&self, note: &RepairNote) -> Result<(), StoreError> {
        self.inner.note(note).await
    }

    async fn repairs(&self, limit: NonZeroU32) -> Result<Vec<Repair>, StoreError> {
        self.inner.repairs(limit).await
    }
}

#[async_trait]
impl<S: TransactionalStore + ?Sized> TransactionalStore for FaultyStore<S> {
    async fn begin(&self, request: &Acquire) -> Result<Begin, StoreError> {
        let (inner, request) = (Arc::clone(&self.inner), request.clone());
        Ok(match self.plan.call(Verb::Begin, async move { inner.begin(&request).await }).await? {
            Begin::Acquired { lease, transaction, renew } => {
                let transaction = Box::new(FaultyTransaction { inner: transaction, plan: Arc::clone(&self.plan) });
                Begin::Acquired { lease, transaction, renew }
            }
            answered @ Begin::Answered(_) => answered,
        })
    }
}
