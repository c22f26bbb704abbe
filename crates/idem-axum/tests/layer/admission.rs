//! Which requests are admitted: principals and keys.

use std::sync::Arc;

use axum::routing::{get, post as on_post};
use axum::{Extension, Router};
use http::StatusCode;
use idem_axum::{HttpPolicy, IdempotencyLayer, ProblemKind};
use tokio::sync::Semaphore;

use crate::support::{Runs, at_most_once, counted, memory, post, send};

/// Keys belong to the `x-user` of a request.
fn by_user(runs: &Runs) -> Router {
    let user = |request: &http::request::Parts| Some(request.headers.get("x-user")?.to_str().ok()?.to_owned());
    let layer = IdempotencyLayer::at_most_once(memory()).scope(user);
    Router::new().route("/p", on_post(counted(runs)).get(counted(runs)).layer(layer))
}

#[tokio::test]
async fn a_request_that_is_not_protected_needs_no_principal() {
    let runs = Runs::default();
    let request = http::Request::get("/p").header("idempotency-key", "k").body(axum::body::Body::empty()).unwrap();
    send(&by_user(&runs), request).await.assert_run(1);
}

#[tokio::test]
async fn the_principal_can_be_what_an_outer_layer_has_found() {
    #[derive(Clone)]
    struct Account(&'static str);
    let runs = Runs::default();
    let account =
        |request: &http::request::Parts| request.extensions.get::<Account>().map(|account| account.0.to_owned());
    let layer = IdempotencyLayer::at_most_once(memory()).scope(account);
    let unauthenticated = Router::new().route("/p", on_post(counted(&runs)).layer(layer));
    send(&unauthenticated, post("/p", "k")).await.assert_problem(ProblemKind::PrincipalMissing);
    let acme = unauthenticated.clone().layer(Extension(Account("acme")));
    let other = unauthenticated.layer(Extension(Account("other")));
    send(&acme, post("/p", "k")).await.assert_run(1);
    send(&other, post("/p", "k")).await.assert_run(2);
    assert!(send(&acme, post("/p", "k")).await.is_replay());
}

#[tokio::test]
async fn the_names_of_both_headers_can_be_chosen() {
    let runs = Runs::default();
    let layer = at_most_once().policy(HttpPolicy::new().key_header("X-Token").replay_header("X-Again"));
    let router = Router::new().route("/p", on_post(counted(&runs)).layer(layer));
    let request = || http::Request::post("/p").header("x-token", "k").body(axum::body::Body::empty()).unwrap();
    assert_eq!(send(&router, request()).await.header("x-again"), None);
    let again = send(&router, request()).await;
    assert_eq!((again.text(), again.header("x-again")), ("run 1", Some("true")));
    assert!(!again.is_replay());
}

#[tokio::test]
async fn get_is_never_protected_even_if_it_is_named() {
    let runs = Runs::default();
    let layer = at_most_once().policy(HttpPolicy::new().methods(&["GET", "PUT"]));
    let router = Router::new().route("/p", get(counted(&runs)).put(counted(&runs)).layer(layer));
    let request = |method| {
        let mut request = post("/p", "k");
        *request.method_mut() = method;
        request
    };
    send(&router, request(http::Method::GET)).await.assert_run(1);
    send(&router, request(http::Method::GET)).await.assert_run(2);
    let first = send(&router, request(http::Method::PUT)).await;
    assert_eq!((first.status, first.text()), (StatusCode::CREATED, "run 3"));
    send(&router, request(http::Method::PUT)).await.assert_replay_of(&first);
}

#[tokio::test]
async fn the_keys_of_one_principal_at_once_can_be_limited() {
    let (runs, gate) = (Runs::default(), Arc::new(Semaphore::new(0)));
    let handler = {
        let (runs, gate) = (runs.clone(), Arc::clone(&gate));
        async move || {
            runs.next();
            gate.acquire().await.unwrap().forget();
            StatusCode::CREATED
        }
    };
    let user = |request: &http::request::Parts| Some(request.headers.get("x-user")?.to_str().ok()?.to_owned());
    let layer = IdempotencyLayer::at_most_once(memory()).scope(user);
    let layer = layer.policy(HttpPolicy::new().max_keys_per_principal(1));
    let router = Router::new().route("/p", on_post(handler).layer(layer));
    let by = |user: &'static str, key: &str| {
        let mut request = post("/p", key);
        request.headers_mut().insert("x-user", http::HeaderValue::from_static(user));
        let router = router.clone();
        async move { send(&router, request).await }
    };
    let first = tokio::spawn(by("acme", "k1"));
    while runs.count() == 0 {
        tokio::task::yield_now().await;
    }
    let refused = by("acme", "k2").await;
    refused.assert_problem(ProblemKind::ShareExceeded);
    assert_eq!((refused.header("retry-after"), runs.count()), (Some("1"), 1));
    gate.add_permits(3);
    assert_eq!(by("other", "k1").await.status, StatusCode::CREATED, "another principal is not affected");
    assert_eq!(first.await.unwrap().status, StatusCode::CREATED);
    assert_eq!(by("acme", "k2").await.status, StatusCode::CREATED);
    assert!(by("acme", "k2").await.is_replay(), "a replay leaves no place taken");
    assert!(by("acme", "k1").await.is_replay());
}
