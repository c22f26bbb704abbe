//! The decision on what an operator does: resolve an operation that ended without an answer.

use super::command::{Refusal, Resolution, Resolve, ResolveOutcome, Settlement};
use super::expiry::{SHORTEST_RETENTION, current};
use super::owner::{is_settled_so, settled};
use crate::record::{Failure, OwnerToken, Record, State};
use crate::timestamp::Timestamp;

/// Decides what a [`Resolve`] does: returns the record afterwards, and whether it was resolved.
///
/// The first matching rule decides:
/// 1. The record was resolved by the same action, in the same way: `Resolved`, unchanged (law L8).
/// 2. There is no record, or it is not the one that was [seen](Resolve::seen): `Changed`.
/// 3. The action is no new token: refused as `Token`.
/// 4. In progress under a live lease: refused as `Live`.
/// 5. In progress, lease over: only to be unknown, else refused as `Unfenced`. Its owner may have stalled, and its writes may come
///    after the operator has looked. As unknown it can do no more; then look, and resolve again. A released record has no owner, so this
///    does not hold for it.
/// 6. Completed, or failed terminally: refused as `Final` (law L2). So is an unknown outcome that is to be unknown.
/// 7. Otherwise `Resolved`. The record keeps its attempt, so that a further run has a larger one (law L7). Unless it completed, it also
///    keeps its checkpoint. Its owner is the action from now on, so that the crashed run can no longer settle it (law L3). It is not
///    kept for less than before.
#[must_use]
pub fn resolve(record: Option<&Record>, request: &Resolve, now: Timestamp) -> (Option<Record>, ResolveOutcome) {
    let Some(record) = current(record, now) else { return (None, ResolveOutcome::Changed) };
    let unchanged = |outcome| (Some(record.clone()), outcome);
    let settlement = Settlement::from(request.resolution.clone());
    if request.action != OwnerToken::NOBODY
        && record.owner == request.action
        && is_settled_so(&record.state, &settlement)
    {
        return unchanged(ResolveOutcome::Resolved);
    }
    if record.version() != request.seen {
        return unchanged(ResolveOutcome::Changed);
    }
    if request.action == OwnerToken::NOBODY || request.action == record.owner {
        return unchanged(ResolveOutcome::Refused(Refusal::Token));
    }
    let is_to_be_unknown = request.resolution == Resolution::OutcomeUnknown;
    let may_resolve = match record.state {
        State::InProgress { .. } if record.owner == OwnerToken::NOBODY => Ok(()),
        State::InProgress { lease_until, .. } if now < lease_until => Err(Refusal::Live),
        State::InProgress { .. } if !is_to_be_unknown => Err(Refusal::Unfenced),
        State::InProgress { .. } | State::Failed { failure: Failure::Retryable { .. }, .. } => Ok(()),
        State::Failed { failure: Failure::OutcomeUnknown, .. } if !is_to_be_unknown => Ok(()),
        State::Completed { .. } | State::Failed { .. } => Err(Refusal::Final),
    };
    let retention = request.retention.max(SHORTEST_RETENTION);
    match (may_resolve, settled(record, &settlement, retention, now)) {
        (Err(refusal), _) => unchanged(ResolveOutcome::Refused(refusal)),
        (Ok(()), Some(next)) => {
            let expires_at = next.expires_at.max(record.expires_at);
            (Some(Record { owner: request.action, expires_at, ..next }), ResolveOutcome::Resolved)
        }
        // Does not happen: no resolution is a release.
        (Ok(()), None) => unchanged(ResolveOutcome::Refused(Refusal::Final)),
    }
}
