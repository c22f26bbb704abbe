//! What extractors give a handler.

use actix_web::test::{TestRequest, init_service};
use actix_web::{App, HttpResponse, web};
use idem_actix::{IdempotencyContext, IdempotencyLayer, IdempotentTransaction, NotProtected, ProblemKind, Rejection};
use idem_log::Log;
use idem_sqlite::SqliteTransaction;

use crate::support::{Answer, Database, at_most_once, memory, post, send};

type Transaction = IdempotentTransaction<SqliteTransaction>;

#[track_caller]
fn assert_refused(answer: &Answer, because: &str) {
    assert_eq!(answer.status, 500);
    assert_eq!(answer.text(), "The server cannot handle this request; its log says why.");
    assert!(!Log::of_process().lines(&["ERROR", "an extractor", because]).is_empty(), "the log does not say {because}");
}

#[actix_web::test]
async fn a_handler_gets_the_context_of_its_run() {
    let handler = |IdempotencyContext(context): IdempotencyContext| async move {
        format!("{} {}", context.attempt(), context.is_protected())
    };
    let app = init_service(App::new().wrap(at_most_once()).route("/p", web::post().to(handler))).await;
    assert_eq!(send(&app, post("/p", "k")).await.text(), "1 true");
}

#[actix_web::test]
async fn the_context_of_a_request_that_is_not_protected_is_refused_with_the_reason() {
    Log::of_process();
    let handler = |_: IdempotencyContext| async { "ran" };
    let app = init_service(App::new().wrap(at_most_once()).route("/p", web::get().to(handler))).await;
    assert_refused(&send(&app, TestRequest::get().uri("/p")).await, "this request is not protected");
}

#[actix_web::test]
async fn the_transaction_of_a_contract_without_one_is_refused_with_the_reason() {
    Log::of_process();
    let handler = |_: Transaction| async { "ran" };
    let app = init_service(App::new().wrap(at_most_once()).route("/p", web::post().to(handler))).await;
    assert_refused(&send(&app, post("/p", "k")).await, "this operation has no transaction");
}

#[actix_web::test]
async fn a_handler_that_also_serves_without_a_transaction_learns_why_it_has_none() {
    let handler = |found: Result<Transaction, Rejection>| async move {
        match found {
            Err(Rejection(NotProtected::NoTransaction(error))) => HttpResponse::Ok().body(error.to_string()),
            _ => HttpResponse::Conflict().finish(),
        }
    };
    let layer = IdempotencyLayer::at_least_once(memory()).single_tenant();
    let app = init_service(App::new().wrap(layer).route("/p", web::post().to(handler))).await;
    assert_eq!(send(&app, post("/p", "k")).await.status, 200);
}

#[actix_web::test]
async fn a_second_extractor_of_the_transaction_is_refused_and_nothing_runs() {
    Log::of_process();
    let database = Database::new().await;
    let handler = |_: Transaction, _: Transaction| async { "ran" };
    let app = init_service(App::new().wrap(database.layer()).route("/p", web::post().to(handler))).await;
    assert_refused(&send(&app, post("/p", "k")).await, "in use elsewhere");
    let other = |_: IdempotentTransaction<String>| async { "ran" };
    let app = init_service(App::new().wrap(database.layer()).route("/p", web::post().to(other))).await;
    assert_refused(&send(&app, post("/p", "other")).await, "alloc::string::String");
}

#[actix_web::test]
async fn a_request_that_another_extractor_refuses_is_settled_by_its_status() {
    let handler = |_: web::Json<u8>| async { "ran" };
    let app = init_service(App::new().wrap(at_most_once()).route("/p", web::post().to(handler))).await;
    let request = || post("/p", "k").insert_header(("content-type", "application/json")).set_payload("no json");
    let first = send(&app, request()).await;
    assert_eq!((first.status.as_u16(), first.problem), (400, None::<ProblemKind>));
    send(&app, request()).await.assert_replay_of(&first);
}
