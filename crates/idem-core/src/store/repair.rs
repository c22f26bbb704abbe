//! Repairs with a reason that stays.

use super::{Operate, RepairNote, StateName, StoreError};
use crate::machine::{Erase, EraseOutcome, Refusal, Resolution, Resolve, ResolveOutcome};

/// Resolves an operation, and keeps who asked for it and why.
///
/// The note is written before the resolution, so that no record is resolved without one. After it, the outcome is added.
///
/// # Errors
/// [`StoreError`] when the store could not answer. If it is indeterminate, repeat with the same request.
pub async fn repair<O: Operate + ?Sized>(
    store: &O,
    request: &Resolve,
    actor: &str,
    reason: &str,
) -> Result<ResolveOutcome, StoreError> {
    let note = RepairNote {
        action: request.action,
        record: request.id,
        actor: actor.to_owned(),
        reason: reason.to_owned(),
        resolution: state_after(&request.resolution).as_str().to_owned(),
        outcome: None,
    };
    store.note(&note).await?;
    let outcome = store.resolve(request).await?;
    store
        .note(&RepairNote { outcome: Some(text_of(outcome).to_owned()), ..note })
        .await
        .map_err(StoreError::indeterminate)?;
    Ok(outcome)
}

/// Erases what a person left in a record, and keeps who asked for it and why. A principal in the reason is not kept.
///
/// The note is written before the record changes. After it, the outcome is added.
///
/// # Errors
/// [`StoreError`] when the store could not answer. If it is indeterminate, repeat with the same request.
pub async fn erase<O: Operate + ?Sized>(
    store: &O,
    request: &Erase,
    actor: &str,
    reason: &str,
) -> Result<EraseOutcome, StoreError> {
    let note = RepairNote {
        action: request.action,
        record: request.id,
        actor: actor.to_owned(),
        reason: reason.to_owned(),
        resolution: "erased".to_owned(),
        outcome: None,
    };
    let reason = request.principal.as_deref().and_then(|principal| note.reason_without(principal));
    let note = match reason {
        Some(reason) => RepairNote { reason, ..note },
        None => note,
    };
    store.note(&note).await?;
    let outcome = store.erase(request).await?;
    let text = match outcome {
        EraseOutcome::Erased => "erased",
        EraseOutcome::Changed => "changed meanwhile",
        EraseOutcome::Live => "refused: live",
        EraseOutcome::Unsettled => "refused: not settled",
        EraseOutcome::Token => "refused: no new action",
    };
    store.note(&RepairNote { outcome: Some(text.to_owned()), ..note }).await.map_err(StoreError::indeterminate)?;
    Ok(outcome)
}

fn state_after(resolution: &Resolution) -> StateName {
    match resolution {
        Resolution::Completed(_) => StateName::Completed,
        Resolution::FailedTerminal(_) => StateName::Failed,
        Resolution::FailedRetryable { .. } => StateName::Retryable,
        Resolution::OutcomeUnknown => StateName::OutcomeUnknown,
    }
}

fn text_of(outcome: ResolveOutcome) -> &'static str {
    match outcome {
        ResolveOutcome::Resolved => "resolved",
        // An earlier try may have got no answer, and the operation may have run again since.
        ResolveOutcome::Changed => "changed meanwhile, or resolved by an earlier try",
        ResolveOutcome::Refused(Refusal::Live) => "refused: live",
        ResolveOutcome::Refused(Refusal::Unfenced) => "refused: not unknown yet",
        ResolveOutcome::Refused(Refusal::Token) => "refused: no new action",
        ResolveOutcome::Refused(Refusal::Final) => "refused: final",
    }
}
