//! The store: the fast one is asked first, and the durable one decides.

use std::fmt;
use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use idem_core::{
    Acquire, AcquireOutcome, Begin, Capabilities, Checkpoint, DurableStore, FastStore, IdempotencyStore, Lease, Look,
    OwnerOutcome, Record, RecordId, SelfTestError, Settlement, SettlementListener, StoreError, Term, Timestamp,
    TransactionalStore,
};
use tokio::runtime::Handle;
use tokio::sync::Semaphore;

use crate::config::HybridConfig;
use crate::entry::Entry;
use crate::front::{Front, Sight};
use crate::metrics::{Counter, HybridMetrics};
use crate::runs::{Asked, Runs};
use crate::transaction::HybridTransaction;

/// How long the lock of a transaction lasts that needs no lease: its key is free as soon as its process dies, and nobody
/// should be turned away for much longer. Most transactions end sooner; for the others, the durable store has to be asked.
const TRANSACTION_LOCK: Duration = Duration::from_secs(1);

/// How many records are brought up to date in the fast store at once, behind the callers' backs. What is too much is left
/// to whoever misses it.
const BEHIND: usize = 1024;

/// The pauses between tries to do so: as long as the default lease in all, after which a lock is over by itself.
const PAUSES: [Duration; 5] = [
    Duration::from_secs(1),
    Duration::from_secs(2),
    Duration::from_secs(4),
    Duration::from_secs(8),
    Duration::from_secs(15),
];

/// A durable store with a fast one in front. Clones share everything.
///
/// `D` may be a trait object: `HybridStore<dyn TransactionalStore>`. It needs a tokio runtime with time enabled.
///
/// # Cancellation safety
/// As that of the durable store. A lock that is left behind is over after its short life.
pub struct HybridStore<D: ?Sized> {
    pub(crate) shared: Arc<Shared<D>>,
}

pub(crate) struct Shared<D: ?Sized> {
    front: Front,
    config: HybridConfig,
    durable_fails: AtomicBool,
    durable_replays: Counter,
    durable_in_progress: Counter,
    runs: Runs,
    behind: Arc<Semaphore>,
    durable: Arc<D>,
}

/// How the two stores are.
#[derive(Debug)]
#[non_exhaustive]
pub struct HybridHealth {
    /// Whether the fast store answers now, whatever the breaker says.
    pub fast: Result<(), StoreError>,
    /// What was spared and what went wrong so far.
    pub metrics: HybridMetrics,
}

/// What came of asking the fast store.
enum Answer {
    Given(AcquireOutcome),
    /// The other store has to say. With the fast one's time, if it answered.
    Undecided(Option<Timestamp>),
}

impl<D: DurableStore + ?Sized> HybridStore<D> {
    /// Puts `fast` in front of `durable`.
    #[must_use]
    pub fn new(durable: Arc<D>, fast: Arc<dyn FastStore>, config: HybridConfig) -> Self {
        let shared = Shared {
            front: Front::new(fast, config.patience),
            config,
            durable_fails: AtomicBool::new(false),
            durable_replays: Counter::default(),
            durable_in_progress: Counter::default(),
            runs: Runs::default(),
            behind: Arc::new(Semaphore::new(BEHIND)),
            durable,
        };
        Self { shared: Arc::new(shared) }
    }

    /// The store that decides.
    #[must_use]
    pub fn durable(&self) -> &Arc<D> {
        &self.shared.durable
    }

    /// Counters, for metrics.
    #[must_use]
    pub fn metrics(&self) -> HybridMetrics {
        let Shared { front, durable_replays, durable_in_progress, .. } = &*self.shared;
        front.metrics(durable_replays.total(), durable_in_progress.total())
    }

    /// How the fast store is; the durable one has a `health` of its own.
    pub async fn health(&self) -> HybridHealth {
        // Of no record.
        let id = RecordId::from_bytes([0; 32]);
        HybridHealth { fast: self.shared.front.try_out(&id).await, metrics: self.metrics() }
    }

    /// Proves that both stores together keep the promises of one, on a record of its own (see [`idem_core::self_test`]),
    /// and says how the fast one is: that it does not answer is no failure.
    ///
    /// # Errors
    /// [`SelfTestError`] says which promise does not hold.
    pub async fn self_test(&self) -> Result<HybridHealth, SelfTestError> {
        idem_core::self_test(self).await?;
        Ok(self.health().await)
    }
}

impl<D: DurableStore + ?Sized> Shared<D> {
    /// Asks the fast store.
    async fn ask(&self, request: &Acquire) -> Answer {
        let Some(sight) = self.front.look(&request.id).await else { return Answer::Undecided(None) };
        match sight.answer(request) {
            Some(outcome) if self.may_answer(&sight) => {
                self.front.answered(&outcome);
                Answer::Given(outcome)
            }
            _ => Answer::Undecided(Some(sight.now)),
        }
    }

    fn may_answer(&self, sight: &Sight) -> bool {
        if sight.entry.as_ref().is_some_and(Entry::is_lock) {
            return self.config.locks;
        }
        let may_replay = self.config.replays_while_durable_fails || !self.durable_fails.load(Ordering::Relaxed);
        self.config.caches && may_replay
    }

    /// Asks the durable store, and keeps in mind whether it answers.
    pub(crate) async fn decide<T>(&self, verb: impl Future<Output = Result<T, StoreError>>) -> Result<T, StoreError> {
        let answer = verb.await;
        self.durable_fails.store(answer.is_err(), Ordering::Relaxed);
        answer
    }

    /// Puts the lock of a run in place. It lasts as long as the lease, and `at_most` as long as said.
    async fn lock(&self, request: &Acquire, lease: &Lease, asked: Asked, at_most: Duration) {
        if let Some(asked_at) = asked.at.filter(|_| self.config.locks) {
            let entry = Entry::lock(request, lease, asked_at, asked.lease.min(at_most));
            self.front.put(&request.id, &entry).await;
        }
    }

    /// Keeps what the durable store answered to somebody who does not run.
    fn learn(self: &Arc<Self>, request: &Acquire, outcome: &AcquireOutcome, asked: Asked, seen_at: Option<Timestamp>) {
        // An owner that asks for something else does not lose what it has.
        if asked.is_new || !matches!(outcome, AcquireOutcome::Mismatch { .. }) {
            self.runs.forget(&request.id, &request.owner);
        }
        match outcome {
            AcquireOutcome::Replay(_) => {
                self.durable_replays.count();
                if self.config.caches {
                    self.catch_up(request.id, seen_at, None, true);
                }
            }
            AcquireOutcome::InProgress { .. } => self.durable_in_progress.count(),
            _ => {}
        }
    }

    /// Lets the fast store know that a run has ended. The lock of whoever has lost its lease is over, or is another's.
    pub(crate) async fn ended(self: &Arc<Self>, lease: &Lease, settlement: &Settlement, outcome: OwnerOutcome) {
        self.runs.forget(&lease.id, &lease.owner);
        if outcome == OwnerOutcome::LeaseLost {
            return;
        }
        let seen_at = self.front.unlock(&lease.id, lease.attempt).await;
        let is_final = !matches!(settlement, Settlement::Released | Settlement::FailedRetryable { .. });
        let copies = is_final && self.config.caches;
        if copies || (seen_at.is_none() && self.config.locks) {
            self.catch_up(lease.id, seen_at, Some(lease.attempt), copies);
        }
    }

    /// The run's lock shall go, behind the caller's back.
    pub(crate) fn unlock_behind(self: &Arc<Self>, lease: &Lease) {
        self.runs.forget(&lease.id, &lease.owner);
        if self.config.locks {
            self.catch_up(lease.id, None, Some(lease.attempt), false);
        }
    }

    /// Brings the fast store up to date behind the caller's back: without the lock of `attempt`, and, where it `copies`,
    /// with a copy of the settled record. `seen_at` is when the lock was removed, if it was.
    fn catch_up(self: &Arc<Self>, id: RecordId, seen_at: Option<Timestamp>, attempt: Option<u32>, copies: bool) {
        let (Ok(place), Ok(runtime)) = (Arc::clone(&self.behind).try_acquire_owned(), Handle::try_current()) else {
            return;
        };
        let shared = Arc::clone(self);
        runtime.spawn(async move {
            let _place = place;
            let mut seen_at = seen_at;
            let mut pauses = PAUSES.into_iter();
            loop {
                seen_at = match (seen_at, attempt) {
                    (None, Some(attempt)) => shared.front.unlock(&id, attempt).await,
                    (seen_at, _) => seen_at,
                };
                match seen_at {
                    Some(_) if !copies => return,
                    Some(seen_at) if shared.copy(&id, seen_at).await => return,
                    _ => {}
                }
                // Whoever only missed a copy will miss it again.
                let Some(pause) = pauses.next().filter(|_| attempt.is_some()) else { return };
                tokio::time::sleep(pause).await;
            }
        });
    }

    /// Puts a copy of the record in place if it is settled; `false` when it should be tried again.
    async fn copy(&self, id: &RecordId, seen_at: Timestamp) -> bool {
        let Ok(look) = self.decide(self.durable.look(id)).await else { return false };
        match look.and_then(|look| Entry::settled(look, seen_at)) {
            Some(entry) => self.front.put(id, &entry).await,
            None => true,
        }
    }
}

#[async_trait]
impl<D: DurableStore + ?Sized> IdempotencyStore for HybridStore<D> {
    async fn acquire(&self, request: &Acquire) -> Result<AcquireOutcome, StoreError> {
        let seen_at = match self.shared.ask(request).await {
            Answer::Given(outcome) => return Ok(outcome),
            Answer::Undecided(seen_at) => seen_at,
        };
        let asked = self.shared.runs.ask(request, seen_at);
        let outcome = self.shared.decide(self.shared.durable.acquire(request)).await?;
        match &outcome {
            AcquireOutcome::Acquired(lease) => self.shared.lock(request, lease, asked, Duration::MAX).await,
            outcome => self.shared.learn(request, outcome, asked, seen_at),
        }
        Ok(outcome)
    }

    async fn renew(&self, lease: &Lease, term: Term) -> Result<OwnerOutcome, StoreError> {
        let sight = match self.shared.config.locks {
            true => self.shared.front.look(&lease.id).await,
            false => None,
        };
        let outcome = self.shared.decide(self.shared.durable.renew(lease, term)).await?;
        if outcome == OwnerOutcome::Applied {
            self.shared.runs.renew(&lease.id, &lease.owner, sight.as_ref().map(|sight| sight.now), term.lease);
            if let Some(Sight { now, entry: Some(entry) }) = sight
                && let Some(entry) = entry.renewed(lease, now, term.lease)
            {
                self.shared.front.put(&lease.id, &entry).await;
            }
        }
        Ok(outcome)
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
        self.shared.front.on_settled(listener);
    }

    fn capabilities(&self) -> Capabilities {
        let durable = self.shared.durable.capabilities();
        Capabilities::new("hybrid", durable.durability, durable.shared)
    }
}

#[async_trait]
impl<D: DurableStore + ?Sized> DurableStore for HybridStore<D> {
    async fn look(&self, id: &RecordId) -> Result<Option<Look>, StoreError> {
        self.shared.decide(self.shared.durable.look(id)).await
    }
}

#[async_trait]
impl<D: TransactionalStore + ?Sized> TransactionalStore for HybridStore<D> {
    async fn begin(&self, request: &Acquire) -> Result<Begin, StoreError> {
        let seen_at = match self.shared.ask(request).await {
            Answer::Given(outcome) => return Ok(Begin::Answered(outcome)),
            Answer::Undecided(seen_at) => seen_at,
        };
        let asked = self.shared.runs.ask(request, seen_at);
        match self.shared.decide(self.shared.durable.begin(request)).await? {
            Begin::Acquired { lease, transaction, renew } => {
                let transaction = HybridTransaction::new(transaction, Arc::clone(&self.shared), lease.clone());
                let at_most = if renew { Duration::MAX } else { TRANSACTION_LOCK };
                self.shared.lock(request, &lease, asked, at_most).await;
                Ok(Begin::Acquired { lease, transaction: Box::new(transaction), renew })
            }
            Begin::Answered(outcome) => {
                self.shared.learn(request, &outcome, asked, seen_at);
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
            .field("front", &self.shared.front)
            .field("config", &self.shared.config)
            .finish_non_exhaustive()
    }
}
