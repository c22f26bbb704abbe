//! Redis in front of Postgres: it may be unavailable, be emptied, and hold anything.

use std::time::Duration;

use idem_servers::{Postgres, Redis, redis_command};

use crate::support::{Answer, Backend, Contract, Request, Server, eventually, refusal};

/// Reads a counter of the cache.
fn counted(server: &Server, what: &str, by: &str) -> u64 {
    server.health()["cache"][what][by].as_u64().unwrap()
}

/// Waits until Redis answers a repeat of `key`.
fn await_copy(server: &Server, key: &str) -> Answer {
    eventually("a replay from Redis", || {
        let before = counted(server, "replays", "cache");
        let replay = server.send(&Request::pay(key));
        assert!(replay.is_replay(), "{replay:?}");
        (counted(server, "replays", "cache") > before).then_some(replay)
    })
}

#[test]
fn repeats_and_duplicates_do_not_reach_postgres() {
    for contract in Contract::ALL {
        // A busy machine may outlast the short lock of a transaction, or let Redis answer too late. Then the test retries.
        eventually("Redis alone is asked", || is_spared(contract).then_some(()));
    }
}

/// Whether neither duplicates nor repeats reach Postgres.
fn is_spared(contract: Contract) -> bool {
    let server = Server::start_on(Backend::Hybrid, contract, &[]);
    let turned_away = || (counted(&server, "in_progress", "cache"), counted(&server, "in_progress", "store"));
    let replayed = || (counted(&server, "replays", "cache"), counted(&server, "replays", "store"));
    let running = Request::pay("k").simulate("delay-before=800").begin(server.address);
    server.await_running();
    let (by_redis, by_postgres) = turned_away();
    for _ in 0..5 {
        server.send(&Request::pay("k"));
    }
    let duplicates_are_spared = turned_away() == (by_redis + 5, by_postgres);
    let first = Answer::read(running, "POST").unwrap();
    assert_eq!(await_copy(&server, "k").essence(), first.essence(), "{contract:?}");
    let (by_redis, by_postgres) = replayed();
    for _ in 0..5 {
        assert_eq!(server.send(&Request::pay("k")).essence(), first.essence(), "{contract:?}");
    }
    assert_eq!(server.effects(), 1, "{contract:?}");
    duplicates_are_spared && replayed() == (by_redis + 5, by_postgres)
}

#[test]
fn without_redis_everything_is_as_it_was() {
    let mut redis = Redis::start().unwrap();
    let url = redis.url();
    for contract in Contract::ALL {
        let server = Server::start_behind(&url, contract, &[]);
        let first = server.send(&Request::pay("k"));
        assert_eq!(first.status, 201);
        redis.kill().unwrap();
        for _ in 0..8 {
            assert_eq!(server.send(&Request::pay("k")).essence(), first.essence(), "{contract:?}");
        }
        assert_eq!(server.send(&Request::pay("new")).status, 201, "{contract:?}");
        assert_eq!(server.effects(), 2);
        redis.start_again().unwrap();
        await_copy(&server, "k");
    }
}

#[test]
fn a_service_starts_without_redis_and_finds_it() {
    let mut redis = Redis::start().unwrap();
    redis.kill().unwrap();
    let server = Server::start_behind(&redis.url(), Contract::Transactional, &[]);
    assert!(server.log().contains("there is no cache for now"), "{}", server.log());
    assert_eq!(server.send(&Request::pay("k")).status, 201);
    redis.start_again().unwrap();
    await_copy(&server, "k");
}

#[test]
fn garbage_under_every_key_changes_nothing() {
    let redis = Redis::start().unwrap();
    let server = Server::start_behind(&redis.url(), Contract::Transactional, &[]);
    let first = server.send(&Request::pay("k"));
    await_copy(&server, "k");
    let keys = redis_command(redis.port(), &["KEYS", "*"]).unwrap();
    let keys: Vec<_> = keys.items().iter().map(|key| key.text().unwrap().to_owned()).collect();
    assert_eq!(keys.len(), 1, "{keys:?}");
    // An entry of another version, one without a valid form, and one of another type.
    for write in [
        ["SET", &keys[0], "4611686018427387904:idem\u{2}later"],
        ["SET", &keys[0], "\u{0}\u{1}"],
        ["LPUSH", "to be renamed", "x"],
    ] {
        redis_command(redis.port(), &write).unwrap();
        if write[0] == "LPUSH" {
            redis_command(redis.port(), &["RENAME", write[1], &keys[0]]).unwrap();
        }
        assert_eq!(server.send(&Request::pay("k")).essence(), first.essence());
        await_copy(&server, "k");
    }
    // The rank of a tombstone: no copy may replace it, so repeats are answered by the store.
    redis_command(redis.port(), &["SET", &keys[0], "18446744073709551615:idem\u{2}later"]).unwrap();
    assert_eq!(server.send(&Request::pay("k")).essence(), first.essence());
    assert_eq!(server.effects(), 1);
}

#[test]
fn while_postgres_is_down_repeats_are_replayed_and_nothing_runs() {
    let mut postgres = Postgres::start().unwrap();
    let redis = Redis::start().unwrap();
    let args = ["--store", &postgres.url(), "--cache", &redis.url(), "--lease-ms", "4000"];
    let server = Server::start(Contract::Transactional, &args);
    let first = server.send(&Request::pay("known"));
    assert_eq!(first.status, 201);
    await_copy(&server, "known");
    postgres.kill().unwrap();
    assert_eq!(server.send(&Request::pay("known")).essence(), first.essence());
    let refused = server.send(&Request::pay("new"));
    assert_eq!((refused.status, refused.problem().as_deref()), (503, Some("store-unavailable")));
    assert!(refused.retry_after().is_some());
    postgres.start_again().unwrap();
    // The transaction of a refused request may still hold its lock; then a repeat gets 409.
    let answer = eventually("the store's return", || {
        let answer = server.send(&Request::pay("new"));
        let later = matches!(answer.problem().as_deref(), Some("store-unavailable" | "in-progress"));
        (!later).then_some(answer)
    });
    assert_eq!((answer.status, answer.is_replay()), (201, false));
    assert_eq!(server.effects(), 2);
}

#[test]
fn a_cache_in_front_of_redis_is_refused() {
    let url = idem_servers::redis_url();
    let store = ["--store", &url, "--ledger", "sqlite://ledger.db", "--contract", "at-least-once"];
    let log = refusal(&[&store[..], &["--cache", &url]].concat());
    assert!(log.contains("--cache needs a --store in SQLite, Postgres or MariaDB"), "{log}");
}

#[test]
fn a_lock_that_a_dead_process_left_behind_is_over_with_its_lease() {
    let mut server = Server::start_on(Backend::Hybrid, Contract::AtLeastOnce, &["--lease-ms", "2000"]);
    let _running = Request::pay("k").simulate("delay-before=60000").begin(server.address);
    server.await_running();
    server.kill();
    let died_at = std::time::Instant::now();
    server.start_again();
    let answer = eventually("the retry", || {
        let answer = server.send(&Request::pay("k"));
        (answer.status != 409).then_some(answer)
    });
    assert_eq!((answer.status, answer.is_replay()), (201, false));
    assert!(died_at.elapsed() < Duration::from_secs(2 + 10), "{:?}", died_at.elapsed());
}
