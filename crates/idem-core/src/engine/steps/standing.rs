//! How the steps of an operation stand, as its log tells: which are not undone, and whether it may succeed.

use super::error::StepError;
use super::log::{CHECKPOINT, FailedStep, Log, key_of};
use crate::record::{Checkpoint, Record};
use crate::record_id::RecordId;

/// A step of an operation that is complete and not undone, or that may have taken effect.
///
/// The event [`StepsNotUndone`](crate::engine::EventKind::StepsNotUndone) has those of an operation that has failed for good. Its
/// record keeps them until it expires.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct StandingStep {
    /// Its name.
    pub step: String,
    /// The key that it was called with.
    pub key: String,
    /// What it returned, as JSON. `None` if it is not known whether it took effect.
    pub result: Option<String>,
}

impl StandingStep {
    /// The standing steps of a record that has not completed, the last one first. Steps without an undo are among them until the
    /// undoing has passed them. A step that was called when its process died is not: no result of it was kept.
    ///
    /// # Errors
    /// [`StepError::Refused`] if the record's steps were written by another version, or are damaged.
    pub fn of(id: &RecordId, record: &Record) -> Result<Vec<Self>, StepError> {
        let log = record.checkpoint.as_ref().and_then(log_of).transpose()?;
        Ok(log.map_or_else(Vec::new, |log| Self::of_log(id, &log, log.failed.as_ref(), false)))
    }

    /// `failed` is the step at which the way forward ends, also if the log does not have it yet.
    pub(super) fn of_log(id: &RecordId, log: &Log, failed: Option<&FailedStep>, failed_has_no_undo: bool) -> Vec<Self> {
        let standing = |step: &str, result| Self { step: step.to_owned(), key: key_of(id, step), result };
        let failed = failed.filter(|failed| failed.is_in_doubt && (log.undone == 0 || failed_has_no_undo));
        // The failed step is the first of those that are counted.
        let completed = log.completed.iter().rev().skip(log.undone.saturating_sub(1));
        let completed = completed.map(|completed| standing(&completed.step, Some(completed.result.clone())));
        failed.map(|failed| standing(&failed.step, None)).into_iter().chain(completed).collect()
    }
}

/// How the steps of a run stand.
#[derive(Debug, Clone, Default)]
pub(in crate::engine) struct StepsState {
    /// Why the operation cannot succeed as they stand.
    pub(in crate::engine) error: Option<StepError>,
    /// Those that are not undone, the last one first.
    pub(in crate::engine) standing: Vec<StandingStep>,
}

pub(in crate::engine) fn is_log(checkpoint: &Checkpoint) -> bool {
    &*checkpoint.name == CHECKPOINT
}

/// The log in a checkpoint; `None` if the checkpoint is the handler's.
pub(super) fn log_of(checkpoint: &Checkpoint) -> Option<Result<Log, StepError>> {
    let damaged = |_| StepError::Refused("its checkpoint was written by another version, or is damaged");
    is_log(checkpoint).then(|| serde_json::from_slice(&checkpoint.data).map_err(damaged))
}

/// Why an operation that took `taken` steps has not succeeded; `None` if it may have.
pub(super) fn unfinished(log: &Log, taken: usize) -> Option<StepError> {
    let missing = log.completed.get(taken).map(|completed| &completed.step);
    let missing = missing.or(log.failed.as_ref().map(|failed| &failed.step));
    Some(StepError::OrderChanged { expected: missing?.clone(), found: "the end".to_owned() })
}
