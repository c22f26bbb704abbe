//! Workers that own the key by a lock of their transaction: Transactional in the shape of Postgres.
//!
//! No in-progress record is ever committed. The worker that gets the lock reads the record. Effect and settlement commit
//! together, and the lock is released with the transaction, however that ends.

use std::fmt;

use idem_core::{AcquireOutcome, ReplayKind, Settlement, Takeover};
use stateright::{Model, Property};

use super::world::{Law, Limits, Replayed, Requests, World, response};

type Promise = Property<Advisory>;

#[derive(Debug)]
pub(super) struct Advisory {
    requests: Requests,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Situation {
    world: World,
    /// The open transaction with the lock, in the database server.
    transaction: Option<Transaction>,
    workers: Vec<Phase>,
    effects: u8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Transaction {
    worker: u8,
    /// Whether the server is committing for a worker that will not get the answer.
    commit_under_way: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Phase {
    Idle,
    Running,
    /// The business writes are made, but not committed.
    Affected,
    /// The answer to the commit was lost.
    Indeterminate,
    Ended(Answer),
    Crashed {
        after_effect: bool,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Answer {
    Completed,
    RolledBack,
    Replayed(Replayed),
    Busy,
    Unavailable,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    Begin(u8),
    Effect(u8),
    Commit(u8),
    LoseCommit(u8),
    CommitLands,
    CommitFails,
    ReadAgain(u8),
    RollBack(u8),
    Crash(u8),
    LetTimePass,
    Purge,
}

impl Advisory {
    pub(super) fn new(limits: Limits) -> Self {
        Self { requests: Requests::new(limits, Takeover::Rerun) }
    }

    fn begin(&self, situation: &mut Situation, id: u8) {
        let worker = &mut situation.workers[usize::from(id)];
        if situation.transaction.is_some() {
            *worker = Phase::Ended(Answer::Busy);
            return;
        }
        // Nothing is written here: the record of the acquire stays inside the transaction.
        match situation.world.clone().acquire(&self.requests, id) {
            AcquireOutcome::Acquired(_) => {
                situation.transaction = Some(Transaction { worker: id, commit_under_way: false });
                *worker = Phase::Running;
            }
            AcquireOutcome::Replay(replay) => *worker = Phase::Ended(Answer::Replayed(replay.into())),
            outcome => unreachable!("without in-progress records there is no {outcome:?}"),
        }
    }

    fn commit(&self, situation: &mut Situation, id: u8) {
        situation.world.acquire(&self.requests, id);
        situation.world.settle(&self.requests, id, &Settlement::Completed(response(id)));
        situation.effects += 1;
        situation.transaction = None;
    }

    fn read_again(situation: &mut Situation, id: u8) {
        let answer = match situation.world.peek().and_then(|record| record.replay()) {
            Some(replay) => Answer::Replayed(replay.into()),
            None => Answer::Unavailable,
        };
        situation.workers[usize::from(id)] = Phase::Ended(answer);
    }
}

impl Model for Advisory {
    type State = Situation;
    type Action = Step;

    fn init_states(&self) -> Vec<Situation> {
        let workers = vec![Phase::Idle; self.requests.limits.workers.into()];
        vec![Situation { world: World::default(), transaction: None, workers, effects: 0 }]
    }

    fn actions(&self, situation: &Situation, steps: &mut Vec<Step>) {
        for (worker, id) in situation.workers.iter().zip(0..) {
            match worker {
                Phase::Idle => {
                    steps.push(Step::Begin(id));
                    // Untouched workers are interchangeable, so they begin in order.
                    break;
                }
                Phase::Running => steps.extend([Step::Effect(id), Step::RollBack(id), Step::Crash(id)]),
                Phase::Affected => {
                    steps.extend([Step::Commit(id), Step::LoseCommit(id), Step::RollBack(id), Step::Crash(id)]);
                }
                Phase::Indeterminate => steps.extend([Step::ReadAgain(id), Step::Crash(id)]),
                Phase::Ended(_) | Phase::Crashed { .. } => {}
            }
        }
        if let Some(Transaction { commit_under_way: true, .. }) = situation.transaction {
            steps.extend([Step::CommitLands, Step::CommitFails]);
        }
        if situation.world.step < self.requests.limits.last_step {
            steps.push(Step::LetTimePass);
        }
        steps.push(Step::Purge);
    }

    fn next_state(&self, before: &Situation, step: Step) -> Option<Situation> {
        let mut next = before.clone();
        match step {
            Step::Begin(id) => self.begin(&mut next, id),
            Step::Effect(id) => next.workers[usize::from(id)] = Phase::Affected,
            Step::Commit(id) => {
                self.commit(&mut next, id);
                next.workers[usize::from(id)] = Phase::Ended(Answer::Completed);
            }
            Step::LoseCommit(id) => {
                next.transaction = Some(Transaction { worker: id, commit_under_way: true });
                next.workers[usize::from(id)] = Phase::Indeterminate;
            }
            Step::CommitLands => self.commit(&mut next, before.transaction?.worker),
            Step::CommitFails => next.transaction = None,
            Step::ReadAgain(id) => Self::read_again(&mut next, id),
            Step::RollBack(id) => {
                next.transaction = None;
                next.workers[usize::from(id)] = Phase::Ended(Answer::RolledBack);
            }
            Step::Crash(id) => {
                // A crashed worker cannot take back a commit that the server is executing.
                next.transaction = next.transaction.filter(|open| open.worker != id || open.commit_under_way);
                let after_effect = next.workers[usize::from(id)] != Phase::Running;
                next.workers[usize::from(id)] = Phase::Crashed { after_effect };
            }
            Step::LetTimePass => next.world.step += 1,
            Step::Purge => {
                if !next.world.purge() {
                    return None;
                }
            }
        }
        Some(next)
    }

    fn properties(&self) -> Vec<Promise> {
        vec![
            Promise::always("L2: a settled record never changes", |_, situation| {
                situation.world.keeps(Law::SettledRecordsChange)
            }),
            Promise::always("L3: a stale owner changes nothing", |_, situation| {
                situation.world.keeps(Law::StaleOwnersChangeThings)
            }),
            Promise::always("L5: the key is free at once, or answers with the effect", |model, situation| {
                match situation.world.clone().acquire(&model.requests, model.requests.limits.workers) {
                    AcquireOutcome::Acquired(_) => situation.effects == 0,
                    AcquireOutcome::Replay(replay) => replay.kind == ReplayKind::Completed && situation.effects == 1,
                    _ => false,
                }
            }),
            Promise::always("L1: only the holder of the lock runs", |_, situation| {
                let runs = |phase: &Phase| matches!(phase, Phase::Running | Phase::Affected);
                let holder = situation.transaction.map(|transaction| transaction.worker);
                situation.workers.iter().zip(0..).all(|(phase, id)| !runs(phase) || holder == Some(id))
            }),
            Promise::always("there is one effect at most", |_, situation| situation.effects <= 1),
            Promise::always("nothing in progress is ever stored", |_, situation| !situation.world.live_lease()),
            Promise::always("all final answers are the same, and true", |_, situation| {
                let mut answers = situation.final_answers();
                let Some(first) = answers.next() else { return true };
                situation.effects == 1 && answers.all(|answer| answer == first)
            }),
            Promise::sometimes("a completed run is replayed", |_, situation| {
                situation.workers.iter().any(|phase| matches!(phase, Phase::Ended(Answer::Replayed(_))))
            }),
            Promise::sometimes("a repeat is turned away while the first one runs", |_, situation| {
                situation.transaction.is_some() && situation.workers.contains(&Phase::Ended(Answer::Busy))
            }),
            Promise::sometimes("a worker crashes before its commit and another one completes", |_, situation| {
                let crashed = situation.workers.contains(&Phase::Crashed { after_effect: true });
                crashed && situation.workers.contains(&Phase::Ended(Answer::Completed))
            }),
            Promise::sometimes("a commit lands after its worker read again in vain", |_, situation| {
                situation.effects == 1 && situation.workers.contains(&Phase::Ended(Answer::Unavailable))
            }),
        ]
    }
}

impl Situation {
    /// Every answer that says how the operation ended.
    fn final_answers(&self) -> impl Iterator<Item = Replayed> {
        self.workers.iter().zip(0..).filter_map(|(phase, id)| match phase {
            Phase::Ended(Answer::Replayed(replayed)) => Some(*replayed),
            Phase::Ended(Answer::Completed) => Some(Replayed { kind: ReplayKind::Completed, answer_of: Some(id) }),
            _ => None,
        })
    }
}

impl fmt::Display for Step {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Begin(worker) => write!(formatter, "worker {worker} begins a transaction and tries the lock"),
            Self::Effect(worker) => write!(formatter, "worker {worker} makes its writes"),
            Self::Commit(worker) => write!(formatter, "worker {worker} commits"),
            Self::LoseCommit(worker) => write!(formatter, "worker {worker} commits and loses the connection"),
            Self::CommitLands => formatter.write_str("the lost commit takes effect"),
            Self::CommitFails => formatter.write_str("the lost commit is rolled back"),
            Self::ReadAgain(worker) => write!(formatter, "worker {worker} reads the record on a new connection"),
            Self::RollBack(worker) => write!(formatter, "worker {worker} rolls back"),
            Self::Crash(worker) => write!(formatter, "worker {worker} crashes"),
            Self::LetTimePass => formatter.write_str("a second passes"),
            Self::Purge => formatter.write_str("the expired record is purged"),
        }
    }
}
