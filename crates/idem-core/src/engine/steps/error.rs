//! Why a step has no result.

use std::time::Duration;

use crate::engine::contract::ErrorMeaning;

/// Why a step has no result. The operation must end with it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StepError {
    /// The step failed, and the next attempt of the operation runs it again, or undoes it if it does not go forward.
    #[error("step `{step}` did not complete in this attempt: {message}")]
    Interrupted {
        /// The step.
        step: String,
        /// Its error.
        message: String,
        /// How long the next attempt should wait; by default the backoff of the settings.
        retry_after: Option<Duration>,
    },
    /// The step failed finally, and all steps that have an undo are undone.
    #[error("step `{step}` failed{}, and the steps before it are undone: {message}", if *may_stand { " and may have taken effect" } else { "" })]
    Failed {
        /// The step.
        step: String,
        /// Its error.
        message: String,
        /// Whether the step itself may have taken effect, and has no undo: an operator has to find out.
        may_stand: bool,
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
    /// [`EventKind::StepsNotUndone`](crate::engine::EventKind::StepsNotUndone) has their keys and results.
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
    /// The lease is lost, or is about to end: another attempt may run this operation, so this one must stop.
    #[error("the lease was lost before step `{step}`: another attempt may run this operation, so this one must stop")]
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
    /// The store did not keep the result of a step. The next attempt runs the step again with the same key, or undoes it if it
    /// does not go forward.
    #[error("the store did not keep what step `{step}` did: {message}")]
    NotKept {
        /// The step.
        step: String,
        /// The error of the store.
        message: String,
    },
    /// The operation cannot have steps, or not this one.
    #[error("this operation cannot have such steps: {0}")]
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
