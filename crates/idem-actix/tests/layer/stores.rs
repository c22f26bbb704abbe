//! A store that cannot answer, and what the client gets.

use std::sync::{Arc, Mutex};

use actix_web::dev::Service;
use actix_web::test::init_service;
use actix_web::{App, Error, web};
use idem_actix::{Idempotency, IdempotencyContext, IdempotencyLayer, ProblemKind, Settings, SingleTenant};
use idem_core::MemoryStore;
use idem_core::engine::{Event, EventKind, Observer};
use idem_testkit::{Fault, FaultyStore, Verb};
use tokio::runtime::Handle;
use tokio::task::LocalSet;

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

/// A layer under Transactional, one of whose commits goes wrong.
fn committing(database: &Database, fault: Fault) -> IdempotencyLayer<SingleTenant> {
    let store = FaultyStore::new(Arc::new(database.store.clone())).script(Verb::Finish, [fault]);
    IdempotencyLayer::transactional(Arc::new(store)).single_tenant()
}

async fn app(
    runs: &Runs,
    layer: IdempotencyLayer<SingleTenant>,
) -> impl Service<actix_http::Request, Response = actix_web::dev::ServiceResponse, Error = Error> + use<> {
    init_service(App::new().wrap(layer).route("/p", web::post().to(counted(runs)))).await
}

#[actix_web::test]
async fn a_layer_that_fails_open_runs_unprotected_and_says_so() {
    let (runs, log, store) = (Runs::default(), Arc::new(Log::default()), failing(Verb::Acquire, 2));
    let settings = Settings::new().dangerous_fail_open().observer(log.clone());
    let layer = IdempotencyLayer::new(Idempotency::at_most_once(store, settings)).single_tenant();
    let handler = {
        let runs = runs.clone();
        move |IdempotencyContext(context): IdempotencyContext| {
            assert_eq!(context.is_protected(), runs.count() >= 1);
            std::future::ready(runs.answer())
        }
    };
    let app = init_service(App::new().wrap(layer).route("/p", web::post().to(handler))).await;
    send(&app, post("/p", "k")).await.assert_run(1);
    assert_eq!(log.events(), ["failed open"]);
    let protected = send(&app, post("/p", "k")).await;
    protected.assert_run(2);
    send(&app, post("/p", "k")).await.assert_replay_of(&protected);
    assert_eq!(log.events().len(), 1);
}

/// The engine runs on the test's runtime, so that its timeouts follow the paused clock.
#[tokio::test(start_paused = true)]
async fn a_settlement_that_the_store_refuses_for_long_costs_the_client_nothing() {
    let (runs, log, store) = (Runs::default(), Arc::new(Log::default()), failing(Verb::Settle, 1000));
    let settings = Settings::new().observer(log.clone()).runtime(Handle::current());
    let engine = Idempotency::at_most_once(store.clone(), settings);
    let worker = LocalSet::new();
    let asked = worker.run_until(async {
        let app = app(&runs, IdempotencyLayer::new(engine).single_tenant()).await;
        let first = send(&app, post("/p", "k")).await;
        first.assert_run(1);
        assert_eq!(log.events(), ["settlement delayed"]);
        send(&app, post("/p", "k")).await.assert_problem(ProblemKind::InProgress);
        store.heal();
        send(&app, post_and_wait("/p", "k")).await.assert_replay_of(&first);
    });
    asked.await;
    assert_eq!((runs.count(), log.events().len()), (1, 1));
}

#[actix_web::test]
async fn a_commit_without_an_answer_is_read_back_before_the_client_is_told() {
    let (runs, database) = (Runs::default(), Database::new().await);
    let app = app(&runs, committing(&database, Fault::ErrorAfter)).await;
    let first = send(&app, post("/p", "k")).await;
    first.assert_run(1);
    send(&app, post("/p", "k")).await.assert_replay_of(&first);
}

#[actix_web::test]
async fn a_commit_that_did_not_happen_is_503_and_the_retry_runs() {
    let (runs, database) = (Runs::default(), Database::new().await);
    let app = app(&runs, committing(&database, Fault::ErrorBefore)).await;
    send(&app, post("/p", "k")).await.assert_problem(ProblemKind::CommitUnclear);
    // The key is given back in the background.
    send(&app, post_and_wait("/p", "k")).await.assert_run(2);
}

#[actix_web::test]
async fn a_record_that_cannot_be_read_is_500_and_nothing_runs() {
    let (runs, database) = (Runs::default(), Database::new().await);
    let app = app(&runs, database.layer()).await;
    send(&app, post("/p", "k")).await.assert_run(1);
    let damage = sqlx::query("UPDATE idem_records SET format = 2").execute(database.store.pool()).await.unwrap();
    assert_eq!(damage.rows_affected(), 1);
    send(&app, post("/p", "k")).await.assert_problem(ProblemKind::RecordUnreadable);
    assert_eq!(runs.count(), 1);
}
