//! The one key of a model: its record, the store's time, and an observer of the laws.

use std::num::NonZeroU32;
use std::time::Duration;

use idem_core::machine::{current, transition};
use idem_core::{
    Acquire, AcquireOutcome, Checkpoint, Command, Fingerprint, Lease, OnMismatch, Origin, Outcome, OwnerAction,
    OwnerOutcome, OwnerToken, Record, RecordId, Replay, ReplayKind, Scope, Settlement, State, StoredResponse, Takeover,
    Term, Timestamp,
};

use super::stored::Stored;

/// Durations in steps of the model's clock; a step stands for a second.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    pub(super) workers: u8,
    pub(super) last_step: u8,
    pub(super) lease: u8,
    pub(super) retention: u8,
    pub(super) retry_after: u8,
    pub(super) max_attempts: u32,
}

/// The inputs of the machine, which are the same in every state.
#[derive(Debug)]
pub(super) struct Requests {
    pub(super) limits: Limits,
    takeover: Takeover,
}

/// A law that a step has broken, as a bit of [`World::broken`].
#[derive(Debug, Clone, Copy)]
pub(super) enum Law {
    SettledRecordsChange = 1,
    StaleOwnersChangeThings = 2,
    AttemptsDoNotGrow = 4,
    LiveRecordsArePurged = 8,
    CheckpointsAreLost = 16,
}

/// The store, and the memory of an observer who sees every step.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub(super) struct World {
    pub(super) record: Option<Stored>,
    pub(super) step: u8,
    /// The worker whose acquire was answered last, until its run ends or is taken over. This does not read the record.
    owner: Option<u8>,
    /// The attempt of the last applied checkpoint.
    checkpoint: Option<u8>,
    broken: u8,
}

impl Requests {
    pub(super) fn new(limits: Limits, takeover: Takeover) -> Self {
        Self { limits, takeover }
    }

    pub(super) fn acquire(&self, worker: u8) -> Acquire {
        Acquire {
            id: RecordId::from_bytes([0; 32]),
            origin: Origin { namespace: "model".into(), scope: Scope::single_tenant("model") },
            trace: None,
            fingerprint: Fingerprint::from_parts(idem_core::Algorithm::V1, [0; 32]),
            owner: token(worker),
            term: self.term(),
            takeover: self.takeover,
            max_attempts: NonZeroU32::new(self.limits.max_attempts).unwrap_or(NonZeroU32::MIN),
            on_mismatch: OnMismatch::Refuse,
        }
    }

    pub(super) fn term(&self) -> Term {
        Term { lease: seconds(self.limits.lease), retention: self.retention() }
    }

    pub(super) fn retention(&self) -> Duration {
        seconds(self.limits.retention)
    }

    pub(super) fn retry_after(&self) -> Duration {
        seconds(self.limits.retry_after)
    }
}

impl World {
    pub(super) fn acquire(&mut self, requests: &Requests, worker: u8) -> AcquireOutcome {
        let request = requests.acquire(worker);
        let now = at(self.step);
        let (before, outcome) = self.apply(Command::Acquire(&request));
        let Outcome::Acquire(outcome) = outcome else {
            unreachable!("the answer to an acquire is the outcome of an acquire")
        };
        match &outcome {
            AcquireOutcome::Acquired(lease) => {
                let before = current(before.as_ref(), now);
                if before.is_none() {
                    self.checkpoint = None;
                }
                self.note_acquired(before, lease);
                self.owner = Some(worker);
            }
            AcquireOutcome::Replay(_) => self.owner = None,
            _ => {}
        }
        outcome
    }

    fn note_acquired(&mut self, before: Option<&Record>, lease: &Lease) {
        let unchanged = before.is_some() && before == self.record.as_ref().map(|stored| &stored.0);
        if !unchanged && lease.attempt <= before.map_or(0, |before| before.attempt) {
            self.note(Law::AttemptsDoNotGrow);
        }
        let carried = lease.checkpoint.as_ref().and_then(|checkpoint| checkpoint.data.first().copied());
        if carried != self.checkpoint {
            self.note(Law::CheckpointsAreLost);
        }
    }

    pub(super) fn renew(&mut self, requests: &Requests, worker: u8) -> OwnerOutcome {
        self.owner_action(worker, OwnerAction::Renew(requests.term()))
    }

    pub(super) fn checkpoint(&mut self, worker: u8, attempt: u8) -> OwnerOutcome {
        let checkpoint = Checkpoint { sequence: attempt.into(), name: "step".into(), data: vec![attempt].into() };
        let outcome = self.owner_action(worker, OwnerAction::Checkpoint(&checkpoint));
        if outcome == OwnerOutcome::Applied {
            self.checkpoint = Some(attempt);
        }
        outcome
    }

    pub(super) fn settle(&mut self, requests: &Requests, worker: u8, settlement: &Settlement) -> OwnerOutcome {
        let outcome = self.owner_action(worker, OwnerAction::Settle(settlement, requests.retention()));
        if outcome == OwnerOutcome::Applied && self.owner == Some(worker) {
            self.owner = None;
        }
        outcome
    }

    fn owner_action(&mut self, worker: u8, action: OwnerAction<'_>) -> OwnerOutcome {
        let stale = self.owner != Some(worker);
        let (before, outcome) = self.apply(Command::Owner(token(worker), action));
        if stale && current(before.as_ref(), at(self.step)) != self.record.as_ref().map(|stored| &stored.0) {
            self.note(Law::StaleOwnersChangeThings);
        }
        let Outcome::Owner(outcome) = outcome else {
            unreachable!("the answer to an owner's action is the outcome of one")
        };
        outcome
    }

    /// Applies a command to the machine. Returns the record from before, and the outcome.
    fn apply(&mut self, command: Command<'_>) -> (Option<Record>, Outcome) {
        let before = self.record.take().map(|stored| stored.0);
        let (after, outcome) = transition(before.as_ref(), command, at(self.step));
        if let Some(settled) = current(before.as_ref(), at(self.step)).filter(|record| is_settled(record))
            && after.as_ref() != Some(settled)
        {
            self.note(Law::SettledRecordsChange);
        }
        self.record = after.map(Stored);
        (before, outcome)
    }

    /// Removes the record if the core says that it no longer counts; returns false if it removed nothing.
    pub(super) fn purge(&mut self) -> bool {
        let Some(Stored(record)) = &self.record else { return false };
        if current(Some(record), at(self.step)).is_some() {
            return false;
        }
        if self.live_lease() {
            self.note(Law::LiveRecordsArePurged);
        }
        self.record = None;
        true
    }

    /// Whether an owner's lease is live, by the record alone.
    pub(super) fn live_lease(&self) -> bool {
        match self.record.as_ref().map(|stored| &stored.0.state) {
            Some(State::InProgress { lease_until, .. }) => at(self.step) < *lease_until,
            _ => false,
        }
    }

    /// The step at which the lease in the record ends.
    pub(super) fn lease_until(&self) -> u8 {
        match self.record.as_ref().map(|stored| &stored.0.state) {
            Some(State::InProgress { lease_until, .. }) => {
                u8::try_from(lease_until.unix_micros() / 1_000_000).unwrap_or(u8::MAX)
            }
            _ => 0,
        }
    }

    /// The record as a read returns it.
    pub(super) fn peek(&self) -> Option<&Record> {
        current(self.record.as_ref().map(|stored| &stored.0), at(self.step))
    }

    /// The answer to a new client one lease later, if no other client does anything (law L5).
    pub(super) fn answer_after_one_lease(&self, requests: &Requests) -> AcquireOutcome {
        let mut later = self.clone();
        later.step += requests.limits.lease;
        later.acquire(requests, requests.limits.workers)
    }

    fn note(&mut self, law: Law) {
        self.broken |= law as u8;
    }

    pub(super) fn keeps(&self, law: Law) -> bool {
        self.broken & law as u8 == 0
    }
}

fn is_settled(record: &Record) -> bool {
    match &record.state {
        State::Completed { .. } => true,
        State::Failed { failure, .. } => !matches!(failure, idem_core::Failure::Retryable { .. }),
        State::InProgress { .. } => false,
    }
}

/// The answer of a worker's run. It differs between workers, so that replays can be attributed.
pub(super) fn response(worker: u8) -> StoredResponse {
    StoredResponse::new(200, vec![worker])
}

/// What matters of a replay: how the operation ended, and whose answer it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Replayed {
    pub(super) kind: ReplayKind,
    pub(super) answer_of: Option<u8>,
}

impl From<Replay> for Replayed {
    fn from(replay: Replay) -> Self {
        let answer_of = match &replay.response.body {
            idem_core::StoredBody::Retained(body) => body.first().copied(),
            idem_core::StoredBody::NotRetained => None,
        };
        Self { kind: replay.kind, answer_of }
    }
}

fn token(worker: u8) -> OwnerToken {
    // From 1, because a token of zeros belongs to no owner.
    OwnerToken::from_bytes([worker + 1; 16])
}

fn seconds(steps: u8) -> Duration {
    Duration::from_secs(steps.into())
}

fn at(step: u8) -> Timestamp {
    Timestamp::from_unix_micros(0).saturating_add(seconds(step))
}
