//! Steps that were made before, under another key.
//!
//! Stores compare bytes to tell whether a step was made before (law L8). A rotation, another version of the compression, or another order
//! of header fields gives other bytes to the same step, and the store refuses it. Then the stored value is opened, and the state
//! machine decides again, by plaintext. If it calls the step repeated, the step goes to the store once more with the stored bytes,
//! so that the store answers it as durably as any.

use idem_core::{
    Checkpoint, Command, Lease, Outcome, OwnerAction, OwnerOutcome, Record, Resolution, Resolve, ResolveOutcome,
    Settlement, State, StoreError, StoredResponse, Timestamp, machine,
};

use crate::sealer::{Run, Sealer};

/// Whether `command` is the step that led to the record, of which the part that the command writes is opened.
fn is_repeated(record: &Record, command: Command<'_>) -> bool {
    // The store has just returned the record, so it has not expired. No other time matters to a step that changes nothing.
    let now = Timestamp::from_unix_micros(record.expires_at.unix_micros().saturating_sub(1));
    let (next, outcome) = machine::transition(Some(record), command, now);
    let is_accepted =
        matches!(outcome, Outcome::Owner(OwnerOutcome::Applied) | Outcome::Resolve(ResolveOutcome::Resolved));
    is_accepted && next.as_ref() == Some(record)
}

/// The settlement with the answer as the store has it, if it was made before. An answer that does not open cannot be compared, and
/// leaves the store's refusal.
pub(crate) fn settlement(
    sealer: &Sealer,
    lease: &Lease,
    record: &Record,
    settlement: &Settlement,
) -> Option<Settlement> {
    let response = stored_response(record).filter(|_| record.owner == lease.owner)?;
    let state = sealer.open_state(Run::of_record(&lease.id, record), &record.state).ok()?;
    let record = Record { state, ..record.clone() };
    let action = OwnerAction::Settle(settlement, std::time::Duration::ZERO);
    if !is_repeated(&record, Command::Owner(lease.owner, action)) {
        return None;
    }
    match settlement {
        Settlement::Completed(_) => Some(Settlement::Completed(response)),
        Settlement::FailedTerminal(_) => Some(Settlement::FailedTerminal(response)),
        Settlement::FailedRetryable { retry_after, .. } => {
            Some(Settlement::FailedRetryable { response, retry_after: *retry_after })
        }
        Settlement::OutcomeUnknown | Settlement::Released => None,
    }
}

/// The checkpoint as the store has it, if it was made before. One that does not open leaves the store's refusal.
pub(crate) fn checkpoint(
    sealer: &Sealer,
    lease: &Lease,
    record: &Record,
    checkpoint: &Checkpoint,
) -> Option<Checkpoint> {
    let stored = record.checkpoint.as_ref().filter(|_| record.owner == lease.owner)?;
    let opened = sealer.open_checkpoint(Run::of_record(&lease.id, record), stored).ok()?;
    let record = Record { checkpoint: Some(opened), ..record.clone() };
    let command = Command::Owner(lease.owner, OwnerAction::Checkpoint(checkpoint));
    is_repeated(&record, command).then(|| stored.clone())
}

/// The resolution with the answer as the store has it, if it was made before.
pub(crate) fn resolution(
    sealer: &Sealer,
    record: &Record,
    request: &Resolve,
) -> Result<Option<Resolution>, StoreError> {
    let Some(response) = stored_response(record).filter(|_| record.owner == request.action) else { return Ok(None) };
    let state = sealer.open_state(Run::of_record(&request.id, record), &record.state);
    let record = Record { state: state.map_err(|fault| fault.of(&request.id))?, ..record.clone() };
    if !is_repeated(&record, Command::Resolve(request)) {
        return Ok(None);
    }
    Ok(match &request.resolution {
        Resolution::Completed(_) => Some(Resolution::Completed(response)),
        Resolution::FailedTerminal(_) => Some(Resolution::FailedTerminal(response)),
        Resolution::FailedRetryable { retry_after, .. } => {
            Some(Resolution::FailedRetryable { response, retry_after: *retry_after })
        }
        Resolution::OutcomeUnknown => None,
    })
}

fn stored_response(record: &Record) -> Option<StoredResponse> {
    match &record.state {
        State::InProgress { .. } => None,
        State::Completed { response } | State::Failed { response, .. } => Some(response.clone()),
    }
}
