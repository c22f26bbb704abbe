//! The decision on what an owner does: renew, checkpoint, settle.

use std::time::Duration;

use super::command::{OwnerAction, OwnerOutcome, Settlement};
use super::expiry::current;
use crate::record::{Acquisition, Checkpoint, Failure, OwnerToken, Record, State, StoredResponse, Takeover};
use crate::timestamp::Timestamp;

/// Decides an owner's action: returns the record afterwards, and whether the action was applied.
///
/// If the owner token is not the record's, or the operation is not in progress, the answer is `LeaseLost` and nothing
/// changes (law L3). A lease that has run out but was not taken over still belongs to its owner.
///
/// A checkpoint that does not follow the stored one changes nothing. If it equals the stored one, the answer is
/// `Applied`, else `LeaseLost`.
///
/// A repeated settlement gets the same answer as the first time (law L8). A settlement counts as repeated in two cases:
/// - The record is settled, with the same token and the same settlement.
/// - It is [`Settlement::Released`], and there is no record, or one that was released.
#[must_use]
pub fn apply(
    record: Option<&Record>,
    owner: OwnerToken,
    action: OwnerAction<'_>,
    now: Timestamp,
) -> (Option<Record>, OwnerOutcome) {
    let record = current(record, now);
    let Some(record) = record.filter(|record| record.owner != OwnerToken::NOBODY) else {
        let released = matches!(action, OwnerAction::Settle(Settlement::Released, _));
        return (record.cloned(), if released { OwnerOutcome::Applied } else { OwnerOutcome::LeaseLost });
    };
    let unchanged = |outcome| (Some(record.clone()), outcome);
    if record.owner != owner {
        return unchanged(OwnerOutcome::LeaseLost);
    }
    let State::InProgress { acquisition, takeover, .. } = record.state else {
        let repeated = matches!(action, OwnerAction::Settle(settlement, _) if is_settled_so(&record.state, settlement));
        return unchanged(if repeated { OwnerOutcome::Applied } else { OwnerOutcome::LeaseLost });
    };
    let applied = |next| (next, OwnerOutcome::Applied);
    match action {
        OwnerAction::Renew(term) => {
            let lease_until = now.saturating_add(term.lease);
            applied(Some(Record {
                updated_at: now,
                expires_at: lease_until.saturating_add(term.retention),
                state: State::InProgress { lease_until, acquisition, takeover },
                ..record.clone()
            }))
        }
        OwnerAction::Checkpoint(checkpoint) if record.checkpoint.as_ref() == Some(checkpoint) => {
            unchanged(OwnerOutcome::Applied)
        }
        OwnerAction::Checkpoint(checkpoint) if is_superseded(record, checkpoint) => unchanged(OwnerOutcome::LeaseLost),
        OwnerAction::Checkpoint(checkpoint) => {
            applied(Some(Record { checkpoint: Some(checkpoint.clone()), updated_at: now, ..record.clone() }))
        }
        OwnerAction::Settle(settlement, retention) => {
            applied(settled(record, settlement, retention, now).or_else(|| given_back(record, now)))
        }
    }
}

/// The record after a settlement; `None` for a release.
pub(super) fn settled(record: &Record, settlement: &Settlement, retention: Duration, now: Timestamp) -> Option<Record> {
    let state = settled_state(settlement, now)?;
    // A retry needs the checkpoint, and so does an operator after the last one.
    let checkpoint = record.checkpoint.clone().filter(|_| matches!(state, State::Failed { .. }));
    // The record must outlast the backoff.
    let kept_from = match state {
        State::Failed { failure: Failure::Retryable { not_before }, .. } => not_before,
        _ => now,
    };
    let expires_at = kept_from.saturating_add(retention);
    Some(Record { checkpoint, updated_at: now, expires_at, state, ..record.clone() })
}

/// Whether the stored checkpoint has the same or a later sequence.
///
/// Then a stalled store delivered this checkpoint late, or its run lost the lease and got it back unknowingly, by a
/// late acquire.
fn is_superseded(record: &Record, checkpoint: &Checkpoint) -> bool {
    !follows(checkpoint, record.checkpoint.as_ref().map(|stored| stored.sequence))
}

/// Whether a checkpoint is later than the stored one, whose sequence is `stored`.
///
/// A checkpoint that commits together with business writes has to be later. If it is the stored one, an earlier transaction
/// was committed although its COMMIT got no answer, and the writes must not be made again.
#[must_use]
pub fn follows(checkpoint: &Checkpoint, stored: Option<u32>) -> bool {
    stored.is_none_or(|stored| stored < checkpoint.sequence)
}

/// The record after a release: `None`, unless an earlier run may have had effects.
///
/// It may have had effects in these cases:
/// - `Rerun`: this is not the first attempt, or there is a checkpoint.
/// - `Unknown` or `Probe`: the record was acquired to probe an earlier run, or to retry one that failed.
///
/// Then the record keeps its attempt, its checkpoint and how it was acquired. It has no owner, so that a late renewal does not
/// hold it. Its lease is over, so that the next acquire decides at once.
fn given_back(record: &Record, now: Timestamp) -> Option<Record> {
    let State::InProgress { lease_until, acquisition, takeover } = record.state else { return None };
    let ran_before = match takeover {
        Takeover::Rerun => record.attempt > 1 || record.checkpoint.is_some(),
        Takeover::Unknown | Takeover::Probe => matches!(acquisition, Acquisition::Probe | Acquisition::Retry),
    };
    if !ran_before {
        return None;
    }
    let state = State::InProgress { lease_until: lease_until.min(now), acquisition, takeover };
    Some(Record { owner: OwnerToken::NOBODY, updated_at: now, state, ..record.clone() })
}

/// The state that a settlement leads to; `None` for a release.
fn settled_state(settlement: &Settlement, now: Timestamp) -> Option<State> {
    Some(match settlement {
        Settlement::Completed(response) => State::Completed { response: response.clone() },
        Settlement::FailedTerminal(response) => {
            State::Failed { failure: Failure::Terminal, response: response.clone() }
        }
        Settlement::FailedRetryable { response, retry_after } => State::Failed {
            failure: Failure::Retryable { not_before: now.saturating_add(*retry_after) },
            response: response.clone(),
        },
        Settlement::OutcomeUnknown => {
            State::Failed { failure: Failure::OutcomeUnknown, response: StoredResponse::outcome_unknown() }
        }
        Settlement::Released => return None,
    })
}

/// Whether `settlement` is the one that led to `state`. The time of a backoff is not compared: the repeat comes later. Nor is
/// the order of header fields with different names, which has no meaning.
pub(crate) fn is_settled_so(state: &State, settlement: &Settlement) -> bool {
    match (state, settlement) {
        (State::Completed { response: stored }, Settlement::Completed(response))
        | (State::Failed { failure: Failure::Terminal, response: stored }, Settlement::FailedTerminal(response))
        | (
            State::Failed { failure: Failure::Retryable { .. }, response: stored },
            Settlement::FailedRetryable { response, .. },
        ) => stored.is_equivalent_to(response),
        (State::Failed { failure: Failure::OutcomeUnknown, .. }, Settlement::OutcomeUnknown) => true,
        _ => false,
    }
}
