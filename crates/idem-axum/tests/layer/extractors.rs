//! What extractors give a handler, and how they fail.

use axum::Router;
use axum::routing::post as on_post;
use http::StatusCode;
use idem_axum::{IdempotencyContext, IdempotentTransaction};
use idem_core::Acquisition;
use idem_log::Log;
use idem_sqlite::SqliteTransaction;

use crate::support::{Answer, Database, Runs, at_most_once, pay, post, send};

type Transaction = IdempotentTransaction<SqliteTransaction>;

fn get_request() -> axum::extract::Request {
    let mut request = post("/p", "k");
    *request.method_mut() = http::Method::GET;
    request
}

#[track_caller]
fn assert_refused(answer: &Answer, because: &str) {
    assert_eq!(answer.status, StatusCode::INTERNAL_SERVER_ERROR, "{answer:?}");
    assert_eq!(answer.text(), "The server cannot handle this request; its log says why.");
    assert!(!Log::of_process().lines(&["ERROR", "an extractor", because]).is_empty(), "the log does not say {because}");
}

#[tokio::test]
async fn a_handler_gets_the_context_of_its_run() {
    let handler = async |IdempotencyContext(context): IdempotencyContext| {
        assert_eq!((context.attempt(), context.acquisition()), (1, Acquisition::Fresh));
        assert!(context.is_protected());
        context.downstream_key("charge")
    };
    let router = Router::new().route("/p", on_post(handler).layer(at_most_once()));
    let (one, other) = (send(&router, post("/p", "k1")).await, send(&router, post("/p", "k2")).await);
    assert_eq!((one.status, other.status), (StatusCode::OK, StatusCode::OK));
    assert_ne!(one.body, other.body, "each key has its own downstream key");
}

#[tokio::test]
async fn the_context_of_a_request_that_is_not_protected_is_refused_with_the_reason() {
    Log::of_process();
    let handler = async |_: IdempotencyContext| "ran";
    let router = Router::new().route("/p", on_post(handler).get(handler).layer(at_most_once()));
    assert_refused(&send(&router, get_request()).await, "not protected");
    assert_eq!(send(&router, post("/p", "k")).await.text(), "ran");
    let bare = Router::new().route("/p", on_post(handler));
    assert_refused(&send(&bare, post("/p", "k")).await, "not protected");
}

#[tokio::test]
async fn an_optional_context_is_none_where_nothing_is_protected() {
    let handler = async |context: Option<IdempotencyContext>| format!("{}", context.is_some());
    let router = Router::new().route("/p", on_post(handler).get(handler).layer(at_most_once()));
    assert_eq!(send(&router, get_request()).await.text(), "false");
    assert_eq!(send(&router, post("/p", "k")).await.text(), "true");
}

#[tokio::test]
async fn the_transaction_of_a_contract_without_one_is_refused_with_the_reason() {
    Log::of_process();
    let router = Router::new().route("/p", on_post(async |_: Transaction| "ran").layer(at_most_once()));
    assert_refused(&send(&router, post("/p", "k")).await, "transactional(store)");
    let bare = Router::new().route("/p", on_post(async |_: Transaction| "ran"));
    assert_refused(&send(&bare, post("/p", "k")).await, "not protected");
}

#[tokio::test]
async fn an_optional_transaction_is_none_where_there_is_none() {
    let handler = async |transaction: Option<Transaction>| format!("{}", transaction.is_some());
    let router = Router::new().route("/p", on_post(handler).get(handler).layer(at_most_once()));
    assert_eq!(send(&router, post("/p", "k")).await.text(), "false");
    assert_eq!(send(&router, get_request()).await.text(), "false");
    let database = Database::new().await;
    let router = Router::new().route("/p", on_post(handler).layer(database.layer()));
    assert_eq!(send(&router, post("/p", "k")).await.text(), "true");
}

#[tokio::test]
async fn a_transaction_of_another_type_is_refused_with_its_name() {
    Log::of_process();
    let database = Database::new().await;
    let router = Router::new()
        .route("/p", on_post(async |_: IdempotentTransaction<String>| "ran"))
        .route("/o", on_post(async |_: Option<IdempotentTransaction<String>>| "ran"))
        .layer(database.layer());
    for target in ["/p", "/o"] {
        let answer = send(&router, post(target, "k")).await;
        assert_refused(&answer, "is not a `alloc::string::String`");
    }
}

#[tokio::test]
async fn a_second_extractor_of_the_transaction_is_refused_and_nothing_runs() {
    Log::of_process();
    let (database, runs) = (Database::new().await, Runs::default());
    let handler = {
        let runs = runs.clone();
        async move |_: Transaction, _: Transaction| runs.next().to_string()
    };
    let optional = {
        let runs = runs.clone();
        async move |_: Transaction, _: Option<Transaction>| runs.next().to_string()
    };
    let router = Router::new().route("/p", on_post(handler)).route("/o", on_post(optional)).layer(database.layer());
    for target in ["/p", "/o"] {
        assert_refused(&send(&router, post(target, "k")).await, "in use elsewhere");
    }
    assert_eq!(runs.count(), 0);
}

#[tokio::test]
async fn a_request_that_another_extractor_refuses_is_settled_by_its_status() {
    let (database, runs) = (Database::new().await, Runs::default());
    let counting = runs.clone();
    let handler = async move |mut transaction: Transaction, axum::Json(_): axum::Json<u32>| {
        pay(&mut transaction).await;
        format!("run {}", counting.next())
    };
    let router = Router::new().route("/p", on_post(handler).layer(database.layer()));
    // No content type: the body's extractor refuses with 415, a 4xx that is kept, and nothing was written.
    let first = send(&router, post("/p", "k")).await;
    assert_eq!(first.status, StatusCode::UNSUPPORTED_MEDIA_TYPE);
    send(&router, post("/p", "k")).await.assert_replay_of(&first);
    assert_eq!((runs.count(), database.payments().await), (0, 0));
}

#[tokio::test]
async fn a_transaction_that_is_dropped_can_be_borrowed_again() {
    let database = Database::new().await;
    let handler = async |IdempotencyContext(context): IdempotencyContext, mut first: Transaction| {
        assert!(context.transaction::<SqliteTransaction>().is_err(), "it is borrowed");
        pay(&mut first).await;
        drop(first);
        let mut second = context.transaction::<SqliteTransaction>().unwrap();
        pay(&mut second).await;
        StatusCode::CREATED
    };
    let router = Router::new().route("/p", on_post(handler).layer(database.layer()));
    assert_eq!(send(&router, post("/p", "k")).await.status, StatusCode::CREATED);
    assert_eq!(database.payments().await, 2);
}
