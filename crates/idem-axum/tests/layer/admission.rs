//! Which requests are admitted: principals and keys.

use axum::routing::{get, post as on_post};
use axum::{Extension, Router};
use http::StatusCode;
use idem_axum::{HttpPolicy, IdempotencyLayer, ProblemKind};

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
