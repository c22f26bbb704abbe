//! Other layers, outside and inside.

use std::io::Read;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::routing::{MethodRouter, post as on_post};
use flate2::read::GzDecoder;
use http::StatusCode;
use tokio::sync::Semaphore;
use tower_http::compression::CompressionLayer;
use tower_http::timeout::TimeoutLayer;

use crate::support::{Answer, Runs, at_most_once, post, post_and_wait, send, with};

const LIMIT: Duration = Duration::from_secs(1);

/// A body that is worth compressing.
fn long(runs: &Runs) -> MethodRouter {
    let runs = runs.clone();
    on_post(async move || format!("{}{}", "x".repeat(10_000), runs.next()))
}

/// The same, compressed outside of the layer.
fn compressed(runs: &Runs) -> Router {
    Router::new().route("/p", long(runs).layer(at_most_once())).layer(CompressionLayer::new())
}

#[track_caller]
fn plain(answer: &Answer) -> String {
    assert_eq!(answer.header("content-encoding"), None, "{answer:?}");
    answer.text().to_owned()
}

#[track_caller]
fn unzipped(answer: &Answer) -> String {
    assert_eq!(answer.header("content-encoding"), Some("gzip"), "{answer:?}");
    let mut text = String::new();
    GzDecoder::new(&answer.body[..]).read_to_string(&mut text).unwrap();
    text
}

#[tokio::test]
async fn an_answer_that_was_compressed_first_can_be_had_plain() {
    let runs = Runs::default();
    let router = compressed(&runs);
    let first = send(&router, with(post("/p", "k"), "accept-encoding", "gzip")).await;
    let again = send(&router, with(post("/p", "k"), "accept-encoding", "identity")).await;
    assert!(again.is_replay());
    assert_eq!(unzipped(&first), plain(&again));
    assert_eq!(runs.count(), 1);
}

#[tokio::test]
async fn an_answer_that_was_plain_first_can_be_had_compressed() {
    let runs = Runs::default();
    let router = compressed(&runs);
    let first = send(&router, post("/p", "k")).await;
    let again = send(&router, with(post("/p", "k"), "accept-encoding", "gzip")).await;
    assert!(again.is_replay());
    assert_eq!(plain(&first), unzipped(&again));
    assert_eq!(runs.count(), 1);
}

/// The reason why compression stands outside.
#[tokio::test]
async fn a_compression_inside_is_part_of_the_answer_that_all_get() {
    let runs = Runs::default();
    let router = Router::new().route("/p", long(&runs).layer(CompressionLayer::new()).layer(at_most_once()));
    let first = send(&router, with(post("/p", "k"), "accept-encoding", "gzip")).await;
    let again = send(&router, with(post("/p", "k"), "accept-encoding", "identity")).await;
    assert_eq!(unzipped(&again), unzipped(&first));
    again.assert_replay_of(&first);
}

/// A route whose first run waits for the gate.
fn gated(runs: &Runs, gate: &Arc<Semaphore>) -> MethodRouter {
    let (runs, gate) = (runs.clone(), gate.clone());
    on_post(async move || {
        let run = runs.next();
        if run == 1 {
            gate.acquire().await.unwrap().forget();
        }
        (StatusCode::CREATED, format!("run {run}"))
    })
}

#[tokio::test(start_paused = true)]
async fn a_timeout_outside_ends_the_request_and_not_the_operation() {
    let (runs, gate) = (Runs::default(), Arc::new(Semaphore::new(0)));
    let router = Router::new()
        .route("/p", gated(&runs, &gate).layer(at_most_once()))
        .layer(TimeoutLayer::with_status_code(StatusCode::REQUEST_TIMEOUT, LIMIT));
    assert_eq!(send(&router, post("/p", "k")).await.status, StatusCode::REQUEST_TIMEOUT);
    gate.add_permits(1);
    let again = send(&router, post_and_wait("/p", "k")).await;
    assert!(again.is_replay());
    assert_eq!((again.status, again.text(), runs.count()), (StatusCode::CREATED, "run 1", 1));
}

#[tokio::test(start_paused = true)]
async fn a_timeout_inside_ends_the_operation_which_never_runs_again_under_at_most_once() {
    let (runs, gate) = (Runs::default(), Arc::new(Semaphore::new(0)));
    let route = gated(&runs, &gate)
        .layer(TimeoutLayer::with_status_code(StatusCode::REQUEST_TIMEOUT, LIMIT))
        .layer(at_most_once());
    let router = Router::new().route("/p", route);
    let first = send(&router, post("/p", "k")).await;
    assert_eq!(first.status, StatusCode::REQUEST_TIMEOUT);
    gate.add_permits(1);
    send(&router, post("/p", "k")).await.assert_replay_of(&first);
    assert_eq!(runs.count(), 1);
}
