//! The decision on what an operator does: resolve an operation that ended without an answer.

use super::command::{Refusal, Resolution, Resolve, ResolveOutcome, Settlement};
use super::expiry::current;
use super::owner::{is_settled_so, settled};
use crate::record::{Failure, Record, State};
use crate::timestamp::Timestamp;

/// Decides what a [`Resolve`] does: returns the record afterwards, and whether it was resolved.
///
/// The first matching rule decides:
/// 1. The record was resolved by the same action, in the same way: `Resolved`, unchanged (law L8).
/// 2. There is no record, or it is not the one that was [seen](Resolve::seen): `Changed`.
/// 3. In progress under a live lease: refused as `Live`.
/// 4. Completed, or failed terminally: refused as `Final` (law L2).
/// 5. An unknown outcome that is to be unknown: refused as `Final`, because nothing would change.
/// 6. Otherwise `Resolved`. The record keeps its attempt, so that a further run has a larger one (law L7). Unless it completed, it also
///    keeps its checkpoint. Its owner is the action from now on, so that the crashed run can no longer settle it (law L3).
#[must_use]
pub fn resolve(record: Option<&Record>, request: &Resolve, now: Timestamp) -> (Option<Record>, ResolveOutcome) {
    let Some(record) = current(record, now) else { return (None, ResolveOutcome::Changed) };
    let unchanged = |outcome| (Some(record.clone()), outcome);
    let settlement = Settlement::from(request.resolution.clone());
    if record.owner == request.action && is_settled_so(&record.state, &settlement) {
        return unchanged(ResolveOutcome::Resolved);
    }
    if record.version() != request.seen {
        return unchanged(ResolveOutcome::Changed);
    }
    let may_resolve = match record.state {
        State::InProgress { lease_until, .. } if now < lease_until => Err(Refusal::Live),
        State::InProgress { .. } | State::Failed { failure: Failure::Retryable { .. }, .. } => Ok(()),
        State::Failed { failure: Failure::OutcomeUnknown, .. } if request.resolution != Resolution::OutcomeUnknown => {
            Ok(())
        }
        State::Completed { .. } | State::Failed { .. } => Err(Refusal::Final),
    };
    match (may_resolve, settled(record, &settlement, request.retention, now)) {
        (Err(refusal), _) => unchanged(ResolveOutcome::Refused(refusal)),
        (Ok(()), Some(next)) => (Some(Record { owner: request.action, ..next }), ResolveOutcome::Resolved),
        // Does not happen: no resolution is a release.
        (Ok(()), None) => unchanged(ResolveOutcome::Refused(Refusal::Final)),
    }
}
