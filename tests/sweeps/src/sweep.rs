//! Runs all trials of one verb at one place.

use std::sync::Arc;

use crate::coverage::Coverage;
use crate::harm::{Harm, Trial};
use crate::leased::Verb;
use crate::transactions::Part;
use crate::world::{Checked, LONG, PATIENCE, Place, SHORT, World};
use idem_proxy::{Cut, Direction, Ending};

/// The number of sweeps. Some answers arrive before they are awaited, so only many sweeps meet every await.
const SWEEPS: usize = 10;

/// A future with more awaits than this never completes.
const MOST_AWAITS: usize = 1_000;

/// How often an exchange is measured.
const MEASUREMENTS: usize = 3;

/// Other endings of a connection are tried at one in this many bytes, because the same bytes have arrived.
const OTHER_ENDINGS_EVERY: usize = 8;

/// How often a cut is tried, because an exchange may be shorter now and then.
const TRIES: usize = 3;

/// How often a server falls silent. Each time takes as long as the timeout.
const SILENCES: usize = 3;

/// The verb that comes to harm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Case {
    Leased(Verb),
    Transaction(Part),
}

impl Case {
    /// All cases at a place.
    pub(crate) fn all(place: Place) -> Vec<Self> {
        let verbs = Verb::ALL.map(Self::Leased).into_iter();
        let parts = Part::ALL.map(Self::Transaction).into_iter();
        verbs.chain(parts.filter(|_| place.has_transactions())).collect()
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Leased(verb) => verb.name(),
            Self::Transaction(part) => part.name(),
        }
    }

    async fn suffer(self, world: &World, trial: &Trial) -> Checked {
        match self {
            Self::Leased(verb) => verb.suffer(world, trial).await,
            Self::Transaction(part) => part.suffer(world, trial).await,
        }
    }
}

/// One kind of trial of a case.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Pass {
    /// Dropped at every await.
    Drops { is_cold: bool },
    /// Cut after every byte.
    Cuts { direction: Direction, ending: Ending },
    /// The request is delivered, and nothing comes back.
    Silences,
}

impl Pass {
    pub(crate) fn all(place: Place, case: Case) -> Vec<Self> {
        let mut all = vec![Self::Drops { is_cold: false }];
        if place.has_server() {
            all.push(Self::Drops { is_cold: true });
            // The handler chooses the timeout of its statement.
            if case != Case::Transaction(Part::Write) {
                all.push(Self::Silences);
            }
            for direction in [Direction::Requests, Direction::Answers] {
                let endings = [Ending::Reset, Ending::Close, Ending::Outage].into_iter();
                all.extend(endings.map(|ending| Self::Cuts { direction, ending }));
            }
        }
        all
    }
}

/// The state of a sweep of one case at one place.
pub(crate) struct Sweep {
    world: World,
    case: Case,
    /// Only one in this many bytes is tried.
    every: usize,
    turn: usize,
    coverage: Coverage,
}

impl Sweep {
    /// Runs all trials of one pass.
    pub(crate) async fn run(place: Place, case: Case, pass: Pass, every: usize) -> Coverage {
        let timeout = if matches!(pass, Pass::Silences) { SHORT } else { LONG };
        let world = match World::open(place, timeout).await {
            Ok(world) => world,
            Err(error) => {
                let violations = vec![format!("{pass:?}: it cannot be opened: {error}")];
                return Coverage { violations, ..Coverage::default() };
            }
        };
        let mut sweep = Self { world, case, every, turn: 0, coverage: Coverage::default() };
        match pass {
            Pass::Drops { is_cold } => sweep.drops(is_cold).await,
            Pass::Cuts { direction, ending } => sweep.cuts(direction, ending).await,
            Pass::Silences => sweep.silences().await,
        }
        let Self { world, mut coverage, .. } = sweep;
        if let Err(error) = world.close().await {
            coverage.violations.push(format!("{pass:?}: it cannot be closed: {error}"));
        }
        coverage
    }

    async fn drops(&mut self, is_cold: bool) {
        for _ in 0..SWEEPS {
            for at in 0..MOST_AWAITS {
                if !self.suffer(Harm::Drop { at, is_cold }).await.is_met() {
                    break;
                }
                self.coverage.drops += 1;
                self.coverage.awaits = self.coverage.awaits.max(at);
            }
        }
    }

    async fn cuts(&mut self, direction: Direction, ending: Ending) {
        let mut bytes = 0;
        for _ in 0..MEASUREMENTS {
            bytes = bytes.max(self.suffer(Harm::None).await.carried(direction));
        }
        self.coverage.bytes[direction as usize] = bytes;
        let every = if ending == Ending::Reset { self.every } else { self.every * OTHER_ENDINGS_EVERY };
        let mut after = 0;
        while after <= bytes {
            if self.cut(Cut { direction, after, ending }).await {
                self.coverage.cuts[direction as usize] += 1;
                let is_lost = direction == Direction::Answers && after == 0;
                self.coverage.lost += usize::from(is_lost);
            }
            after += every;
        }
    }

    /// Returns whether the cut was made.
    async fn cut(&mut self, cut: Cut) -> bool {
        for _ in 0..TRIES {
            if self.suffer(Harm::Cut(cut)).await.is_met() {
                return true;
            }
        }
        false
    }

    async fn silences(&mut self) {
        let cut = Cut { direction: Direction::Answers, after: 0, ending: Ending::Silence };
        for _ in 0..SILENCES {
            let is_met = self.suffer(Harm::Cut(cut)).await.is_met();
            self.coverage.lost += usize::from(is_met);
        }
    }

    async fn suffer(&mut self, harm: Harm) -> Trial {
        self.world.renew();
        let trial = Trial::new(harm, self.turn, self.world.proxies.first().map(Arc::clone));
        self.turn += 1;
        let one = async {
            self.world.warm(matches!(self.case, Case::Transaction(_))).await?;
            self.case.suffer(&self.world, &trial).await
        };
        let checked = tokio::time::timeout(PATIENCE * 3, one).await;
        // A hanging trial is abandoned.
        let checked = checked.unwrap_or_else(|_| Err("it hangs".into()));
        if let Err(error) = checked {
            self.world.proxies.iter().for_each(|proxy| {
                proxy.disarm();
            });
            self.coverage.violations.push(format!("{harm:?}, turn {}: {error}", trial.turn));
        }
        trial
    }
}
