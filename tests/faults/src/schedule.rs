//! Plans the faults of a run from a seed.

use std::collections::BTreeSet;
use std::fmt;
use std::time::Duration;

use crate::random::Random;
use idem_proxy::Weather;

/// Where the records are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "a run must know what each of them needs")]
pub enum Store {
    /// Postgres alone.
    Postgres,
    /// Postgres, with transactions from a connection pool of the application.
    OwnPool,
    /// Postgres. Runs join transactions that the application opens.
    Joined,
    /// Postgres. Handlers settle their runs by SQL, in the transactions of their payments.
    SettledByHandler,
    /// Postgres through PgBouncer.
    Pooled,
    /// Postgres with Redis as a cache.
    Hybrid,
    /// Redis alone.
    Redis,
    /// MariaDB.
    MariaDb,
}

/// The contract.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "a run must know what each of them promises")]
pub enum Contract {
    /// Effect and record commit in one transaction.
    Transactional,
    /// Nothing runs twice.
    AtMostOnce,
    /// An operation runs again after a fault.
    AtLeastOnce,
}

/// A store under a contract.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "it is nothing but its members")]
pub struct Cell {
    /// The store.
    pub store: Store,
    /// The contract.
    pub contract: Contract,
}

/// The kinds of faults. Network weather is between a service and a store, or between clients and a service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[expect(clippy::exhaustive_enums, reason = "a run must know how to cause each of them")]
pub enum Kind {
    /// A service is killed, and another one starts.
    KillService,
    /// A service stands still for longer than a lease.
    PauseService,
    /// A service is asked to stop, and the other framework takes its place.
    ReplaceService,
    /// A service is asked to stop, and the next version takes its place, which writes records in another format. This happens
    /// once for each service, so that half of the run is a rolling deploy.
    UpgradeService,
    /// The clock of a service is wrong.
    ShiftService,
    /// Postgres crashes.
    KillPostgres,
    /// Postgres is restarted by its administrator.
    RestartPostgres,
    /// The sessions of Postgres are terminated.
    EndSessions,
    /// The disk of Postgres is full.
    FillPostgres,
    /// The clock of Postgres is put forward or back for a while, by more than a lease.
    ShiftPostgres,
    /// Postgres stands still, or traffic to it is held up; afterwards it executes what it was sent.
    StallPostgres(Stall),
    /// The role of the services may not log in or has another password, and its sessions are terminated.
    RotatePostgres,
    /// The role of the services may not use the tables, the functions or the schema of the store.
    RevokePostgres,
    /// A role that may only log in takes every advisory lock that it sees, again and again.
    SquatLocks,
    /// PgBouncer disconnects its clients and refuses new ones.
    FillPooler,
    /// PgBouncer crashes.
    KillPooler,
    /// Redis crashes.
    KillRedis,
    /// Redis stands still.
    PauseRedis,
    /// Redis is restarted by its administrator.
    RestartRedis,
    /// Redis has no memory left.
    FillRedis,
    /// Redis stands still, or traffic to it is held up; afterwards it executes what it was sent.
    StallRedis(Stall),
    /// The services' user of Redis has another password, and its connections are closed.
    RotateRedis,
    /// The services' user of Redis may not call scripts, write, or touch keys.
    RevokeRedis,
    /// Redis loses all data; only where it is a cache.
    FlushRedis,
    /// The values in Redis become garbage; only where it is a cache.
    GarbleRedis,
    /// MariaDB crashes.
    KillMariaDb,
    /// The sessions of MariaDB are ended.
    EndMariaDbSessions,
    /// MariaDB stands still, or traffic to it is held up; afterwards it executes what it was sent.
    StallMariaDb(Stall),
    /// Bad network weather between a service and MariaDB.
    ToMariaDb(Bad),
    /// Bad network weather between a service and Postgres.
    ToPostgres(Bad),
    /// Bad network weather between a service and Redis.
    ToRedis(Bad),
    /// Bad network weather between clients and a service.
    ToService(Bad),
}

/// How long a store stands still.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[expect(clippy::exhaustive_enums, reason = "it is a list of faults")]
pub enum Stall {
    /// Longer than a lease, and longer than a caller waits for a settlement.
    Short,
    /// So long that every client has given up.
    Long,
}

impl Stall {
    fn lasts(self) -> Duration {
        Duration::from_secs(if self == Self::Short { 10 } else { 60 })
    }
}

/// Kinds of bad network weather.
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
    /// The fault.
    pub fault: Fault,
}

/// A fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "it is nothing but its members")]
pub struct Fault {
    /// Its kind.
    pub kind: Kind,
    /// The service that it hits, if it hits one.
    pub service: usize,
    /// Its duration, if it has one.
    pub lasts: Duration,
    /// The weather, if it is a network fault.
    pub weather: Weather,
    /// How far a clock is ahead, in seconds, if it shifts a clock.
    pub ahead: i64,
    /// Selects one of several ways to cause the kind.
    pub way: usize,
}

/// The pause between two faults: at least `SHORTEST_PAUSE`, plus a random time up to `PAUSE`, or up to `SHORT_PAUSE` if time is
/// short.
const SHORTEST_PAUSE: Duration = Duration::from_millis(300);
const PAUSE: Duration = Duration::from_millis(1700);
const SHORT_PAUSE: Duration = Duration::from_millis(500);

const ONE_SECOND: Duration = Duration::from_secs(1);

/// How long a paused service stands still, in leases: longer than one.
const PAUSE_IN_LEASES: f64 = 1.5;

/// How far the clocks of services are off, in seconds. These clocks decide nothing.
const HOUR: i64 = 3600;

/// How far the clock of Postgres is off, in leases. Runs lose their leases too early, or keep them too long.
const JUMP_IN_LEASES: i64 = 2;

/// A cell with its duration and its faults.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "it is nothing but its members")]
pub struct Share {
    /// The cell.
    pub cell: Cell,
    /// Its duration.
    pub lasts: Duration,
    /// Its faults.
    pub planned: Vec<Planned>,
}

/// `LEAST`: what a cell needs besides a long stall. `AMPLE`: from this share on, each cell has its own long stalls.
const LEAST: Duration = Duration::from_secs(20);
const AMPLE: Duration = Duration::from_secs(200);

/// Plans all cells, which take `total` together.
///
/// Within a cell, each kind comes equally often. If time is short, each kind comes in one of the cells before any kind comes in
/// a second one.
///
/// Each cell has its long stalls if there is ample time. If time is short, each long stall comes in one cell only; if there is
/// too little time, none comes.
#[must_use]
pub fn plan(cells: &[Cell], seed: u64, total: Duration, lease: Duration, services: usize) -> Vec<Share> {
    let mut random = Random::new(seed);
    let count = cells.len().max(1) as u32;
    let stalls = long_stalls(cells, total / count, &mut random);
    let stalled = |stalls: &[(Cell, Kind)]| stalls.iter().map(|(_, kind)| kind.takes(lease)).sum::<Duration>();
    let stalls = if stalled(&stalls) + LEAST * count <= total { stalls } else { Vec::new() };
    let share = total.saturating_sub(stalled(&stalls)) / count;
    let mut missing: BTreeSet<Kind> = cells.iter().flat_map(|cell| cell.kinds()).collect();
    let mut shares = Vec::new();
    for (number, &cell) in cells.iter().enumerate() {
        let later: BTreeSet<Kind> = cells[number + 1..].iter().flat_map(|cell| cell.kinds()).collect();
        let urgency = |kind: &Kind| match missing.contains(kind) {
            // No later cell has this kind, or the kind takes long.
            true if !later.contains(kind) || !kind.takes(lease).is_zero() => 2,
            true => 1,
            false => 0,
        };
        let long: Vec<Kind> = stalls.iter().filter(|(of, _)| *of == cell).map(|(_, kind)| *kind).collect();
        let lasts = share + long.iter().map(|kind| kind.takes(lease)).sum::<Duration>();
        // Cells with the same seed differ.
        let mixed = |mixed: u64, byte: u8| mixed.wrapping_mul(31).wrapping_add(u64::from(byte));
        let random = Random::new(seed ^ cell.name().bytes().fold(0, mixed));
        let pause = if share < AMPLE { SHORT_PAUSE } else { PAUSE };
        let planned = Planner { random, cell, lasts, pause, lease, services }.plan(&long, urgency);
        for planned in &planned {
            missing.remove(&planned.fault.kind);
        }
        shares.push(Share { cell, lasts, planned });
    }
    shares
}

/// Chooses the cells that have long stalls.
fn long_stalls(cells: &[Cell], share: Duration, random: &mut Random) -> Vec<(Cell, Kind)> {
    let mut stalls = Vec::new();
    for kind in [Kind::StallPostgres(Stall::Long), Kind::StallRedis(Stall::Long), Kind::StallMariaDb(Stall::Long)] {
        let of: Vec<Cell> = cells.iter().filter(|cell| cell.long_stalls().contains(&kind)).copied().collect();
        if of.is_empty() {
            continue;
        }
        if share >= AMPLE {
            stalls.extend(of.into_iter().map(|cell| (cell, kind)));
        } else if let Some(cell) = of.get(random.below(of.len() as u64) as usize) {
            stalls.push((*cell, kind));
        }
    }
    stalls
}

/// Plans one cell: faults one after the other.
struct Planner {
    random: Random,
    cell: Cell,
    lasts: Duration,
    /// The longest pause between two faults.
    pause: Duration,
    lease: Duration,
    services: usize,
}

impl Planner {
    fn plan(mut self, long: &[Kind], urgency: impl Fn(&Kind) -> u8) -> Vec<Planned> {
        let mut planned = Vec::new();
        let mut at = Duration::from_millis(500);
        // From the middle of the run on, one service after the other gets its next version.
        let (lasts, services) = (self.lasts, self.services);
        let due = |service: usize| lasts * (services + service) as u32 / (2 * services) as u32;
        let mut upgrades = (0..services).map(|service| (due(service), service)).peekable();
        let mut round = self.shuffled(self.cell.kinds());
        // Kinds are taken from the end.
        round.sort_by_key(urgency);
        for kind in long {
            let place = round.len() - (self.random.below(3) as usize).min(round.len());
            round.insert(place, *kind);
        }
        loop {
            let mut has_planned = false;
            while let Some(kind) = round.pop() {
                if let Some((_, service)) = upgrades.next_if(|(from, _)| *from <= at) {
                    let fault = Fault { service, ..self.fault(Kind::UpgradeService) };
                    at = self.place(&mut planned, at, fault);
                }
                let fault = self.fault(kind);
                // The last fault ends well before the run does.
                if at + fault.lasts + 2 * self.lease < self.lasts {
                    at = self.place(&mut planned, at, fault);
                    has_planned = true;
                }
            }
            if !has_planned {
                return planned;
            }
            round = self.shuffled(self.cell.kinds());
        }
    }

    /// Adds a fault and returns when the next one may begin.
    fn place(&mut self, planned: &mut Vec<Planned>, at: Duration, fault: Fault) -> Duration {
        planned.push(Planned { at, fault });
        at + fault.lasts
            + fault.kind.calm(self.lease)
            + SHORTEST_PAUSE
            + self.pause.mul_f64(self.random.below(1000) as f64 / 1000.0)
    }

    fn shuffled(&mut self, mut kinds: Vec<Kind>) -> Vec<Kind> {
        let mut shuffled = Vec::new();
        while !kinds.is_empty() {
            shuffled.push(kinds.swap_remove(self.random.below(kinds.len() as u64) as usize));
        }
        shuffled
    }

    fn fault(&mut self, kind: Kind) -> Fault {
        let random = &mut self.random;
        let time = Duration::from_millis(100 + random.below(1400));
        let lasts = match kind {
            Kind::PauseService => self.lease.mul_f64(PAUSE_IN_LEASES),
            Kind::StallPostgres(stall) | Kind::StallRedis(stall) | Kind::StallMariaDb(stall) => stall.lasts(),
            Kind::FillPooler | Kind::SquatLocks => 2 * ONE_SECOND + time.mul_f64(0.7),
            Kind::RotatePostgres | Kind::RevokePostgres | Kind::RotateRedis | Kind::RevokeRedis => ONE_SECOND + time,
            _ => time,
        };
        let service = random.below(self.services as u64) as usize;
        let weather = kind.weather(random);
        let direction = if random.chance(500) { 1 } else { -1 };
        let jump = JUMP_IN_LEASES * self.lease.as_secs() as i64;
        let ahead = direction * if kind == Kind::ShiftPostgres { jump } else { HOUR };
        Fault { kind, service, lasts, weather, ahead, way: random.number() as usize }
    }
}

impl Kind {
    /// How long no fault follows it. What a stall leaves behind shows when leases expire.
    #[must_use]
    pub fn calm(self, lease: Duration) -> Duration {
        match self {
            Self::StallPostgres(_) | Self::StallRedis(_) | Self::StallMariaDb(_) => 2 * lease,
            _ => Duration::ZERO,
        }
    }

    /// How long a stall takes, with the calm after it and the longest pause before the next fault. Zero for other kinds.
    fn takes(self, lease: Duration) -> Duration {
        let (Self::StallPostgres(stall) | Self::StallRedis(stall) | Self::StallMariaDb(stall)) = self else {
            return Duration::ZERO;
        };
        stall.lasts() + self.calm(lease) + 2 * ONE_SECOND
    }

    /// Whether it makes clients lose answers.
    #[must_use]
    pub fn loses_answers(self) -> bool {
        match self {
            Self::KillService | Self::PauseService => true,
            Self::ToService(bad) => bad != Bad::Delay,
            _ => false,
        }
    }

    fn weather(self, random: &mut Random) -> Weather {
        let (Self::ToPostgres(bad) | Self::ToRedis(bad) | Self::ToMariaDb(bad) | Self::ToService(bad)) = self else {
            return Weather::Clear;
        };
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
    /// The cells that are tested if none is named.
    pub const ALL: [Self; 9] = [
        Self { store: Store::Postgres, contract: Contract::Transactional },
        Self { store: Store::OwnPool, contract: Contract::Transactional },
        Self { store: Store::Joined, contract: Contract::Transactional },
        Self { store: Store::Postgres, contract: Contract::AtMostOnce },
        Self { store: Store::SettledByHandler, contract: Contract::AtLeastOnce },
        Self { store: Store::Pooled, contract: Contract::AtLeastOnce },
        Self { store: Store::Hybrid, contract: Contract::Transactional },
        Self { store: Store::Hybrid, contract: Contract::AtMostOnce },
        Self { store: Store::Redis, contract: Contract::AtLeastOnce },
    ];

    /// The cells that are tested if they are named, because not every machine has their server.
    pub const NAMED: [Self; 3] = [
        Self { store: Store::MariaDb, contract: Contract::Transactional },
        Self { store: Store::MariaDb, contract: Contract::AtMostOnce },
        Self { store: Store::MariaDb, contract: Contract::AtLeastOnce },
    ];

    /// Its name, as in `postgres/transactional`.
    #[must_use]
    pub fn name(self) -> String {
        let store = match self.store {
            Store::Postgres => "postgres",
            Store::OwnPool => "own-pool",
            Store::Joined => "joined",
            Store::SettledByHandler => "settled-by-handler",
            Store::Pooled => "pooled",
            Store::Hybrid => "hybrid",
            Store::Redis => "redis",
            Store::MariaDb => "mariadb",
        };
        format!("{store}/{}", self.contract.name())
    }

    /// Whether payments commit in a database together with their records.
    #[must_use]
    pub fn commits_both(self) -> bool {
        self.contract == Contract::Transactional || self.store == Store::SettledByHandler
    }

    /// Whether records are in Postgres.
    #[must_use]
    pub fn has_postgres(self) -> bool {
        !matches!(self.store, Store::Redis | Store::MariaDb)
    }

    /// Whether Redis holds records or copies of them.
    #[must_use]
    pub fn has_redis(self) -> bool {
        matches!(self.store, Store::Hybrid | Store::Redis)
    }

    /// The kinds that come once, if there is time.
    #[must_use]
    pub fn long_stalls(self) -> Vec<Kind> {
        let postgres = self.has_postgres().then_some(Kind::StallPostgres(Stall::Long));
        let mariadb = (self.store == Store::MariaDb).then_some(Kind::StallMariaDb(Stall::Long));
        let redis = self.has_redis().then_some(Kind::StallRedis(Stall::Long));
        postgres.into_iter().chain(mariadb).chain(redis).collect()
    }

    /// The kinds that come again and again.
    #[must_use]
    pub fn kinds(self) -> Vec<Kind> {
        let mut kinds = vec![Kind::KillService, Kind::PauseService, Kind::ReplaceService, Kind::ShiftService];
        kinds.extend(BAD.map(Kind::ToService));
        if self.has_postgres() {
            kinds.extend([Kind::KillPostgres, Kind::RestartPostgres, Kind::EndSessions]);
            kinds.extend([Kind::FillPostgres, Kind::ShiftPostgres, Kind::StallPostgres(Stall::Short)]);
            kinds.extend([Kind::RotatePostgres, Kind::RevokePostgres, Kind::SquatLocks]);
            kinds.extend(BAD.map(Kind::ToPostgres));
        }
        if self.store == Store::MariaDb {
            kinds.extend([Kind::KillMariaDb, Kind::EndMariaDbSessions, Kind::StallMariaDb(Stall::Short)]);
            kinds.extend(BAD.map(Kind::ToMariaDb));
        }
        if self.store == Store::Pooled {
            kinds.extend([Kind::FillPooler, Kind::KillPooler]);
        }
        if self.has_redis() {
            kinds.extend([Kind::KillRedis, Kind::PauseRedis, Kind::RestartRedis, Kind::FillRedis]);
            kinds.extend([Kind::StallRedis(Stall::Short), Kind::RotateRedis, Kind::RevokeRedis]);
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

/// Displays it as in `drop-answer to postgres`.
impl fmt::Display for Kind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (place, bad) = match self {
            Self::ToPostgres(bad) => ("postgres", bad),
            Self::ToRedis(bad) => ("redis", bad),
            Self::ToMariaDb(bad) => ("mariadb", bad),
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
    const HALF_AN_HOUR: Duration = Duration::from_secs(1800);
    const SIX_MINUTES: Duration = Duration::from_secs(360);

    fn kinds_of(share: &Share) -> BTreeSet<Kind> {
        share.planned.iter().map(|planned| planned.fault.kind).collect()
    }

    #[test]
    fn the_same_seed_gives_the_same_schedule_and_another_one_another() {
        let shares = |seed| plan(&Cell::ALL, seed, HALF_AN_HOUR, LEASE, 2);
        assert_eq!(shares(7), shares(7));
        for (one, other) in shares(7).iter().zip(shares(8)) {
            assert_ne!(one.planned, other.planned);
        }
        assert_ne!(shares(7)[0].planned, shares(7)[1].planned);
    }

    #[test]
    fn every_kind_comes_in_each_cell_and_none_is_under_way_at_the_end() {
        for share in plan(&Cell::ALL, 7, HALF_AN_HOUR, LEASE, 2) {
            let (cell, lasts, planned) = (share.cell, share.lasts, &share.planned);
            let mut expected: BTreeSet<_> = cell.kinds().into_iter().chain([Kind::UpgradeService]).collect();
            expected.extend(cell.long_stalls());
            assert_eq!(kinds_of(&share), expected, "{}", cell.name());
            assert!(planned.iter().all(|planned| planned.at + planned.fault.lasts < lasts));
            assert!(planned.windows(2).all(|pair| pair[0].at + pair[0].fault.lasts < pair[1].at));
        }
    }

    #[test]
    fn every_kind_comes_in_named_cells() {
        for share in plan(&Cell::NAMED, 7, Duration::from_secs(900), LEASE, 2) {
            let mut expected: BTreeSet<_> = share.cell.kinds().into_iter().chain([Kind::UpgradeService]).collect();
            expected.extend(share.cell.long_stalls());
            assert_eq!(kinds_of(&share), expected, "{}", share.cell.name());
        }
    }

    #[test]
    fn every_kind_comes_in_six_minutes_in_one_cell_or_another() {
        for seed in 1..50 {
            let shares = plan(&Cell::ALL, seed, SIX_MINUTES, LEASE, 2);
            assert!(shares.iter().map(|share| share.lasts).sum::<Duration>() <= SIX_MINUTES);
            let kinds: BTreeSet<_> = shares.iter().flat_map(kinds_of).collect();
            let long = [Kind::StallPostgres(Stall::Long), Kind::StallRedis(Stall::Long), Kind::UpgradeService];
            let expected: BTreeSet<_> = Cell::ALL.iter().flat_map(|cell| cell.kinds()).chain(long).collect();
            let left_out: Vec<_> = expected.difference(&kinds).collect();
            assert!(left_out.is_empty(), "seed {seed}: {left_out:?}");
        }
    }

    #[test]
    fn a_run_that_is_too_short_for_a_long_stall_has_none() {
        let shares = plan(&Cell::ALL, 7, Duration::from_secs(120), LEASE, 2);
        let long = [Kind::StallPostgres(Stall::Long), Kind::StallRedis(Stall::Long)];
        assert!(shares.iter().all(|share| long.iter().all(|kind| !kinds_of(share).contains(kind))));
    }

    #[test]
    fn every_service_is_upgraded_once_in_the_second_half() {
        for share in plan(&Cell::ALL, 7, HALF_AN_HOUR, LEASE, 2) {
            let upgrades = share.planned.iter().filter(|planned| planned.fault.kind == Kind::UpgradeService);
            let upgrades: Vec<_> = upgrades.map(|planned| (planned.fault.service, planned.at)).collect();
            let [(0, first), (1, second)] = upgrades[..] else { panic!("{upgrades:?}") };
            assert!(first > share.lasts / 3 && second > first + share.lasts / 6, "{first:?} {second:?}");
        }
    }

    #[test]
    fn half_an_hour_has_more_than_three_hundred_faults_of_more_than_ten_kinds() {
        let shares = plan(&Cell::ALL, 1, HALF_AN_HOUR, LEASE, 2);
        let faults: usize = shares.iter().map(|share| share.planned.len()).sum();
        assert!(faults >= 300, "{faults}");
        assert!(Cell::ALL.iter().all(|cell| cell.kinds().len() >= 10));
    }
}
