//! The order of layers in the README: what each layer does outside of the idempotency layer, and what it would do inside.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::Router;
use axum::extract::Request;
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::post as on_post;
use http::{HeaderValue, StatusCode};
use idem_axum::ProblemKind;
use tower_http::limit::RequestBodyLimitLayer;

use crate::support::{Runs, at_most_once, counted, post, send, with, with_body};

/// Where a layer stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Outside,
    Inside,
}

/// A router with the idempotency layer, and another layer outside or inside of it.
macro_rules! stacked {
    ($place:expr, $runs:expr, $layer:expr) => {{
        let router = Router::new().route("/p", on_post(counted($runs)));
        match $place {
            Place::Outside => router.layer(at_most_once()).layer($layer),
            Place::Inside => router.layer($layer).layer(at_most_once()),
        }
    }};
}

/// Refuses requests without the right token.
async fn authenticate(request: Request, next: Next) -> Response {
    match request.headers().get("authorization").map(HeaderValue::as_bytes) {
        Some(b"Bearer right") => next.run(request).await,
        _ => StatusCode::UNAUTHORIZED.into_response(),
    }
}

#[tokio::test]
async fn authentication_outside_keeps_replays_from_strangers_and_a_refusal_is_never_stored() {
    for place in [Place::Outside, Place::Inside] {
        let router = stacked!(place, &Runs::default(), from_fn(authenticate));
        assert_eq!(send(&router, post("/p", "k")).await.status, StatusCode::UNAUTHORIZED);
        send(&router, with(post("/p", "k"), "authorization", "Bearer right")).await.assert_run(1);
        // Inside, authentication does not see requests for a replay.
        let stranger = send(&router, post("/p", "k")).await;
        assert_eq!(stranger.status == StatusCode::UNAUTHORIZED, place == Place::Outside, "{place:?}");
    }
}

#[tokio::test]
async fn a_rate_limit_outside_counts_replays_and_one_inside_counts_runs_and_neither_refusal_is_stored() {
    for (place, replays_pass) in [(Place::Outside, false), (Place::Inside, true)] {
        let (runs, left) = (Runs::default(), Arc::new(AtomicUsize::new(0)));
        let limit = {
            let left = Arc::clone(&left);
            from_fn(move |request: Request, next: Next| {
                let left = Arc::clone(&left);
                async move {
                    match left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)) {
                        Ok(_) => next.run(request).await,
                        Err(_) => StatusCode::TOO_MANY_REQUESTS.into_response(),
                    }
                }
            })
        };
        let router = stacked!(place, &runs, limit);
        assert_eq!(send(&router, post("/p", "k")).await.status, StatusCode::TOO_MANY_REQUESTS);
        left.store(1, Ordering::SeqCst);
        send(&router, post("/p", "k")).await.assert_run(1);
        let again = send(&router, post("/p", "k")).await;
        assert_eq!(again.is_replay(), replays_pass, "{place:?}: {again:?}");
    }
}

#[tokio::test]
async fn tracing_outside_sees_every_request_and_inside_only_what_runs() {
    for (place, seen) in [(Place::Outside, 3), (Place::Inside, 1)] {
        let count = Runs::default();
        let trace = {
            let count = count.clone();
            from_fn(move |request: Request, next: Next| {
                count.next();
                next.run(request)
            })
        };
        let router = stacked!(place, &Runs::default(), trace);
        for _ in 0..3 {
            send(&router, post("/p", "k")).await;
        }
        assert_eq!(count.count(), seen, "{place:?}");
    }
}

#[tokio::test]
async fn a_body_limit_outside_leaves_no_record_and_inside_its_refusal_is_the_answer() {
    let body = |body: &'static str| with(with_body(post("/p", "k"), body), "content-length", &body.len().to_string());
    for place in [Place::Outside, Place::Inside] {
        let runs = Runs::default();
        let router = stacked!(place, &runs, RequestBodyLimitLayer::new(4));
        let large = send(&router, body("12345")).await;
        assert_eq!((large.status, runs.count()), (StatusCode::PAYLOAD_TOO_LARGE, 0));
        let again = send(&router, body("12345")).await;
        assert_eq!((again.status, again.is_replay()), (StatusCode::PAYLOAD_TOO_LARGE, place == Place::Inside));
        let small = send(&router, body("1234")).await;
        match place {
            Place::Outside => small.assert_run(1),
            Place::Inside => small.assert_problem(ProblemKind::Mismatch),
        }
    }
}
