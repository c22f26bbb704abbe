//! What the clones of an engine share, and how all of its parts ask the store.

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::select_ok;
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};
use tracing::Instrument as _;

use super::contract::Contract;
use super::observer::{Durations, Event, EventKind, Subject};
use super::renewal::Schedule;
use super::settings::Settings;
use super::waiters::Waiters;
use crate::machine::{Lease, OwnerOutcome, Term};
use crate::record_id::RecordId;
use crate::scope::Scope;
use crate::store::{IdempotencyStore, LeaseRenewer, StoreError, StoreErrorKind, TransactionalStore};

/// The most waiting duplicates that ask the store at once. Each needs a permit to run meanwhile, and one settlement may
/// wake a thousand of them: they must not keep other operations out.
const LOOKS_AT_ONCE: usize = 32;

/// The first and the longest pause between two tries of a verb that is repeated until the store answers.
pub(super) const FIRST_PAUSE: Duration = Duration::from_millis(50);
pub(super) const LAST_PAUSE: Duration = Duration::from_secs(2);

/// The most unanswered acquires whose late leases an engine waits for: each is a task of less than a kilobyte.
pub(super) const MOST_LATE_ACQUIRES: usize = 50_000;

/// The most of them that ask the store at once, so that they do not overrun a store that recovers.
const LATE_ACQUIRES_AT_ONCE: usize = 64;

/// The state of engines that are shut down together.
pub(super) struct Group {
    pub(super) tasks: TaskTracker,
    /// Cancelled when [`Idempotency::shutdown`](super::Idempotency::shutdown) begins: waiters are answered.
    pub(super) closing: CancellationToken,
    /// Cancelled when its time is over: settlements that the store does not take are given up.
    pub(super) giving_up: CancellationToken,
    /// The permits of operations that run, and how many there are.
    pub(super) running: Arc<Semaphore>,
    pub(super) most_running: usize,
    /// The number of settlements that continue after their answers.
    pub(super) behind: AtomicUsize,
}

impl Group {
    pub(super) fn new(most_running: usize) -> Self {
        Self {
            tasks: TaskTracker::new(),
            closing: CancellationToken::new(),
            giving_up: CancellationToken::new(),
            running: Arc::new(Semaphore::new(most_running)),
            most_running,
            behind: AtomicUsize::new(0),
        }
    }
}

/// What the clones of an engine share.
pub(super) struct Shared {
    pub(super) backend: Backend,
    pub(super) settings: Settings,
    pub(super) group: Arc<Group>,
    /// The permits to wait for late leases of unanswered acquires, and to release them.
    pub(super) late_acquires: Arc<Semaphore>,
    pub(super) late_releases: Semaphore,
    /// The permits of waiters that ask the store.
    pub(super) looks: Semaphore,
    pub(super) observer_panics: AtomicU64,
    pub(super) waiters: Arc<Waiters>,
    pub(super) renewals: Arc<Schedule>,
    /// The store's separate renewer, if it has one; set on first use.
    pub(super) renewer: OnceLock<Option<Arc<dyn LeaseRenewer>>>,
}

#[derive(Clone)]
pub(super) enum Backend {
    Leased(Arc<dyn IdempotencyStore>, Contract),
    Transactional(Arc<dyn TransactionalStore>),
}

impl Shared {
    /// Also registers the waiters with the store, which announces settlements.
    pub(super) fn new(backend: Backend, settings: Settings, group: Arc<Group>) -> Arc<Self> {
        let waiters = Arc::new(Waiters::new(settings.max_waiters_per_key, settings.max_waiters));
        let shared = Arc::new(Self {
            backend,
            settings,
            group,
            late_acquires: Arc::new(Semaphore::new(MOST_LATE_ACQUIRES)),
            late_releases: Semaphore::new(LATE_ACQUIRES_AT_ONCE),
            looks: Semaphore::new(LOOKS_AT_ONCE),
            observer_panics: AtomicU64::new(0),
            waiters,
            renewals: Arc::default(),
            renewer: OnceLock::new(),
        });
        let listener: Weak<Waiters> = Arc::downgrade(&shared.waiters);
        shared.store().on_settled(listener);
        shared
    }

    pub(super) fn contract(&self) -> Contract {
        match &self.backend {
            Backend::Leased(_, contract) => *contract,
            Backend::Transactional(_) => Contract::Transactional,
        }
    }

    pub(super) fn store(&self) -> &dyn IdempotencyStore {
        match &self.backend {
            Backend::Leased(store, _) => store.as_ref(),
            Backend::Transactional(store) => store.as_ref(),
        }
    }

    /// Renews a lease by the store's usual verb. If that fails, or does not answer soon because the operation keeps its
    /// runtime busy, the store's separate renewer is tried as well. The first success counts: repeating a renewal is
    /// safe.
    pub(super) async fn renew(
        self: &Arc<Self>,
        lease: &Lease,
        term: Term,
        home: &Handle,
    ) -> Result<OwnerOutcome, StoreError> {
        let Some(renewer) = self.renewer.get_or_init(|| self.store().renewer()) else {
            return self.store().renew(lease, term).await;
        };
        let usual = self.usual_renewal(lease.clone(), term, home).shared();
        if let Ok(Ok(outcome)) = timeout(self.settings.store_timeout / 4, usual.clone()).await {
            return Ok(outcome);
        }
        let ways = [usual.boxed(), renewer.renew(lease, term)];
        select_ok(ways).await.map(|(outcome, _slower)| outcome)
    }

    /// Renews on the runtime of the operation: a connection that is opened meanwhile serves all verbs, and stays there.
    fn usual_renewal(
        self: &Arc<Self>,
        lease: Lease,
        term: Term,
        home: &Handle,
    ) -> impl Future<Output = Result<OwnerOutcome, StoreError>> + Send + use<> {
        let shared = Arc::clone(self);
        let renewal = async move { shared.store().renew(&lease, term).await };
        let renewal = AbortOnDropHandle::new(home.spawn(renewal.in_current_span()));
        renewal.map(|answer| {
            let gone = |error| {
                let message = "a renewal ended without an answer, by a panic or with the runtime of its operation";
                Err(StoreError::new(StoreErrorKind::Unavailable, message).with_source(error))
            };
            answer.unwrap_or_else(gone)
        })
    }

    /// Awaits a verb of the store for at most the [store timeout](Settings::store_timeout).
    pub(super) async fn bounded<T>(
        &self,
        subject: &Subject,
        verb: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        let limit = self.settings.store_timeout;
        let late = |_| {
            let message = format!("the store did not answer within {limit:?}");
            StoreError::new(StoreErrorKind::Timeout, message)
        };
        let answer = timeout(limit, verb).await.map_err(late).flatten();
        if let Err(error) = &answer {
            let what = match error.kind() {
                StoreErrorKind::Busy => "no transaction was free for an operation",
                _ => "the idempotency store could not answer",
            };
            tracing::warn!(record = %subject.id, error = error as &dyn std::error::Error, "{what}");
            self.observe(subject, None, EventKind::StoreFailed(error));
        }
        answer
    }

    /// What a waiter needs to ask the store once more; never `None`, as neither semaphore is closed.
    pub(super) async fn permits_to_look(&self) -> Option<(SemaphorePermit<'_>, OwnedSemaphorePermit)> {
        let look = self.looks.acquire().await.ok()?;
        Some((look, Arc::clone(&self.group.running).acquire_owned().await.ok()?))
    }

    /// A permit for one operation to run; `None` when too many do.
    pub(super) fn permit(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.group.running).try_acquire_owned().ok()
    }

    /// Reports an event of a request to the observer.
    pub(super) fn observe(&self, subject: &Subject, attempt: Option<u32>, kind: EventKind<'_>) {
        if self.settings.observer.is_some() {
            let event = self.event(kind, &subject.scope, Some(&subject.id), attempt);
            self.tell(&Event { trace: subject.trace, ..event });
        }
    }

    pub(super) fn event<'a>(
        &self,
        kind: EventKind<'a>,
        scope: &'a Scope,
        record: Option<&'a RecordId>,
        attempt: Option<u32>,
    ) -> Event<'a> {
        let (operation, principal) = (scope.operation(), scope.principal());
        let durations = Durations::default();
        Event {
            kind,
            operation,
            principal,
            contract: self.contract(),
            record,
            attempt,
            trace: None,
            original_trace: None,
            durations,
        }
    }

    pub(super) fn tell(&self, event: &Event<'_>) {
        let Some(observer) = &self.settings.observer else { return };
        if catch_unwind(AssertUnwindSafe(|| observer.observe(event))).is_err() {
            self.observer_panics.fetch_add(1, Ordering::Relaxed);
            let record = event.record.map(tracing::field::display);
            tracing::error!(record, event = event.kind.name(), "an observer panicked; the operation goes on");
        }
    }
}
