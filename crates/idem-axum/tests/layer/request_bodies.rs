//! A request body on its way in: nothing runs, and nothing is acquired, before it has arrived.

use std::io::Error;
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::middleware::map_request;
use axum::routing::post as on_post;
use bytes::Bytes;
use futures_util::{StreamExt, stream};
use http::{HeaderMap, HeaderName, HeaderValue};
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use idem_axum::{HttpPolicy, IdempotencyLayer, ProblemKind};
use idem_http::ByteBudget;
use idem_log::Log;
use idem_testkit::{FaultyStore, Verb};
use tokio::sync::Semaphore;
use tower_http::limit::RequestBodyLimitLayer;

use crate::support::{Runs, Wire, at_most_once, counted, eventually, memory, post, send, serve, with, with_body};

/// A route that takes at most 8 bytes.
fn route(runs: &Runs) -> Router {
    let layer = at_most_once().policy(HttpPolicy::new().request_body_limit(8));
    Router::new().route("/p", on_post(counted(runs)).layer(layer))
}

/// A body in chunks, whose length is not declared.
fn chunked(chunks: &[Result<&'static str, ()>]) -> Body {
    let chunk = |chunk: &Result<&'static str, ()>| chunk.map(Bytes::from).map_err(|()| Error::other("broken"));
    Body::from_stream(stream::iter(chunks.iter().map(chunk).collect::<Vec<_>>()))
}

#[tokio::test]
async fn a_declared_length_over_the_limit_is_refused_before_a_byte_is_read() {
    let runs = Runs::default();
    let address = serve(route(&runs)).await;
    // The body is never sent, so an answer can only come from the head.
    let answer = Wire::post(address, "k", "content-length: 9\r\n").await.read_until("\r\n").await;
    assert_eq!(answer, "HTTP/1.1 413 Payload Too Large\r\n");
    assert_eq!(runs.count(), 0);
}

#[tokio::test]
async fn a_body_over_the_limit_is_refused_also_when_its_length_is_not_declared() {
    let runs = Runs::default();
    let router = route(&runs);
    for chunks in [&[Ok("123456789")][..], &[Ok("12345678"), Ok("9")]] {
        let request = with_body(post("/p", "k"), chunked(chunks));
        let answer = send(&router, request).await;
        answer.assert_problem(ProblemKind::BodyTooLarge);
        assert!(answer.json()["detail"].as_str().unwrap().contains("8 bytes"), "{answer:?}");
    }
    assert_eq!(runs.count(), 0);
    let exact = with_body(post("/p", "k"), chunked(&[Ok("1234"), Ok("5678")]));
    send(&router, exact).await.assert_run(1);
}

#[tokio::test]
async fn a_chunked_upload_over_the_limit_is_refused_while_it_arrives() {
    let runs = Runs::default();
    let address = serve(route(&runs)).await;
    let mut wire = Wire::post(address, "k", "transfer-encoding: chunked\r\n").await;
    wire.send("9\r\n123456789\r\n").await;
    // The last chunk is never sent.
    assert_eq!(wire.read_until("\r\n").await, "HTTP/1.1 413 Payload Too Large\r\n");
    assert_eq!(runs.count(), 0);
}

#[tokio::test]
async fn a_limit_of_an_outer_layer_is_413_too() {
    let runs = Runs::default();
    let router = route(&runs).layer(RequestBodyLimitLayer::new(4));
    let request = with_body(post("/p", "k"), chunked(&[Ok("12345")]));
    send(&router, request).await.assert_problem(ProblemKind::BodyTooLarge);
    assert_eq!(runs.count(), 0);
}

#[tokio::test]
async fn a_body_that_breaks_off_is_400_and_leaves_no_record() {
    let runs = Runs::default();
    let router = route(&runs);
    let broken = with_body(post("/p", "k"), chunked(&[Ok("1234"), Err(())]));
    send(&router, broken).await.assert_problem(ProblemKind::BodyIncomplete);
    assert_eq!(runs.count(), 0);
    // With a record, another body would be a mismatch.
    send(&router, with_body(post("/p", "k"), "12345")).await.assert_run(1);
}

#[tokio::test]
async fn a_body_that_an_outer_layer_has_consumed_is_a_misconfiguration_and_not_an_empty_body() {
    let (log, runs) = (Log::of_process(), Runs::default());
    let consume = |request: Request| async move {
        let (head, body) = request.into_parts();
        body.collect().await.unwrap();
        Request::from_parts(head, Body::empty())
    };
    let router = route(&runs).layer(map_request(consume));
    for body in ["1234", "5678"] {
        let request = with(with_body(post("/p", "k"), body), "content-length", "4");
        let refused = send(&router, request).await;
        refused.assert_problem(ProblemKind::Misconfigured);
        assert!(!refused.text().contains("consumed"), "{refused:?}");
    }
    assert!(!log.lines(&["ERROR", "operation=\"POST /p\"", "was consumed before"]).is_empty());
    assert_eq!(runs.count(), 0);
    let empty = with(post("/p", "k"), "content-length", "0");
    send(&router, empty).await.assert_run(1);
}

#[tokio::test]
async fn a_body_of_which_an_outer_layer_keeps_a_part_is_a_misconfiguration_too() {
    let runs = Runs::default();
    let take = |request: Request| async move {
        let (head, body) = request.into_parts();
        let whole = body.collect().await.unwrap().to_bytes();
        Request::from_parts(head, Body::from(whole.slice(4..)))
    };
    let router = route(&runs).layer(map_request(take));
    for body in ["1234same", "5678same"] {
        let request = with(with_body(post("/p", "k"), body), "content-length", "8");
        send(&router, request).await.assert_problem(ProblemKind::Misconfigured);
    }
    assert_eq!(runs.count(), 0);
}

#[tokio::test]
async fn an_upload_whose_connection_ends_leaves_no_record() {
    let runs = Runs::default();
    let store = Arc::new(FaultyStore::new(memory()));
    let layer = IdempotencyLayer::at_most_once(store.clone()).single_tenant();
    let address = serve(Router::new().route("/p", on_post(counted(&runs)).layer(layer))).await;
    let mut wire = Wire::post(address, "k", "content-length: 8\r\n").await;
    wire.send("1234").await;
    wire.half_close().await;
    let answer = wire.read_to_end().await;
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 400 "), "{answer}");
    assert_eq!((runs.count(), store.calls(Verb::Acquire)), (0, 0));
}

#[tokio::test]
async fn a_client_that_asks_first_is_told_to_send_only_what_is_taken() {
    let runs = Runs::default();
    let address = serve(route(&runs)).await;
    let lines = |length: usize| format!("content-length: {length}\r\nexpect: 100-continue\r\n");
    let refusals =
        [("k", 9, "HTTP/1.1 413 Payload Too Large\r\n"), ("no key at all", 8, "HTTP/1.1 400 Bad Request\r\n")];
    for (key, length, refusal) in refusals {
        assert_eq!(Wire::post(address, key, &lines(length)).await.read_until("\r\n").await, refusal);
    }
    let mut taken = Wire::post(address, "k", &lines(8)).await;
    assert_eq!(taken.read_until("\r\n\r\n").await, "HTTP/1.1 100 Continue\r\n\r\n");
    taken.send("12345678").await;
    assert_eq!(taken.read_until("\r\n").await, "HTTP/1.1 201 Created\r\n");
    assert_eq!(runs.count(), 1);
}

#[tokio::test]
async fn bodies_over_the_budget_of_all_requests_are_turned_away_until_there_is_room() {
    let (runs, gate) = (Runs::default(), Arc::new(Semaphore::new(0)));
    let handler = {
        let (runs, gate) = (runs.clone(), gate.clone());
        async move || {
            let run = runs.next();
            gate.acquire().await.unwrap().forget();
            format!("run {run}")
        }
    };
    // Two layers share one budget.
    let policy = HttpPolicy::new().budget(ByteBudget::new(10));
    let router = Router::new()
        .route("/p", on_post(handler.clone()).layer(at_most_once().policy(policy.clone())))
        .route("/q", on_post(handler).layer(at_most_once().policy(policy)));
    let held = {
        let router = router.clone();
        tokio::spawn(async move { send(&router, with_body(post("/p", "k1"), "12345678")).await })
    };
    eventually("the first run", async || (runs.count() == 1).then_some(())).await;
    let refused = send(&router, with_body(post("/q", "k2"), "123")).await;
    refused.assert_problem(ProblemKind::Overloaded);
    assert_eq!(refused.header("retry-after"), Some("1"));
    gate.add_permits(2);
    held.await.unwrap().assert_run(1);
    send(&router, with_body(post("/q", "k2"), "123")).await.assert_run(2);
}

#[tokio::test]
async fn the_trailers_of_a_request_count_in_no_fingerprint_and_do_not_reach_the_handler() {
    let handler = async |request: axum::extract::Request| {
        let body = request.into_body().collect().await.unwrap();
        let trailers = body.trailers().cloned();
        format!("{:?} {:?}", body.to_bytes(), trailers.and_then(|trailers| trailers.get("x-sum").cloned()))
    };
    let router = Router::new().route("/p", on_post(handler).layer(at_most_once()));
    let with_trailer = |value: &'static str| {
        let trailers = HeaderMap::from_iter([(HeaderName::from_static("x-sum"), HeaderValue::from_static(value))]);
        let frames = [Frame::data(Bytes::from("body")), Frame::trailers(trailers)];
        let body = Body::new(StreamBody::new(stream::iter(frames.map(Ok::<_, Error>))));
        with_body(post("/p", "k"), body)
    };
    let first = send(&router, with_trailer("7")).await;
    assert_eq!(first.text(), r#"b"body" None"#);
    send(&router, with_trailer("8")).await.assert_replay_of(&first);
}

#[tokio::test(start_paused = true)]
async fn a_body_that_takes_too_long_is_refused_and_gives_its_share_of_the_budget_back() {
    let runs = Runs::default();
    let limit = std::time::Duration::from_secs(5);
    let policy = HttpPolicy::new().request_body_timeout(limit).budget(ByteBudget::new(6));
    let router = Router::new().route("/p", on_post(counted(&runs)).layer(at_most_once().policy(policy)));
    let stalls = stream::iter([Ok::<_, Error>(Bytes::from("12345"))]).chain(stream::pending());
    let start = tokio::time::Instant::now();
    let answer = send(&router, with_body(post("/p", "k"), Body::from_stream(stalls))).await;
    answer.assert_problem(ProblemKind::BodyTooSlow);
    assert_eq!((start.elapsed(), runs.count()), (limit, 0));
    send(&router, with_body(post("/p", "k"), Body::from("123456"))).await.assert_run(1);
}
