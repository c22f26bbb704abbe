//! Steps of an operation that calls several other systems, each with a kept result and an undo.

use std::fmt::{self, Display};
use std::future::Future;
use std::marker::PhantomData;
use std::panic::AssertUnwindSafe;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::context::{CheckpointError, Context};
use super::contract::Contract;
use super::run::ErrorMeaning;

/// The checkpoint that holds the log of the steps.
const CHECKPOINT: &str = "idem:steps";

/// The longest log with results. Below the limit of a checkpoint there is room for the message of a failure.
const MAX_RESULT_BYTES: usize = 60 * 1024;

/// The longest kept message of a failed step. JSON may take six bytes for one.
const MAX_MESSAGE_BYTES: usize = 512;

/// What the steps of an operation have done, kept in its checkpoint.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct Log {
    /// The completed steps, in their order.
    completed: Vec<Completed>,
    /// The step that ended the way forward.
    failed: Option<FailedStep>,
    /// How many steps are undone, counted from the last one. The failed step is one of them.
    undone: usize,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Completed {
    step: String,
    /// As JSON text: reading it as a value and writing it again would change some numbers.
    result: String,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct FailedStep {
    step: String,
    message: String,
    /// Whether it may have taken effect all the same.
    is_in_doubt: bool,
}

/// The steps of one operation, in order. [`Context::steps`] returns them.
///
/// Each step is one call to another system. It gets a key that is the same on every attempt, and its result is kept in the
/// operation's checkpoint. After a crash, the next attempt runs the same function again: completed steps return their kept
/// results, and the first step without one runs. So each system must repeat a call with the same key safely, because a crash
/// between the call and its checkpoint repeats it.
///
/// The first half of [`Settings::max_attempts`](super::Settings::max_attempts) goes forward, takeovers after crashes included.
/// When a step fails finally, or no attempt is left, the completed steps are undone in reverse order, each by its
/// [`undo`](Step::undo). An interrupted undo goes on in the next attempt. When the attempts for it are used up as well, the
/// operation ends with [`StepError::NotUndone`].
///
/// Run the operation by [`Idempotency::run_classified`](super::Idempotency::run_classified) with [`StepError::meaning`]: then
/// repeats get a final failure again, and a retryable one runs again.
///
/// A step that panics has failed, like one that returns an error. The function must take the same steps on every attempt, apart
/// from what depends on their results, and must end with the error of a step. Attempts happen when
/// requests repeat: if the client gives up, the operation stands still where it is. An engine for workflows (such as Temporal,
/// Restate or DBOS) drives operations by itself. It is the better choice for those that last for days, wait for people, or have
/// more than a few steps.
pub struct Steps {
    context: Context,
    log: Log,
    /// The number of steps that were asked for in this run.
    taken: usize,
    names: Vec<String>,
    /// Of the completed steps, in their order.
    undoings: Vec<Option<Undoing>>,
    /// How this run of the steps ended; every later step returns it again.
    ended: Option<StepError>,
}

/// Undoes a step, whose kept result it gets; `None` if it is not known whether the step took effect.
type Undoing = Box<dyn FnOnce(String, Option<String>) -> BoxFuture<'static, Result<(), String>> + Send>;

/// What an undo knows about its step.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct StepToUndo<T> {
    /// The key for the call that undoes the step, the same on every attempt.
    pub key: String,
    /// The key that the step was called with.
    pub step_key: String,
    /// What the step returned. `None` if it may have taken effect, but its answer is unknown: look it up by `step_key`, or undo
    /// it by a call that does no harm if there is nothing to undo.
    pub result: Option<T>,
}

/// Why a step has no result. The operation must end with it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StepError {
    /// The step failed, and the next attempt of the operation runs it again.
    #[error("step `{step}` failed, and runs again in the next attempt: {message}")]
    Interrupted {
        /// The step.
        step: String,
        /// Its error.
        message: String,
        /// How long the next attempt should wait; by default the backoff of the settings.
        retry_after: Option<Duration>,
    },
    /// The step failed finally, and all steps before it are undone.
    #[error("step `{step}` failed, and the steps before it are undone: {message}")]
    Failed {
        /// The step.
        step: String,
        /// Its error.
        message: String,
    },
    /// An undo failed, and the next attempt of the operation goes on with it.
    #[error("step `{failed}` failed, and step `{step}` is not undone yet: {message}")]
    UndoFailed {
        /// The step that failed first.
        failed: String,
        /// The step whose undo failed.
        step: String,
        /// The error of the undo.
        message: String,
    },
    /// The attempts are used up, and some steps are not undone: an operator has to do it.
    #[error(
        "step `{failed}` failed, and step `{step}` and those before it are not undone, as no attempt is left: {message}"
    )]
    NotUndone {
        /// The step that failed first.
        failed: String,
        /// The first step that is not undone.
        step: String,
        /// Why it is not.
        message: String,
    },
    /// The lease is lost: another attempt runs this operation, so this one must stop.
    #[error("the lease was lost before step `{step}`: another attempt runs this operation, so this one must stop")]
    LeaseLost {
        /// The step that did not run, or whose result is not kept.
        step: String,
    },
    /// An earlier attempt took another step at this place.
    #[error(
        "the operation takes step `{found}` where an earlier attempt took `{expected}`; take the same steps on every attempt"
    )]
    OrderChanged {
        /// The step of the earlier attempt.
        expected: String,
        /// The step of this attempt.
        found: String,
    },
    /// Two steps have one name, and would have one key.
    #[error("two steps of the operation are named `{step}`; give each its own name")]
    NameUsedTwice {
        /// The name.
        step: String,
    },
    /// The kept result is not of the type that the step returns.
    #[error("the kept result of step `{step}` cannot be read: {message}")]
    Unreadable {
        /// The step.
        step: String,
        /// The error of its type.
        message: String,
    },
    /// The store did not keep the result of a step. The next attempt runs the step again with the same key.
    #[error("the store did not keep what step `{step}` did: {message}")]
    NotKept {
        /// The step.
        step: String,
        /// The error of the store.
        message: String,
    },
    /// The operation cannot have steps.
    #[error("this operation cannot have steps: {0}")]
    Refused(&'static str),
}

impl StepError {
    /// What it means for the operation: [`Failed`](Self::Failed) and [`NotUndone`](Self::NotUndone) are final, and
    /// everything else may be tried again.
    #[must_use]
    pub fn meaning(&self) -> ErrorMeaning {
        match self {
            Self::Failed { .. } | Self::NotUndone { .. } => ErrorMeaning::Final,
            Self::Interrupted { retry_after: Some(after), .. } => ErrorMeaning::Retry { after: *after },
            _ => ErrorMeaning::Fault,
        }
    }
}

impl Context {
    /// The steps of this operation, with what earlier attempts have done.
    ///
    /// # Errors
    /// [`StepError::Refused`], without anything done, in these cases:
    /// - The contract is not AtLeastOnce, the only one that resumes operations.
    /// - No record protects this run, because the store is unavailable and the settings say to
    ///   [fail open](super::Settings::dangerous_fail_open): an undone step could not be told from a completed one.
    /// - The operation has recorded a checkpoint of its own, or has asked for its steps before.
    /// - [`Settings::max_attempts`](super::Settings::max_attempts) is 1, so that no attempt would be left to undo.
    pub fn steps(&self) -> Result<Steps, StepError> {
        if self.shared().contract() != Contract::AtLeastOnce {
            return Err(StepError::Refused("only the AtLeastOnce contract resumes an operation"));
        }
        let Some(lease) = self.lease() else {
            return Err(StepError::Refused("no record protects it, because the store is unavailable"));
        };
        let log = match &lease.checkpoint {
            None => Log::default(),
            Some(checkpoint) if &*checkpoint.name == CHECKPOINT => serde_json::from_slice(&checkpoint.data)
                .map_err(|_| StepError::Refused("its checkpoint was written by another version, or is damaged"))?,
            Some(_) => return Err(StepError::Refused("it has recorded a checkpoint of its own")),
        };
        if self.shared().settings.max_attempts.get() < 2 {
            return Err(StepError::Refused(
                "one attempt is too few: set `max_attempts` to 2 or more, so that one is left to undo",
            ));
        }
        if !self.begin_steps() {
            return Err(StepError::Refused("it has asked for its steps before"));
        }
        Ok(Steps { context: self.clone(), log, taken: 0, names: Vec::new(), undoings: Vec::new(), ended: None })
    }
}

impl Steps {
    /// The next step. `name` is part of its key, and must be different from the others' and the same on every attempt.
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
    pub fn step<T>(&mut self, name: &str) -> Step<'_, T> {
        Step { steps: self, name: name.to_owned(), undoing: None, result: PhantomData }
    }

    /// Checks the name of the next step, and returns its kept result.
    fn take(&mut self, name: &str) -> Result<Option<String>, StepError> {
        if let Some(error) = &self.ended {
            return Err(error.clone());
        }
        if self.names.iter().any(|taken| taken == name) {
            return Err(StepError::NameUsedTwice { step: name.to_owned() });
        }
        let place = self.taken;
        let completed = self.log.completed.get(place);
        let after_them = self.log.failed.as_ref().map(|failed| &failed.step).filter(|_| completed.is_none());
        if let Some(expected) = completed.map(|completed| &completed.step).or(after_them)
            && expected != name
        {
            return Err(StepError::OrderChanged { expected: expected.clone(), found: name.to_owned() });
        }
        self.taken += 1;
        self.names.push(name.to_owned());
        Ok(completed.map(|completed| completed.result.clone()))
    }

    /// The last attempt of all. The engine counts only attempts that follow a failure, the steps also those after a crash.
    fn last_attempt(&self) -> u32 {
        self.context.shared().settings.max_attempts.get()
    }

    /// The last attempt that goes forward.
    fn last_forward(&self) -> u32 {
        self.last_attempt() / 2
    }

    /// Records the log; the lease may be lost.
    async fn record(&mut self, step: &str, log: &Log) -> Result<(), StepError> {
        let not_kept = |message: String| StepError::NotKept { step: step.to_owned(), message };
        let data = serde_json::to_vec(log).map_err(|error| not_kept(error.to_string()))?;
        match self.context.checkpoint(CHECKPOINT, data).await {
            Ok(()) => Ok(()),
            Err(CheckpointError::LeaseLost) => Err(StepError::LeaseLost { step: step.to_owned() }),
            Err(error) => Err(not_kept(with_sources(&error))),
        }
    }

    fn hold(&self, step: &str) -> Result<(), StepError> {
        if self.context.is_lease_lost() { Err(StepError::LeaseLost { step: step.to_owned() }) } else { Ok(()) }
    }

    /// Ends the way forward at `step`, unless an earlier attempt did, and undoes what was done.
    ///
    /// Its failure is recorded before the first undo, so that no later attempt goes forward again.
    async fn turn_back(&mut self, failed: FailedStep, undoing: Option<Undoing>) -> StepError {
        let step = failed.step.clone();
        if self.log.failed.is_none() {
            let log = Log { failed: Some(failed.clone()), ..self.log.clone() };
            if let Err(error) = self.record(&step, &log).await {
                return self.final_if_last(error, &step);
            }
            self.log = log;
        }
        match self.undo_all(&failed, undoing).await {
            Ok(()) => StepError::Failed { step, message: failed.message },
            Err(error) => self.final_if_last(error, &step),
        }
    }

    /// What an error means if no attempt follows.
    fn final_if_last(&self, error: StepError, failed: &str) -> StepError {
        if self.context.attempt() < self.last_attempt() {
            return error;
        }
        let failed = failed.to_owned();
        match error {
            StepError::UndoFailed { step, message, .. } | StepError::NotKept { step, message } => {
                StepError::NotUndone { failed, step, message }
            }
            // If another attempt runs, this answer is not stored.
            StepError::LeaseLost { step } => {
                StepError::NotUndone { failed, step, message: "the lease ran out".to_owned() }
            }
            error => error,
        }
    }

    async fn undo_all(&mut self, failed: &FailedStep, undoing: Option<Undoing>) -> Result<(), StepError> {
        let in_doubt = undoing.filter(|_| failed.is_in_doubt).map(|undoing| (failed.step.clone(), Some(undoing), None));
        let completed = self.log.completed.clone().into_iter().zip(std::mem::take(&mut self.undoings));
        let completed = completed.rev().map(|(completed, undoing)| (completed.step, undoing, Some(completed.result)));
        // One place for the failed step, with or without an undo, so that the count means the same on every attempt.
        let all = std::iter::once(in_doubt.unwrap_or((failed.step.clone(), None, None))).chain(completed);
        let all: Vec<_> = all.skip(self.log.undone).collect();
        for (step, undoing, result) in all {
            if let Some(undoing) = undoing {
                self.undo(failed, &step, undoing, result).await?;
            }
            let log = Log { undone: self.log.undone + 1, ..self.log.clone() };
            self.record(&step, &log).await?;
            self.log = log;
        }
        Ok(())
    }

    async fn undo(
        &mut self,
        failed: &FailedStep,
        step: &str,
        undoing: Undoing,
        result: Option<String>,
    ) -> Result<(), StepError> {
        let (failed, step_name) = (failed.step.clone(), step.to_owned());
        let attempts = self.last_attempt();
        if self.context.attempt() > attempts {
            let message = format!("each of {attempts} attempts ended before it was undone");
            return Err(StepError::NotUndone { failed, step: step_name, message });
        }
        self.hold(step)?;
        let key = self.context.downstream_key(&format!("undo:{step}"));
        // Called inside, as it may panic before it returns a future.
        let undone = AssertUnwindSafe(async move { undoing(key, result).await }).catch_unwind().await;
        let undone = undone.unwrap_or_else(|_| Err("its undo panicked".to_owned()));
        undone.map_err(|message| StepError::UndoFailed { failed, step: step_name, message })
    }
}

/// A step that is about to run. [`Steps::step`] returns it.
#[must_use = "a step does nothing until it runs"]
pub struct Step<'s, T> {
    steps: &'s mut Steps,
    name: String,
    undoing: Option<Undoing>,
    result: PhantomData<fn() -> T>,
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
        let step_key = key_of(&self.steps.context, &self.name);
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
    /// If the future is dropped, the step may have taken effect; the next attempt runs it again.
    pub async fn run<E, F, R>(self, call: F) -> Result<T, StepError>
    where
        E: Display,
        F: FnOnce(String) -> R,
        R: Future<Output = Result<T, E>>,
    {
        self.run_classified(|_| ErrorMeaning::Fault, call).await
    }

    /// The same; `meaning` says of an error whether the step may be tried again. [`ErrorMeaning::Final`] says that the step
    /// took no effect and never will.
    ///
    /// # Errors
    /// [`StepError`], as from [`run`](Self::run).
    ///
    /// # Cancellation safety
    /// If the future is dropped, the step may have taken effect; the next attempt runs it again.
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
        let Self { steps, name, undoing, .. } = self;
        let kept = match steps.take(&name) {
            Ok(kept) => kept,
            Err(error) => return Err(end(steps, error)),
        };
        if let Some(json) = kept {
            steps.undoings.push(undoing);
            return read(&name, &json).map_err(|error| end(steps, error));
        }
        // Stays if the future is dropped: no other step may start after one that may have taken effect.
        let message = "its future was dropped before it was done".to_owned();
        steps.ended = Some(StepError::Interrupted { step: name.clone(), message, retry_after: None });
        let ended = match advance(steps, &name, meaning, call).await {
            Ok((value, completed)) => {
                steps.ended = None;
                steps.log.completed.push(completed);
                steps.undoings.push(undoing);
                return Ok(value);
            }
            Err(Stop::Now(error)) => error,
            Err(Stop::TurnBack(failed)) => steps.turn_back(failed, undoing).await,
        };
        Err(end(steps, ended))
    }
}

/// Why a step did not complete.
enum Stop {
    Now(StepError),
    TurnBack(FailedStep),
}

/// Runs a step that no attempt has completed, and keeps its result.
async fn advance<T, E, F, R>(
    steps: &mut Steps,
    name: &str,
    meaning: impl FnOnce(&E) -> ErrorMeaning,
    call: F,
) -> Result<(T, Completed), Stop>
where
    T: Serialize + DeserializeOwned,
    E: Display,
    F: FnOnce(String) -> R,
    R: Future<Output = Result<T, E>>,
{
    if let Some(failed) = &steps.log.failed {
        return Err(Stop::TurnBack(failed.clone()));
    }
    let turn_back = |message: &str, is_in_doubt| {
        Stop::TurnBack(FailedStep { step: name.to_owned(), message: shortened(message), is_in_doubt })
    };
    let forward = steps.last_forward();
    let attempt = steps.context.attempt();
    if attempt > forward {
        let message = format!("each of {forward} attempts ended before it was done");
        return Err(turn_back(&message, true));
    }
    steps.hold(name).map_err(Stop::Now)?;
    let key = key_of(&steps.context, name);
    // Called inside, as it may panic before it returns a future.
    let called = AssertUnwindSafe(async move { call(key).await }).catch_unwind().await;
    let value = match called {
        Ok(Ok(value)) => value,
        failed => {
            let (message, meaning) = match &failed {
                Ok(Err(error)) => (error.to_string(), meaning(error)),
                _ => ("it panicked".to_owned(), ErrorMeaning::Fault),
            };
            let retry_after = match meaning {
                ErrorMeaning::Final => return Err(turn_back(&message, false)),
                ErrorMeaning::Fault => None,
                ErrorMeaning::Retry { after } => Some(after),
            };
            if attempt >= forward {
                return Err(turn_back(&message, true));
            }
            return Err(Stop::Now(StepError::Interrupted { step: name.to_owned(), message, retry_after }));
        }
    };
    let result = match serde_json::to_string(&value) {
        Ok(result) => result,
        Err(error) => return Err(turn_back(&format!("its result cannot be written as JSON: {error}"), true)),
    };
    // Read at once, so that a type that cannot be read back is noticed in the first test, and not after the first crash.
    let value = read(name, &result).map_err(|error| turn_back(&error.to_string(), true))?;
    let completed = Completed { step: name.to_owned(), result };
    let mut log = steps.log.clone();
    log.completed.push(completed.clone());
    let bytes = serde_json::to_vec(&log).map_or(usize::MAX, |json| json.len());
    if bytes > MAX_RESULT_BYTES {
        let message = format!(
            "the results of all steps have {bytes} bytes; at most {MAX_RESULT_BYTES} are kept, so return an identifier"
        );
        return Err(turn_back(&message, true));
    }
    steps.record(name, &log).await.map_err(Stop::Now)?;
    Ok((value, completed))
}

/// Ends the steps of this run, so that a caller that ignores the error cannot start another one.
fn end(steps: &mut Steps, error: StepError) -> StepError {
    steps.ended = Some(error.clone());
    error
}

/// The key of a step. An undo has another prefix, so that no name of a step leads to the key of an undo.
fn key_of(context: &Context, step: &str) -> String {
    context.downstream_key(&format!("step:{step}"))
}

fn read<T: DeserializeOwned>(step: &str, json: &str) -> Result<T, StepError> {
    serde_json::from_str(json)
        .map_err(|error| StepError::Unreadable { step: step.to_owned(), message: error.to_string() })
}

fn shortened(message: &str) -> String {
    let fits = |(start, character): &(usize, char)| start + character.len_utf8() <= MAX_MESSAGE_BYTES;
    message.char_indices().take_while(fits).map(|(_, character)| character).collect()
}

fn with_sources(error: &dyn std::error::Error) -> String {
    let sources = std::iter::successors(error.source(), |error| error.source());
    sources.fold(error.to_string(), |text, source| format!("{text}: {source}"))
}

impl fmt::Debug for Steps {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Steps")
            .field("context", &self.context)
            .field("taken", &self.names)
            .finish_non_exhaustive()
    }
}

impl<T> fmt::Debug for Step<'_, T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Step({})", self.name)
    }
}
