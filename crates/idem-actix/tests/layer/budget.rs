//! The budget of all request bodies: which requests are refused, and when a share is given back.

use std::sync::Arc;

use actix_web::error::PayloadError;
use actix_web::test::{TestRequest, init_service};
use actix_web::{App, HttpResponse, web};
use bytes::Bytes;
use futures_util::future::join;
use futures_util::stream;
use idem_actix::{HttpPolicy, IdempotencyLayer, ProblemKind, SingleTenant};
use idem_http::ByteBudget;
use tokio::sync::Semaphore;

use crate::support::{Runs, at_most_once, counted, counted_at_gate, eventually, post, send, send_chunks};

/// A layer that holds at most 8 bytes of request bodies.
fn narrow() -> IdempotencyLayer<SingleTenant> {
    at_most_once().policy(HttpPolicy::new().budget(ByteBudget::new(8)))
}

fn with_body(key: &str, body: &'static str) -> TestRequest {
    post("/p", key).set_payload(body)
}

#[actix_web::test]
async fn bodies_over_the_budget_are_turned_away_until_a_handler_has_had_its_own() {
    let (runs, gate) = (Runs::default(), Arc::new(Semaphore::new(0)));
    let handler = counted_at_gate(&runs, &gate);
    let app = init_service(App::new().wrap(narrow()).route("/p", web::post().to(handler))).await;
    let second = async {
        eventually("the first run", async || (runs.count() == 1).then_some(())).await;
        let refused = send(&app, with_body("k2", "123")).await;
        refused.assert_problem(ProblemKind::Overloaded);
        assert_eq!((refused.header("retry-after"), runs.count()), (Some("1"), 1));
        gate.add_permits(2);
    };
    let (first, ()) = join(send(&app, with_body("k1", "12345678")), second).await;
    first.assert_run(1);
    send(&app, with_body("k2", "12345678")).await.assert_run(2);
}

#[actix_web::test]
async fn a_handler_that_panics_gives_its_share_back() {
    let handler = async |body: Bytes| -> HttpResponse { panic!("the handler panics over {} bytes", body.len()) };
    let app = init_service(App::new().wrap(narrow()).route("/p", web::post().to(handler))).await;
    for key in ["k1", "k2"] {
        send(&app, with_body(key, "12345678")).await.assert_problem(ProblemKind::HandlerFailed);
    }
}

#[actix_web::test]
async fn a_request_that_is_refused_gives_its_share_back() {
    let runs = Runs::default();
    let app = init_service(App::new().wrap(narrow()).route("/p", web::post().to(counted(&runs)))).await;
    send(&app, with_body("k", "12345678")).await.assert_run(1);
    // One body arrived completely, and one broke off.
    send(&app, with_body("k", "87654321")).await.assert_problem(ProblemKind::Mismatch);
    let broken = stream::iter([Ok(Bytes::from("1234567")), Err(PayloadError::Incomplete(None))]);
    send_chunks(&app, broken).await.assert_problem(ProblemKind::BodyIncomplete);
    assert!(send(&app, with_body("k", "12345678")).await.is_replay());
}
