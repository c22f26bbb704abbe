//! Application code that panics in every place where the layer calls it. No key stays held, no share of the budget stays
//! taken, and the engine shuts down in order.

use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::routing::post as on_post;
use bytes::Bytes;
use futures_util::{StreamExt, stream};
use http::request::Parts;
use idem_axum::{HttpPolicy, IdempotencyLayer, ProblemKind, SingleTenant};
use idem_http::ByteBudget;

use crate::support::{
    Answer, Database, PATIENCE, Runs, Wire, at_most_once, begin, counted, memory, post, send, serve, with, with_body,
};

/// A budget for one body of six bytes.
fn narrow() -> HttpPolicy {
    HttpPolicy::new().budget(ByteBudget::new(6))
}

/// Two bytes, and then a panic in the stream itself.
fn panicking_body() -> Body {
    let first = stream::iter([Ok::<_, axum::Error>(Bytes::from("12"))]);
    Body::from_stream(first.chain(stream::once(async { panic!("the body panics") })))
}

/// Sends a request whose application code panics outside of the handler. It uses a separate task, as a server would.
async fn assert_panics(router: &Router, request: Request) {
    let router = router.clone();
    let ended = tokio::spawn(async move { begin(&router, request).await.status() }).await;
    assert!(ended.expect_err("it has an answer").is_panic());
}

/// Asserts that the key and the whole budget are free, and that a shutdown waits for nothing.
async fn assert_nothing_is_left<S: idem_http::ScopeSource<Parts>>(
    router: &Router,
    layer: &IdempotencyLayer<S>,
    run: usize,
) {
    send(router, with_body(post("/p", "k"), "123456")).await.assert_run(run);
    layer.engine().shutdown(PATIENCE).await.expect("the shutdown waits for something");
}

#[tokio::test]
async fn a_scope_that_panics_leaves_nothing_behind() {
    let runs = Runs::default();
    let scope = |head: &Parts| {
        assert!(!head.headers.contains_key("x-panic"), "the scope panics");
        Some("acme")
    };
    let layer = IdempotencyLayer::at_most_once(memory()).scope(scope).policy(narrow());
    let router = Router::new().route("/p", on_post(counted(&runs)).layer(layer.clone()));
    assert_panics(&router, with_body(with(post("/p", "k"), "x-panic", "1"), "123456")).await;
    let address = serve(router.clone()).await;
    let lines = "x-panic: 1\r\ncontent-length: 6\r\n";
    let ended = Wire::post(address, "k", lines).await.read_to_end().await;
    assert_eq!(ended, "", "the connection ends");
    assert_nothing_is_left(&router, &layer, 1).await;
}

#[tokio::test]
async fn a_request_body_that_panics_leaves_nothing_behind() {
    let runs = Runs::default();
    let layer = at_most_once().policy(narrow());
    let router = Router::new().route("/p", on_post(counted(&runs)).layer(layer.clone()));
    assert_panics(&router, with_body(post("/p", "k"), panicking_body())).await;
    assert_nothing_is_left(&router, &layer, 1).await;
}

/// A route whose first answer has a body that panics.
fn panicking_answer(runs: &Runs, layer: IdempotencyLayer<SingleTenant>) -> Router {
    let runs = runs.clone();
    let handler = async move || match runs.next() {
        1 => panicking_body(),
        run => Body::from(format!("run {run}")),
    };
    Router::new().route("/p", on_post(handler).layer(layer))
}

#[tokio::test]
async fn an_answer_whose_body_panics_is_a_fault() {
    let (database, runs) = (Database::new().await, Runs::default());
    let layer = database.layer().policy(narrow());
    let router = panicking_answer(&runs, layer.clone());
    send(&router, with_body(post("/p", "k"), "123456")).await.assert_problem(ProblemKind::HandlerFailed);
    assert_nothing_is_left(&router, &layer, 2).await;

    let runs = Runs::default();
    let layer = at_most_once().policy(narrow());
    let router = panicking_answer(&runs, layer);
    send(&router, post("/p", "k")).await.assert_problem(ProblemKind::HandlerFailed);
    let again = send(&router, post("/p", "k")).await;
    again.assert_problem_document(ProblemKind::HandlerFailed);
    assert!(again.is_replay());
}

#[tokio::test]
async fn an_answer_whose_body_panics_beyond_what_is_kept_was_made() {
    let runs = Runs::default();
    let layer = at_most_once().policy(narrow().stored_response_limit(1));
    let router = panicking_answer(&runs, layer.clone());
    let response = begin(&router, with_body(post("/p", "k"), "123456")).await;
    let read = tokio::spawn(Answer::read(response)).await;
    assert!(read.expect_err("the body is whole").is_panic());
    send(&router, with_body(post("/p", "k"), "123456")).await.assert_problem(ProblemKind::BodyNotRetained);
    layer.engine().shutdown(PATIENCE).await.expect("the shutdown waits for something");
}

/// A body that panics when it is dropped.
struct Brittle;

impl Drop for Brittle {
    fn drop(&mut self) {
        panic!("the end of a body panics");
    }
}

#[tokio::test]
async fn an_answer_whose_body_panics_at_its_end_is_a_fault() {
    let runs = Runs::default();
    let handler = {
        let runs = runs.clone();
        async move || match runs.next() {
            1 => {
                let brittle = Brittle;
                Body::from_stream(stream::iter([Ok::<_, axum::Error>("12")]).map(move |chunk| {
                    let _ = &brittle;
                    chunk
                }))
            }
            run => Body::from(format!("run {run}")),
        }
    };
    let database = Database::new().await;
    let layer = database.layer().policy(narrow());
    let router = Router::new().route("/p", on_post(handler).layer(layer.clone()));
    send(&router, with_body(post("/p", "k"), "123456")).await.assert_problem(ProblemKind::HandlerFailed);
    assert_nothing_is_left(&router, &layer, 2).await;
}

/// An answer that never ends is as bad as a panic.
#[tokio::test]
async fn an_answer_that_never_ends_is_a_fault_and_holds_up_no_shutdown() {
    let (database, runs) = (Database::new().await, Runs::default());
    let handler = {
        let runs = runs.clone();
        async move || match runs.next() {
            1 => {
                let slow = stream::unfold((), async |()| {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                    Some((Ok::<_, axum::Error>("x"), ()))
                });
                Body::from_stream(slow)
            }
            run => Body::from(format!("run {run}")),
        }
    };
    let layer = database.layer().policy(narrow().response_body_timeout(Duration::from_millis(100)));
    let router = Router::new().route("/p", on_post(handler).layer(layer.clone()));
    let address = serve(router.clone()).await;
    let answer = Wire::post(address, "k", "content-length: 0\r\nconnection: close\r\n").await.read_to_end().await;
    assert!(answer.starts_with("HTTP/1.1 500 ") && answer.contains("#handler-failed"), "{answer}");
    assert_nothing_is_left(&router, &layer, 2).await;
}
