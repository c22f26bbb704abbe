//! What a store keeps of a repair.

use super::{StoreError, StoreErrorKind};
use crate::record::OwnerToken;
use crate::record_id::RecordId;
use crate::timestamp::Timestamp;

/// What a store keeps of a repair: who asked for what, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "stores of other crates keep each part")]
pub struct RepairNote {
    /// The token of the action, which also is the owner of the resolved record.
    pub action: OwnerToken,
    /// Which record.
    pub record: RecordId,
    /// Who asked for it.
    pub actor: String,
    /// Why.
    pub reason: String,
    /// What was asked for: the state that the record should have, as in `completed`, or `erased`.
    pub resolution: String,
    /// How it ended, as in `resolved`. `None` before it ends: if it stays so, the tool was stopped in between, and the record says
    /// whether the action is its owner.
    pub outcome: Option<String>,
}

impl RepairNote {
    /// Whether both are of one repair: only their outcomes may differ.
    #[must_use]
    pub fn is_of_the_same_repair(&self, other: &Self) -> bool {
        let Self { action, record, actor, reason, resolution, outcome: _ } = self;
        (action, record, actor, reason, resolution)
            == (&other.action, &other.record, &other.actor, &other.reason, &other.resolution)
    }

    /// The outcomes of repairs that took effect. A note keeps them: a repeat of the action finds that the record has changed.
    pub const EFFECTIVE: [&str; 2] = ["resolved", "erased"];

    /// The outcome after a further note of the same repair: one that took effect stays, and another is replaced. A repair that was
    /// refused may take effect when it is repeated.
    #[must_use]
    pub fn outcome_after(known: Option<String>, told: Option<String>) -> Option<String> {
        match known {
            Some(known) if Self::EFFECTIVE.contains(&known.as_str()) => Some(known),
            known => told.or(known),
        }
    }

    /// What stands in a reason in place of an erased principal.
    pub const ERASED: &str = "(erased)";

    /// The reason without this principal; `None` if it does not name it.
    #[must_use]
    pub fn reason_without(&self, principal: &str) -> Option<String> {
        let is_named = !principal.is_empty() && self.reason.contains(principal);
        is_named.then(|| self.reason.replace(principal, Self::ERASED))
    }

    /// The error of a store that has a note of another repair with this action.
    #[must_use]
    pub fn action_is_taken() -> StoreError {
        let message = "could not note a repair: its action belongs to another one; use a new token for each repair";
        StoreError::new(StoreErrorKind::Misconfigured, message)
    }
}

/// A repair that was noted.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "it is made by stores of other crates")]
pub struct Repair {
    /// When it was asked for, by the store's clock.
    pub at: Timestamp,
    /// The note.
    pub note: RepairNote,
}
