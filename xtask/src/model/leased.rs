//! Workers that own the key by a lease in the store: AtMostOnce, AtLeastOnce, and Transactional in the shape of SQLite.

use std::fmt;

use idem_core::{AcquireOutcome, OwnerOutcome, ReplayKind, Settlement, Takeover};
use stateright::{Model, Property};

use super::promises;
use super::world::{Limits, Replayed, Requests, World, response};

/// The contract, which decides what happens after a crash.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Contract {
    /// The effect counts only if its transaction commits together with the settlement.
    Transactional,
    AtMostOnce,
    AtLeastOnce,
}

/// One key, a few workers with the same operation, and all faults between them.
#[derive(Debug)]
pub(super) struct Leased {
    pub(super) contract: Contract,
    pub(super) requests: Requests,
    /// The promises to check: those of this contract, or those of another one that must be broken.
    pub(super) promised: Promised,
}

/// A set of properties.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Promised {
    /// All of this contract, and the laws.
    All,
    /// Only the laws.
    Laws,
    /// There is at most one effect.
    AtMostOneEffect,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Situation {
    pub(super) world: World,
    pub(super) workers: Vec<Worker>,
    /// The attempt of every effect that counts, in order.
    pub(super) effects: Vec<u8>,
    late: Late,
}

/// A client's request and the worker that handles it. A retry of the client is the next worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Worker {
    pub(super) phase: Phase,
    /// The attempt of its run; 0 if there is no run.
    pub(super) attempt: u8,
    pub(super) lease_until: u8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Phase {
    /// The request has not arrived.
    Idle,
    /// It has sent its acquire, and the answer was lost.
    Acquiring,
    Running,
    /// The effect has happened, or in a transaction awaits its commit.
    Affected,
    /// A settlement was sent, and its answer was lost.
    Settling(Ending),
    Ended(Answer),
    /// It crashed after its effect and before its settlement, or could not settle.
    CrashedAfterEffect,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Ending {
    Complete,
    Retry,
    Release,
}

/// The answer of the client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Answer {
    /// The run's own answer, settled.
    Completed,
    Replayed(Replayed),
    /// The client must retry later.
    Busy,
    /// Nothing that repeats must agree with: a failure, a refusal, or no answer.
    Inconclusive,
}

/// An acquire that was sent once and has not arrived. No worker waits for it any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Late {
    NotSent,
    OnItsWay(u8),
    Arrived,
}

/// A possible next step; the number is the worker's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    Acquire {
        worker: u8,
        answered: bool,
    },
    DelayAcquire(u8),
    DeliverDelayedAcquire,
    Renew(u8),
    Checkpoint(u8),
    Effect(u8),
    Settle {
        worker: u8,
        ending: Ending,
        answered: bool,
    },
    ReadAgain(u8),
    /// For the store, a worker that gives up is one that crashed.
    Crash(u8),
    LetTimePass,
    Purge,
}

impl Leased {
    pub(super) fn new(contract: Contract, limits: Limits, promised: Promised) -> Self {
        let takeover = if contract == Contract::AtMostOnce { Takeover::Unknown } else { Takeover::Rerun };
        Self { contract, requests: Requests::new(limits, takeover), promised }
    }

    fn settlement(&self, worker: u8, ending: Ending) -> Settlement {
        match ending {
            Ending::Complete => Settlement::Completed(response(worker)),
            Ending::Retry => {
                Settlement::FailedRetryable { response: response(worker), retry_after: self.requests.retry_after() }
            }
            Ending::Release => Settlement::Released,
        }
    }

    /// The possible endings of a run from here.
    fn endings(&self, worker: &Worker) -> &'static [Ending] {
        match (worker.phase, self.contract) {
            (Phase::Affected, Contract::AtLeastOnce) => &[Ending::Complete, Ending::Retry],
            (Phase::Affected, Contract::AtMostOnce) => &[Ending::Complete],
            // A failing transaction takes its effect back.
            (Phase::Affected, Contract::Transactional) => &[Ending::Complete, Ending::Release],
            (Phase::Running, Contract::AtLeastOnce | Contract::AtMostOnce) => &[Ending::Retry, Ending::Release],
            (Phase::Running, Contract::Transactional) => &[Ending::Release],
            _ => &[],
        }
    }

    fn acquire(&self, situation: &mut Situation, id: u8, answered: bool) {
        let outcome = situation.world.acquire(&self.requests, id);
        let worker = &mut situation.workers[usize::from(id)];
        if !answered {
            worker.phase = Phase::Acquiring;
            return;
        }
        match outcome {
            AcquireOutcome::Acquired(lease) => {
                let attempt = u8::try_from(lease.attempt).unwrap_or(u8::MAX);
                *worker = Worker { phase: Phase::Running, attempt, lease_until: situation.world.lease_until() };
            }
            AcquireOutcome::Replay(replay) => worker.end(Phase::Ended(Answer::Replayed(replay.into()))),
            AcquireOutcome::InProgress { .. } | AcquireOutcome::Backoff { .. } => {
                worker.end(Phase::Ended(Answer::Busy));
            }
            AcquireOutcome::Mismatch { .. } => unreachable!("all requests have one fingerprint"),
        }
    }

    fn settle(&self, situation: &mut Situation, id: u8, ending: Ending, answered: bool) {
        let worker = &mut situation.workers[usize::from(id)];
        let outcome = situation.world.settle(&self.requests, id, &self.settlement(id, ending));
        let commits = self.contract == Contract::Transactional && ending == Ending::Complete;
        if commits && outcome == OwnerOutcome::Applied && worker.phase == Phase::Affected {
            situation.effects.push(worker.attempt);
        }
        worker.end(match (answered, ending, outcome) {
            (false, ..) => Phase::Settling(ending),
            (true, Ending::Complete, OwnerOutcome::Applied) => Phase::Ended(Answer::Completed),
            (true, ..) => Phase::Ended(Answer::Inconclusive),
        });
    }

    /// Reads the record again. A commit cannot be repeated after its answer was lost, because the transaction is gone.
    fn read_again(situation: &mut Situation, id: u8) {
        let replay = situation.world.peek().and_then(|record| record.replay());
        let answer = replay.map_or(Answer::Inconclusive, |replay| Answer::Replayed(replay.into()));
        situation.workers[usize::from(id)].end(Phase::Ended(answer));
    }

    fn worker_steps(&self, situation: &Situation, id: u8, steps: &mut Vec<Step>) {
        let worker = &situation.workers[usize::from(id)];
        match worker.phase {
            Phase::Idle | Phase::Acquiring => {
                steps.extend([true, false].map(|answered| Step::Acquire { worker: id, answered }));
                if situation.late == Late::NotSent {
                    steps.push(Step::DelayAcquire(id));
                }
                if worker.phase == Phase::Acquiring {
                    steps.push(Step::Crash(id));
                }
            }
            Phase::Running | Phase::Affected => {
                if worker.phase == Phase::Running {
                    steps.push(Step::Effect(id));
                    if self.contract == Contract::AtLeastOnce {
                        steps.push(Step::Checkpoint(id));
                    }
                }
                steps.push(Step::Renew(id));
                for &ending in self.endings(worker) {
                    steps.extend([true, false].map(|answered| Step::Settle { worker: id, ending, answered }));
                }
                steps.push(Step::Crash(id));
            }
            Phase::Settling(Ending::Complete) if self.contract == Contract::Transactional => {
                steps.extend([Step::ReadAgain(id), Step::Crash(id)]);
            }
            Phase::Settling(ending) => {
                steps.extend([Step::Settle { worker: id, ending, answered: true }, Step::Crash(id)]);
            }
            Phase::Ended(_) | Phase::CrashedAfterEffect => {}
        }
    }
}

impl Worker {
    const NEW: Self = Self { phase: Phase::Idle, attempt: 0, lease_until: 0 };

    /// Ends the worker and resets what does not matter any more.
    fn end(&mut self, phase: Phase) {
        *self = Self { phase, ..Self::NEW };
    }
}

impl Model for Leased {
    type State = Situation;
    type Action = Step;

    fn init_states(&self) -> Vec<Situation> {
        let workers = vec![Worker::NEW; self.requests.limits.workers.into()];
        vec![Situation { world: World::default(), workers, effects: Vec::new(), late: Late::NotSent }]
    }

    fn actions(&self, situation: &Situation, steps: &mut Vec<Step>) {
        for id in 0..self.requests.limits.workers {
            self.worker_steps(situation, id, steps);
            // Untouched workers are interchangeable, so they begin in order.
            if situation.workers[usize::from(id)].phase == Phase::Idle {
                break;
            }
        }
        if situation.late != Late::NotSent {
            steps.push(Step::DeliverDelayedAcquire);
        }
        if situation.world.step < self.requests.limits.last_step {
            steps.push(Step::LetTimePass);
        }
        steps.push(Step::Purge);
    }

    fn next_state(&self, before: &Situation, step: Step) -> Option<Situation> {
        let mut next = before.clone();
        let worker = |id: u8| usize::from(id);
        match step {
            Step::Acquire { worker, answered } => self.acquire(&mut next, worker, answered),
            Step::DelayAcquire(id) => {
                next.late = Late::OnItsWay(id);
                next.workers[worker(id)].phase = Phase::Acquiring;
            }
            Step::DeliverDelayedAcquire => {
                let Late::OnItsWay(id) = next.late else { return None };
                next.late = Late::Arrived;
                next.world.acquire(&self.requests, id);
            }
            Step::Renew(id) => match next.world.renew(&self.requests, id) {
                OwnerOutcome::Applied => next.workers[worker(id)].lease_until = next.world.lease_until(),
                OwnerOutcome::LeaseLost => return None,
            },
            Step::Checkpoint(id) => {
                let attempt = next.workers[worker(id)].attempt;
                next.world.checkpoint(id, attempt);
            }
            Step::Effect(id) => {
                let worker = &mut next.workers[worker(id)];
                worker.phase = Phase::Affected;
                if self.contract != Contract::Transactional {
                    next.effects.push(worker.attempt);
                }
            }
            Step::Settle { worker, ending, answered } => self.settle(&mut next, worker, ending, answered),
            Step::ReadAgain(id) => Self::read_again(&mut next, id),
            Step::Crash(id) => {
                let worker = &mut next.workers[worker(id)];
                let after_effect = worker.phase == Phase::Affected;
                worker.end(if after_effect { Phase::CrashedAfterEffect } else { Phase::Ended(Answer::Inconclusive) });
            }
            Step::LetTimePass => next.world.step += 1,
            Step::Purge => {
                if !next.world.purge() {
                    return None;
                }
            }
        }
        (next != *before).then_some(next)
    }

    /// Bounds the attempts. A sound machine stays far below; a broken one that counts forever must not make the search endless.
    fn within_boundary(&self, situation: &Situation) -> bool {
        situation.world.peek().is_none_or(|record| record.attempt <= 8)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        promises::of(self.contract, self.promised)
    }
}

impl Situation {
    /// Every answer that says how the operation ended.
    pub(super) fn final_answers(&self) -> impl Iterator<Item = Replayed> {
        self.workers.iter().zip(0..).filter_map(|(worker, id)| match worker.phase {
            Phase::Ended(Answer::Replayed(replayed)) => Some(replayed),
            Phase::Ended(Answer::Completed) => Some(Replayed { kind: ReplayKind::Completed, answer_of: Some(id) }),
            _ => None,
        })
    }
}

impl fmt::Display for Step {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lost = |answered: &bool| if *answered { "" } else { ", and the answer is lost" };
        match self {
            Self::Acquire { worker, answered } => write!(formatter, "worker {worker} acquires{}", lost(answered)),
            Self::DelayAcquire(worker) => write!(formatter, "an acquire of worker {worker} is delayed on its way"),
            Self::DeliverDelayedAcquire => formatter.write_str("the delayed acquire arrives"),
            Self::Renew(worker) => write!(formatter, "worker {worker} renews its lease"),
            Self::Checkpoint(worker) => write!(formatter, "worker {worker} records a checkpoint"),
            Self::Effect(worker) => write!(formatter, "worker {worker} has its effect"),
            Self::Settle { worker, ending, answered } => {
                let verb = match ending {
                    Ending::Complete => "settles as completed",
                    Ending::Retry => "settles as failed, to be retried",
                    Ending::Release => "releases the key",
                };
                write!(formatter, "worker {worker} {verb}{}", lost(answered))
            }
            Self::ReadAgain(worker) => write!(formatter, "worker {worker} reads the record again"),
            Self::Crash(worker) => write!(formatter, "worker {worker} crashes or gives up"),
            Self::LetTimePass => formatter.write_str("a second passes"),
            Self::Purge => formatter.write_str("the expired record is purged"),
        }
    }
}
