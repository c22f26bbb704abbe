//! Which requests are admitted: principals and keys.

use std::sync::Arc;

use actix_web::dev::Service;
use actix_web::test::{TestRequest, init_service};
use actix_web::{App, HttpMessage, HttpRequest, HttpResponse, web};
use futures_util::future::join;
use idem_actix::{HttpPolicy, IdempotencyLayer, ProblemKind};
use tokio::sync::Semaphore;

use crate::support::{Runs, counted, counted_at_gate, eventually, memory, post, send};

fn user(request: &HttpRequest) -> Option<String> {
    Some(request.headers().get("x-user")?.to_str().ok()?.to_owned())
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

#[actix_web::test]
async fn the_keys_of_one_principal_at_once_can_be_limited() {
    let (runs, gate) = (Runs::default(), Arc::new(Semaphore::new(0)));
    let handler = counted_at_gate(&runs, &gate);
    let layer = IdempotencyLayer::at_most_once(memory()).scope(user);
    let layer = layer.policy(HttpPolicy::new().max_keys_per_principal(1));
    let app = init_service(App::new().wrap(layer).route("/p", web::post().to(handler))).await;
    let by = |user: &'static str, key: &str| send(&app, post("/p", key).insert_header(("x-user", user)));
    let second = async {
        eventually("the first run", async || (runs.count() == 1).then_some(())).await;
        by("acme", "k2").await.assert_problem(ProblemKind::ShareExceeded);
        gate.add_permits(3);
        by("other", "k1").await.assert_run(2);
    };
    let (first, ()) = join(by("acme", "k1"), second).await;
    first.assert_run(1);
    by("acme", "k2").await.assert_run(3);
    assert!(by("acme", "k1").await.is_replay());
}
