//! What the tools of operators say: the same sentences on a terminal and in a browser.

use super::{Inspection, RecordState};
use crate::machine::{EraseOutcome, Refusal, ResolveOutcome};
use crate::record::{OwnerToken, Record, State, StoredBody, Takeover};

impl Inspection {
    /// What the state of the record means for its next request, and what an operator can do.
    #[must_use]
    pub fn meaning(&self) -> &'static str {
        let Some(record) = &self.record else {
            return match self.runs_in_transaction {
                true => {
                    "A transaction runs the operation for the first time. Its record comes when the transaction commits."
                }
                false => "There is no such record, or its retention is over. The next request with its key runs.",
            };
        };
        if self.runs_in_transaction {
            return "A transaction runs the operation now. Its record changes when the transaction commits.";
        }
        let is_released = record.owner == OwnerToken::NOBODY;
        match RecordState::of(record) {
            RecordState::InProgress { lease_until } if self.now < lease_until => {
                "A process runs the operation, or has crashed less than a lease ago."
            }
            RecordState::InProgress { .. } => match (&record.state, is_released) {
                (State::InProgress { takeover: Takeover::Unknown, .. }, _) => {
                    "Its process has crashed or stalled, and it is not known whether the operation took effect. The next request \
                     with this key gets 504, and so does every later one. To resolve it: mark it as unknown, look at what \
                     happened, and resolve that."
                }
                (State::InProgress { takeover: Takeover::Probe, .. }, true) => {
                    "A probe of a crashed run was given back. The next request with this key asks the probe again whether the \
                     operation took effect."
                }
                (State::InProgress { takeover: Takeover::Probe, .. }, false) => {
                    "Its process has crashed or stalled. The next request with this key asks the probe whether the operation took \
                     effect."
                }
                _ => "Its process has crashed or stalled. The next request with this key runs the operation again.",
            },
            RecordState::Completed | RecordState::Failed if !record.keeps_its_answer() => {
                "Its answer was erased, or was too large to keep. Every repeat gets 410 with its status."
            }
            RecordState::Completed => "It took effect. Every repeat gets this answer.",
            RecordState::Failed => "It failed and never runs again. Every repeat gets this answer.",
            RecordState::OutcomeUnknown => {
                "Its process crashed, and it is not known whether the operation took effect. Every repeat gets 504. Look at what \
                 happened, and resolve it."
            }
            RecordState::Retryable { not_before } if self.now < not_before => {
                "It failed, and may run again later, when a request with this key comes."
            }
            RecordState::Retryable { .. } => {
                "It failed, or its owner gave it back. The next request with this key runs it again, unless its attempts are \
                 used up: then it has failed for good."
            }
        }
    }
}

impl Record {
    /// Whether there is a final answer with its body.
    fn keeps_its_answer(&self) -> bool {
        match &self.state {
            State::Completed { response } | State::Failed { response, .. } => {
                matches!(response.body, StoredBody::Retained(_))
            }
            State::InProgress { .. } => false,
        }
    }
}

impl EraseOutcome {
    /// What became of the record, and what to do next.
    #[must_use]
    pub fn meaning(self) -> &'static str {
        match self {
            Self::Erased => "erased",
            Self::Changed => "nothing was changed: the record is not the one that you have looked at; look again",
            Self::Live => "nothing was changed: a process runs the operation; wait for its end",
            Self::Unsettled => {
                "nothing was changed: the operation has no final answer, and may still run; resolve it first"
            }
            Self::Token => "nothing was changed: the action is not new",
        }
    }
}

impl ResolveOutcome {
    /// What became of the record, and what to do next.
    #[must_use]
    pub fn meaning(self) -> &'static str {
        match self {
            Self::Resolved => "resolved",
            Self::Changed => "nothing was changed now: the record is not the one that you have looked at; look again",
            Self::Refused(Refusal::Live) => "nothing was changed: a process runs the operation",
            Self::Refused(Refusal::Unfenced) => {
                "nothing was changed: its process may only have stalled. Mark it as unknown first, which keeps that process from \
                 settling it; then look at what happened, and resolve that"
            }
            Self::Refused(Refusal::Token) => "nothing was changed: the action is not new",
            Self::Refused(Refusal::Final) => "nothing was changed: the record has its final answer",
        }
    }
}
