//! Tests with Redis: contracts that it cannot keep, how it is found, and notices to waiters.

use std::time::{Duration, Instant};

use idem_servers::{Redis, redis_command};

use crate::support::{Answer, Backend, Contract, Framework, Request, Server, refusal};

/// The number of payments with a waiter in another process.
const PAYMENTS: usize = 40;

/// Far less than a waiter's last pauses without notices, and far more than a notice takes.
const PROMPTLY: Duration = Duration::from_millis(250);

#[test]
fn sentinels_and_a_cluster_serve_a_payment_and_its_replay() {
    for backend in [Backend::RedisSentinel, Backend::RedisCluster] {
        for &contract in backend.contracts() {
            let server = Server::start_on(backend, contract, &["--min-replicas", "1"]);
            for key in ["a", "b", "c", "d", "e"] {
                let (first, again) = (server.send(&Request::pay(key)), server.send(&Request::pay(key)));
                assert_eq!((first.status, first.is_replay()), (201, false), "{backend:?} {contract:?}");
                assert!(again.is_replay(), "{backend:?} {contract:?}");
                assert_eq!(again.essence(), first.essence());
            }
            assert_eq!(server.effects(), 5);
        }
    }
}

#[test]
fn what_redis_cannot_promise_is_refused_at_start() {
    let url = idem_servers::redis_url();
    let on_redis = |args: &[&str]| refusal(&[&["--store", &url, "--ledger", "sqlite://ledger.db"], args].concat());
    let log = on_redis(&["--contract", "transactional"]);
    assert!(log.contains("Redis has no transaction") && log.contains("--contract at-least-once"), "{log}");
    let log = on_redis(&["--contract", "transactional", "--dangerous-accept-store-loss"]);
    assert!(log.contains("Redis has no transaction"), "{log}");
    let log = on_redis(&["--contract", "at-most-once"]);
    assert!(log.contains("Redis can lose records") && log.contains("--dangerous-accept-store-loss"), "{log}");
    let log = on_redis(&["--contract", "at-least-once", "--min-replicas", "1"]);
    assert!(log.contains("0 of 1 replicas"), "{log}");
    let log = refusal(&["--store", &url, "--contract", "at-least-once"]);
    assert!(log.contains("say by --ledger where the payments are"), "{log}");
    let log = refusal(&["--store", &url, "--contract", "at-least-once", "--ledger", &url]);
    assert!(
        log.contains("--ledger takes sqlite://FILE, postgres://USER@HOST/DATABASE or mysql://USER@HOST/DATABASE"),
        "{log}"
    );
}

#[test]
fn a_redis_that_evicts_records_is_refused_at_start_unless_that_is_accepted() {
    let redis = Redis::start_with(&["--maxmemory-policy", "volatile-lru"]).unwrap();
    let args = ["--store", &redis.url(), "--ledger", "sqlite://ledger.db", "--contract", "at-least-once"];
    let log = refusal(&args);
    assert!(log.contains("volatile-lru") && log.contains("noeviction"), "{log}");
    let server = Server::start_on_redis(redis.url(), Contract::AtLeastOnce, &["--dangerous-allow-eviction"]);
    assert_eq!(server.send(&Request::pay("k")).status, 201);
    assert!(server.send(&Request::pay("k")).is_replay());
}

#[test]
fn the_log_says_what_a_record_survives() {
    let server = Server::start_on(Backend::Redis, Contract::AtMostOnce, &[]);
    let log = server.log();
    assert!(log.contains("the store passed its self-test"), "{log}");
    assert!(log.contains("maxmemory-policy=noeviction") && log.contains("an acknowledged record may be lost"), "{log}");
}

#[test]
fn a_duplicate_that_waits_in_another_process_is_answered_promptly() {
    waiters_are_told(Backend::Redis);
}

#[test]
fn a_duplicate_that_waits_in_another_process_on_sentinels_is_answered_promptly() {
    waiters_are_told(Backend::RedisSentinel);
}

#[test]
fn a_duplicate_that_waits_in_another_process_on_a_cluster_is_answered_promptly() {
    waiters_are_told(Backend::RedisCluster);
}

/// Sends each payment to two processes. One makes it, which takes three seconds, and in the other one its duplicate waits.
///
/// Without notices, a waiter polls at intervals between half a second and a second by then. Two thirds of the waiters would be
/// later than [`PROMPTLY`], so three quarters are never punctual by chance.
fn waiters_are_told(backend: Backend) {
    let server = Server::start_on(backend, Contract::AtLeastOnce, &[]);
    let replica = server.replica_on(Framework::Actix);
    let answered = |stream| (Answer::read(stream, "POST").unwrap(), Instant::now());
    let begin = |(at, address)| {
        let request = Request::pay(&format!("k{at}")).simulate("delay-before=3000");
        request.header("Prefer", "wait=20").begin(address)
    };
    let sent = (0..PAYMENTS).map(|at| [(at, server.address), (at, replica.address)].map(begin));
    let sent: Vec<_> = sent.collect();
    let mut late: Vec<Duration> = std::thread::scope(|scope| {
        let clients = sent.into_iter().map(|pair| pair.map(|stream| scope.spawn(move || answered(stream))));
        let clients: Vec<_> = clients.collect();
        let lateness = |pair: [(Answer, Instant); 2]| {
            let [(first, first_at), (other, other_at)] = pair;
            assert_eq!((first.status, first.essence()), (201, other.essence()));
            assert_ne!(first.is_replay(), other.is_replay());
            let (made_at, told_at) = if other.is_replay() { (first_at, other_at) } else { (other_at, first_at) };
            told_at.saturating_duration_since(made_at)
        };
        clients.into_iter().map(|pair| lateness(pair.map(|client| client.join().unwrap()))).collect()
    });
    late.sort();
    let (half, most) = (late[PAYMENTS / 2], late[PAYMENTS * 3 / 4]);
    println!("{backend:?}: half of the waiters are told within {half:?}, three in four within {most:?}");
    assert!(most < PROMPTLY, "{late:?}");
    assert_eq!(server.effects(), PAYMENTS as u64);
}

#[test]
fn a_record_that_cannot_be_read_is_an_error_and_nothing_runs() {
    let server = Server::start_on(Backend::Redis, Contract::AtMostOnce, &[]);
    assert_eq!(server.send(&Request::pay("k")).status, 201);
    let keys = server.keys();
    // The format of a later version, as if this one followed a rollback.
    redis_command(keys.port(), &["SET", &keys.all()[0], "\0\u{2}and whatever it is followed by", "KEEPTTL"]).unwrap();
    for _ in 0..2 {
        let answer = server.send(&Request::pay("k"));
        assert_eq!((answer.status, answer.problem().as_deref()), (500, Some("record-unreadable")));
    }
    assert_eq!(server.effects(), 1);
}
