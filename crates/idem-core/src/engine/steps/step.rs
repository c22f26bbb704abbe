//! One step: from its kept result, or from its call to the result that is kept.

use std::fmt::{self, Display};
use std::future::Future;
use std::marker::PhantomData;
use std::panic::AssertUnwindSafe;

use futures_util::FutureExt as _;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::error::StepError;
use super::log::{CHECKPOINT, Completed, FailedStep, Log, key_of};
use super::progress::{StepToUndo, Steps, Undoing};
use crate::engine::contract::ErrorMeaning;
use crate::machine::Lease;
use crate::record::Checkpoint;

/// A step that is about to run. [`Steps::step`] returns it.
#[must_use = "a step does nothing until it runs"]
pub struct Step<'s, T> {
    steps: &'s mut Steps,
    name: String,
    undoing: Option<Undoing>,
    result: PhantomData<fn() -> T>,
}

impl Steps {
    /// The next step. `name` is part of its key, and must be different from the others' and the same on every attempt. It has
    /// 1 to 128 bytes.
    ///
    /// ```
    /// # use idem_core::engine::{Context, StepError};
    /// # async fn call(_: &str, _: &str) -> Result<String, std::io::Error> { Ok(String::new()) }
    /// async fn sign_up(context: Context) -> Result<String, StepError> {
    ///     let mut steps = context.steps()?;
    ///     let account = steps
    ///         .step("account")
    ///         .undo(|step| async move { call("DELETE /accounts", &step.step_key).await.map(drop) })
    ///         .run(|key| async move { call("POST /accounts", &key).await })
    ///         .await?;
    ///     steps.step("mail").run(|key| async move { call("POST /mails", &key).await }).await?;
    ///     Ok(account)
    /// }
    /// ```
    pub fn step<T>(&mut self, name: &str) -> Step<'_, T>
    where
        T: Serialize + DeserializeOwned + Send + 'static,
    {
        Step { steps: self, name: name.to_owned(), undoing: None, result: PhantomData }
    }
}

/// What a step commits together with its writes, see [`Step::run_with_record`].
#[derive(Debug)]
pub struct StepRecord<T> {
    lease: Lease,
    key: String,
    log: Log,
    name: String,
    /// Of the checkpoint.
    sequence: u32,
    result: PhantomData<fn() -> T>,
}

impl<T: Serialize + DeserializeOwned> StepRecord<T> {
    /// The lease of the run, which the store needs to fence the writes.
    #[must_use]
    pub fn lease(&self) -> &Lease {
        &self.lease
    }

    /// The key of the step, the same on every attempt. Write it into the rows if the step has an undo, which may know nothing
    /// else.
    #[must_use]
    pub fn key(&self) -> &str {
        &self.key
    }

    /// The checkpoint that keeps `result`, to be committed with the writes.
    ///
    /// # Errors
    /// [`StepError`] when the result cannot be written as JSON or read back, or when all results have more than 60 KiB: roll
    /// back.
    pub fn checkpoint(&self, result: &T) -> Result<Checkpoint, StepError> {
        let not_kept = |message| StepError::NotKept { step: self.name.clone(), message };
        let log = self.log.with(&self.name, result).map_err(not_kept)?;
        last_result::<T>(&self.name, &log)?;
        let data = log.encode().map_err(not_kept)?;
        Ok(Checkpoint { sequence: self.sequence, name: CHECKPOINT.into(), data: data.into() })
    }
}

/// Why a step did not complete.
enum Stop {
    Now(StepError),
    TurnBack(FailedStep),
}

impl<T: Serialize + DeserializeOwned + Send + 'static> Step<'_, T> {
    /// How to undo this step after a later one has failed. By default nothing is to be undone.
    ///
    /// An undo that fails runs again in the next attempt, with the same key. It also runs for the failed step itself, if that
    /// may have taken effect.
    pub fn undo<E, F, U>(mut self, undo: F) -> Self
    where
        E: Display + Send,
        F: FnOnce(StepToUndo<T>) -> U + Send + 'static,
        U: Future<Output = Result<(), E>> + Send + 'static,
    {
        let step_key = key_of(self.steps.context.record_id(), &self.name);
        self.undoing = Some(Box::new(move |key, result| {
            Box::pin(async move {
                let result = result.map(|json| serde_json::from_str(&json)).transpose();
                let result = result.map_err(|error| format!("its kept result cannot be read: {error}"))?;
                undo(StepToUndo { key, step_key, result }).await.map_err(|error| error.to_string())
            })
        }));
        self
    }

    /// Runs the step, or returns the result that an earlier attempt has kept. Every error of `call` may be tried again.
    ///
    /// `call` gets the key for its system.
    ///
    /// # Errors
    /// [`StepError`], after which no other step of this run starts: end the operation with it.
    ///
    /// # Cancellation safety
    /// If the future is dropped, the step may have taken effect. The next attempt runs it again, or undoes it if it does not go
    /// forward.
    pub async fn run<E, F, R>(self, call: F) -> Result<T, StepError>
    where
        E: Display,
        F: FnOnce(String) -> R,
        R: Future<Output = Result<T, E>>,
    {
        self.run_classified(|_| ErrorMeaning::Fault, call).await
    }

    /// The same; `meaning` says of an error whether the step may be tried again. [`ErrorMeaning::Final`] says that this call
    /// took no effect and never will. If an earlier attempt may have called as well, the step is undone all the same.
    ///
    /// # Errors
    /// [`StepError`], as from [`run`](Self::run).
    ///
    /// # Cancellation safety
    /// If the future is dropped, the step may have taken effect. The next attempt runs it again, or undoes it if it does not go
    /// forward.
    pub async fn run_classified<E, F, R>(
        self,
        meaning: impl FnOnce(&E) -> ErrorMeaning,
        call: F,
    ) -> Result<T, StepError>
    where
        E: Display,
        F: FnOnce(String) -> R,
        R: Future<Output = Result<T, E>>,
    {
        let advance = async |steps: &mut Steps, name: &str| {
            let key = key_of(steps.context.record_id(), name);
            let value = caught(meaning, async move { call(key).await }).await;
            let value = value.map_err(|failure| after_failure(steps, name, failure))?;
            let log = steps.log.with(name, &value).map_err(|message| in_doubt(name, &message))?;
            // Read at once, so that a type that cannot be read back is noticed in the first test, not after the first crash.
            let value = last_result(name, &log).map_err(|error| in_doubt(name, &error.to_string()))?;
            steps.record(name, log).await.map_err(Stop::Now)?;
            Ok(value)
        };
        self.advance(advance).await
    }

    /// Runs a step whose writes are in the store's database, so that its result commits together with them.
    ///
    /// `call` opens a transaction, makes its writes, has the store write [`StepRecord::checkpoint`] in the same transaction, and
    /// commits. So a crash leaves both or nothing. `idem-postgres` writes it by `Guard::checkpoint`,
    /// `idem-sqlite` by `SqliteStore::checkpoint_within`. A `call` that repeats its transaction after an error must end when the
    /// store says `LeaseLost`: the earlier transaction may have been committed.
    ///
    /// The store is asked afterwards whether it has the checkpoint. So a lost answer to COMMIT is found out, and a checkpoint
    /// that was forgotten is an error.
    ///
    /// # Errors
    /// [`StepError`], as from [`run`](Self::run).
    ///
    /// # Cancellation safety
    /// If the future is dropped, the step is complete if its transaction commits. Else the next attempt runs it again, or undoes it
    /// if it does not go forward.
    pub async fn run_with_record<E, F, R>(
        self,
        meaning: impl FnOnce(&E) -> ErrorMeaning,
        call: F,
    ) -> Result<T, StepError>
    where
        E: Display,
        F: FnOnce(StepRecord<T>) -> R,
        R: Future<Output = Result<T, E>>,
    {
        let advance = async |steps: &mut Steps, name: &str| {
            let Some(lease) = steps.context.lease().cloned() else {
                return Err(Stop::Now(StepError::Refused("no record protects it")));
            };
            let sequence = steps.context.next_checkpoint().await;
            let (log, name_in_record) = (steps.log.clone(), name.to_owned());
            let key = key_of(steps.context.record_id(), name);
            let record = StepRecord { lease, key, log, name: name_in_record, sequence, result: PhantomData };
            let value = caught(meaning, async move { call(record).await }).await;
            let recorded = steps.recorded(name, sequence).await.map_err(Stop::Now)?;
            match (recorded, value) {
                // Its COMMIT took effect, whatever answer came back.
                (Some(log), _) => {
                    let value = last_result(name, &log).map_err(Stop::Now)?;
                    steps.log = log;
                    Ok(value)
                }
                // Another attempt would make the writes once more.
                (None, Ok(_)) => Err(in_doubt(name, "it did not commit its checkpoint with its writes")),
                (None, Err(failure)) => Err(after_failure(steps, name, failure)),
            }
        };
        self.advance(advance).await
    }

    /// Returns the kept result; else takes the step by `advance`, which keeps the result in the log.
    async fn advance(self, advance: impl AsyncFnOnce(&mut Steps, &str) -> Result<T, Stop>) -> Result<T, StepError> {
        let Self { steps, name, undoing, .. } = self;
        let kept = match steps.take(&name) {
            Ok(kept) => kept,
            Err(error) => return Err(end(steps, &name, error)),
        };
        if let Some(Completed { result, .. }) = kept {
            steps.undoings.push(undoing);
            return read(&name, &result).map_err(|error| end(steps, &name, error));
        }
        // Stays if the future is dropped: no other step may start after one that may have taken effect.
        let message = "its future was dropped before it was done".to_owned();
        let dropped = StepError::Interrupted { step: name.clone(), message, retry_after: None };
        steps.ended = Some(steps.final_if_last(dropped, &name));
        steps.note();
        let advanced = match may_start(steps, &name) {
            Ok(()) => advance(steps, &name).await,
            Err(stop) => Err(stop),
        };
        let ended = match advanced {
            Ok(value) => {
                steps.ended = None;
                steps.undoings.push(undoing);
                steps.note();
                return Ok(value);
            }
            Err(Stop::Now(error)) => error,
            Err(Stop::TurnBack(failed)) => steps.turn_back(failed, undoing).await,
        };
        Err(end(steps, &name, ended))
    }
}

/// Whether a step that no attempt has completed may start in this attempt.
fn may_start(steps: &Steps, name: &str) -> Result<(), Stop> {
    if let Some(failed) = &steps.log.failed {
        return Err(Stop::TurnBack(failed.clone()));
    }
    let forward = steps.last_forward();
    if steps.context.attempt() > forward {
        let message = format!("it was not done in the {forward} attempts that go forward, half of `max_attempts`");
        return Err(in_doubt(name, &message));
    }
    steps.hold(name).map_err(Stop::Now)
}

/// How a call failed, and what that means.
struct CallFailure {
    message: String,
    meaning: ErrorMeaning,
}

/// Awaits a call. A panic is a failure.
async fn caught<T, E: Display>(
    meaning: impl FnOnce(&E) -> ErrorMeaning,
    call: impl Future<Output = Result<T, E>>,
) -> Result<T, CallFailure> {
    match AssertUnwindSafe(call).catch_unwind().await {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(CallFailure { message: error.to_string(), meaning: meaning(&error) }),
        Err(_) => Err(CallFailure { message: "it panicked".to_owned(), meaning: ErrorMeaning::Fault }),
    }
}

fn after_failure(steps: &Steps, name: &str, CallFailure { message, meaning }: CallFailure) -> Stop {
    let retry_after = match meaning {
        ErrorMeaning::Final => {
            return Stop::TurnBack(FailedStep::new(name, &message, steps.may_have_been_called()));
        }
        ErrorMeaning::Fault => None,
        ErrorMeaning::Retry { after } => Some(after),
    };
    if steps.context.attempt() >= steps.last_forward() {
        return in_doubt(name, &message);
    }
    Stop::Now(StepError::Interrupted { step: name.to_owned(), message, retry_after })
}

/// The way forward ends at a step that may have taken effect.
fn in_doubt(name: &str, message: &str) -> Stop {
    Stop::TurnBack(FailedStep::new(name, message, true))
}

/// Ends the steps of this run, so that a caller that ignores the error cannot start another one.
fn end(steps: &mut Steps, step: &str, error: StepError) -> StepError {
    let error = steps.final_if_last(error, step);
    steps.ended = Some(error.clone());
    steps.note();
    error
}

fn last_result<T: DeserializeOwned>(step: &str, log: &Log) -> Result<T, StepError> {
    read(step, log.completed.last().map_or("", |completed| &completed.result))
}

fn read<T: DeserializeOwned>(step: &str, json: &str) -> Result<T, StepError> {
    serde_json::from_str(json)
        .map_err(|error| StepError::Unreadable { step: step.to_owned(), message: error.to_string() })
}

impl<T> fmt::Debug for Step<'_, T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Step({})", self.name)
    }
}
