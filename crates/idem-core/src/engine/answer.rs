//! The answers to requests, made from outcomes of the store and from records.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;

use super::context::Context;
use super::observer::{Durations, Event, EventKind, Subject};
use super::shared::Shared;
use super::steps::StepError;
use crate::machine::{AcquireOutcome, Replay, ReplayKind};
use crate::record::{Record, StoredBody};
use crate::scope::Scope;
use crate::store::StoreError;

/// The answer to a request for an operation.
#[derive(Debug)]
#[expect(clippy::exhaustive_enums, reason = "callers must handle every answer")]
pub enum Answer<T> {
    /// It ran now, and this is what it concluded.
    Ran {
        /// The value of its [`Conclusion`](super::Conclusion).
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
        /// When to ask again.
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
    /// The limit of transactions was reached, and none was free in time; the operation did not run. Repeat the request
    /// later. The source names the limit and says how long it waited.
    #[error("no transaction was free for the operation, so it was not run")]
    Busy(#[source] StoreError),
    /// The operation ran, and it is not known how its record ended: a transaction whose commit got no answer, or a run
    /// that was superseded. Repeat the request: it gets the answer, or runs again if everything was rolled back.
    #[error("the operation ran, and the store has not said how its record ended; repeat the request to learn it")]
    CommitUnclear(#[source] StoreError),
    /// The operation's transaction could not be committed because of what the operation did in it, such as an error of the
    /// database that it overlooked. There is no record. The source says what it was.
    #[error("the operation's transaction could not be committed")]
    TransactionFailed(#[source] StoreError),
    /// The operation kept its transaction beyond its end, so everything was rolled back.
    #[error(
        "the operation still held its transaction when it ended, so it was rolled back; drop the guard before the operation returns"
    )]
    TransactionHeld,
    /// The operation returned a success although one of its [steps](super::Context::steps) had failed, or earlier attempts had
    /// taken more of them. The success is not stored.
    #[error("the operation returned a success although its steps had not succeeded")]
    Steps(#[source] StepError),
    /// The engine is shutting down; the operation did not run.
    #[error("the engine is shutting down, so the operation was not run")]
    ShuttingDown,
    /// The [limit of running operations](super::Settings::max_running) was reached; the operation did not run. Repeat
    /// the request later.
    #[error("{limit} operations already run, the maximum of this engine; repeat the request later")]
    Overloaded {
        /// The most that may run at once.
        limit: usize,
    },
    /// The operation's task was ended by its runtime, or by a panic of the store.
    #[error(
        "the task of the operation ended early, because its runtime stopped or the store panicked; repeat the request to learn the outcome"
    )]
    Interrupted,
}

pub(super) type ExecuteResult<T> = Result<Answer<T>, ExecuteError>;

/// The way back to the caller. The observer gets one decision for each request, even if this is dropped unused.
pub(super) struct Reply<T> {
    /// `None` when the request is decided.
    caller: Option<oneshot::Sender<ExecuteResult<T>>>,
    shared: Arc<Shared>,
    subject: Subject,
    pub(super) durations: Durations,
}

impl<T> Reply<T> {
    pub(super) fn new(shared: Arc<Shared>, subject: Subject) -> (Self, oneshot::Receiver<ExecuteResult<T>>) {
        let (caller, answer) = oneshot::channel();
        (Self { caller: Some(caller), shared, subject, durations: Durations::default() }, answer)
    }

    pub(super) fn subject(&self) -> &Subject {
        &self.subject
    }

    /// Completes when the caller has gone.
    pub(super) async fn closed(&mut self) {
        if let Some(caller) = &mut self.caller {
            caller.closed().await;
        }
    }

    /// Answers the caller in another task, if it still waits.
    pub(super) fn send(mut self, outcome: ExecuteResult<T>) {
        self.shared.decide(&self.subject, &outcome, self.durations);
        if let Some(caller) = self.caller.take() {
            // A caller that has gone gets the replay when it repeats its request.
            let _ = caller.send(outcome);
        }
    }

    /// Answers the caller in this task.
    pub(super) fn give(mut self, outcome: ExecuteResult<T>) -> ExecuteResult<T> {
        self.shared.decide(&self.subject, &outcome, self.durations);
        self.caller = None;
        outcome
    }
}

impl<T> Drop for Reply<T> {
    fn drop(&mut self) {
        if self.caller.is_some() {
            self.shared.decide::<T>(&self.subject, &Err(ExecuteError::Interrupted), self.durations);
        }
    }
}

/// The bounds of `retry_after` for an operation that runs, which is a quarter of its age. Most runs end soon, so a
/// client that pauses for long learns the answer late; the rest of a lease would be up to half a minute.
const ASK_AGAIN: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(5));

impl<T> Answer<T> {
    /// The answer to a repeat of an operation that runs for `age` already.
    pub(super) fn in_progress(age: Duration) -> Self {
        Self::InProgress { retry_after: (age / 4).clamp(ASK_AGAIN.0, ASK_AGAIN.1) }
    }
}

/// Turns a store's outcome into the answer to a request that does not run.
pub(super) fn answered<T>(outcome: AcquireOutcome) -> Answer<T> {
    match outcome {
        AcquireOutcome::Replay(replay) => Answer::Replay(replay),
        AcquireOutcome::Backoff { retry_after } => Answer::Backoff { retry_after },
        AcquireOutcome::Mismatch { .. } => Answer::Mismatch,
        AcquireOutcome::InProgress { age, .. } => Answer::in_progress(age),
        // A store that answers so from `begin` breaks its contract; turning the caller away is safe.
        AcquireOutcome::Acquired(_) => Answer::in_progress(Duration::ZERO),
    }
}

/// The record as it is now; `None` when there is none for this request. If the run took longer than lease and retention,
/// another request may have the key by now.
pub(super) async fn current_record(context: &Context) -> Result<Option<Record>, ExecuteError> {
    let shared = context.shared();
    let record = shared
        .bounded(context.subject(), shared.store().peek(context.record_id()))
        .await
        .map_err(ExecuteError::CommitUnclear)?;
    Ok(record.filter(|record| record.fingerprint == *context.fingerprint()))
}

/// The answer that a record gives.
pub(super) fn recorded<T>(record: &Record) -> Answer<T> {
    record.replay().map_or_else(|| Answer::in_progress(Duration::ZERO), Answer::Replay)
}

/// Turns an unclear commit into [`ExecuteError::NotAdmitted`]: nothing ran, so nothing is unclear.
pub(super) fn not_admitted(error: ExecuteError) -> ExecuteError {
    match error {
        ExecuteError::CommitUnclear(error) => ExecuteError::NotAdmitted(error),
        error => error,
    }
}

impl Shared {
    /// Reports the answer of a request to the observer.
    pub(super) fn decide<T>(&self, subject: &Subject, outcome: &ExecuteResult<T>, durations: Durations) {
        let (kind, attempt) = decision(outcome);
        let original_trace = match outcome {
            Ok(Answer::Replay(replay)) => replay.response.trace,
            _ => None,
        };
        let original = original_trace.map(tracing::field::display);
        let contract = self.contract();
        tracing::debug!(
            operation = subject.scope.operation(),
            record = %subject.id,
            outcome = kind.name(),
            ?contract,
            attempt,
            ?durations,
            original_trace = original,
            "decided"
        );
        let event = self.event(kind, &subject.scope, Some(&subject.id), attempt);
        self.tell(&Event { durations, trace: subject.trace, original_trace, ..event });
    }

    /// Refuses a request before the store is asked.
    pub(super) fn refuse<T>(&self, scope: &Scope, error: ExecuteError) -> ExecuteResult<T> {
        let outcome = Err(error);
        let (kind, attempt) = decision(&outcome);
        tracing::debug!(operation = scope.operation(), outcome = kind.name(), "decided");
        self.tell(&self.event(kind, scope, None, attempt));
        outcome
    }
}

/// The decision that an outcome is, and which attempt it is about.
fn decision<T>(outcome: &ExecuteResult<T>) -> (EventKind<'_>, Option<u32>) {
    match outcome {
        Ok(Answer::Ran { attempt, .. }) => (EventKind::Executed, Some(*attempt)),
        Err(ExecuteError::Steps(_)) => (EventKind::Executed, None),
        Ok(Answer::Replay(replay)) => {
            let is_tombstone = replay.kind == ReplayKind::Completed && replay.response.body == StoredBody::NotRetained;
            let kind = if is_tombstone { EventKind::Tombstone } else { EventKind::Replayed(replay.kind) };
            (kind, Some(replay.attempt))
        }
        Ok(Answer::InProgress { .. }) => (EventKind::InProgress, None),
        Ok(Answer::Backoff { .. }) => (EventKind::Backoff, None),
        Ok(Answer::Mismatch) => (EventKind::Mismatch, None),
        Err(ExecuteError::NotAdmitted(error)) => (EventKind::StoreUnavailable(error), None),
        Err(ExecuteError::Busy(error)) => (EventKind::Busy(error), None),
        Err(ExecuteError::CommitUnclear(error)) => (EventKind::CommitUnclear(error), None),
        Err(ExecuteError::TransactionFailed(error)) => (EventKind::TransactionFailed(error), None),
        Err(ExecuteError::TransactionHeld) => (EventKind::TransactionHeld, None),
        Err(ExecuteError::ShuttingDown) => (EventKind::Refused("shutting-down"), None),
        Err(ExecuteError::Overloaded { .. }) => (EventKind::Refused("overloaded"), None),
        Err(ExecuteError::Interrupted) => (EventKind::Interrupted, None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longer_an_operation_runs_the_later_its_repeats_are_to_ask_again() {
        for (age, expected) in
            [(0, 1_000), (4_000, 1_000), (8_000, 2_000), (12_000, 3_000), (20_000, 5_000), (60_000, 5_000)]
        {
            let Answer::InProgress { retry_after } = Answer::<()>::in_progress(Duration::from_millis(age)) else {
                panic!()
            };
            assert_eq!(retry_after, Duration::from_millis(expected), "{age} ms");
        }
    }
}
