//! All trials of one verb at one place.

use std::sync::Arc;

use crate::coverage::Coverage;
use crate::harm::{Harm, Trial};
use crate::leased::Verb;
use crate::transactions::Part;
use crate::world::{Checked, LONG, PATIENCE, Place, SHORT, World};
use idem_proxy::{Cut, Direction, Ending};

/// Some answers are there before they are awaited: many sweeps meet every await.
const SWEEPS: usize = 10;

/// A future that waits this often never completes.
const MOST_AWAITS: usize = 1_000;

/// How often an exchange is measured.
const MEASUREMENTS: usize = 3;

/// One of so many bytes is enough for the other ways in which a connection ends: what arrived is the same.
const OTHER_ENDINGS_EVERY: usize = 8;

/// How often one cut is tried: an exchange may be shorter now and then.
const TRIES: usize = 3;

/// How often a server falls silent, which takes as long as it is waited for.
const SILENCES: usize = 3;

/// What comes to harm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Case {
    Leased(Verb),
    Transaction(Part),
}

impl Case {
    /// All that there are at a place.
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

/// One way through all trials of a case.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Pass {
    /// Dropped at every await.
    Drops { is_cold: bool },
    /// Cut after every byte.
    Cuts { direction: Direction, ending: Ending },
    /// The request is delivered, and then nothing comes.
    Silences,
}

impl Pass {
    pub(crate) fn all(place: Place, case: Case) -> Vec<Self> {
        let mut all = vec![Self::Drops { is_cold: false }];
        if place.has_server() {
            all.push(Self::Drops { is_cold: true });
            // How long a handler waits for its own statement is its own matter.
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

/// A case at a place, and how far it has come.
pub(crate) struct Sweep {
    world: World,
    case: Case,
    /// Of bytes, only each of so many is tried.
    every: usize,
    turn: usize,
    coverage: Coverage,
}

impl Sweep {
    /// Goes one way through all trials.
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

    /// Whether the cut was made.
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
        // What hangs is left where it is.
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
