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
//! Everything between the acquire and the settlement happens in a task of its own, or [goes on](Idempotency::or_on) in one:
//! whoever awaits the answer may go away without cancelling the operation, and its retry gets the replay. The task is in the tracing
//! span of whoever asked.

mod admit;
mod alarm;
mod attended;
#[cfg(idem_planted_bugs)]
mod bugs;
mod context;
mod contract;
mod execute;
mod heartbeat;
mod observer;
mod probe;
mod run;
mod settings;
mod settle;
mod waiters;

use std::fmt;
use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};
use std::task::{self, Poll};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::Instrument as _;

use attended::Attended;
pub use context::{CheckpointError, Context, TransactionError, TransactionGuard};
pub use contract::{Conclusion, Contract, Disposition};
use execute::Handler;
pub use execute::{Answer, ExecuteError};
use heartbeat::Pacemaker;
pub use observer::{Event, Observer};
pub use probe::{Probe, Probed};
pub use run::{Ran, RunError};
pub use settings::Settings;

use crate::fingerprint::Fingerprint;
use crate::key::IdempotencyKey;
use crate::planted;
use crate::scope::Scope;
use crate::store::{DurableStore, IdempotencyStore, StoreError, StoreErrorKind, TransactionalStore};
use waiters::Waiters;

/// Runs operations under one contract on one store. Clones share everything.
///
/// There is no default contract: what happens after a crash is chosen where the thing is built.
///
/// Needs a tokio runtime with time enabled; see [`Settings::runtime`].
#[derive(Clone)]
pub struct Idempotency {
    shared: Arc<Shared>,
    /// Where operations run; `None` where they are asked for.
    runtime: Option<Handle>,
    /// Whether what a store allows at once runs there only when nobody awaits it any more.
    attended: bool,
}

/// One request to do something at most once, or once at a time.
#[derive(Debug, Clone)]
pub struct Operation {
    scope: Scope,
    key: IdempotencyKey,
    fingerprint: Fingerprint,
    wait: Option<Duration>,
}

impl Operation {
    /// The operation that `key` names inside `scope`, asked for by a request with this fingerprint.
    #[must_use]
    pub fn new(scope: Scope, key: IdempotencyKey, fingerprint: Fingerprint) -> Self {
        Self { scope, key, fingerprint, wait: None }
    }

    /// How long to wait for the answer when the operation runs elsewhere, at most [`Settings::max_wait`].
    ///
    /// Default: what [`Settings::wait`] says.
    #[must_use]
    pub fn wait(mut self, wait: Duration) -> Self {
        self.wait = Some(wait);
        self
    }
}

struct Shared {
    backend: Backend,
    settings: Settings,
    tasks: TaskTracker,
    /// Cancelled by [`Idempotency::shutdown`]: settlements that the store does not take are then given up.
    closing: CancellationToken,
    waiters: Arc<Waiters>,
    pacemaker: Arc<Pacemaker>,
}

enum Backend {
    Leased(Arc<dyn IdempotencyStore>, Contract),
    Transactional(Arc<dyn TransactionalStore>),
}

impl Idempotency {
    /// The key, the business writes and the stored response commit in one transaction: effectively-once inside that
    /// database. After a crash everything is rolled back and the key is free.
    #[must_use]
    pub fn transactional(store: Arc<dyn TransactionalStore>, settings: Settings) -> Self {
        Self::new(Backend::Transactional(store), settings)
    }

    /// At most one run. After a crash repeats are told that the outcome is unknown, and it never runs again.
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
        let waiters = Arc::new(Waiters::new(settings.max_waiters_per_key));
        let (tasks, closing) = (TaskTracker::new(), CancellationToken::new());
        let runtime = settings.runtime.clone();
        let shared = Arc::new(Shared { backend, settings, tasks, closing, waiters, pacemaker: Arc::default() });
        let listener: Weak<Waiters> = Arc::downgrade(&shared.waiters);
        shared.store().on_settled(listener);
        Self { shared, runtime, attended: false }
    }

    /// This engine, whose operations run on `runtime` unless its [settings](Settings::runtime) name another one: for
    /// integrations whose handlers have tasks of their own, and no business on the thread that asks.
    ///
    /// An operation that the store allows at once, as one in memory does, is driven by whoever asked for it all the same,
    /// because the way to another thread and back takes longer; renewals are on `runtime`, and so is what is left when
    /// the future of [`execute`](Self::execute) is dropped. That future has to be polled to its end, or dropped: while it is
    /// kept, such an operation stands still, and its lease is renewed.
    #[must_use]
    pub fn or_on(mut self, runtime: Handle) -> Self {
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

    /// How many requests wait in this process for the end of another one's run: a gauge. More than
    /// [`max_waiters_per_key`](Settings::max_waiters_per_key) never wait for one key.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.shared.waiters.count()
    }

    /// Runs `run` unless it ran before, and settles what it concludes before this answers.
    ///
    /// `run` says by its [`Conclusion`] what repeats shall get and what this caller gets now. When it panics,
    /// `on_panic` concludes in its place.
    ///
    /// # Errors
    /// [`ExecuteError`] when the store could not say whether it may run, or whether its end is committed.
    ///
    /// # Cancellation safety
    /// Dropping the returned future cancels neither the operation nor its settlement.
    pub fn execute<T, F, R, P>(
        &self,
        operation: Operation,
        run: F,
        on_panic: P,
    ) -> impl Future<Output = Result<Answer<T>, ExecuteError>> + Send + use<T, F, R, P>
    where
        T: Send + 'static,
        F: FnOnce(Context) -> R + Send + 'static,
        R: Future<Output = Conclusion<T>> + Send + 'static,
        P: FnOnce() -> Conclusion<T> + Send + 'static,
    {
        // What is large has a place of its own on the heap from the beginning: it would have one in each of the futures
        // that hand it down, and would keep it there after its end.
        let run: Handler<T> = Box::new(move |context| Box::pin(run(context)));
        let engine = self.clone();
        async move {
            // Counted before looking, so that a shutdown that begins in between waits for it.
            let _counted = engine.shared.tasks.token();
            if engine.shared.tasks.is_closed() {
                return Err(ExecuteError::ShuttingDown);
            }
            let (sender, receiver) = oneshot::channel();
            let request = engine.shared.acquire_request(&operation);
            let wait = operation.wait.unwrap_or(engine.shared.settings.wait);
            let mut asking = Box::pin(execute::ask(Arc::clone(&engine.shared), request, wait, sender));
            // A store that answers at once, as one in memory does, makes a task needless for whoever does not run: nobody
            // can go away meanwhile. What runs has one, from the beginning or when nobody awaits it any more.
            let poll = |context: &mut task::Context<'_>| {
                // Its timers belong to the runtime on which it may go on.
                let _entered = engine.runtime.as_ref().map(Handle::enter);
                let poll = || asking.as_mut().poll(context).map(|asked| asked.granted(&engine.shared));
                // As in a task, a panic of an observer ends the operation, and not whoever asked for it.
                Poll::Ready(catch_unwind(AssertUnwindSafe(poll)))
            };
            match poll_fn(poll).await {
                Ok(Poll::Ready(Ok(granted))) => {
                    // Done, and large.
                    drop(asking);
                    let granted = execute::run_granted(granted, run, on_panic);
                    if planted!(engine.attended, "no-task-of-its-own" => true) {
                        Attended::new(engine, granted).await;
                    } else {
                        engine.spawn(granted);
                    }
                }
                Ok(Poll::Ready(Err((_, answer)))) => return answer,
                Ok(Poll::Pending) => {
                    let driven = execute::drive(Arc::clone(&engine.shared), asking, run, on_panic);
                    planted!("no-task-of-its-own" => {
                        Attended::new(engine, driven).await;
                        return receiver.await.unwrap_or(Err(ExecuteError::Interrupted));
                    });
                    engine.spawn(driven);
                }
                Err(_) => return Err(ExecuteError::Interrupted),
            }
            receiver.await.unwrap_or(Err(ExecuteError::Interrupted))
        }
    }

    /// In the span of whoever asked: what the operation logs belongs to the request.
    fn spawn(&self, driven: impl Future<Output = ()> + Send + 'static) {
        let driven = driven.in_current_span();
        match &self.runtime {
            Some(runtime) => self.shared.tasks.spawn_on(driven, runtime),
            None => self.shared.tasks.spawn(driven),
        };
    }

    /// Refuses new operations, and returns when all that were begun are settled.
    ///
    /// Settlements that the store does not take are given up; their keys are free, or answered, after one lease.
    pub async fn shutdown(&self) {
        self.shared.tasks.close();
        self.shared.closing.cancel();
        self.shared.tasks.wait().await;
    }
}

impl Shared {
    fn contract(&self) -> Contract {
        match &self.backend {
            Backend::Leased(_, contract) => *contract,
            Backend::Transactional(_) => Contract::Transactional,
        }
    }

    fn store(&self) -> &dyn IdempotencyStore {
        match &self.backend {
            Backend::Leased(store, _) => store.as_ref(),
            Backend::Transactional(store) => store.as_ref(),
        }
    }

    /// Awaits a store for as long as the settings allow.
    async fn bounded<T>(&self, verb: impl Future<Output = Result<T, StoreError>>) -> Result<T, StoreError> {
        let limit = self.settings.store_timeout;
        let late = |_| {
            let message = format!("the store did not answer within {limit:?}");
            StoreError::new(StoreErrorKind::Timeout, message)
        };
        let answer = tokio::time::timeout(limit, verb).await.map_err(late).flatten();
        if let Err(error) = &answer {
            tracing::warn!(error = error as &dyn std::error::Error, "the idempotency store could not answer");
            self.observe(&Event::StoreFailed(error));
        }
        answer
    }

    fn observe(&self, event: &Event<'_>) {
        if let Some(observer) = &self.settings.observer {
            observer.observe(event);
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
