//! What was said of one key, and what therefore may not be said of it any more.

use idem_core::{AcquireOutcome, Lease, OwnerOutcome, OwnerToken, RecordId, ReplayKind, StoredResponse};

use super::request::response;

/// What must not happen to an acknowledged record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Breach {
    /// Two owners were told that they have the key, although the lease of the first was not over.
    SecondOwner,
    /// A lease that was acknowledged and is not over is not its owner's any more.
    LeaseLost,
    /// An owner was told that its lease is lost, which it is not.
    LeaseDenied,
    /// A settlement that was acknowledged is gone, so that the operation runs again.
    SettlementLost,
    /// A settled record is replayed with another answer, or an answer is one that nobody gave.
    OtherAnswer,
}

/// How far its owner has come, as far as the owner was told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Nobody was told to run.
    Free,
    /// Somebody has been told to run.
    Running,
    /// A settlement was sent, and there was no answer: it may count, and need not.
    Unclear,
    /// The settlement was acknowledged.
    Settled,
}

/// One key. Leases outlast the check, and nobody gives one back, so that a key has one owner for ever.
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

    /// The first thing that was wrong.
    pub(super) fn breach(&self) -> Option<Breach> {
        self.breach
    }

    /// The right to execute, if somebody was given it.
    pub(super) fn lease(&self) -> Option<&Lease> {
        self.lease.as_ref()
    }

    /// Whether its owner was told to run and has not tried to settle.
    pub(super) fn is_running(&self) -> bool {
        self.stage == Stage::Running
    }

    pub(super) fn is_settled(&self) -> bool {
        self.stage == Stage::Settled
    }

    /// The answer to an acquire by `owner`. Whether it is a fact that has to last.
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

    /// The answer to its owner's renewal, which is one of a running operation.
    pub(super) fn renewed(&mut self, outcome: OwnerOutcome) -> bool {
        self.expect(outcome == OwnerOutcome::Applied, Breach::LeaseLost);
        outcome == OwnerOutcome::Applied
    }

    /// The answer to its owner's settlement, which always says the same; `None` when there was none.
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

    /// The answer to somebody who only wants to know: that the key could be had is then a loss, and no second owner.
    pub(super) fn examined(&mut self, outcome: AcquireOutcome) {
        match outcome {
            AcquireOutcome::Acquired(_) if !self.is_settled() => self.broken(Breach::LeaseLost),
            outcome => {
                self.acquired(OwnerToken::NOBODY, outcome);
            }
        }
    }

    /// Somebody else was told to run it, after its owner was.
    pub(super) fn intruded(&mut self) {
        self.broken(Breach::SecondOwner);
    }

    /// Its owner was told that the lease is lost. A key that has been settled since may have been so by then.
    pub(super) fn denied(&mut self) {
        self.expect(!self.is_running(), Breach::LeaseDenied);
    }

    /// What its owner settles it with: different from what any other owner of any key would.
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
