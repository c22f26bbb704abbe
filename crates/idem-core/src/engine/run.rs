//! Operations without HTTP: any asynchronous function whose result can be serialised.

use std::fmt::Display;
use std::future::Future;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::answer::{Answer, ExecuteError};
use super::contract::{Conclusion, Disposition, ErrorMeaning};
use super::{Context, Idempotency, Operation};
use crate::machine::{Replay, ReplayKind};
use crate::record::{StoredBody, StoredResponse};
use crate::store::Writes;

/// The statuses by which [`Idempotency::run`] marks what a record's body is; those of HTTP, so that a reader of the
/// store knows them.
const VALUE: u16 = 200;
const FAILURE: u16 = 500;

/// The result of an operation.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Ran<T> {
    /// What it returned, now or the first time.
    pub value: T,
    /// Whether it had run before: `run` was not called, and the value is the stored one.
    pub replayed: bool,
}

/// Why there is no result.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunError<E> {
    /// It ran now and failed.
    #[error("the operation failed: {0}")]
    Failed(E),
    /// It ran before, failed, and does not run again; this is its message.
    #[error("the operation failed before: {0}")]
    FailedBefore(String),
    /// It panicked.
    #[error("the operation panicked")]
    Panicked,
    /// It runs now, elsewhere.
    #[error("the operation is in progress; try again in {retry_after:?}")]
    InProgress {
        /// When to ask again.
        retry_after: Duration,
    },
    /// It failed, and its next attempt has to wait.
    #[error("the operation failed; try again in {retry_after:?}")]
    Backoff {
        /// How long.
        retry_after: Duration,
    },
    /// The key belongs to another request.
    #[error("the idempotency key was used for another request; use a new key")]
    Mismatch,
    /// The process that ran it disappeared, and it is not known whether it took effect.
    #[error("the outcome of the operation is unknown; find out whether it took effect before using a new key")]
    OutcomeUnknown,
    /// Its result cannot be serialised, or the stored one cannot be read as this type. It took effect.
    #[error("the operation took effect, but its result cannot be stored or read")]
    Result(#[source] serde_json::Error),
    /// There is no answer.
    #[error(transparent)]
    Engine(#[from] ExecuteError),
}

enum Value<T, E> {
    Done(T),
    Failed(E),
    Unwritable(serde_json::Error),
    Panicked,
}

impl Idempotency {
    /// Runs `run` unless it ran before, and returns its result, now or again.
    ///
    /// The value is stored as JSON. Every error is a [fault](ErrorMeaning::Fault), and the contract decides: rolled back
    /// and free to repeat, final, or retryable after a backoff. If it is final, repeats get its `Display` text.
    ///
    /// # Errors
    /// [`RunError`].
    ///
    /// # Cancellation safety
    /// Dropping the returned future cancels neither the operation nor its settlement.
    pub async fn run<T, E, F, R>(&self, operation: Operation, run: F) -> Result<Ran<T>, RunError<E>>
    where
        T: Serialize + DeserializeOwned + Send + 'static,
        E: Display + Send + 'static,
        F: FnOnce(Context) -> R + Send + 'static,
        R: Future<Output = Result<T, E>> + Send + 'static,
    {
        self.run_classified(operation, |_| ErrorMeaning::Fault, run).await
    }

    /// The same; `meaning` says of an error whether it is final or may be retried.
    ///
    /// ```
    /// # use idem_core::engine::{ErrorMeaning, Idempotency, Operation, Ran, RunError};
    /// #[derive(Debug, thiserror::Error)]
    /// enum ShipError {
    ///     #[error("the address does not exist")]
    ///     NoSuchAddress,
    ///     #[error("the carrier does not answer")]
    ///     CarrierAway,
    /// }
    ///
    /// # async fn ship(idempotency: Idempotency, operation: Operation) -> Result<Ran<u64>, RunError<ShipError>> {
    /// let meaning = |error: &ShipError| match error {
    ///     ShipError::NoSuchAddress => ErrorMeaning::Final,
    ///     ShipError::CarrierAway => ErrorMeaning::Fault,
    /// };
    /// idempotency.run_classified(operation, meaning, |context| async move {
    ///     let key = context.downstream_key("ship");
    ///     // Calls the carrier with `key`.
    ///     # let _ = key;
    ///     Err(ShipError::CarrierAway)
    /// }).await
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`RunError`].
    ///
    /// # Cancellation safety
    /// Dropping the returned future cancels neither the operation nor its settlement.
    pub async fn run_classified<T, E, M, F, R>(
        &self,
        operation: Operation,
        meaning: M,
        run: F,
    ) -> Result<Ran<T>, RunError<E>>
    where
        T: Serialize + DeserializeOwned + Send + 'static,
        E: Display + Send + 'static,
        M: FnOnce(&E) -> ErrorMeaning + Send + 'static,
        F: FnOnce(Context) -> R + Send + 'static,
        R: Future<Output = Result<T, E>> + Send + 'static,
    {
        let conclude = |context: Context| async move { conclusion(run(context).await, meaning) };
        let on_panic = || fault(Value::Panicked, "the operation panicked");
        match self.execute(operation, conclude, on_panic).await? {
            Answer::Ran { value: Value::Done(value), .. } => Ok(Ran { value, replayed: false }),
            Answer::Ran { value: Value::Failed(error), .. } => Err(RunError::Failed(error)),
            Answer::Ran { value: Value::Unwritable(error), .. } => Err(RunError::Result(error)),
            Answer::Ran { value: Value::Panicked, .. } => Err(RunError::Panicked),
            Answer::Replay(replay) => read(&replay),
            Answer::InProgress { retry_after } => Err(RunError::InProgress { retry_after }),
            Answer::Backoff { retry_after } => Err(RunError::Backoff { retry_after }),
            Answer::Mismatch => Err(RunError::Mismatch),
        }
    }
}

fn conclusion<T, E>(result: Result<T, E>, meaning: impl FnOnce(&E) -> ErrorMeaning) -> Conclusion<Value<T, E>>
where
    T: Serialize,
    E: Display,
{
    let value = match result {
        Ok(value) => value,
        Err(error) => return failure(meaning(&error), &error.to_string(), Value::Failed(error)),
    };
    let (value, response) = match serde_json::to_vec(&value) {
        Ok(json) => (Value::Done(value), StoredResponse::new(VALUE, json)),
        // It took effect, so it must not run again, even without a result: the record is a tombstone.
        Err(error) => {
            let tombstone = StoredResponse { body: StoredBody::NotRetained, ..StoredResponse::new(VALUE, "") };
            (Value::Unwritable(error), tombstone)
        }
    };
    Conclusion { value, disposition: Disposition::Complete { response, writes: Writes::Keep }, retention: None }
}

fn failure<T, E>(meaning: ErrorMeaning, message: &str, value: Value<T, E>) -> Conclusion<Value<T, E>> {
    let response = StoredResponse::new(FAILURE, message.to_owned());
    let disposition = match meaning {
        ErrorMeaning::Fault => Disposition::Fault { response },
        ErrorMeaning::Final => Disposition::Fail { response },
        ErrorMeaning::Retry { after } => Disposition::Retry { response, after: Some(after) },
    };
    Conclusion { value, disposition, retention: None }
}

fn fault<T, E>(value: Value<T, E>, message: &str) -> Conclusion<Value<T, E>> {
    let response = StoredResponse::new(FAILURE, message.to_owned());
    Conclusion { value, disposition: Disposition::Fault { response }, retention: None }
}

fn read<T: DeserializeOwned, E>(replay: &Replay) -> Result<Ran<T>, RunError<E>> {
    let body: &[u8] = match &replay.response.body {
        StoredBody::Retained(body) => body,
        StoredBody::NotRetained => b"",
    };
    match replay.kind {
        ReplayKind::OutcomeUnknown => Err(RunError::OutcomeUnknown),
        ReplayKind::Failed => Err(RunError::FailedBefore(String::from_utf8_lossy(body).into_owned())),
        ReplayKind::Completed => {
            serde_json::from_slice(body).map(|value| Ran { value, replayed: true }).map_err(RunError::Result)
        }
    }
}
