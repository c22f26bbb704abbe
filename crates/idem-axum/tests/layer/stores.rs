//! A store that cannot answer.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::routing::post as on_post;
use http::StatusCode;
use idem_axum::{Idempotency, IdempotencyContext, IdempotencyLayer, ProblemKind, Settings};
use idem_core::MemoryStore;
use idem_core::engine::{Event, EventKind, Observer};
use idem_testkit::{Fault, FaultyStore, Verb};

use crate::support::{Database, Runs, counted, memory, post, post_and_wait, send};

/// The events that matter here.
#[derive(Debug, Default)]
struct Log(Mutex<Vec<&'static str>>);

impl Observer for Log {
    fn observe(&self, event: &Event<'_>) {
        let name = match event.kind {
            EventKind::FailedOpen => "failed open",
            EventKind::SettlementDelayed => "settlement delayed",
            EventKind::SettlementLost => "settlement lost",
            _ => return,
        };
        self.0.lock().unwrap().push(name);
    }
}

impl Log {
    fn events(&self) -> Vec<&'static str> {
        self.0.lock().unwrap().clone()
    }
}

/// A store whose next calls of `verb` fail; the engine repeats a failed acquire once.
fn failing(verb: Verb, calls: usize) -> Arc<FaultyStore<MemoryStore>> {
    Arc::new(FaultyStore::new(memory()).script(verb, vec![Fault::ErrorBefore; calls]))
}

fn route<S: idem_axum::ScopeSource<http::request::Parts>>(runs: &Runs, layer: IdempotencyLayer<S>) -> Router {
    Router::new().route("/p", on_post(counted(runs)).layer(layer))
}

#[tokio::test]
async fn one_failed_acquire_is_repeated_and_nobody_notices() {
    for fault in [Fault::ErrorBefore, Fault::ErrorAfter] {
        let runs = Runs::default();
        let store = Arc::new(FaultyStore::new(memory()).script(Verb::Acquire, [fault]));
        let router = route(&runs, IdempotencyLayer::at_most_once(store).single_tenant());
        let first = send(&router, post("/p", "k")).await;
        first.assert_run(1);
        send(&router, post("/p", "k")).await.assert_replay_of(&first);
    }
}

#[tokio::test]
async fn a_layer_that_fails_open_runs_unprotected_and_says_so() {
    let (runs, log, store) = (Runs::default(), Arc::new(Log::default()), failing(Verb::Acquire, 4));
    let settings = Settings::new().dangerous_fail_open().observer(log.clone());
    let layer = IdempotencyLayer::new(Idempotency::at_most_once(store, settings)).single_tenant();
    let counting = runs.clone();
    let handler = async move |IdempotencyContext(context): IdempotencyContext| {
        assert_eq!(context.is_protected(), counting.count() >= 2);
        format!("run {}", counting.next())
    };
    let router = Router::new().route("/p", on_post(handler).layer(layer));
    send(&router, post("/p", "k")).await.assert_run(1);
    send(&router, post("/p", "k")).await.assert_run(2);
    assert_eq!(log.events(), ["failed open", "failed open"]);
    let protected = send(&router, post("/p", "k")).await;
    protected.assert_run(3);
    send(&router, post("/p", "k")).await.assert_replay_of(&protected);
    assert_eq!(log.events().len(), 2);
}

#[tokio::test]
async fn transactional_never_fails_open() {
    let (runs, database) = (Runs::default(), Database::new().await);
    let store = FaultyStore::new(Arc::new(database.store.clone())).script(Verb::Begin, [Fault::ErrorBefore; 2]);
    let engine = Idempotency::transactional(Arc::new(store), Settings::new().dangerous_fail_open());
    let router = route(&runs, IdempotencyLayer::new(engine).single_tenant());
    send(&router, post("/p", "k")).await.assert_problem(ProblemKind::StoreUnavailable);
    assert_eq!(runs.count(), 0);
    send(&router, post("/p", "k")).await.assert_run(1);
}

#[tokio::test(start_paused = true)]
async fn a_settlement_that_the_store_refuses_for_long_costs_the_client_nothing() {
    let (runs, log, store) = (Runs::default(), Arc::new(Log::default()), failing(Verb::Settle, 1000));
    let settings = Settings::new().observer(log.clone());
    let engine = Idempotency::at_most_once(store.clone(), settings);
    let router = route(&runs, IdempotencyLayer::new(engine).single_tenant());
    let first = send(&router, post("/p", "k")).await;
    assert_eq!(first.status, StatusCode::CREATED);
    first.assert_run(1);
    assert_eq!(log.events(), ["settlement delayed"]);
    send(&router, post("/p", "k")).await.assert_problem(ProblemKind::InProgress);
    store.heal();
    send(&router, post_and_wait("/p", "k")).await.assert_replay_of(&first);
    assert_eq!((runs.count(), log.events().len()), (1, 1));
}

#[tokio::test]
async fn a_commit_without_an_answer_is_read_back_before_the_client_is_told() {
    let (runs, database) = (Runs::default(), Database::new().await);
    let store = FaultyStore::new(Arc::new(database.store.clone())).script(Verb::Finish, [Fault::ErrorAfter]);
    let router = route(&runs, IdempotencyLayer::transactional(Arc::new(store)).single_tenant());
    let first = send(&router, post("/p", "k")).await;
    first.assert_run(1);
    send(&router, post("/p", "k")).await.assert_replay_of(&first);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_that_did_not_happen_is_503_and_the_retry_runs() {
    let (runs, database) = (Runs::default(), Database::new().await);
    let store = FaultyStore::new(Arc::new(database.store.clone())).script(Verb::Finish, [Fault::ErrorBefore]);
    let router = route(&runs, IdempotencyLayer::transactional(Arc::new(store)).single_tenant());
    send(&router, post("/p", "k")).await.assert_problem(ProblemKind::CommitUnclear);
    // The key is given back in the background.
    send(&router, post_and_wait("/p", "k")).await.assert_run(2);
}

#[tokio::test]
async fn a_record_that_cannot_be_read_is_500_and_nothing_runs() {
    let (runs, database) = (Runs::default(), Database::new().await);
    let router = route(&runs, database.layer());
    send(&router, post("/p", "k")).await.assert_run(1);
    sqlx::query("UPDATE idem_records SET format = 2").execute(database.store.pool()).await.unwrap();
    send(&router, post("/p", "k")).await.assert_problem(ProblemKind::RecordUnreadable);
    assert_eq!(runs.count(), 1);
}

#[tokio::test]
async fn an_engine_that_shuts_down_refuses_new_operations() {
    let runs = Runs::default();
    let layer = IdempotencyLayer::at_most_once(memory()).single_tenant();
    let router = route(&runs, layer.clone());
    let first = send(&router, post("/p", "k")).await;
    first.assert_run(1);
    layer.engine().shutdown(Duration::from_secs(60)).await.unwrap();
    for key in ["k", "other"] {
        send(&router, post("/p", key)).await.assert_problem(ProblemKind::ShuttingDown);
    }
    assert_eq!(runs.count(), 1);
}
