//! The decision on an acquire: the table of the state machine, row by row.

use super::command::{Acquire, AcquireOutcome, Lease, OnMismatch, Replay, ReplayKind};
use super::expiry::current;
use crate::record::{Acquisition, Failure, OwnerToken, Record, State, StoredResponse, Takeover};
use crate::timestamp::Timestamp;

/// Decides an acquire: returns the record afterwards, and the outcome for the caller.
///
/// The first matching rule decides:
/// 1. No record: `Acquired`, attempt 1.
/// 2. Another fingerprint: `Mismatch`, or the settled answer if the caller wants the original replayed.
/// 3. Completed, failed terminally, or outcome unknown: `Replay`.
/// 4. In progress by the same owner token: `Acquired` again, unchanged.
/// 5. In progress under a live lease: `InProgress`.
/// 6. A released retry of a failure: `Acquired` with the next attempt, under every contract, as after the failure itself.
/// 7. In progress, lease over: [`Takeover::met_by`] decides. `Rerun` and `Probe` give `Acquired` with the next attempt.
///    `Unknown` fails the record with an unknown outcome, and gives `Replay` of that.
/// 8. Failed retryably, before its time: `Backoff`.
/// 9. Failed retryably, attempts left: `Acquired` with the next attempt.
/// 10. Failed retryably, attempts used up: failed terminally, and `Replay` of the last response.
#[must_use]
pub fn acquire(record: Option<&Record>, request: &Acquire, now: Timestamp) -> (Option<Record>, AcquireOutcome) {
    let Some(record) = current(record, now) else {
        return start(None, Acquisition::Fresh, 1, request, now);
    };
    let unchanged = |outcome| (Some(record.clone()), outcome);
    let same_request = record.fingerprint == request.fingerprint;
    let mismatch = AcquireOutcome::Mismatch { stored_algorithm: record.fingerprint.algorithm() };
    // An attempt number that cannot grow would break the fencing, so a record at the largest number is settled instead.
    let next_attempt = record.attempt.checked_add(1);
    match standing(record) {
        Standing::Settled(replay) if same_request || request.on_mismatch == OnMismatch::ReplayOriginal => {
            unchanged(AcquireOutcome::Replay(replay))
        }
        Standing::Settled(_) => unchanged(mismatch),
        _ if !same_request => unchanged(mismatch),
        Standing::Running { acquisition, .. } if record.owner == request.owner => {
            unchanged(AcquireOutcome::Acquired(lease_of(record, acquisition, request)))
        }
        // No owner holds a released record, also if the store's clock has gone back since.
        Standing::Running { lease_until, .. } if now < lease_until && record.owner != OwnerToken::NOBODY => {
            let lease_left = lease_until.saturating_duration_since(now);
            unchanged(AcquireOutcome::InProgress { lease_left, age: now.saturating_duration_since(record.created_at) })
        }
        Standing::Running { acquisition: Acquisition::Retry, .. }
            if record.owner == OwnerToken::NOBODY
                && let Some(attempt) = next_attempt =>
        {
            start(Some(record), Acquisition::Retry, attempt, request, now)
        }
        Standing::Running { takeover, .. } => match (takeover.met_by(request.takeover), next_attempt) {
            (Takeover::Rerun, Some(attempt)) => start(Some(record), Acquisition::Takeover, attempt, request, now),
            (Takeover::Probe, Some(attempt)) => start(Some(record), Acquisition::Probe, attempt, request, now),
            (Takeover::Unknown, _) | (_, None) => {
                let response = StoredResponse::outcome_unknown();
                fail(record, Failure::OutcomeUnknown, ReplayKind::OutcomeUnknown, response, request, now)
            }
        },
        Standing::Retryable { not_before, .. } if now < not_before => {
            unchanged(AcquireOutcome::Backoff { retry_after: not_before.saturating_duration_since(now) })
        }
        Standing::Retryable { response, .. } => match next_attempt {
            Some(attempt) if record.attempt < request.max_attempts.get() => {
                start(Some(record), Acquisition::Retry, attempt, request, now)
            }
            _ => fail(record, Failure::Terminal, ReplayKind::Failed, response.clone(), request, now),
        },
    }
}

/// A state as an acquire sees it: final, running, or waiting for its next attempt.
enum Standing<'a> {
    Settled(Replay),
    Running { lease_until: Timestamp, acquisition: Acquisition, takeover: Takeover },
    Retryable { not_before: Timestamp, response: &'a StoredResponse },
}

fn standing(record: &Record) -> Standing<'_> {
    let settled = |kind, response: &StoredResponse| {
        Standing::Settled(Replay {
            response: response.clone(),
            kind,
            attempt: record.attempt,
            settled_at: record.updated_at,
        })
    };
    match &record.state {
        State::Completed { response } => settled(ReplayKind::Completed, response),
        State::Failed { failure: Failure::Terminal, response } => settled(ReplayKind::Failed, response),
        State::Failed { failure: Failure::OutcomeUnknown, response } => settled(ReplayKind::OutcomeUnknown, response),
        State::Failed { failure: Failure::Retryable { not_before }, response } => {
            Standing::Retryable { not_before: *not_before, response }
        }
        &State::InProgress { lease_until, acquisition, takeover } => {
            Standing::Running { lease_until, acquisition, takeover }
        }
    }
}

impl Record {
    /// The answer that this record gives to repeats, or `None` while the operation may still run.
    #[must_use]
    pub fn replay(&self) -> Option<Replay> {
        match standing(self) {
            Standing::Settled(replay) => Some(replay),
            Standing::Running { .. } | Standing::Retryable { .. } => None,
        }
    }
}

/// Begins a new attempt. From the attempt before, the record keeps its creation time and its checkpoint.
fn start(
    before: Option<&Record>,
    acquisition: Acquisition,
    attempt: u32,
    request: &Acquire,
    now: Timestamp,
) -> (Option<Record>, AcquireOutcome) {
    let lease_until = now.saturating_add(request.term.lease);
    let record = Record {
        fingerprint: request.fingerprint,
        owner: request.owner,
        attempt,
        checkpoint: before.and_then(|before| before.checkpoint.clone()),
        created_at: before.map_or(now, |before| before.created_at),
        updated_at: now,
        expires_at: lease_until.saturating_add(request.term.retention),
        state: State::InProgress { lease_until, acquisition, takeover: request.takeover },
    };
    let outcome = AcquireOutcome::Acquired(lease_of(&record, acquisition, request));
    (Some(record), outcome)
}

/// Settles the record without another run. It keeps its owner token, so that the owner's late settlement counts as
/// stale, and its checkpoint, which says how far the operation came.
fn fail(
    record: &Record,
    failure: Failure,
    kind: ReplayKind,
    response: StoredResponse,
    request: &Acquire,
    now: Timestamp,
) -> (Option<Record>, AcquireOutcome) {
    let replay = Replay { response: response.clone(), kind, attempt: record.attempt, settled_at: now };
    let next = Record {
        updated_at: now,
        expires_at: now.saturating_add(request.term.retention),
        state: State::Failed { failure, response },
        ..record.clone()
    };
    (Some(next), AcquireOutcome::Replay(replay))
}

fn lease_of(record: &Record, acquisition: Acquisition, request: &Acquire) -> Lease {
    Lease {
        id: request.id,
        fingerprint: record.fingerprint,
        owner: record.owner,
        attempt: record.attempt,
        acquisition,
        checkpoint: record.checkpoint.clone(),
    }
}
