//! One operation from its request to its answer.

use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::Shared;
use super::admit::{Admission, Admitted};
use super::context::Context;
use super::contract::{Conclusion, Contract, Disposition};
use super::heartbeat::Heartbeat;
use super::observer::Event;
use super::probe::find_out;
use super::settle::{Ending, Settled, release_behind};
use crate::fingerprint::Fingerprint;
use crate::machine::{Acquire, AcquireOutcome, Lease, Replay, Settlement};
use crate::planted;
use crate::record::Acquisition;
use crate::record_id::RecordId;
use crate::store::{StoreError, Writes};

/// What a request for an operation gets.
#[derive(Debug)]
#[expect(clippy::exhaustive_enums, reason = "callers must handle every answer")]
pub enum Answer<T> {
    /// It ran now, and this is what it concluded.
    Ran {
        /// The value of its [`Conclusion`].
        value: T,
        /// Which attempt it was.
        attempt: u32,
        /// Whether a record protected it. False only when failing open.
        protected: bool,
    },
    /// It ran before, and this is its answer.
    Replay(Replay),
    /// It runs now, elsewhere.
    InProgress {
        /// When its lease ends, if it is not renewed.
        retry_after: Duration,
    },
    /// It failed, and its next attempt has to wait.
    Backoff {
        /// How long.
        retry_after: Duration,
    },
    /// The key belongs to another request.
    Mismatch,
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExecuteError {
    /// The store could not say whether the operation may run; it did not run. Repeat the request later.
    #[error("the idempotency store could not answer, so the operation was not run")]
    NotAdmitted(#[source] StoreError),
    /// The operation ran, and it is not known how its record ended: a transaction whose commit got no answer, or a run
    /// that was superseded. Repeat the request: it gets the answer, or runs again if everything was rolled back.
    #[error("the operation ran, and it is not known how its record ended")]
    CommitUnclear(#[source] StoreError),
    /// The operation kept its transaction beyond its end, so everything was rolled back.
    #[error("the operation still held its transaction when it ended, so it was rolled back; drop the guard before")]
    TransactionHeld,
    /// The engine is shutting down; the operation did not run.
    #[error("the engine is shutting down, so the operation was not run")]
    ShuttingDown,
    /// The runtime ended the operation's task, or an observer panicked in it.
    #[error("the runtime stopped before the operation ended")]
    Interrupted,
}

/// The shortest time for which a run may ask its record to be kept.
const SHORTEST_RETENTION: Duration = Duration::from_secs(1);

pub(super) type Outcome<T> = Result<Answer<T>, ExecuteError>;
pub(super) type Reply<T> = oneshot::Sender<Outcome<T>>;

/// What runs when the store allows it.
pub(super) type Handler<T> = Box<dyn FnOnce(Context) -> Handling<T> + Send>;
type Handling<T> = Pin<Box<dyn Future<Output = Conclusion<T>> + Send>>;

/// An operation that was asked for, and what the store said to it.
pub(super) struct Asked<T> {
    id: RecordId,
    fingerprint: Fingerprint,
    admission: Result<Admission, StoreError>,
    reply: Reply<T>,
}

/// An operation that is to run.
pub(super) struct Granted<T> {
    context: Context,
    /// When its lease was asked for; `None` when there is none to be renewed.
    renewed_from: Option<Instant>,
    reply: Reply<T>,
}

/// Asks the store whether an operation may run.
#[expect(clippy::manual_async_fn, reason = "the future of an `async fn` has room for each argument twice")]
pub(super) fn ask<T>(
    shared: Arc<Shared>,
    request: Acquire,
    wait: Duration,
    mut reply: Reply<T>,
) -> impl Future<Output = Asked<T>> {
    async move {
        let admission = shared.admit(&request, wait, reply.closed()).await;
        Asked { id: request.id, fingerprint: request.fingerprint, admission, reply }
    }
}

impl<T> Asked<T> {
    /// The operation if it is to run; else the answer, and who waits for it.
    pub(super) fn granted(self, shared: &Arc<Shared>) -> Result<Granted<T>, (Reply<T>, Outcome<T>)> {
        let Self { id, fingerprint, admission, reply } = self;
        let context = |lease, transaction| Context::new(Arc::clone(shared), id, fingerprint, lease, transaction);
        match admission {
            Ok(Admission::Run(Admitted { lease, transaction, renew, acquired_at })) => {
                let renewed_from = renew.then_some(acquired_at);
                Ok(Granted { context: context(Some(lease), transaction), renewed_from, reply })
            }
            Ok(Admission::Answered(outcome)) => Err((reply, Ok(answered(shared, outcome)))),
            // Nobody is there to be told.
            Ok(Admission::Gone) => Err((reply, Err(ExecuteError::Interrupted))),
            Err(error) if shared.may_fail_open(&error) || planted!("fail-open-on-a-store-error") => {
                tracing::error!(error = &error as &dyn std::error::Error, "an operation runs without protection");
                shared.observe(&Event::FailedOpen);
                Ok(Granted { context: context(None, None), renewed_from: None, reply })
            }
            Err(error) => Err((reply, Err(ExecuteError::NotAdmitted(error)))),
        }
    }
}

/// Drives an operation to its end, and answers whoever still waits for it.
pub(super) async fn drive<T>(
    shared: Arc<Shared>,
    asking: impl Future<Output = Asked<T>>,
    run: Handler<T>,
    on_panic: impl FnOnce() -> Conclusion<T> + Send,
) {
    match asking.await.granted(&shared) {
        Ok(granted) => run_granted(granted, run, on_panic).await,
        Err((reply, answer)) => tell(reply, answer),
    }
}

/// The same for one that is to run.
pub(super) async fn run_granted<T>(
    granted: Granted<T>,
    run: Handler<T>,
    on_panic: impl FnOnce() -> Conclusion<T> + Send,
) {
    let Granted { context, renewed_from, reply } = granted;
    let heartbeat = renewed_from.map(|acquired_at| Heartbeat::start(context.clone(), acquired_at));
    tell(reply, run_and_settle(&context, heartbeat, run, on_panic).await);
}

fn tell<T>(reply: Reply<T>, answer: Outcome<T>) {
    // Nobody waits any more when the client has gone; its retry gets the replay.
    let _ = reply.send(answer);
}

impl Shared {
    /// Failing open is for a store that is away. One that answers something unreadable may hold the record of a run that
    /// took effect, and one that is set up wrongly would fail open for ever.
    fn may_fail_open(&self, error: &StoreError) -> bool {
        let is_away = error.is_retryable() && !error.knows_a_record();
        self.settings.fail_open && self.contract() != Contract::Transactional && is_away
    }

    fn ending(&self, disposition: Disposition, retention: Option<Duration>, attempt: u32) -> Ending {
        let (settlement, writes) = self.contract().settlement(disposition, attempt, &self.settings);
        // What is kept for no time at all is gone before its settlement can be repeated.
        let retention = retention.unwrap_or(self.settings.retention).max(SHORTEST_RETENTION);
        Ending { settlement, writes, retention }
    }
}

async fn run_and_settle<T>(
    context: &Context,
    heartbeat: Option<Heartbeat>,
    run: Handler<T>,
    on_panic: impl FnOnce() -> Conclusion<T> + Send,
) -> Outcome<T> {
    if context.acquisition() == Acquisition::Probe
        && let Some(finding) = find_out(context).await
    {
        return Box::pin(settle_finding(context, finding, heartbeat)).await;
    }
    let conclusion = conclude(context, run, on_panic).await;
    match context.lease() {
        Some(lease) => settle(context, lease, heartbeat, conclusion).await,
        None => Ok(Answer::Ran { value: conclusion.value, attempt: context.attempt(), protected: false }),
    }
}

/// Settles a run by its conclusion, and answers what holds then.
///
/// Boxed, as it comes at the end: the run would hold the room for it all the time.
fn settle<T>(
    context: &Context,
    lease: &Lease,
    heartbeat: Option<Heartbeat>,
    conclusion: Conclusion<T>,
) -> Pin<Box<impl Future<Output = Outcome<T>>>> {
    let Conclusion { value, disposition, retention } = conclusion;
    let shared = context.shared();
    let ending = shared.ending(disposition, retention, lease.attempt);
    Box::pin(async move {
        let settled = if shared.contract() == Contract::Transactional {
            let Some(transaction) = context.take_transaction() else {
                release_behind(shared, lease.clone());
                return Err(ExecuteError::TransactionHeld);
            };
            shared.settle_transaction(lease, &ending, transaction).await
        } else {
            let Some(heartbeat) = heartbeat else { return Err(ExecuteError::Interrupted) };
            shared.settle_leased(lease, &ending, heartbeat).await
        };
        shared.waiters.wake(&lease.id);
        match settled {
            Settled::Ours => Ok(Answer::Ran { value, attempt: lease.attempt, protected: true }),
            Settled::Lost => Box::pin(superseded(context, value)).await,
            Settled::Unclear(error) => Err(ExecuteError::CommitUnclear(error)),
        }
    })
}

/// Settles what a probe found about an earlier run, and answers what the record says then.
async fn settle_finding<T>(context: &Context, settlement: Settlement, heartbeat: Option<Heartbeat>) -> Outcome<T> {
    let shared = context.shared();
    let ending = Ending { settlement, writes: Writes::Discard, retention: shared.settings.retention };
    let (Some(lease), Some(heartbeat)) = (context.lease(), heartbeat) else { return Err(ExecuteError::Interrupted) };
    // Whoever settled it if not this run: the record says it all.
    shared.settle_leased(lease, &ending, heartbeat).await;
    shared.waiters.wake(&lease.id);
    let later = Answer::InProgress { retry_after: shared.settings.backoff };
    Ok(recorded(context).await?.unwrap_or(later))
}

async fn conclude<T>(
    context: &Context,
    run: Handler<T>,
    on_panic: impl FnOnce() -> Conclusion<T> + Send,
) -> Conclusion<T> {
    let own = context.clone();
    // Called inside, as it may panic before it returns a future. Nothing that a panic could leave half changed is looked at
    // afterwards but the transaction, which is discarded.
    match AssertUnwindSafe(async move { run(own).await }).catch_unwind().await {
        Ok(conclusion) => conclusion,
        Err(_) => {
            tracing::error!("an idempotent operation panicked");
            context.shared().observe(&Event::Panicked);
            on_panic()
        }
    }
}

/// The answer of a run that somebody else superseded: what the record says, so that all callers are told the same.
async fn superseded<T>(context: &Context, value: T) -> Outcome<T> {
    let shared = context.shared();
    tracing::warn!(record = %context.id(), "an operation ended after it had lost its lease");
    shared.observe(&Event::LeaseLost);
    Ok(match recorded(context).await? {
        Some(answer) => answer,
        // The record is gone. A transaction was rolled back; what a lease protects has happened all the same.
        None if shared.contract() == Contract::Transactional => {
            Answer::InProgress { retry_after: shared.settings.backoff }
        }
        None => Answer::Ran { value, attempt: context.attempt(), protected: true },
    })
}

/// What the record says now; `None` when there is none for this request. Another request may have the key by now, when
/// the run took longer than lease and retention.
async fn recorded<T>(context: &Context) -> Result<Option<Answer<T>>, ExecuteError> {
    let shared = context.shared();
    let record = shared.bounded(shared.store().peek(context.id())).await.map_err(ExecuteError::CommitUnclear)?;
    let record = record.filter(|record| record.fingerprint == *context.fingerprint());
    Ok(record.map(|record| match record.replay() {
        Some(replay) => Answer::Replay(replay),
        None => Answer::InProgress { retry_after: shared.settings.backoff },
    }))
}

fn answered<T>(shared: &Shared, outcome: AcquireOutcome) -> Answer<T> {
    let (event, answer) = match outcome {
        AcquireOutcome::Replay(replay) => (Event::Replayed, Answer::Replay(replay)),
        AcquireOutcome::Backoff { retry_after } => (Event::Backoff, Answer::Backoff { retry_after }),
        AcquireOutcome::Mismatch { .. } => (Event::Mismatch, Answer::Mismatch),
        AcquireOutcome::InProgress { retry_after } => (Event::InProgress, Answer::InProgress { retry_after }),
        // A store that answers so from `begin` breaks its contract; turning the caller away is what stays safe.
        AcquireOutcome::Acquired(_) => (Event::InProgress, Answer::InProgress { retry_after: shared.settings.lease }),
    };
    shared.observe(&event);
    answer
}
