//! A response body on its way out: kept up to the limit, passed on whole.

use std::io::Error;

use axum::Router;
use axum::body::Body;
use axum::response::IntoResponse;
use axum::routing::post as on_post;
use bytes::Bytes;
use futures_util::stream;
use http::{HeaderMap, HeaderValue, StatusCode};
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use idem_axum::{HttpPolicy, IdempotencyLayer, ProblemKind, SingleTenant};
use idem_log::Log;

use crate::support::{Database, Runs, Wire, at_most_once, begin, memory, post, send, serve};

/// A route that answers 201 with these chunks, some of them broken.
fn chunked(runs: &Runs, chunks: &'static [Result<&str, &str>], layer: IdempotencyLayer<SingleTenant>) -> Router {
    let runs = runs.clone();
    let handler = async move || {
        runs.next();
        let chunk = |chunk: &Result<&'static str, &'static str>| chunk.map(Bytes::from).map_err(Error::other);
        (StatusCode::CREATED, Body::from_stream(stream::iter(chunks.iter().map(chunk))))
    };
    Router::new().route("/p", on_post(handler).layer(layer))
}

/// Keeps at most 8 bytes.
fn small() -> IdempotencyLayer<SingleTenant> {
    at_most_once().policy(HttpPolicy::new().stored_response_limit(8))
}

#[tokio::test]
async fn a_body_in_chunks_is_replayed_whole_up_to_the_limit() {
    let runs = Runs::default();
    let router = chunked(&runs, &[Ok("1234"), Ok("5678")], small());
    let first = send(&router, post("/p", "k")).await;
    assert_eq!((first.status, first.text()), (StatusCode::CREATED, "12345678"));
    send(&router, post("/p", "k")).await.assert_replay_of(&first);
}

#[tokio::test]
async fn a_body_over_the_limit_reaches_the_first_client_whole_and_is_then_gone() {
    let runs = Runs::default();
    let router = chunked(&runs, &[Ok("1234"), Ok("56789"), Ok("more")], small());
    assert_eq!(send(&router, post("/p", "k")).await.text(), "123456789more");
    let again = send(&router, post("/p", "k")).await;
    again.assert_problem(ProblemKind::BodyNotRetained);
    assert_eq!((again.json()["original_status"].as_u64(), runs.count()), (Some(201), 1));
}

/// A client would read the next answer on its connection as the rest of one that is too short.
#[tokio::test]
async fn a_body_of_another_length_than_declared_is_a_failure() {
    for declared in ["3", "9"] {
        let handler = async move || {
            let body = Body::from_stream(stream::iter([Ok::<_, Error>("12345")]));
            (StatusCode::CREATED, [("content-length", declared)], body)
        };
        let router = Router::new().route("/p", on_post(handler).layer(at_most_once()));
        let first = send(&router, post("/p", "k")).await;
        first.assert_problem(ProblemKind::HandlerFailed);
        send(&router, post("/p", "k")).await.assert_replay_of(&first);
    }
}

#[tokio::test]
async fn a_body_that_breaks_off_under_the_limit_is_a_failure_and_not_its_first_half() {
    let runs = Runs::default();
    let router = chunked(&runs, &[Ok("1234"), Err("broken")], small());
    send(&router, post("/p", "k")).await.assert_problem(ProblemKind::HandlerFailed);
    let again = send(&router, post("/p", "k")).await;
    again.assert_problem_document(ProblemKind::HandlerFailed);
    assert!(again.is_replay(), "under AtMostOnce it is the outcome");
    assert_eq!(runs.count(), 1);
}

#[tokio::test]
async fn a_body_that_breaks_off_is_the_fault_of_its_contract() {
    let (log, runs, database) = (Log::of_process(), Runs::default(), Database::new().await);
    let router = chunked(&runs, &[Ok("1234"), Err("torn in a transaction")], database.layer());
    for _ in 0..2 {
        send(&router, post("/p", "k")).await.assert_problem(ProblemKind::HandlerFailed);
    }
    assert_eq!(runs.count(), 2, "under Transactional the key is free");
    let logged =
        log.lines(&["a failure of its handler record=", "cannot be used: it broke off: torn in a transaction"]);
    assert_eq!(logged.len(), 2, "{logged:?}");
    let runs = Runs::default();
    let layer = IdempotencyLayer::at_least_once(memory()).single_tenant();
    let router = chunked(&runs, &[Ok("1234"), Err("broken")], layer);
    send(&router, post("/p", "k")).await.assert_problem(ProblemKind::HandlerFailed);
    send(&router, post("/p", "k")).await.assert_problem(ProblemKind::Backoff);
    assert_eq!(runs.count(), 1, "under AtLeastOnce it rests");
}

#[tokio::test]
async fn a_body_that_breaks_off_over_the_limit_breaks_off_and_never_runs_again() {
    let runs = Runs::default();
    let router = chunked(&runs, &[Ok("123456789"), Ok("more"), Err("broken")], small());
    let response = begin(&router, post("/p", "k")).await;
    assert_eq!(response.status(), StatusCode::CREATED);
    let mut body = response.into_body();
    for chunk in ["123456789", "more"] {
        assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), chunk);
    }
    assert!(body.frame().await.unwrap().is_err(), "the client sees that the body is not whole");
    send(&router, post("/p", "k")).await.assert_problem(ProblemKind::BodyNotRetained);
    assert_eq!(runs.count(), 1);
}

/// A route whose body ends with a trailer.
fn with_trailers(layer: IdempotencyLayer<SingleTenant>) -> Router {
    let handler = async || {
        let trailers = HeaderMap::from_iter([(http::HeaderName::from_static("x-sum"), HeaderValue::from_static("7"))]);
        let frames = [Frame::data(Bytes::from("body")), Frame::trailers(trailers)];
        let body = StreamBody::new(stream::iter(frames.map(Ok::<_, Error>)));
        ([("trailer", "x-sum")], Body::new(body)).into_response()
    };
    Router::new().route("/p", on_post(handler).layer(layer))
}

#[tokio::test]
async fn trailers_reach_the_first_client() {
    for limit in [1024, 1] {
        let router = with_trailers(at_most_once().policy(HttpPolicy::new().stored_response_limit(limit)));
        let first = send(&router, post("/p", "k")).await;
        let sum = first.trailers.as_ref().and_then(|trailers| trailers.get("x-sum"));
        assert_eq!((first.text(), sum), ("body", Some(&HeaderValue::from_static("7"))), "limit {limit}");
    }
}

#[tokio::test]
async fn a_replay_has_no_trailers_and_does_not_announce_any() {
    let router = with_trailers(at_most_once());
    let first = send(&router, post("/p", "k")).await;
    let again = send(&router, post("/p", "k")).await;
    again.assert_replay_of(&first);
    assert_eq!((again.trailers.as_ref(), again.header("trailer")), (None, None));
}

#[tokio::test]
async fn trailers_reach_the_first_client_over_a_socket() {
    let address = serve(with_trailers(at_most_once())).await;
    let lines = "content-length: 0\r\nte: trailers\r\nconnection: te, close\r\n";
    let answer = Wire::post(address, "k", lines).await.read_to_end().await;
    assert!(answer.ends_with("4\r\nbody\r\n0\r\nx-sum: 7\r\n\r\n"), "{answer}");
}

#[tokio::test]
async fn only_a_replay_has_the_mark_of_one_also_when_the_handler_passed_one_on() {
    let handler = async || ([("idempotency-replayed", "true")], "from upstream").into_response();
    let router = Router::new().route("/p", on_post(handler).layer(at_most_once()));
    assert!(!send(&router, post("/p", "k")).await.is_replay(), "the mark is of an upstream server");
    let again = send(&router, post("/p", "k")).await;
    assert_eq!(again.headers.get_all("idempotency-replayed").iter().count(), 1);
}
