//! Plans the faults of a run from a seed.

use std::fmt;
use std::ops::Range;
use std::time::Duration;

use crate::random::Random;

/// How long a lease lasts, on every store.
pub const LEASE: Duration = Duration::from_secs(2);

/// The processes, in the order of their start.
pub const PROCESSES: [&str; 11] = [
    "axum", "actix", "worker-0", "worker-1", "relay-0", "relay-1", "consumer", "client-0", "client-1", "client-2",
    "client-3",
];

/// The places of the services and of the clients in [`PROCESSES`].
const SERVICES: Range<usize> = 0..2;
/// The places of the clients in [`PROCESSES`].
pub const CLIENTS: Range<usize> = 7..11;

/// What a fault hits. Servers come first, because processes need them to start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[expect(clippy::exhaustive_enums, reason = "a run must know how to hit each of them")]
pub enum Target {
    /// Postgres, which decides.
    Postgres,
    /// Redis, which caches.
    Redis,
    /// NATS, which carries messages.
    Nats,
    /// A process, by its place in [`PROCESSES`].
    Process(usize),
}

/// The kinds of faults.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[expect(clippy::exhaustive_enums, reason = "a run must know how to cause each of them")]
pub enum Kind {
    /// SIGKILL. The targets start again later.
    Kill,
    /// SIGSTOP, for longer than a lease. The targets then go on. The network of NATS stands still instead.
    Pause,
    /// Services execute requests, and their answers are lost.
    LoseAnswers,
}

/// A fault.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "it is nothing but its members")]
pub struct Fault {
    /// When it begins, at the earliest.
    pub at: Duration,
    /// Its kind.
    pub kind: Kind,
    /// What it hits, all at once, in the order of their start.
    pub targets: Vec<Target>,
    /// How long it lasts.
    pub lasts: Duration,
}

/// How often a round kills each target. A round pauses each target once, and kills all of them together once.
const KILLS: usize = 3;

/// The most targets of one fault that does not hit everything.
const MOST: u64 = 3;

/// A pause between two faults.
const SHORTEST_PAUSE_MS: u64 = 200;
const LONGEST_PAUSE_MS: u64 = 1500;

/// Plans the faults of a run that takes `total`: the same seed gives the same faults. A longer run begins as a shorter one does.
#[must_use]
pub fn plan(seed: u64, total: Duration) -> Vec<Fault> {
    let mut random = Random::new(seed);
    let mut planned = Vec::new();
    let mut at = Duration::ZERO;
    loop {
        for (kind, targets) in round(&mut random) {
            at += Duration::from_millis(random_between(&mut random, SHORTEST_PAUSE_MS..LONGEST_PAUSE_MS));
            let lasts = Duration::from_millis(match kind {
                Kind::Kill => random.below(600),
                Kind::Pause => LEASE.as_millis() as u64 * 3 / 2 + random.below(1000),
                Kind::LoseAnswers => 300 + random.below(700),
            });
            let fault = Fault { at, kind, targets, lasts };
            at += fault.takes();
            if at > total {
                return planned;
            }
            planned.push(fault);
        }
    }
}

/// All kinds and all targets, in a random order.
fn round(random: &mut Random) -> Vec<(Kind, Vec<Target>)> {
    let mut faults = vec![(Kind::Kill, Target::all())];
    for _ in 0..KILLS {
        faults.extend(groups(random, Target::all()).into_iter().map(|targets| (Kind::Kill, targets)));
    }
    faults.extend(groups(random, Target::all()).into_iter().map(|targets| (Kind::Pause, targets)));
    faults.extend(SERVICES.map(|service| (Kind::LoseAnswers, vec![Target::Process(service)])));
    shuffled(random, faults)
}

/// Each target once, in groups of one to [`MOST`].
fn groups(random: &mut Random, targets: Vec<Target>) -> Vec<Vec<Target>> {
    let mut targets = shuffled(random, targets);
    let mut groups = Vec::new();
    while !targets.is_empty() {
        let size = (1 + random.below(MOST) as usize).min(targets.len());
        let mut group = targets.split_off(targets.len() - size);
        group.sort();
        groups.push(group);
    }
    groups
}

fn shuffled<T>(random: &mut Random, mut all: Vec<T>) -> Vec<T> {
    let mut shuffled = Vec::new();
    while !all.is_empty() {
        shuffled.push(all.swap_remove(random.below(all.len() as u64) as usize));
    }
    shuffled
}

fn random_between(random: &mut Random, range: Range<u64>) -> u64 {
    range.start + random.below(range.end - range.start)
}

impl Fault {
    /// How long it takes, with the starts after a kill.
    fn takes(&self) -> Duration {
        let restarts = self.targets.iter().filter(|_| self.kind == Kind::Kill).map(|target| target.restart());
        self.lasts + restarts.sum::<Duration>()
    }
}

impl Target {
    /// All of them, in the order of their start.
    #[must_use]
    pub fn all() -> Vec<Self> {
        let servers = [Self::Postgres, Self::Redis, Self::Nats];
        servers.into_iter().chain((0..PROCESSES.len()).map(Self::Process)).collect()
    }

    /// About how long it takes to start again.
    fn restart(self) -> Duration {
        match self {
            Self::Postgres => Duration::from_secs(2),
            Self::Redis | Self::Nats | Self::Process(_) => Duration::from_millis(200),
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Postgres => "postgres",
            Self::Redis => "redis",
            Self::Nats => "nats",
            Self::Process(place) => PROCESSES.get(*place).copied().unwrap_or("unknown"),
        })
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Kill => "kill",
            Self::Pause => "pause",
            Self::LoseAnswers => "lose answers of",
        })
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let targets: Vec<String> = self.targets.iter().map(Target::to_string).collect();
        let targets =
            if self.targets.len() == Target::all().len() { "everything".to_owned() } else { targets.join(", ") };
        let (at, lasts) = (self.at.as_secs_f64(), self.lasts.as_secs_f64());
        write!(formatter, "{at:8.3} s  {} {targets} for {lasts:.3} s", self.kind)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    #[test]
    fn a_seed_repeats_its_schedule_and_other_seeds_have_others() {
        let printed = |seed| plan(seed, 15 * MINUTE).iter().map(|fault| format!("{fault}\n")).collect::<String>();
        assert_eq!(printed(1), printed(1));
        let schedules: BTreeSet<String> = (0..50).map(printed).collect();
        assert_eq!(schedules.len(), 50);
    }

    #[test]
    fn a_longer_run_begins_as_a_shorter_one_does() {
        let (short, long) = (plan(7, 2 * MINUTE), plan(7, 15 * MINUTE));
        assert!(long.len() > 5 * short.len());
        assert_eq!(short, long[..short.len()]);
    }

    #[test]
    fn fifteen_minutes_hit_everything_in_every_way_one_after_the_other() {
        for seed in 0..20 {
            let planned = plan(seed, 15 * MINUTE);
            for pair in planned.windows(2) {
                assert!(pair[0].at + pair[0].takes() < pair[1].at, "{pair:?}");
            }
            let times = |kind, target| {
                planned.iter().filter(|fault| fault.kind == kind && fault.targets.contains(&target)).count()
            };
            for target in Target::all() {
                assert!(times(Kind::Kill, target) >= 15, "kills of {target} in seed {seed}");
                assert!(times(Kind::Pause, target) >= 5, "pauses of {target} in seed {seed}");
            }
            assert!(SERVICES.into_iter().all(|service| times(Kind::LoseAnswers, Target::Process(service)) >= 5));
            let all = planned.iter().filter(|fault| fault.targets == Target::all()).count();
            assert!(all >= 5, "{all} kills of everything in seed {seed}");
        }
    }

    #[test]
    fn clients_and_services_are_where_they_are_said_to_be() {
        assert!(PROCESSES[CLIENTS].iter().all(|name| name.starts_with("client-")));
        assert_eq!(PROCESSES[SERVICES], ["axum", "actix"]);
    }
}
