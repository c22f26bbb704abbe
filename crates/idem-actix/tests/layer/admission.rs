//! Who may ask, and with which key.

use actix_web::dev::Service;
use actix_web::test::{TestRequest, init_service};
use actix_web::{App, HttpMessage, HttpRequest, HttpResponse, web};
use idem_actix::{HttpPolicy, IdempotencyContext, IdempotencyLayer, ProblemKind};

use crate::support::{Runs, at_most_once, counted, memory, post, send};

fn user(request: &HttpRequest) -> Option<String> {
    Some(request.headers().get("x-user")?.to_str().ok()?.to_owned())
}

#[actix_web::test]
async fn a_request_without_a_principal_is_401_whatever_its_key() {
    let runs = Runs::default();
    let layer = IdempotencyLayer::at_most_once(memory()).scope(user);
    let app = init_service(App::new().wrap(layer).route("/p", web::post().to(counted(&runs)))).await;
    for request in [post("/p", "k"), post("/p", ""), TestRequest::post().uri("/p")] {
        let refused = send(&app, request).await;
        refused.assert_problem(ProblemKind::PrincipalMissing);
        assert_eq!(refused.header("www-authenticate"), Some("Bearer"));
    }
    assert_eq!(runs.count(), 0);
}

#[actix_web::test]
async fn two_principals_with_the_same_key_never_meet() {
    let runs = Runs::default();
    let layer = IdempotencyLayer::at_most_once(memory()).scope(user);
    let app = init_service(App::new().wrap(layer).route("/p", web::post().to(counted(&runs)))).await;
    for (at, name) in ["alice", "bob"].into_iter().enumerate() {
        send(&app, post("/p", "k").insert_header(("x-user", name))).await.assert_run(at + 1);
    }
    assert!(send(&app, post("/p", "k").insert_header(("x-user", "alice"))).await.is_replay());
}

#[actix_web::test]
async fn the_principal_can_be_what_an_outer_middleware_has_found() {
    struct Account(&'static str);
    let runs = Runs::default();
    let layer = IdempotencyLayer::at_most_once(memory())
        .scope(|request: &HttpRequest| Some(request.extensions().get::<Account>()?.0));
    let app = App::new().route("/p", web::post().to(counted(&runs))).wrap(layer).wrap_fn(|request, inner| {
        request.extensions_mut().insert(Account("acme"));
        inner.call(request)
    });
    let app = init_service(app).await;
    send(&app, post("/p", "k")).await.assert_run(1);
    assert!(send(&app, post("/p", "k")).await.is_replay());
}

#[actix_web::test]
async fn a_key_that_is_missing_or_malformed_is_refused() {
    let runs = Runs::default();
    let app = init_service(App::new().wrap(at_most_once()).route("/p", web::post().to(counted(&runs)))).await;
    send(&app, TestRequest::post().uri("/p")).await.assert_problem(ProblemKind::KeyMissing);
    send(&app, post("/p", "a b")).await.assert_problem(ProblemKind::KeyInvalid);
    let twice = post("/p", "k").append_header(("idempotency-key", "k"));
    send(&app, twice).await.assert_problem(ProblemKind::KeyInvalid);
    assert_eq!(runs.count(), 0);
}

#[actix_web::test]
async fn where_the_key_is_optional_a_request_without_one_is_not_protected() {
    let layer = at_most_once().policy(HttpPolicy::new().key_optional());
    let handler = |context: Option<IdempotencyContext>| async move { format!("{}", context.is_some()) };
    let app = init_service(App::new().wrap(layer).route("/p", web::post().to(handler))).await;
    assert_eq!(send(&app, TestRequest::post().uri("/p")).await.text(), "false");
    assert_eq!(send(&app, post("/p", "k")).await.text(), "true");
}

#[actix_web::test]
async fn what_is_not_protected_passes_untouched() {
    let layer = IdempotencyLayer::at_most_once(memory()).scope(user);
    let answer = async |body: web::Bytes| HttpResponse::Ok().body(body);
    let handler = move |body: web::Bytes| answer(body);
    let app = init_service(App::new().wrap(layer).route("/p", web::put().to(handler))).await;
    let put = || TestRequest::put().uri("/p").insert_header(("idempotency-key", "k")).set_payload("body");
    for _ in 0..2 {
        let answer = send(&app, put()).await;
        assert_eq!((answer.text(), answer.is_replay()), ("body", false));
    }
}
