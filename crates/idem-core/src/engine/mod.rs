//! Runs any asynchronous operation under a contract: acquire, run, renew, settle, and only then answer.
//!
//! ```
//! use std::{num::NonZeroUsize, sync::Arc};
//! use idem_core::engine::{Idempotency, Operation, Settings};
//! use idem_core::{Fingerprint, MemoryStore, Scope};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let store = Arc::new(MemoryStore::new(NonZeroUsize::new(10_000).unwrap()));
//! let idempotency = Idempotency::at_least_once(store, Settings::new());
//! let order = br#"{"order":7}"#;
//! let operation = || -> Result<_, idem_core::KeyError> {
//!     let fingerprint = Fingerprint::of_json("ship", order);
//!     Ok(Operation::new(Scope::new("acme", "ship"), "message-4711".parse()?, fingerprint))
//! };
//! let first = idempotency.run(operation()?, |_| async { Ok::<_, std::io::Error>("shipped".to_owned()) }).await?;
//! let again = idempotency.run(operation()?, |_| async { Ok::<_, std::io::Error>("twice!".to_owned()) }).await?;
//! assert_eq!((first.value.as_str(), first.replayed), ("shipped", false));
//! assert_eq!((again.value.as_str(), again.replayed), ("shipped", true));
//! # Ok(())
//! # }
//! ```
//!
//! Everything between the acquire and the settlement happens in a separate task, or moves to one if the caller goes
//! away (see [`default_runtime`](Idempotency::default_runtime)). So a caller that disconnects does not cancel the
//! operation, and its retry gets the replay.
//!
//! What the application runs, the operation or the probe before it, has a tracing span inside the caller's: `idempotent_operation`, with
//! the id of the record. It is of the level `debug` and the target `idem_core::operation`. Warnings, errors and the event `decided` name
//! the record themselves, and the event its operation. The verbs of the store run in the caller's span.

mod admit;
mod answer;
mod ask;
mod attended;
mod context;
mod contract;
mod execute;
mod granted;
mod hold;
mod late_acquires;
mod observer;
mod probe;
mod purger;
mod renewal;
mod run;
mod settings;
mod settle;
mod shared;
mod steps;
mod waiters;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::runtime::Handle;

pub use answer::{Answer, ExecuteError};
pub use context::{CheckpointError, Context, TransactionError, TransactionGuard};
pub use contract::{Conclusion, Contract, Disposition, ErrorMeaning};
pub use observer::{Durations, Event, EventKind, Observer};
pub use probe::{CrashedRun, Probe, ProbeOutcome};
pub use purger::{Purger, PurgerSettings};
pub use run::{Ran, RunError};
pub use settings::Settings;
pub use steps::{StandingStep, Step, StepError, StepRecord, StepToUndo, Steps};

use crate::fingerprint::Fingerprint;
use crate::key::IdempotencyKey;
use crate::machine::{Acquire, SHORTEST_RETENTION};
use crate::record::Record;
use crate::record_id::RecordId;
use crate::scope::Scope;
use crate::store::{DurableStore, IdempotencyStore, StoreError, TransactionalStore};
use crate::trace::TraceParent;
use observer::Subject;
use shared::{Backend, Group, Shared};

/// Runs operations under one contract on one store. Clones share everything.
///
/// There is no default contract: the constructor chooses what happens after a crash.
///
/// Needs a tokio runtime with time enabled; see [`Settings::runtime`].
#[derive(Clone)]
pub struct Idempotency {
    shared: Arc<Shared>,
    /// Where operations run; `None` for the runtime of the caller.
    runtime: Option<Handle>,
    /// Whether the caller drives an operation that the store allows at once; `runtime` drives what is left if the
    /// caller drops it.
    attended: bool,
}

/// One request to do something at most once, or once at a time.
#[derive(Debug, Clone)]
pub struct Operation {
    scope: Scope,
    key: IdempotencyKey,
    fingerprint: Fingerprint,
    by_other_algorithms: Vec<Fingerprint>,
    wait: Option<Duration>,
    retention: Option<Duration>,
    trace: Option<TraceParent>,
    downstream: Option<RecordId>,
}

impl Operation {
    /// The operation that `key` names inside `scope`, asked for by a request with this fingerprint.
    #[must_use]
    pub fn new(scope: Scope, key: IdempotencyKey, fingerprint: Fingerprint) -> Self {
        Self {
            scope,
            key,
            fingerprint,
            by_other_algorithms: Vec::new(),
            wait: None,
            retention: None,
            trace: None,
            downstream: None,
        }
    }

    /// Digest of the request.
    #[must_use]
    pub fn fingerprint(&self) -> &Fingerprint {
        &self.fingerprint
    }

    /// Adds the fingerprint of the same request by another algorithm. If the record was made with that algorithm, the request is
    /// compared by it. So a deployment that changes the algorithm turns no retries into mismatches.
    #[must_use]
    pub fn also_fingerprinted(mut self, other: Fingerprint) -> Self {
        self.by_other_algorithms.push(other);
        self
    }

    /// How long to wait for the answer when the operation runs elsewhere, at most [`Settings::max_wait`].
    ///
    /// Default: what [`Settings::wait`] says.
    #[must_use]
    pub fn wait(mut self, wait: Duration) -> Self {
        self.wait = Some(wait);
        self
    }

    /// How long the record of this operation is kept after its end, at least 1 s. A [`Conclusion`] that says so itself has the
    /// last word.
    ///
    /// Default: [`Settings::retention`].
    #[must_use]
    pub fn retention(mut self, retention: Duration) -> Self {
        self.retention = Some(retention.max(SHORTEST_RETENTION));
        self
    }

    /// Names the trace of the request. [`Context::trace`] has it during the run.
    #[must_use]
    pub fn trace(mut self, trace: Option<TraceParent>) -> Self {
        self.trace = trace;
        self
    }

    /// Derives the [downstream keys](Context::downstream_key) from `record`: that of another operation, which this one repeats. Another
    /// system then recognises calls that the other operation has made. The keys of [steps](Context::steps) still follow from the
    /// record of this operation: the steps of an operation that has failed are undone, and their keys may be cancelled for good.
    ///
    /// Default: the record of this operation.
    #[must_use]
    pub fn downstream_keys_of(mut self, record: RecordId) -> Self {
        self.downstream = Some(record);
        self
    }
}

/// How long a shutdown whose time is over waits for settlements that it has given up.
const LAST_WORDS: Duration = Duration::from_millis(100);

/// A shutdown was over before all operations were.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{running} operations did not end within the time of the shutdown; they end with their runtime")]
#[non_exhaustive]
pub struct Unfinished {
    /// The operations that still run.
    pub running: usize,
}

impl Idempotency {
    /// The key, the business writes and the stored response commit in one transaction: effectively-once inside that
    /// database. After a crash everything is rolled back and the key is free.
    #[must_use]
    pub fn transactional(store: Arc<dyn TransactionalStore>, settings: Settings) -> Self {
        Self::new(Backend::Transactional(store), settings)
    }

    /// At most one run. After a crash, repeats get an unknown outcome, and the operation does not run again unless an operator [resolves](crate::Resolve) it so.
    #[must_use]
    pub fn at_most_once(store: Arc<dyn DurableStore>, settings: Settings) -> Self {
        Self::new(Backend::Leased(store, Contract::AtMostOnce), settings)
    }

    /// At least one run; never two at once while leases hold. After a crash the next repeat runs again, with a larger
    /// attempt and the last checkpoint: the operation must be safe to repeat.
    #[must_use]
    pub fn at_least_once(store: Arc<dyn IdempotencyStore>, settings: Settings) -> Self {
        Self::new(Backend::Leased(store, Contract::AtLeastOnce), settings)
    }

    fn new(backend: Backend, settings: Settings) -> Self {
        let runtime = settings.runtime.clone();
        let group = Arc::new(Group::new(settings.most_running()));
        Self { shared: Shared::new(backend, settings, group), runtime, attended: false }
    }

    /// Attaches this engine to another one, for routes that need another contract or other settings.
    ///
    /// A [`shutdown`](Self::shutdown) of either ends both, and together they run at most as many operations as `engine`
    /// may. Everything else stays separate: store, contract, settings and waiters.
    ///
    /// # Panics
    /// When this engine has been cloned, given to a layer, or had another one attached: those would be left behind. Attach it
    /// where it is made.
    ///
    /// ```
    /// use std::num::NonZeroUsize;
    /// use std::sync::Arc;
    /// use std::time::Duration;
    /// use idem_core::MemoryStore;
    /// use idem_core::engine::{Idempotency, Settings};
    ///
    /// let store = Arc::new(MemoryStore::new(NonZeroUsize::new(10_000).unwrap()));
    /// let engine = Idempotency::at_least_once(store.clone(), Settings::new());
    /// let week = Duration::from_secs(7 * 24 * 3600);
    /// let imports = Idempotency::at_least_once(store, Settings::new().retention(week)).attached_to(&engine);
    /// ```
    #[must_use]
    pub fn attached_to(self, engine: &Self) -> Self {
        let is_alone = Arc::strong_count(&self.shared) == 1 && Arc::strong_count(&self.shared.group) == 1;
        assert!(is_alone, "attach an engine where it is made, before it is cloned or another one is attached to it");
        let Shared { backend, settings, .. } = &*self.shared;
        let shared = Shared::new(backend.clone(), settings.clone(), Arc::clone(&engine.shared.group));
        Self { shared, ..self }
    }

    /// Runs operations on `runtime`, unless the [settings](Settings::runtime) name another one.
    ///
    /// For integrations that run their handlers in separate tasks, so that an operation does not depend on the caller's
    /// thread.
    ///
    /// If the store allows an operation at once, as the in-memory store does, the caller still drives it, because the
    /// way to another thread and back takes longer. Its renewals run on `runtime`. So does the rest of the operation
    /// when the future of [`execute`](Self::execute) is dropped.
    ///
    /// Poll that future to its end, or drop it. While it is kept without being polled, such an operation stands still,
    /// and its lease is renewed.
    #[must_use]
    pub fn default_runtime(mut self, runtime: Handle) -> Self {
        if self.runtime.is_none() {
            self.runtime = Some(runtime);
            self.attended = true;
        }
        self
    }

    /// The contract that was chosen.
    #[must_use]
    pub fn contract(&self) -> Contract {
        self.shared.contract()
    }

    /// The settings that were given.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.shared.settings
    }

    /// The number of operations that run now, from their acquire until their record is settled: a gauge, at most
    /// [`max_running`](Settings::max_running). It counts those of [attached](Self::attached_to) engines, too.
    #[must_use]
    pub fn running(&self) -> usize {
        let group = &self.shared.group;
        group.most_running.saturating_sub(group.running.available_permits())
    }

    /// The number of settlements that continue after their answers, because the store did not take them in time: a
    /// gauge. [`running`](Self::running) counts them, too.
    #[must_use]
    pub fn settling(&self) -> usize {
        self.shared.group.behind.load(Ordering::Relaxed)
    }

    /// How often the [observer](Settings::observer) has panicked: a counter.
    #[must_use]
    pub fn observer_panics(&self) -> u64 {
        self.shared.observer_panics.load(Ordering::Relaxed)
    }

    /// The number of requests that wait in this process for another one's run: a gauge, at most
    /// [`max_waiters`](Settings::max_waiters), and [`max_waiters_per_key`](Settings::max_waiters_per_key) for one key.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.shared.waiters.count()
    }

    /// The acquire that this engine sends for `operation`, with a new owner token.
    ///
    /// For callers that ask the store without the engine, such as inside a transaction that they opened. If an acquire
    /// gets no answer, repeat it with the same value; a further run needs a new one.
    #[must_use]
    pub fn acquire_for(&self, operation: &Operation) -> Acquire {
        self.shared.acquire_request(operation)
    }

    /// The record of an operation, whoever runs it; `None` if there is none, or it has expired. It acquires nothing.
    ///
    /// # Errors
    /// [`StoreError`] when the store does not answer within [`Settings::store_timeout`].
    pub async fn find(&self, operation: &Operation) -> Result<Option<Record>, StoreError> {
        let subject = Subject::of(&self.acquire_for(operation));
        self.shared.bounded(&subject, self.shared.store().peek(&subject.id)).await
    }

    /// Reports to the observer that a request was refused before it became an operation. For integrations: `reason` is
    /// the name of their problem, such as `key-missing`, out of a small fixed set.
    pub fn refused(&self, operation: &str, reason: &'static str) {
        tracing::debug!(operation, outcome = reason, "decided");
        let event = Event {
            kind: EventKind::Refused(reason),
            operation,
            principal: None,
            contract: self.contract(),
            record: None,
            attempt: None,
            trace: None,
            original_trace: None,
            durations: Durations::default(),
        };
        self.shared.tell(&event);
    }

    /// Refuses new operations, and returns when all that were begun are settled, at the latest after `within`.
    ///
    /// Waiting duplicates are answered at once. After `within`, settlements that the store does not take are given up: their
    /// keys are free, or answered, after one lease. Operations that still run are not cancelled; they end with their runtime.
    /// Give it somewhat less than what the supervisor allows: 25 s suits the 30 s of Kubernetes.
    ///
    /// # Errors
    /// [`Unfinished`] when `within` is over first.
    ///
    /// # Cancellation safety
    /// New operations stay refused if the future is dropped; call it again to wait on.
    pub async fn shutdown(&self, within: Duration) -> Result<(), Unfinished> {
        self.shared.group.tasks.close();
        self.shared.group.closing.cancel();
        let ended = tokio::time::timeout(within, self.shared.group.tasks.wait()).await;
        self.shared.group.giving_up.cancel();
        if ended.is_ok() {
            return Ok(());
        }
        // What was given up just now ends at once.
        match tokio::time::timeout(LAST_WORDS, self.shared.group.tasks.wait()).await {
            Ok(()) => Ok(()),
            Err(_) => Err(Unfinished { running: self.running() }),
        }
    }
}

impl fmt::Debug for Idempotency {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Idempotency")
            .field("contract", &self.contract())
            .field("store", &self.shared.store())
            .field("settings", &self.shared.settings)
            .finish_non_exhaustive()
    }
}
