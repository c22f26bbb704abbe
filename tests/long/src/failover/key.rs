//! The acknowledgements for one key, and the answers that they rule out.

use idem_core::{AcquireOutcome, Lease, OwnerOutcome, OwnerToken, RecordId, ReplayKind, StoredResponse};

use super::request::response;

/// What must not happen to an acknowledged record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Breach {
    /// Two owners acquired the key, although the lease of the first was not over.
    SecondOwner,
    /// An acknowledged lease that is not over does not belong to its owner any more.
    LeaseLost,
    /// An owner was answered that its lease is lost, although it is not.
    LeaseDenied,
    /// An acknowledged settlement is gone, so that the operation runs again.
    SettlementLost,
    /// A settled record is replayed with another answer, or an answer is one that no owner gave.
    OtherAnswer,
}

/// The progress of the owner, according to the answers that it got.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// No client was allowed to run.
    Free,
    /// A client was allowed to run.
    Running,
    /// A settlement was sent without an answer: it may or may not count.
    Unclear,
    /// The settlement was acknowledged.
    Settled,
}

/// One key. It has one owner throughout, because leases outlast the check and are never released.
#[derive(Debug)]
pub(super) struct Key {
    pub(super) id: RecordId,
    lease: Option<Lease>,
    stage: Stage,
    breach: Option<Breach>,
}

impl Key {
    pub(super) fn new(id: RecordId) -> Self {
        Self { id, lease: None, stage: Stage::Free, breach: None }
    }

    /// The first breach.
    pub(super) fn breach(&self) -> Option<Breach> {
        self.breach
    }

    /// The right to execute, if a client got it.
    pub(super) fn lease(&self) -> Option<&Lease> {
        self.lease.as_ref()
    }

    /// Whether its owner may run it and has not tried to settle.
    pub(super) fn is_running(&self) -> bool {
        self.stage == Stage::Running
    }

    pub(super) fn is_settled(&self) -> bool {
        self.stage == Stage::Settled
    }

    /// Takes the answer to an acquire by `owner`. Returns whether it is a fact that must last.
    pub(super) fn acquired(&mut self, owner: OwnerToken, outcome: AcquireOutcome) -> bool {
        let ours = self.lease.as_ref().is_some_and(|lease| lease.owner == owner);
        match outcome {
            AcquireOutcome::Acquired(lease) if self.stage == Stage::Free => {
                self.expect(lease.attempt == 1, Breach::SecondOwner);
                (self.lease, self.stage) = (Some(lease), Stage::Running);
                return true;
            }
            AcquireOutcome::Acquired(_) if self.stage == Stage::Settled => self.broken(Breach::SettlementLost),
            AcquireOutcome::Acquired(_) if ours => {}
            AcquireOutcome::Acquired(_) => self.broken(Breach::SecondOwner),
            AcquireOutcome::InProgress { .. } if self.stage == Stage::Settled => self.broken(Breach::SettlementLost),
            AcquireOutcome::InProgress { .. } => self.expect(!ours, Breach::LeaseLost),
            AcquireOutcome::Replay(replay) => {
                let settled = matches!(self.stage, Stage::Settled | Stage::Unclear);
                let same = replay.response == self.answer() && replay.kind == ReplayKind::Completed;
                self.expect(settled && same, Breach::OtherAnswer);
            }
            AcquireOutcome::Backoff { .. } | AcquireOutcome::Mismatch { .. } => self.broken(Breach::OtherAnswer),
        }
        false
    }

    /// Takes the answer to a renewal by its owner while the operation runs.
    pub(super) fn renewed(&mut self, outcome: OwnerOutcome) -> bool {
        self.expect(outcome == OwnerOutcome::Applied, Breach::LeaseLost);
        outcome == OwnerOutcome::Applied
    }

    /// Takes the answer to the settlement by its owner, which always has the same content; `None` if there was no answer.
    pub(super) fn settled(&mut self, outcome: Option<OwnerOutcome>) -> bool {
        let lost = if self.is_settled() { Breach::SettlementLost } else { Breach::LeaseLost };
        match outcome {
            Some(OwnerOutcome::Applied) => self.stage = Stage::Settled,
            Some(OwnerOutcome::LeaseLost) => self.broken(lost),
            None if self.is_running() => self.stage = Stage::Unclear,
            None => {}
        }
        outcome == Some(OwnerOutcome::Applied)
    }

    /// Takes the answer to an examination. If that acquired the key, it counts as a loss and not as a second owner.
    pub(super) fn examined(&mut self, outcome: AcquireOutcome) {
        match outcome {
            AcquireOutcome::Acquired(_) if !self.is_settled() => self.broken(Breach::LeaseLost),
            outcome => {
                self.acquired(OwnerToken::NOBODY, outcome);
            }
        }
    }

    /// Another client was allowed to run it after its owner was.
    pub(super) fn intruded(&mut self) {
        self.broken(Breach::SecondOwner);
    }

    /// Its owner was answered that the lease is lost. A key that was settled since may have been settled by then.
    pub(super) fn denied(&mut self) {
        self.expect(!self.is_running(), Breach::LeaseDenied);
    }

    /// The response with which its owner settles it, unique among all owners and keys.
    pub(super) fn answer(&self) -> StoredResponse {
        response(&self.id, self.lease.as_ref().map(|lease| lease.owner))
    }

    fn expect(&mut self, holds: bool, otherwise: Breach) {
        if !holds {
            self.broken(otherwise);
        }
    }

    fn broken(&mut self, breach: Breach) {
        self.breach.get_or_insert(breach);
    }
}
