//! The decision on an erasure: what is left of a final answer.

use std::sync::Arc;

use super::command::{Erase, EraseOutcome};
use super::expiry::current;
use crate::record::{Failure, OwnerToken, Record, State, StoredBody, StoredResponse};
use crate::timestamp::Timestamp;

/// Decides what an [`Erase`] does: returns the record afterwards, and whether it was erased.
///
/// The first matching rule decides:
/// 1. The record was erased by the same action: `Erased`, unchanged (law L8).
/// 2. There is no record, or it is not the one that was [seen](Erase::seen): `Changed`.
/// 3. The action is no new token: `Token`.
/// 4. In progress under a live lease: `Live`.
/// 5. Without a final answer: `Unsettled`. The operation may still run, and then its record would get an answer that no search for the
///    principal finds. A run without its checkpoint would also repeat steps.
/// 6. Otherwise `Erased`. This is the exception to law L2. The record keeps its id, fingerprint, attempt, state, status and retention,
///    so that the operation does not run again. It loses header fields, body, trace and checkpoint. Its owner is the action from now on.
#[must_use]
pub fn erase(record: Option<&Record>, request: &Erase, now: Timestamp) -> (Option<Record>, EraseOutcome) {
    let Some(record) = current(record, now) else { return (None, EraseOutcome::Changed) };
    let unchanged = |outcome| (Some(record.clone()), outcome);
    let is_new = request.action != OwnerToken::NOBODY;
    if is_new && record.owner == request.action && record.is_erased() {
        return unchanged(EraseOutcome::Erased);
    }
    if record.version() != request.seen {
        return unchanged(EraseOutcome::Changed);
    }
    if !is_new || record.owner == request.action {
        return unchanged(EraseOutcome::Token);
    }
    let state = match &record.state {
        State::InProgress { lease_until, .. } if now < *lease_until => return unchanged(EraseOutcome::Live),
        State::Completed { response } => State::Completed { response: bare(response) },
        State::Failed { failure: Failure::Terminal, response } => {
            State::Failed { failure: Failure::Terminal, response: bare(response) }
        }
        State::InProgress { .. } | State::Failed { .. } => return unchanged(EraseOutcome::Unsettled),
    };
    let next = Record { owner: request.action, checkpoint: None, updated_at: now, state, ..record.clone() };
    (Some(next), EraseOutcome::Erased)
}

/// The status of an answer, and nothing else of it.
fn bare(response: &StoredResponse) -> StoredResponse {
    StoredResponse { status: response.status, headers: Arc::from([]), body: StoredBody::NotRetained, trace: None }
}

impl Record {
    /// Whether the record has what an [erasure](erase) leaves: a final answer with a status only, and no checkpoint.
    ///
    /// The principal of such a record may be erased in its store.
    #[must_use]
    pub fn is_erased(&self) -> bool {
        match &self.state {
            State::Completed { response } | State::Failed { failure: Failure::Terminal, response } => {
                self.checkpoint.is_none() && *response == bare(response)
            }
            State::InProgress { .. } | State::Failed { .. } => false,
        }
    }
}
