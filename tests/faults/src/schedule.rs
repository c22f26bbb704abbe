//! Which faults come when: all of it follows from a seed.

use std::fmt;
use std::time::Duration;

use crate::proxy::Weather;
use crate::random::Random;

/// Where records are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "a run must know what each of them needs")]
pub enum Store {
    /// Postgres alone.
    Postgres,
    /// Postgres, with Redis in front.
    Hybrid,
    /// Redis alone.
    Redis,
}

/// What is promised.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "a run must know what each of them promises")]
pub enum Contract {
    /// Effect and record in one transaction.
    Transactional,
    /// Nothing runs twice.
    AtMostOnce,
    /// A fault runs again.
    AtLeastOnce,
}

/// A store under a contract.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "it is nothing but its members")]
pub struct Cell {
    /// Where records are.
    pub store: Store,
    /// What is promised.
    pub contract: Contract,
}

/// What a fault is. The weather of a network is one between a service and a store, or between clients and a service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[expect(clippy::exhaustive_enums, reason = "a run must know how to cause each of them")]
pub enum Kind {
    /// A service is killed, and another one starts.
    KillService,
    /// A service stands still for longer than a lease.
    PauseService,
    /// A service is asked to stop, and the other framework takes its place.
    ReplaceService,
    /// A service is asked to stop, and the next version, which writes records in another format, takes its place. Once for
    /// each, so that half of the time is a rolling deploy.
    UpgradeService,
    /// The clock of a service is wrong.
    ShiftService,
    /// Postgres crashes.
    KillPostgres,
    /// Postgres is restarted by its administrator.
    RestartPostgres,
    /// Its sessions are ended.
    EndSessions,
    /// Its disk is full.
    FillPostgres,
    /// Its clock is put forward or back for a while, by more than a lease.
    ShiftPostgres,
    /// Redis crashes.
    KillRedis,
    /// Redis stands still.
    PauseRedis,
    /// Redis is restarted by its administrator.
    RestartRedis,
    /// Redis has no memory left.
    FillRedis,
    /// Redis loses everything. Only where it holds nothing but copies.
    FlushRedis,
    /// What Redis holds becomes garbage. Only where it holds nothing but copies.
    GarbleRedis,
    /// The network to Postgres.
    ToPostgres(Bad),
    /// The network to Redis.
    ToRedis(Bad),
    /// The network between clients and a service.
    ToService(Bad),
}

/// Bad weather.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[expect(clippy::exhaustive_enums, reason = "it is a list of faults")]
pub enum Bad {
    /// Everything is late.
    Delay,
    /// Connections are reset.
    Reset,
    /// Nothing arrives for a while.
    BlackHole,
    /// Answers are cut.
    Cut,
    /// Answers are lost.
    DropAnswer,
    /// Answers end early.
    HalfClose,
}

const BAD: [Bad; 6] = [Bad::Delay, Bad::Reset, Bad::BlackHole, Bad::Cut, Bad::DropAnswer, Bad::HalfClose];

/// A fault in the schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "it is nothing but its members")]
pub struct Planned {
    /// When it begins.
    pub at: Duration,
    /// What it is.
    pub fault: Fault,
}

/// A fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "it is nothing but its members")]
pub struct Fault {
    /// What kind it is.
    pub kind: Kind,
    /// Which of the services it befalls, where it befalls one.
    pub service: usize,
    /// How long it lasts, where it lasts.
    pub lasts: Duration,
    /// The weather, where it is weather.
    pub weather: Weather,
    /// By how much a clock is ahead, where it is a clock, in seconds.
    pub ahead: i64,
}

/// A pause that outlives a lease, in leases.
const PAUSE_IN_LEASES: f64 = 1.5;

/// How wrong the clocks of services are, which decide nothing.
const HOUR: i64 = 3600;

/// How wrong the clock of Postgres is, in leases: runs lose theirs, or keep them when they should not.
const JUMP_IN_LEASES: i64 = 2;

/// The schedule of one cell: faults one after the other, each kind about as often as each other one.
#[must_use]
pub fn plan(cell: Cell, seed: u64, lasts: Duration, lease: Duration, services: usize) -> Vec<Planned> {
    // Cells with the same seed differ.
    let mut random = Random::new(
        seed ^ cell.name().bytes().fold(0_u64, |mixed, byte| mixed.wrapping_mul(31).wrapping_add(u64::from(byte))),
    );
    let kinds = cell.kinds();
    let mut planned = Vec::new();
    let mut round = Vec::new();
    let mut at = Duration::from_millis(500);
    // The last of them is over well before the end.
    while at + 3 * lease < lasts {
        if round.is_empty() {
            round.clone_from(&kinds);
        }
        let kind = round.swap_remove(random.below(round.len() as u64) as usize);
        let time = Duration::from_millis(100 + random.below(1400));
        let lasts = if kind == Kind::PauseService { lease.mul_f64(PAUSE_IN_LEASES) } else { time };
        let service = random.below(services as u64) as usize;
        let weather = kind.weather(&mut random);
        let direction = if random.chance(500) { 1 } else { -1 };
        let ahead =
            direction * if kind == Kind::ShiftPostgres { JUMP_IN_LEASES * lease.as_secs() as i64 } else { HOUR };
        planned.push(Planned { at, fault: Fault { kind, service, lasts, weather, ahead } });
        at += lasts + Duration::from_millis(300 + random.below(1700));
    }
    upgrade(&mut planned, services);
    planned
}

/// From the middle on, one service after the other.
fn upgrade(planned: &mut [Planned], services: usize) {
    let half = planned.len() / 2;
    for service in 0..services {
        if let Some(Planned { fault, .. }) = planned.get_mut(half + service * half / services.max(1)) {
            *fault = Fault { kind: Kind::UpgradeService, service, weather: Weather::Clear, ..*fault };
        }
    }
}

impl Kind {
    fn weather(self, random: &mut Random) -> Weather {
        let (Self::ToPostgres(bad) | Self::ToRedis(bad) | Self::ToService(bad)) = self else { return Weather::Clear };
        match bad {
            Bad::Delay => Weather::Delay(Duration::from_millis(20 + random.below(200))),
            Bad::Reset => Weather::Reset,
            Bad::BlackHole => Weather::BlackHole,
            Bad::Cut => Weather::CutAfter(random.below(40) as usize),
            Bad::DropAnswer => Weather::DropAnswer,
            Bad::HalfClose => Weather::HalfClose,
        }
    }
}

impl Cell {
    /// Those that are tried.
    pub const ALL: [Self; 5] = [
        Self { store: Store::Postgres, contract: Contract::Transactional },
        Self { store: Store::Postgres, contract: Contract::AtMostOnce },
        Self { store: Store::Hybrid, contract: Contract::Transactional },
        Self { store: Store::Hybrid, contract: Contract::AtMostOnce },
        Self { store: Store::Redis, contract: Contract::AtLeastOnce },
    ];

    /// As in `postgres/transactional`.
    #[must_use]
    pub fn name(self) -> String {
        let store = match self.store {
            Store::Postgres => "postgres",
            Store::Hybrid => "hybrid",
            Store::Redis => "redis",
        };
        format!("{store}/{}", self.contract.name())
    }

    /// The kinds of fault that befall it again and again.
    #[must_use]
    pub fn kinds(self) -> Vec<Kind> {
        let mut kinds = vec![Kind::KillService, Kind::PauseService, Kind::ReplaceService, Kind::ShiftService];
        kinds.extend(BAD.map(Kind::ToService));
        if self.store != Store::Redis {
            kinds.extend([Kind::KillPostgres, Kind::RestartPostgres, Kind::EndSessions]);
            kinds.extend([Kind::FillPostgres, Kind::ShiftPostgres]);
            kinds.extend(BAD.map(Kind::ToPostgres));
        }
        if self.store != Store::Postgres {
            kinds.extend([Kind::KillRedis, Kind::PauseRedis, Kind::RestartRedis, Kind::FillRedis]);
            kinds.extend(BAD.map(Kind::ToRedis));
        }
        if self.store == Store::Hybrid {
            kinds.extend([Kind::FlushRedis, Kind::GarbleRedis]);
        }
        kinds
    }
}

impl Contract {
    /// Its name on the command line of the example.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Transactional => "transactional",
            Self::AtMostOnce => "at-most-once",
            Self::AtLeastOnce => "at-least-once",
        }
    }
}

/// As in `drop-answer to postgres`.
impl fmt::Display for Kind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (place, bad) = match self {
            Self::ToPostgres(bad) => ("postgres", bad),
            Self::ToRedis(bad) => ("redis", bad),
            Self::ToService(bad) => ("service", bad),
            other => return write!(formatter, "{other:?}"),
        };
        write!(formatter, "{bad:?} to {place}")
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const LEASE: Duration = Duration::from_secs(2);
    const LASTS: Duration = Duration::from_secs(360);

    #[test]
    fn the_same_seed_gives_the_same_schedule_and_another_one_another() {
        for cell in Cell::ALL {
            assert_eq!(plan(cell, 7, LASTS, LEASE, 2), plan(cell, 7, LASTS, LEASE, 2));
            assert_ne!(plan(cell, 7, LASTS, LEASE, 2), plan(cell, 8, LASTS, LEASE, 2));
        }
        let [one, other] = [Cell::ALL[0], Cell::ALL[1]].map(|cell| plan(cell, 7, LASTS, LEASE, 2));
        assert_ne!(one, other);
    }

    #[test]
    fn every_kind_comes_and_none_is_under_way_at_the_end() {
        for cell in Cell::ALL {
            let planned = plan(cell, 7, LASTS, LEASE, 2);
            let kinds: BTreeSet<_> = planned.iter().map(|planned| planned.fault.kind).collect();
            let expected: BTreeSet<_> = cell.kinds().into_iter().chain([Kind::UpgradeService]).collect();
            assert_eq!(kinds, expected, "{}", cell.name());
            assert!(planned.iter().all(|planned| planned.at + planned.fault.lasts < LASTS));
            assert!(planned.windows(2).all(|pair| pair[0].at + pair[0].fault.lasts < pair[1].at));
        }
    }

    #[test]
    fn every_service_is_upgraded_once_in_the_second_half() {
        for cell in Cell::ALL {
            let planned = plan(cell, 7, LASTS, LEASE, 2);
            let upgrades = planned.iter().filter(|planned| planned.fault.kind == Kind::UpgradeService);
            let upgrades: Vec<_> = upgrades.map(|planned| (planned.fault.service, planned.at)).collect();
            let [(0, first), (1, second)] = upgrades[..] else { panic!("{upgrades:?}") };
            assert!(first > LASTS / 3 && second > first + LASTS / 6, "{first:?} {second:?}");
        }
    }

    #[test]
    fn half_an_hour_has_more_than_three_hundred_faults_of_more_than_ten_kinds() {
        let faults: usize = Cell::ALL.map(|cell| plan(cell, 1, LASTS, LEASE, 2).len()).iter().sum();
        assert!(faults >= 300, "{faults}");
        assert!(Cell::ALL.iter().all(|cell| cell.kinds().len() >= 10));
    }
}
