//! Decisions of the HTTP policy that the other files do not test.

use std::time::Duration;

use sqlx::{ConnectOptions, Connection};

use crate::support::{
    Answer, Backend, Contract, Framework, OPERATOR, Request, Server, Setup, eventually, on_every_backend,
    on_every_framework, refusal,
};

on_every_backend! {
    the_first_answer_is_replayed_also_after_a_restart,
    a_client_may_decline_to_wait,
    the_body_limit_is_exact_and_nothing_runs_beyond_it,
    retention_ends_and_the_key_is_free_again,
    the_page_of_operators_names_the_store,
}

on_every_framework! {
    a_store_that_cannot_answer_is_503_and_nothing_runs,
    strangers_learn_that_the_service_answers_and_nothing_else,
}

#[test]
fn what_one_framework_has_answered_is_replayed_by_the_other() {
    for backend in [Backend::Sqlite, Backend::Postgres, Backend::Redis] {
        for [first, second] in [Framework::ALL, [Framework::Actix, Framework::Axum]] {
            let server = Server::start_on(Setup { framework: first, backend }, backend.contracts()[0], &[]);
            let other = server.replica_on(second);
            let request = Request::pay("k").simulate("raw-header");
            let answer = server.send(&request);
            assert_eq!((answer.status, answer.is_replay()), (201, false), "{first:?}");
            let again = request.send(other.address);
            assert!(again.is_replay(), "{second:?} after {first:?} on {backend:?}");
            assert_eq!(again.essence(), answer.essence());
            assert_eq!(Request::pay("k").body("{}").send(other.address).problem().as_deref(), Some("mismatch"));
        }
    }
}

fn the_first_answer_is_replayed_also_after_a_restart(setup: Setup) {
    for &contract in setup.contracts() {
        let mut server = Server::start_on(setup, contract, &[]);
        let first = server.send(&Request::pay("k"));
        assert_eq!(first.status, 201);
        assert!(!first.is_replay());
        let id = first.json()["id"].as_str().unwrap().to_owned();
        assert_eq!(first.header("location"), Some(format!("/v1/payments/{id}").as_str()));
        server.terminate();
        assert_eq!(server.wait().code(), Some(0));
        server.start_again();
        let again = server.send(&Request::pay("k"));
        assert!(again.is_replay());
        assert_eq!(again.essence(), first.essence());
        assert_eq!(server.effects(), 1);
        assert_eq!(server.send(&Request::get(&format!("/v1/payments/{id}"))).status, 200);
    }
}

fn a_client_may_decline_to_wait(setup: Setup) {
    let server = Server::start_on(setup, Contract::AtMostOnce, &["--wait-ms", "20000"]);
    let running = Request::pay("k").simulate("hold-before").begin(server.address);
    server.await_running();
    assert_eq!(server.send(&Request::pay("k").header("Prefer", "wait=0")).status, 409);
    server.release();
    assert_eq!(Answer::read(running, "POST").unwrap().status, 201);
}

fn the_body_limit_is_exact_and_nothing_runs_beyond_it(setup: Setup) {
    let server = Server::start_on(setup, setup.strongest_contract(), &["--body-limit", "200"]);
    let padded = |length: usize| {
        let body = r#"{"amount": 1, "currency": "EUR", "recipient": "a"}"#;
        format!("{body}{}", " ".repeat(length - body.len()))
    };
    assert_eq!(server.send(&Request::pay("199").body(padded(199))).status, 201);
    assert_eq!(server.send(&Request::pay("200").body(padded(200))).status, 201);
    let over = server.send(&Request::pay("201").body(padded(201)));
    assert_eq!((over.status, over.problem().as_deref()), (413, Some("body-too-large")));
    assert_eq!((server.effects(), server.records()), (2, 2));
}

fn a_store_that_cannot_answer_is_503_and_nothing_runs(setup: Setup) {
    let server = Server::start_on(setup, Contract::Transactional, &[]);
    assert_eq!(server.send(&Request::pay("known")).status, 201);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let options = sqlx::sqlite::SqliteConnectOptions::new().filename(server.store());
    let mut writer = runtime.block_on(options.connect()).unwrap();
    runtime.block_on(sqlx::raw_sql("BEGIN IMMEDIATE").execute(&mut writer)).unwrap();
    let refused = server.send(&Request::pay("new"));
    assert_eq!((refused.status, refused.problem().as_deref()), (503, Some("store-unavailable")));
    assert!(refused.retry_after().is_some());
    assert!(server.send(&Request::pay("known")).is_replay(), "a replay needs no writer");
    runtime.block_on(sqlx::raw_sql("ROLLBACK").execute(&mut writer)).unwrap();
    runtime.block_on(writer.close()).unwrap();
    assert_eq!(server.effects(), 1);
    let answer = eventually("the store's return", || {
        let answer = server.send(&Request::pay("new"));
        (answer.status == 201).then_some(answer)
    });
    assert_eq!(answer.status, 201);
    assert_eq!(server.effects(), 2);
}

fn retention_ends_and_the_key_is_free_again(setup: Setup) {
    let server = Server::start_on(setup, setup.strongest_contract(), &["--retention-s", "1"]);
    let first = server.send(&Request::pay("k"));
    let second = eventually("the end of the retention", || {
        std::thread::sleep(Duration::from_millis(100));
        let answer = server.send(&Request::pay("k"));
        (!answer.is_replay()).then_some(answer)
    });
    assert_eq!((first.status, second.status), (201, 201));
    assert_ne!(first.body, second.body);
    assert_eq!(server.effects(), 2);
}

fn strangers_learn_that_the_service_answers_and_nothing_else(setup: Setup) {
    let server = Server::start_on(setup, Contract::AtMostOnce, &[]);
    assert_eq!(server.send(&Request::pay("k")).status, 201);
    for request in [Request::get("/healthz"), Request::get("/healthz").without("Authorization")] {
        let answer = server.send(&request);
        assert_eq!((answer.status, answer.json()), (200, serde_json::json!({ "status": "ok" })));
    }
    for stranger in [Request::get("/operator/health"), Request::get("/operator/health").without("Authorization")] {
        assert_eq!(server.send(&stranger).status, 401);
    }
    let operator = Request::pay("k").tenant(OPERATOR);
    assert_eq!(server.send(&operator).status, 401, "its token would be in a record");
    assert_eq!(server.health()["records"], 1);
    assert!(!server.log().contains(OPERATOR));
}

#[test]
fn a_record_that_cannot_be_read_is_an_error_and_nothing_runs() {
    let server = Server::start(Contract::AtMostOnce, &[]);
    assert_eq!(server.send(&Request::pay("k")).status, 201);
    server.make_records_unreadable();
    for _ in 0..2 {
        let answer = server.send(&Request::pay("k"));
        assert_eq!((answer.status, answer.problem().as_deref()), (500, Some("record-unreadable")));
    }
    assert_eq!(server.effects(), 1);
}

#[test]
fn a_server_that_cannot_start_says_why() {
    const TAKES: &str =
        "--store takes sqlite://FILE, postgres://USER@HOST/DATABASE, mysql://USER@HOST/DATABASE, redis://HOST";
    let cases = [
        ("sqlite:///no/such/folder/x.db", "unable to open"),
        ("oracle://user:secret@host/x", TAKES),
        ("payments.db", TAKES),
        ("mysql://user:secret@127.0.0.1:1/x", "refused"),
        ("postgres://user:secret@127.0.0.1:1/x", "refused"),
        ("redis://user:secret@127.0.0.1:1/0", "refused"),
        ("redis+ring://user:secret@host", "redis+cluster"),
    ];
    for (store, reason) in cases {
        let log = refusal(&["--store", store]);
        assert!(log.contains(reason), "{log}");
        assert!(!log.contains("secret"), "{log}");
    }
}

#[test]
fn memory_keeps_no_contract_that_needs_a_transaction_and_forgets_with_its_process() {
    let log = refusal(&["--store", "memory:", "--ledger", "sqlite://ledger.db", "--contract", "transactional"]);
    assert!(log.contains("memory has none"), "{log}");
    let mut server = Server::start_on(Backend::Memory, Contract::AtMostOnce, &[]);
    assert_eq!(server.send(&Request::pay("k")).status, 201);
    assert!(server.send(&Request::pay("k")).is_replay());
    server.kill();
    server.start_again();
    assert_eq!((server.send(&Request::pay("k")).status, server.effects()), (201, 2));
}

fn the_page_of_operators_names_the_store(setup: Setup) {
    let server = Server::start_on(setup, Contract::AtMostOnce, &[]);
    let health = server.health();
    let (store, counted) = match setup.backend {
        Backend::Memory => ("memory", "records"),
        Backend::Sqlite => ("sqlite", "records"),
        Backend::Postgres | Backend::OwnPool | Backend::Joined | Backend::PgBouncer | Backend::Hybrid => {
            ("postgres", "records")
        }
        Backend::MariaDb => ("mariadb", "records"),
        Backend::Redis | Backend::RedisSentinel | Backend::RedisCluster => ("redis", "keys"),
    };
    assert_eq!((&health["status"], &health["store"]), (&"ok".into(), &store.into()));
    assert!(
        health["version"].as_str().is_some_and(|version| version.starts_with(|first: char| first.is_ascii_digit()))
    );
    assert!(health[counted].is_u64(), "{health}");
}
