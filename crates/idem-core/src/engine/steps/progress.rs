//! How far the steps of one operation are, and how they are undone.

use std::fmt;
use std::panic::AssertUnwindSafe;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;

use super::error::StepError;
use super::log::{CHECKPOINT, Completed, FailedStep, Log};
use super::standing::{StandingStep, StepsState, log_of, unfinished};
use crate::engine::context::{CheckpointError, Context};
use crate::engine::contract::Contract;
use crate::engine::settle::PATIENCE;
use crate::machine::OwnerOutcome;

/// The longest name of a step. It is kept for each step, beside its result.
const MAX_NAME_BYTES: usize = 128;

/// The steps of one operation, in order. [`Context::steps`] returns them.
///
/// Each step is one call to another system. It gets a key that is the same on every attempt, and its result is kept in the
/// operation's checkpoint. After a crash, the next attempt runs the same function again: completed steps return their kept
/// results, and the first step without one runs. So each system must repeat a call with the same key safely, because a crash
/// between the call and its checkpoint repeats it. The record, and so its retention, must outlast the client's repeats.
///
/// The first half of [`Settings::max_attempts`](crate::engine::Settings::max_attempts) goes forward, takeovers after crashes included.
/// When a step fails finally, or no attempt is left, the completed steps are undone in reverse order, each by its
/// [`undo`](crate::engine::Step::undo). An interrupted undo goes on in the next attempt. When the attempts for it are used up as well, the
/// operation ends with [`StepError::NotUndone`], and an event names the steps with their keys and results
/// ([`EventKind::StepsNotUndone`](crate::engine::EventKind::StepsNotUndone)). The same event comes if the operation ends with an error of
/// its own, or by a panic in its last attempt: then its steps stay as they are.
///
/// Limits:
/// - The store must keep what it has acknowledged. If it forgets a checkpoint, as Redis may in a failover, a step that was undone
///   counts as done.
/// - Do not lower `max_attempts` while operations with steps are open: one that has used up the new number ends without being
///   undone. Its record still has its steps ([`StandingStep::of`]).
/// - Crashes in the function's own code between two completed steps are not counted.
///
/// Run the operation by [`Idempotency::run_classified`](crate::engine::Idempotency::run_classified) with [`StepError::meaning`]: then
/// repeats get a final failure again, and a retryable one runs again.
///
/// A step that panics has failed, like one that returns an error. The function must take the same steps on every attempt, apart
/// from what depends on their results, and must end with the error of a step. Attempts happen when
/// requests repeat: if the client gives up, the operation stands still where it is. An engine for workflows (such as Temporal,
/// Restate or DBOS) drives operations by itself. It is the better choice for those that last for days, wait for people, or have
/// more than a few steps.
pub struct Steps {
    pub(super) context: Context,
    pub(super) log: Log,
    /// The number of steps that earlier attempts completed.
    kept: usize,
    /// The number of steps that were asked for in this run.
    taken: usize,
    names: Vec<String>,
    /// Of the completed steps, in their order.
    pub(super) undoings: Vec<Option<Undoing>>,
    /// The step at which this run ends the way forward.
    failing: Option<FailedStep>,
    /// Whether that step has no undo.
    failed_has_no_undo: bool,
    /// How this run of the steps ended; every later step returns it again.
    pub(super) ended: Option<StepError>,
}

/// Undoes a step, whose kept result it gets; `None` if it is not known whether the step took effect.
pub(super) type Undoing = Box<dyn FnOnce(String, Option<String>) -> BoxFuture<'static, Result<(), String>> + Send>;

/// What an undo knows about its step.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct StepToUndo<T> {
    /// The key for the call that undoes the step, the same on every attempt.
    pub key: String,
    /// The key that the step was called with.
    pub step_key: String,
    /// What the step returned. `None` if it may have taken effect, or may still do so: its call can be on the way. Undo it by a
    /// call that cancels `step_key` for good, and does no harm if there is nothing to undo.
    pub result: Option<T>,
}

impl Context {
    /// The steps of this operation, with what earlier attempts have done.
    ///
    /// # Errors
    /// [`StepError::Refused`], without anything done, in these cases:
    /// - The contract is not AtLeastOnce, the only one that resumes operations.
    /// - No record protects this run, because the store is unavailable and the settings say to
    ///   [fail open](crate::engine::Settings::dangerous_fail_open): an undone step could not be told from a completed one.
    /// - The operation has recorded a checkpoint of its own, or has asked for its steps before.
    /// - Another version of this crate has written its steps.
    /// - [`Settings::max_attempts`](crate::engine::Settings::max_attempts) is 1, so that no attempt would be left to undo.
    pub fn steps(&self) -> Result<Steps, StepError> {
        if self.shared().contract() != Contract::AtLeastOnce {
            return Err(StepError::Refused("only the AtLeastOnce contract resumes an operation"));
        }
        let Some(lease) = self.lease() else {
            return Err(StepError::Refused("no record protects it, because the store is unavailable"));
        };
        let log = match lease.checkpoint.as_ref().map(log_of) {
            None => Log::default(),
            Some(Some(log)) => log?,
            Some(None) => return Err(StepError::Refused("it has recorded a checkpoint of its own")),
        };
        if self.shared().settings.max_attempts.get() < 2 {
            return Err(StepError::Refused(
                "one attempt is too few: set `max_attempts` to 2 or more, so that one is left to undo",
            ));
        }
        if !self.begin_steps() {
            return Err(StepError::Refused(
                "it has asked for its steps before, or has recorded a checkpoint of its own",
            ));
        }
        let kept = log.completed.len();
        let (names, undoings) = (Vec::new(), Vec::new());
        let steps = Steps {
            context: self.clone(),
            log,
            kept,
            taken: 0,
            names,
            undoings,
            failing: None,
            failed_has_no_undo: false,
            ended: None,
        };
        steps.note();
        Ok(steps)
    }
}

impl Steps {
    /// Checks the name of the next step, and returns its kept result.
    pub(super) fn take(&mut self, name: &str) -> Result<Option<Completed>, StepError> {
        if let Some(error) = &self.ended {
            return Err(error.clone());
        }
        if name.is_empty() || name.len() > MAX_NAME_BYTES {
            return Err(StepError::Refused("the name of a step has 1 to 128 bytes"));
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
        self.note();
        Ok(completed.cloned())
    }

    /// Notes in the run how its steps stand, so that a handler that ignores the error of a step has no success stored.
    pub(super) fn note(&self) {
        let error = self.ended.clone().or_else(|| unfinished(&self.log, self.taken));
        self.context.note_steps(StepsState { error, standing: self.standing() });
    }

    fn standing(&self) -> Vec<StandingStep> {
        let failed = self.failing.as_ref().or(self.log.failed.as_ref());
        StandingStep::of_log(self.context.record_id(), &self.log, failed, self.failed_has_no_undo)
    }

    /// Whether an earlier attempt may have called the step that this run is at.
    pub(super) fn may_have_been_called(&self) -> bool {
        self.context.attempt() > 1 && self.taken == self.kept + 1
    }

    /// The last attempt of all. The engine counts only attempts that follow a failure, the steps also those after a crash.
    fn last_attempt(&self) -> u32 {
        self.context.shared().settings.max_attempts.get()
    }

    /// The last attempt that goes forward.
    pub(super) fn last_forward(&self) -> u32 {
        self.last_attempt() / 2
    }

    /// Records the log, which holds from then on. The lease may be lost.
    pub(super) async fn record(&mut self, step: &str, log: Log) -> Result<(), StepError> {
        let not_kept = |message: String| StepError::NotKept { step: step.to_owned(), message };
        let data = log.encode().map_err(not_kept)?;
        match self.context.record(CHECKPOINT, data.into(), Some(PATIENCE)).await {
            Ok(()) => {
                self.log = log;
                self.note();
                Ok(())
            }
            Err(CheckpointError::LeaseLost) => Err(StepError::LeaseLost { step: step.to_owned() }),
            Err(error) => Err(not_kept(with_sources(&error))),
        }
    }

    /// The log in the record, if the checkpoint with this sequence is there.
    ///
    /// The lease is renewed first. That waits for an open transaction that has written the checkpoint, so a COMMIT that is still
    /// on its way is found out too.
    pub(super) async fn recorded(&mut self, step: &str, sequence: u32) -> Result<Option<Log>, StepError> {
        let not_kept = |message: String| StepError::NotKept { step: step.to_owned(), message };
        let renewed = self.context.renew_now(PATIENCE).await.map_err(|error| not_kept(with_sources(&error)))?;
        if renewed == OwnerOutcome::LeaseLost {
            return Err(StepError::LeaseLost { step: step.to_owned() });
        }
        let checkpoint =
            self.context.recorded_checkpoint(PATIENCE).await.map_err(|error| not_kept(with_sources(&error)))?;
        let checkpoint = checkpoint.filter(|checkpoint| checkpoint.sequence == sequence);
        let log = checkpoint.map(|checkpoint| serde_json::from_slice(&checkpoint.data)).transpose();
        log.map_err(|error| not_kept(error.to_string()))
    }

    pub(super) fn hold(&self, step: &str) -> Result<(), StepError> {
        if self.context.is_lease_lost() { Err(StepError::LeaseLost { step: step.to_owned() }) } else { Ok(()) }
    }

    /// Ends the way forward at `step`, unless an earlier attempt did, and undoes what was done.
    ///
    /// Its failure is recorded before the first undo, so that no later attempt goes forward again.
    pub(super) async fn turn_back(&mut self, failed: FailedStep, undoing: Option<Undoing>) -> StepError {
        self.failing = Some(failed.clone());
        self.failed_has_no_undo = undoing.is_none();
        self.note();
        // The failed step is one of those that are counted.
        let is_undone = self.log.undone > self.log.completed.len();
        if !is_undone && let Err(error) = self.begin_to_undo(&failed).await {
            return self.final_if_last(error, &failed.step);
        }
        let may_stand = failed.is_in_doubt && undoing.is_none();
        match self.undo_all(&failed, undoing).await {
            Ok(()) => StepError::Failed { step: failed.step, message: failed.message, may_stand },
            Err(error) => self.final_if_last(error, &failed.step),
        }
    }

    /// Counts an attempt to undo, unless there have been enough.
    async fn begin_to_undo(&mut self, failed: &FailedStep) -> Result<(), StepError> {
        let begun = self.log.undo_attempts;
        // Crashes may have used up all attempts before the first undo. Then this many attempts undo nevertheless.
        let enough = self.last_attempt() - self.last_forward();
        if self.context.attempt() > self.last_attempt() && begun >= enough {
            return Err(StepError::NotUndone {
                failed: failed.step.clone(),
                step: self.first_standing(&failed.step),
                message: format!("undoing began {begun} times, and did not end"),
            });
        }
        let log = Log { failed: Some(failed.clone()), undo_attempts: begun + 1, ..self.log.clone() };
        self.record(&failed.step, log).await
    }

    /// The first step that is not undone; `failed` if there is none.
    fn first_standing(&self, failed: &str) -> String {
        self.standing().into_iter().next().map_or_else(|| failed.to_owned(), |standing| standing.step)
    }

    /// What an error means if no attempt follows.
    pub(super) fn final_if_last(&self, error: StepError, failed: &str) -> StepError {
        if self.context.attempt() < self.last_attempt() {
            return error;
        }
        let message = match &error {
            StepError::UndoFailed { message, .. }
            | StepError::NotKept { message, .. }
            | StepError::Interrupted { message, .. } => message.clone(),
            StepError::OrderChanged { .. } | StepError::NameUsedTwice { .. } | StepError::Unreadable { .. } => {
                error.to_string()
            }
            // If another attempt runs, this answer is not stored.
            StepError::LeaseLost { .. } => "the lease ran out".to_owned(),
            StepError::Failed { .. } | StepError::NotUndone { .. } | StepError::Refused(_) => return error,
        };
        StepError::NotUndone { failed: failed.to_owned(), step: self.first_standing(failed), message }
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
            self.record(&step, log).await?;
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
        self.hold(step)?;
        let key = self.context.record_id().downstream_key(&format!("undo:{step}"));
        // Called inside, as it may panic before it returns a future.
        let undone = AssertUnwindSafe(async move { undoing(key, result).await }).catch_unwind().await;
        let undone = undone.unwrap_or_else(|_| Err("its undo panicked".to_owned()));
        undone.map_err(|message| StepError::UndoFailed { failed, step: step_name, message })
    }
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
