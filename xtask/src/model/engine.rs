//! Models the engine around the verbs: slow acquires, probes, and settlements that fail behind their answers.
//!
//! Each rule can be switched off, and the search must then find the consequence.

use std::fmt;

use idem_core::{AcquireOutcome, Acquisition, OwnerOutcome, ReplayKind, Settlement, Takeover};
use stateright::{Model, Property};

use super::world::{Law, Limits, Replayed, Requests, World, response};

type Promise = Property<Engine>;

/// The rules of the engine, and the faults that may happen to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Rules {
    pub(super) takeover: Takeover,
    /// After a probe, and if its lease may be over, an operation begins only after an acknowledged renewal.
    pub(super) confirms: bool,
    /// An acquire that arrives after it was given up is released.
    pub(super) gives_back: bool,
    /// A settlement is repeated behind its answer, whatever the error.
    pub(super) insists: bool,
    /// Renewals behind an answer succeed while settlements fail.
    pub(super) renews_behind: bool,
    /// A probe that says "did not happen" also prevents later effects of earlier attempts.
    pub(super) probe_prevents: bool,
    /// A process may stand still between the last check and the effect.
    pub(super) stands_still: bool,
}

impl Rules {
    /// All rules on, in a world without stops.
    pub(super) const fn kept(takeover: Takeover) -> Self {
        Self {
            takeover,
            confirms: true,
            gives_back: true,
            insists: true,
            renews_behind: true,
            probe_prevents: false,
            stands_still: false,
        }
    }
}

#[derive(Debug)]
pub(super) struct Engine {
    rules: Rules,
    requests: Requests,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Situation {
    world: World,
    workers: Vec<Worker>,
    /// The attempts whose effects happened, in order.
    effects: Vec<u8>,
    /// Effects of attempts below this one are prevented.
    prevented_below: u8,
    /// An acquire that was sent once and has not arrived.
    late: Option<u8>,
    was_late: bool,
    has_crashed: bool,
    has_run: bool,
    /// A client got a success.
    is_acknowledged: bool,
    has_run_after_success: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Worker {
    phase: Phase,
    attempt: u8,
    lease_until: u8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Phase {
    Idle,
    /// Its acquire has no answer yet.
    Acquiring,
    /// Its client was answered that nothing ran. It releases what its acquire may get.
    GivingBack,
    Probing,
    /// The probe found nothing.
    Probed,
    /// Acquired, and about to begin.
    Granted,
    Running,
    Affected,
    /// The client has its answer, and the settlement continues.
    Behind,
    Ended(Option<Replayed>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    Acquire(u8),
    DelayAcquire(u8),
    DeliverAcquire,
    Probe(u8),
    Confirm(u8),
    Begin(u8),
    Effect(u8),
    Renew(u8),
    Settle(u8),
    AnswerBeforeSettlement(u8),
    GiveUpSettlement(u8),
    Crash(u8),
    LetTimePass,
}

impl Engine {
    pub(super) fn new(rules: Rules, limits: Limits) -> Self {
        Self { rules, requests: Requests::new(limits, rules.takeover) }
    }

    fn acquire(&self, situation: &mut Situation, id: u8) {
        let outcome = situation.world.acquire(&self.requests, id);
        let worker = &mut situation.workers[usize::from(id)];
        match outcome {
            AcquireOutcome::Acquired(lease) => {
                let phase = if lease.acquisition == Acquisition::Probe { Phase::Probing } else { Phase::Granted };
                let attempt = u8::try_from(lease.attempt).unwrap_or(u8::MAX);
                *worker = Worker { phase, attempt, lease_until: situation.world.lease_until() };
            }
            AcquireOutcome::Replay(replay) => worker.end(Some(replay.into())),
            _ => worker.end(None),
        }
    }

    fn probe(&self, situation: &mut Situation, id: u8) {
        let attempt = situation.workers[usize::from(id)].attempt;
        if let Some(first) = situation.effects.first() {
            let settlement = Settlement::Completed(response(*first));
            situation.world.settle(&self.requests, id, &settlement);
            situation.workers[usize::from(id)].end(None);
            return;
        }
        if self.rules.probe_prevents {
            situation.prevented_below = attempt;
        }
        situation.workers[usize::from(id)].phase = if self.rules.confirms { Phase::Probed } else { Phase::Granted };
    }

    fn begin(&self, situation: &mut Situation, id: u8) {
        situation.has_run = true;
        situation.has_run_after_success |= situation.is_acknowledged;
        situation.workers[usize::from(id)].phase = Phase::Running;
        if !self.rules.stands_still {
            Self::have_effect(situation, id);
        }
    }

    fn have_effect(situation: &mut Situation, id: u8) {
        let worker = &mut situation.workers[usize::from(id)];
        if worker.attempt < situation.prevented_below {
            worker.end(None);
        } else {
            worker.phase = Phase::Affected;
            situation.effects.push(worker.attempt);
        }
    }

    fn settle(&self, situation: &mut Situation, id: u8) {
        let settlement = Settlement::Completed(response(situation.workers[usize::from(id)].attempt));
        let outcome = situation.world.settle(&self.requests, id, &settlement);
        situation.is_acknowledged |= outcome == OwnerOutcome::Applied;
        situation.workers[usize::from(id)].end(None);
    }

    /// Background work of living processes: they renew leases before a run and behind an answer, and release late acquires.
    /// During a probe or a run, renewals may fail, so those are separate steps.
    fn work_behind(&self, situation: &mut Situation) {
        for (worker, id) in situation.workers.iter_mut().zip(0..) {
            match worker.phase {
                Phase::Granted if self.rules.stands_still => {}
                Phase::Behind if !self.rules.renews_behind => {}
                Phase::Granted | Phase::Behind
                    if situation.world.renew(&self.requests, id) == OwnerOutcome::Applied =>
                {
                    worker.lease_until = situation.world.lease_until();
                }
                Phase::GivingBack if self.rules.gives_back => {
                    situation.world.settle(&self.requests, id, &Settlement::Released);
                }
                _ => {}
            }
        }
    }

    fn worker_steps(&self, situation: &Situation, id: u8, steps: &mut Vec<Step>) {
        let worker = &situation.workers[usize::from(id)];
        match worker.phase {
            Phase::Idle => {
                steps.push(Step::Acquire(id));
                if !situation.was_late {
                    steps.push(Step::DelayAcquire(id));
                }
            }
            Phase::Acquiring => steps.push(Step::Acquire(id)),
            Phase::Probing => steps.extend([Step::Probe(id), Step::Renew(id), Step::Crash(id)]),
            Phase::Probed => steps.extend([Step::Confirm(id), Step::Crash(id)]),
            Phase::Granted => {
                if !self.rules.confirms || situation.world.step < worker.lease_until {
                    steps.push(Step::Begin(id));
                } else {
                    steps.push(Step::Confirm(id));
                }
                steps.push(Step::Crash(id));
            }
            Phase::Running => steps.extend([Step::Effect(id), Step::Renew(id), Step::Crash(id)]),
            Phase::Affected => {
                let more = [Step::AnswerBeforeSettlement(id), Step::Renew(id), Step::Crash(id)];
                steps.push(Step::Settle(id));
                steps.extend(more);
            }
            Phase::Behind => {
                steps.extend([Step::Settle(id), Step::Crash(id)]);
                if !self.rules.insists {
                    steps.push(Step::GiveUpSettlement(id));
                }
            }
            Phase::GivingBack | Phase::Ended(_) => {}
        }
    }
}

impl Worker {
    const NEW: Self = Self { phase: Phase::Idle, attempt: 0, lease_until: 0 };

    fn end(&mut self, replayed: Option<Replayed>) {
        *self = Self { phase: Phase::Ended(replayed), ..Self::NEW };
    }
}

impl Model for Engine {
    type State = Situation;
    type Action = Step;

    fn init_states(&self) -> Vec<Situation> {
        vec![Situation {
            world: World::default(),
            workers: vec![Worker::NEW; self.requests.limits.workers.into()],
            effects: Vec::new(),
            prevented_below: 0,
            late: None,
            was_late: false,
            has_crashed: false,
            has_run: false,
            is_acknowledged: false,
            has_run_after_success: false,
        }]
    }

    fn actions(&self, situation: &Situation, steps: &mut Vec<Step>) {
        for id in 0..self.requests.limits.workers {
            self.worker_steps(situation, id, steps);
            // Untouched workers are interchangeable, so they begin in order.
            if situation.workers[usize::from(id)].phase == Phase::Idle {
                break;
            }
        }
        if situation.late.is_some() {
            steps.push(Step::DeliverAcquire);
        }
        if situation.world.step < self.requests.limits.last_step {
            steps.push(Step::LetTimePass);
        }
    }

    fn next_state(&self, before: &Situation, step: Step) -> Option<Situation> {
        let mut next = before.clone();
        let worker = |id: u8| usize::from(id);
        match step {
            Step::Acquire(id) => self.acquire(&mut next, id),
            Step::DelayAcquire(id) => {
                next.late = Some(id);
                next.was_late = true;
                next.workers[worker(id)].phase = Phase::Acquiring;
            }
            Step::DeliverAcquire => {
                let id = next.late.take()?;
                next.world.acquire(&self.requests, id);
            }
            Step::Probe(id) => self.probe(&mut next, id),
            Step::Confirm(id) => match next.world.renew(&self.requests, id) {
                OwnerOutcome::Applied => {
                    let worker = &mut next.workers[worker(id)];
                    worker.phase = Phase::Granted;
                    worker.lease_until = next.world.lease_until();
                }
                OwnerOutcome::LeaseLost => next.workers[worker(id)].end(None),
            },
            Step::Begin(id) => self.begin(&mut next, id),
            Step::Effect(id) => Self::have_effect(&mut next, id),
            Step::Renew(id) => match next.world.renew(&self.requests, id) {
                OwnerOutcome::Applied => next.workers[worker(id)].lease_until = next.world.lease_until(),
                OwnerOutcome::LeaseLost => return None,
            },
            Step::Settle(id) => self.settle(&mut next, id),
            Step::AnswerBeforeSettlement(id) => {
                // An expired lease may belong to another owner. The engine finds that out before it answers.
                if next.world.step >= next.workers[worker(id)].lease_until {
                    return None;
                }
                next.workers[worker(id)].phase = Phase::Behind;
                next.is_acknowledged = true;
            }
            Step::GiveUpSettlement(id) => next.workers[worker(id)].end(None),
            Step::Crash(id) => {
                next.has_crashed = true;
                next.workers[worker(id)].end(None);
            }
            Step::LetTimePass => {
                // The timeout of an answer is much shorter than a lease.
                for worker in next.workers.iter_mut().filter(|worker| worker.phase == Phase::Acquiring) {
                    worker.phase = Phase::GivingBack;
                }
                self.work_behind(&mut next);
                next.world.step += 1;
                self.work_behind(&mut next);
            }
        }
        (next != *before).then_some(next)
    }

    fn within_boundary(&self, situation: &Situation) -> bool {
        situation.world.peek().is_none_or(|record| record.attempt <= 8)
    }

    fn properties(&self) -> Vec<Promise> {
        let mut promises = vec![
            Promise::always("L2 and L3: neither a settled record nor another owner's changes", |_, situation| {
                situation.world.keeps(Law::SettledRecordsChange) && situation.world.keeps(Law::StaleOwnersChangeThings)
            }),
            Promise::always(HONEST_UNKNOWN, |_, situation| {
                !situation.is_unknown() || situation.has_run || situation.has_crashed
            }),
            Promise::always(LASTING_SUCCESS, |_, situation| {
                let is_broken = situation.has_run_after_success || situation.is_acknowledged && situation.is_unknown();
                !is_broken || situation.has_crashed
            }),
            Promise::sometimes("an answer is given before its settlement", |_, situation| {
                situation.workers.iter().any(|worker| worker.phase == Phase::Behind)
            }),
        ];
        if self.rules.takeover == Takeover::Probe {
            promises.push(Promise::always(ONE_EFFECT, |_, situation| situation.effects.len() <= 1));
            promises.push(Promise::sometimes("an operation runs after a probe", |_, situation| {
                situation.effects.first().is_some_and(|attempt| *attempt > 1)
            }));
        }
        promises
    }
}

pub(super) const ONE_EFFECT: &str = "with a probe there is one effect at most";
pub(super) const HONEST_UNKNOWN: &str = "an outcome is unknown only if an operation began or a process crashed";
pub(super) const LASTING_SUCCESS: &str = "without a crash nothing runs after a success that was told";

impl Situation {
    fn is_unknown(&self) -> bool {
        let unknown = |replayed: &Replayed| replayed.kind == ReplayKind::OutcomeUnknown;
        self.workers.iter().any(|worker| matches!(&worker.phase, Phase::Ended(Some(replayed)) if unknown(replayed)))
    }
}

impl fmt::Display for Step {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Acquire(id) => write!(formatter, "worker {id} acquires"),
            Self::DelayAcquire(id) => write!(formatter, "an acquire of worker {id} is delayed on its way"),
            Self::DeliverAcquire => formatter.write_str("the delayed acquire arrives"),
            Self::Probe(id) => write!(formatter, "worker {id} probes"),
            Self::Confirm(id) => write!(formatter, "worker {id} has its lease confirmed"),
            Self::Begin(id) => write!(formatter, "worker {id} begins to run"),
            Self::Effect(id) => write!(formatter, "worker {id} has its effect"),
            Self::Renew(id) => write!(formatter, "worker {id} renews its lease"),
            Self::Settle(id) => write!(formatter, "worker {id} settles"),
            Self::AnswerBeforeSettlement(id) => write!(formatter, "worker {id} answers before it is settled"),
            Self::GiveUpSettlement(id) => write!(formatter, "worker {id} gives its settlement up"),
            Self::Crash(id) => write!(formatter, "worker {id} crashes"),
            Self::LetTimePass => formatter.write_str("a second passes; acquires without an answer are given up"),
        }
    }
}
