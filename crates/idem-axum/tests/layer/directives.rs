//! What a handler may say about one response.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::response::{IntoResponse, Response};
use axum::routing::post as on_post;
use http::StatusCode;
use idem_axum::{
    HttpPolicy, IdempotencyLayer, IdempotentTransaction, Meaning, ProblemKind, ResponseDirectives, SingleTenant,
};
use idem_core::memory::ManualClock;
use idem_core::{MemoryStore, Timestamp};
use idem_sqlite::SqliteTransaction;

use crate::support::{Database, Runs, at_most_once, pay, post, send};

/// A layer whose store's clock stands still until the test moves it.
fn with_clock() -> (IdempotencyLayer<SingleTenant>, Arc<ManualClock>) {
    let clock = Arc::new(ManualClock::new(Timestamp::from_unix_micros(1_700_000_000_000_000)));
    let store = MemoryStore::with_clock(NonZeroUsize::new(100).unwrap(), clock.clone());
    (IdempotencyLayer::at_most_once(Arc::new(store)).single_tenant(), clock)
}

/// A route that answers which run it was, with this status and these directives.
fn route(
    runs: &Runs,
    status: StatusCode,
    directives: ResponseDirectives,
    layer: IdempotencyLayer<SingleTenant>,
) -> Router {
    let runs = runs.clone();
    let handler = async move || directed(status, format!("run {}", runs.next()), &directives);
    Router::new().route("/p", on_post(handler).layer(layer))
}

fn directed(status: StatusCode, body: String, directives: &ResponseDirectives) -> Response {
    let mut response = (status, body).into_response();
    response.extensions_mut().insert(directives.clone());
    response
}

#[tokio::test]
async fn without_directives_a_response_is_replayed() {
    let runs = Runs::default();
    let router = route(&runs, StatusCode::CREATED, ResponseDirectives::new(), at_most_once());
    let first = send(&router, post("/p", "k")).await;
    first.assert_run(1);
    send(&router, post("/p", "k")).await.assert_replay_of(&first);
}

#[tokio::test]
async fn a_response_that_is_not_to_be_stored_frees_the_key() {
    for status in [StatusCode::CREATED, StatusCode::UNPROCESSABLE_ENTITY, StatusCode::SERVICE_UNAVAILABLE] {
        let runs = Runs::default();
        let router = route(&runs, status, ResponseDirectives::new().do_not_store(), at_most_once());
        for run in 1..=3 {
            let answer = send(&router, post("/p", "k")).await;
            answer.assert_run(run);
            assert_eq!(answer.status, status);
        }
    }
}

#[tokio::test]
async fn a_retention_of_its_own_ends_earlier_than_the_usual_one() {
    let (hour, runs) = (Duration::from_secs(60 * 60), Runs::default());
    let (layer, clock) = with_clock();
    let router = route(&runs, StatusCode::CREATED, ResponseDirectives::new().retain_for(hour), layer);
    let first = send(&router, post("/p", "k")).await;
    assert_eq!(first.header("idempotency-retention"), Some("3600"));
    clock.advance(hour - Duration::from_secs(1));
    let again = send(&router, post("/p", "k")).await;
    again.assert_replay_of(&first);
    assert_eq!(again.header("idempotency-retention"), None);
    clock.advance(Duration::from_secs(1));
    send(&router, post("/p", "k")).await.assert_run(2);
}

#[tokio::test]
async fn the_usual_retention_is_a_day() {
    let (day, runs) = (Duration::from_secs(24 * 60 * 60), Runs::default());
    let (layer, clock) = with_clock();
    let router = route(&runs, StatusCode::CREATED, ResponseDirectives::new(), layer);
    let first = send(&router, post("/p", "k")).await;
    assert_eq!(first.header("idempotency-retention"), Some("86400"));
    clock.advance(day - Duration::from_secs(1));
    send(&router, post("/p", "k")).await.assert_replay_of(&first);
    clock.advance(Duration::from_secs(1));
    send(&router, post("/p", "k")).await.assert_run(2);
}

#[tokio::test]
async fn a_failure_that_is_marked_as_safe_to_retry_runs_again_after_its_rest() {
    let (layer, clock) = with_clock();
    let runs = Runs::default();
    let directives = ResponseDirectives::new().retryable_after(Duration::from_secs(20));
    let router = route(&runs, StatusCode::BAD_GATEWAY, directives, layer);
    send(&router, post("/p", "k")).await.assert_run(1);
    clock.advance(Duration::from_secs(19));
    let early = send(&router, post("/p", "k")).await;
    early.assert_problem(ProblemKind::Backoff);
    assert_eq!(early.header("retry-after"), Some("1"));
    clock.advance(Duration::from_secs(1));
    send(&router, post("/p", "k")).await.assert_run(2);
}

#[tokio::test]
async fn a_retryable_failure_without_a_time_rests_for_the_usual_backoff() {
    let (layer, clock) = with_clock();
    let runs = Runs::default();
    let router = route(&runs, StatusCode::BAD_GATEWAY, ResponseDirectives::new().retryable_after(None), layer);
    send(&router, post("/p", "k")).await.assert_run(1);
    let early = send(&router, post("/p", "k")).await;
    early.assert_problem(ProblemKind::Backoff);
    assert_eq!(early.header("retry-after"), Some("1"));
    clock.advance(Duration::from_secs(1));
    send(&router, post("/p", "k")).await.assert_run(2);
}

#[tokio::test]
async fn a_body_that_is_not_to_be_kept_leaves_a_tombstone() {
    let runs = Runs::default();
    let router = route(&runs, StatusCode::CREATED, ResponseDirectives::new().do_not_retain_body(), at_most_once());
    send(&router, post("/p", "k")).await.assert_run(1);
    let again = send(&router, post("/p", "k")).await;
    again.assert_problem(ProblemKind::BodyNotRetained);
    assert!(again.is_replay());
    assert_eq!(again.json()["original_status"], 201);
    assert_eq!(runs.count(), 1);
}

#[tokio::test]
async fn a_4xx_keeps_its_writes_only_if_it_says_so() {
    for (directives, kept) in [(ResponseDirectives::new(), 0), (ResponseDirectives::new().keep_writes(), 1)] {
        let database = Database::new().await;
        let handler = async move |mut transaction: IdempotentTransaction<SqliteTransaction>| {
            pay(&mut transaction).await;
            directed(StatusCode::UNPROCESSABLE_ENTITY, "no".to_owned(), &directives)
        };
        let router = Router::new().route("/p", on_post(handler).layer(database.layer()));
        let first = send(&router, post("/p", "k")).await;
        assert_eq!((first.status, first.text()), (StatusCode::UNPROCESSABLE_ENTITY, "no"));
        assert_eq!(database.payments().await, kept);
        send(&router, post("/p", "k")).await.assert_replay_of(&first);
        assert_eq!(database.payments().await, kept);
    }
}

#[tokio::test]
async fn what_is_not_stored_may_keep_its_writes_and_a_retryable_failure_may_not() {
    let not_stored = ResponseDirectives::new().do_not_store();
    let cases = [
        (StatusCode::CREATED, not_stored.clone(), 1),
        (StatusCode::CONFLICT, not_stored.clone(), 0),
        (StatusCode::CONFLICT, not_stored.keep_writes(), 1),
        (StatusCode::CREATED, ResponseDirectives::new().retryable_after(None), 0),
        (StatusCode::CREATED, ResponseDirectives::new().retryable_after(None).keep_writes(), 0),
    ];
    for (status, directives, kept) in cases {
        let database = Database::new().await;
        let said = directives.clone();
        let handler = async move |mut transaction: IdempotentTransaction<SqliteTransaction>| {
            pay(&mut transaction).await;
            directed(status, String::new(), &directives)
        };
        let router = Router::new().route("/p", on_post(handler).layer(database.layer()));
        assert_eq!(send(&router, post("/p", "k")).await.status, status);
        assert_eq!(database.payments().await, kept, "{status}, {said:?}");
    }
}

/// A handler that pays, and then answers as a GraphQL server does.
fn graphql(database: &Database, policy: &HttpPolicy, body: &'static str) -> Router {
    let handler = async move |mut transaction: IdempotentTransaction<SqliteTransaction>| {
        pay(&mut transaction).await;
        ([("content-type", "application/json")], body)
    };
    Router::new().route("/p", on_post(handler).layer(database.layer().policy(policy.clone())))
}

#[tokio::test]
async fn a_graphql_mutation_that_failed_is_rolled_back_and_may_run_again() {
    let policy = HttpPolicy::new().classify(Meaning::of_graphql);
    // Also where no body is stored.
    for (policy, stored) in [(policy.clone(), r#"{"data":{"pay":1}}"#), (policy.key_only(), "")] {
        let database = Database::new().await;
        for failed in
            [r#"{"errors":[{"message":"no funds"}],"data":{"pay":null}}"#, r#"{"errors":[{"message":"syntax"}]}"#]
        {
            let answer = send(&graphql(&database, &policy, failed), post("/p", "k")).await;
            assert_eq!((answer.status, answer.text()), (StatusCode::OK, failed));
            assert_eq!(database.payments().await, 0, "{failed}");
        }
        let first = send(&graphql(&database, &policy, r#"{"data":{"pay":1}}"#), post("/p", "k")).await;
        assert!(!first.is_replay());
        assert_eq!(database.payments().await, 1);
        let again = send(&graphql(&database, &policy, r#"{"data":{"pay":2}}"#), post("/p", "k")).await;
        assert_eq!((again.is_replay(), again.status, again.text()), (true, StatusCode::OK, stored));
        assert_eq!(database.payments().await, 1);
    }
}

#[tokio::test]
async fn a_request_that_failed_validation_may_be_corrected_where_the_policy_says_so() {
    let runs = Runs::default();
    let policy = HttpPolicy::new().classify(|response| match response.status {
        422 => Meaning::Release,
        status => Meaning::of_status(status),
    });
    let handler = {
        let runs = runs.clone();
        async move |body: String| match body.as_str() {
            "right" => (StatusCode::CREATED, format!("run {}", runs.next())),
            wrong => (StatusCode::UNPROCESSABLE_ENTITY, wrong.to_owned()),
        }
    };
    let router = Router::new().route("/p", on_post(handler).layer(at_most_once().policy(policy)));
    let with = |body: &'static str| post("/p", "k").map(|_| body.into());
    assert_eq!(send(&router, with("wrong")).await.status, StatusCode::UNPROCESSABLE_ENTITY);
    let first = send(&router, with("right")).await;
    first.assert_run(1);
    send(&router, with("right")).await.assert_replay_of(&first);
    send(&router, with("wrong")).await.assert_problem(ProblemKind::Mismatch);
}

#[tokio::test]
async fn a_policy_that_keeps_only_keys_replays_status_and_location() {
    let runs = Runs::default();
    let handler = {
        let runs = runs.clone();
        async move || {
            let headers = [("location", "/payments/7"), ("etag", "\"7\""), ("x-trace", "t")];
            (StatusCode::CREATED, headers, format!("secret {}", runs.next()))
        }
    };
    let policy = HttpPolicy::new().key_only().allow_stored_header("x-trace");
    let router = Router::new().route("/p", on_post(handler).layer(at_most_once().policy(policy)));
    let first = send(&router, post("/p", "k")).await;
    assert_eq!((first.status, first.text()), (StatusCode::CREATED, "secret 1"));
    let again = send(&router, post("/p", "k")).await;
    assert!(again.is_replay());
    assert_eq!((again.status, again.text()), (StatusCode::CREATED, ""));
    assert_eq!((again.header("location"), again.header("etag")), (Some("/payments/7"), None));
    assert_eq!(again.header("x-trace"), Some("t"));
    assert_eq!(runs.count(), 1);
}

#[tokio::test]
async fn a_key_that_is_too_short_is_refused_and_says_how_long_it_has_to_be() {
    let runs = Runs::default();
    let layer = at_most_once().policy(HttpPolicy::new().min_key_length(16));
    let router = route(&runs, StatusCode::CREATED, ResponseDirectives::new(), layer);
    let refused = send(&router, post("/p", "123456789012345")).await;
    refused.assert_problem(ProblemKind::KeyInvalid);
    assert_eq!(refused.json()["detail"], "The key has 15 bytes; at least 16 are needed, as in a UUID.");
    send(&router, post("/p", "1234567890123456")).await.assert_run(1);
}

#[tokio::test]
async fn what_the_handler_says_goes_before_what_the_policy_says() {
    let runs = Runs::default();
    let policy = HttpPolicy::new().classify(|_| Meaning::Complete);
    let layer = at_most_once().policy(policy);
    let router = route(&runs, StatusCode::CREATED, ResponseDirectives::new().do_not_store(), layer);
    send(&router, post("/p", "k")).await.assert_run(1);
    send(&router, post("/p", "k")).await.assert_run(2);
}
