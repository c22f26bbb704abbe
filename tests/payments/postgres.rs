//! Tests with Postgres: `kill -9` at every stage of a transaction, and several servers on one database.
//!
//! `IDEM_KILL_ROUNDS` sets how often a process is killed (default 10), and `IDEM_KILL_SEED` the order of the stages.

use std::hash::{BuildHasher, RandomState};
use std::time::{Duration, Instant};

use crate::support::{
    Answer, Backend, Contract, Framework, Gate, Gates, Orphan, Request, Schemas, Server, Setup, eventually,
};

const LEASE_MS: &str = "4000";
const LEASE: Duration = Duration::from_secs(4);

/// Time for the retries themselves, on a loaded machine.
const MARGIN: Duration = Duration::from_secs(5);

/// How many clients retry the same payment concurrently.
const RETRIES: usize = 3;

/// What the process has done when it dies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Locked,
    Paid,
    /// The statement that inserts the settled record is not finished.
    Inserted,
    /// The COMMIT has been sent, and is not finished.
    Committing,
    Committed,
}

impl Stage {
    const ALL: [Self; 5] = [Self::Locked, Self::Paid, Self::Inserted, Self::Committing, Self::Committed];

    fn simulation(self) -> &'static str {
        match self {
            Self::Locked => "delay-before=60000",
            Self::Paid => "delay-after=60000",
            Self::Inserted | Self::Committing => "",
            Self::Committed => "delay-answer=60000",
        }
    }

    fn gate(self) -> Option<Gate> {
        match self {
            Self::Inserted => Some(Gate::Insert),
            Self::Committing => Some(Gate::Commit),
            Self::Locked | Self::Paid | Self::Committed => None,
        }
    }
}

/// SplitMix64: the printed seed is enough to repeat a run.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        usize::try_from((mixed ^ (mixed >> 31)) % bound as u64).unwrap()
    }

    /// All stages in random order.
    fn stages(&mut self) -> Vec<Stage> {
        let mut rest = Stage::ALL.to_vec();
        (0..rest.len()).map(|_| rest.swap_remove(self.below(rest.len()))).collect()
    }
}

fn number_from_environment(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().unwrap_or_else(|_| panic!("{name} is a number, not {value}")))
}

/// Begins a payment, kills the server at the stage, and handles the orphaned statement in the database. Returns the time of
/// death.
fn kill_at(server: &mut Server, gates: &Gates, (stage, orphan): (Stage, Orphan), key: &str) -> Instant {
    let schemas = server.schemas();
    let settled_before = schemas.records();
    if let Some(gate) = stage.gate() {
        gates.shut(gate);
    }
    let stream = Request::pay(key).simulate(stage.simulation()).begin(server.address);
    eventually(&format!("{stage:?}"), || {
        let reached = match (stage, stage.gate()) {
            (_, Some(gate)) => gates.is_reached(gate),
            (Stage::Paid, _) => schemas.transactions_with_effect() == 1,
            (Stage::Committed, _) => schemas.records() == settled_before + 1,
            _ => schemas.transactions() == 1,
        };
        reached.then_some(())
    });
    server.kill();
    let died_at = Instant::now();
    assert_eq!(Answer::read(stream, "POST"), None, "nobody was answered at {stage:?}");
    if let Some(gate) = stage.gate() {
        gates.open(gate, orphan);
    }
    died_at
}

/// Retries until the answer is definite.
fn retried(server: &Server, key: &str) -> Answer {
    eventually("a definite answer", || {
        let answer = server.send(&Request::pay(key));
        if answer.status == 409 {
            assert_eq!(answer.problem().as_deref(), Some("in-progress"));
            assert!((1..=5).contains(&answer.retry_after().unwrap()), "not the rest of the lease: {answer:?}");
        }
        (answer.status != 409).then_some(answer)
    })
}

/// Retries with many clients at once. Returns the common answer, and whether the payment had been made before.
fn retried_by_many(server: &Server, key: &str) -> (Answer, bool) {
    let answers: Vec<Answer> = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..RETRIES).map(|_| scope.spawn(|| retried(server, key))).collect();
        clients.into_iter().map(|client| client.join().unwrap()).collect()
    });
    let first_runs = answers.iter().filter(|answer| !answer.is_replay()).count();
    assert!(first_runs <= 1, "{key} ran {first_runs} times: {answers:?}");
    for answer in &answers {
        assert_eq!(answer.status, 201, "{key}: {answer:?}");
        assert_eq!(answer.essence(), answers[0].essence(), "{key}");
    }
    (answers[0].clone(), first_runs == 0)
}

#[test]
fn a_payment_is_made_once_wherever_its_process_is_killed() {
    kill_often(Backend::Postgres.into());
}

#[test]
fn a_payment_on_actix_is_made_once_wherever_its_process_is_killed() {
    kill_often(Setup { framework: Framework::Actix, backend: Backend::Postgres });
}

#[test]
fn a_payment_from_a_pool_of_the_application_is_made_once_wherever_its_process_is_killed() {
    kill_often(Backend::OwnPool.into());
}

#[test]
fn a_payment_in_a_transaction_that_was_joined_is_made_once_wherever_its_process_is_killed() {
    kill_often(Backend::Joined.into());
}

#[test]
fn a_payment_behind_pgbouncer_is_made_once_wherever_its_process_is_killed() {
    kill_often(Backend::PgBouncer.into());
}

fn kill_often(setup: Setup) {
    let rounds = number_from_environment("IDEM_KILL_ROUNDS").unwrap_or(10);
    let seed = number_from_environment("IDEM_KILL_SEED").unwrap_or_else(|| RandomState::new().hash_one(0));
    println!("IDEM_KILL_SEED={seed} IDEM_KILL_ROUNDS={rounds}");
    let mut random = Random(seed);
    let mut server = Server::start_on(setup, Contract::Transactional, &["--lease-ms", LEASE_MS]);
    let schemas = server.schemas();
    let gates = Gates::install(&schemas, u32::try_from(random.below(1 << 31)).unwrap());
    let (mut stages, mut payments, mut longest) = (Vec::new(), Vec::new(), Duration::ZERO);
    for round in 1..=rounds {
        if stages.is_empty() {
            stages = random.stages();
        }
        let stage = stages.pop().unwrap();
        let orphan = Orphan::ALL[random.below(3)];
        let key = format!("k{round}");
        let died_at = kill_at(&mut server, &gates, (stage, orphan), &key);
        server.start_again();
        let (answer, made_before) = retried_by_many(&server, &key);
        let stuck = died_at.elapsed();
        assert!(stuck < LEASE + MARGIN, "{key} was stuck for {stuck:?} after {stage:?}");
        longest = longest.max(stuck);
        match (stage, orphan) {
            (Stage::Committed, _) => assert!(made_before, "{stage:?}"),
            // COMMIT may have been sent with the statement, or Postgres may have noticed the lost client before it continued.
            (Stage::Inserted | Stage::Committing, Orphan::GoesOn) => {}
            _ => assert!(!made_before, "{stage:?} {orphan:?}"),
        }
        payments.push(answer.json()["id"].as_str().unwrap().to_owned());
        assert_eq!((server.effects(), schemas.records()), (round, round), "after {stage:?} {orphan:?}");
    }
    payments.sort();
    let made =
        schemas.sql.strings(format!("SELECT payment FROM {}.ledger ORDER BY payment COLLATE \"C\"", schemas.payments));
    assert_eq!(made, payments, "each key has exactly one effect, and it is the one that was answered");
    let settled = schemas.sql.number(format!("SELECT count(*) FROM {}.idem_records WHERE state = 2", schemas.idem));
    assert_eq!(u64::try_from(settled).unwrap(), rounds);
    println!("{rounds} kills, {rounds} effects, {settled} settled records; no key was stuck longer than {longest:?}");
}

#[test]
fn replicas_that_start_at_once_on_a_fresh_database_share_the_tables_and_the_keys() {
    for contract in Contract::ALL {
        let mut server = Server::start_on(Backend::Postgres, contract, &["--wait-ms", "10000"]);
        server.kill();
        server.schemas().remove().unwrap();
        let replicas: Vec<_> = std::thread::scope(|scope| {
            let starting: Vec<_> = (0..4)
                .map(|at| {
                    scope.spawn({
                        let server = &server;
                        move || server.replica_on(Framework::ALL[at % 2])
                    })
                })
                .collect();
            starting.into_iter().map(|replica| replica.join().unwrap()).collect()
        });
        let request = Request::pay("k").simulate("delay-before=1000");
        let answers: Vec<Answer> = std::thread::scope(|scope| {
            let addresses = replicas.iter().flat_map(|replica| [replica.address; 5]);
            let request = &request;
            let clients: Vec<_> = addresses.map(|address| scope.spawn(move || request.send(address))).collect();
            clients.into_iter().map(|client| client.join().unwrap()).collect()
        });
        assert_eq!(answers.iter().filter(|answer| !answer.is_replay()).count(), 1, "{contract:?}: {answers:?}");
        for answer in &answers {
            assert_eq!((answer.status, answer.essence()), (201, answers[0].essence()), "{contract:?}");
        }
        server.start_again();
        assert_eq!((server.effects(), server.records()), (1, 1), "{contract:?}");
    }
}

#[test]
fn a_key_whose_transaction_runs_is_refused_for_a_second() {
    let server = Server::start_on(Backend::Postgres, Contract::Transactional, &[]);
    let running = Request::pay("k").simulate("hold-before").begin(server.address);
    server.await_running();
    assert_eq!(server.records(), 0, "nothing is written before the commit");
    let duplicate = server.send(&Request::pay("k"));
    assert_eq!((duplicate.status, duplicate.problem().as_deref()), (409, Some("in-progress")));
    assert_eq!(duplicate.retry_after(), Some(1));
    server.release();
    assert_eq!(Answer::read(running, "POST").unwrap().status, 201);
    assert_eq!((server.effects(), server.records()), (1, 1));
}

#[test]
fn the_payments_may_be_in_another_database_than_the_records() {
    let schemas = Schemas::new();
    let ledger = ["--ledger", &idem_servers::postgres_url(), "--schema", &schemas.payments];
    for contract in [Contract::AtMostOnce, Contract::AtLeastOnce] {
        let server = Server::start(contract, &ledger);
        let request = Request::pay(&format!("{contract:?}"));
        let (first, again) = (server.send(&request), server.send(&request));
        assert_eq!((first.status, again.is_replay()), (201, true), "{contract:?}");
        let path = first.header("location").unwrap();
        assert_eq!(server.send(&Request::get(path)).json(), first.json());
        let payments = server.send(&Request::get("/v1/payments")).json()["payments"].as_array().unwrap().clone();
        assert_eq!(payments.last(), Some(&first.json()), "the last one that was made");
        assert_eq!(server.send(&Request::get("/v1/ledger")).json()["effects"], payments.len());
    }
    assert_eq!(schemas.sql.number(format!("SELECT count(*) FROM {}.ledger", schemas.payments)), 2);
}
