//! Business writes and the record commit together, or not at all.

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::response::{IntoResponse, Response};
use axum::routing::post as on_post;
use bytes::Bytes;
use futures_util::stream;
use http::StatusCode;
use idem_axum::{IdempotentTransaction, ProblemKind, ResponseDirectives};
use idem_sqlite::SqliteTransaction;
use tokio::sync::Semaphore;

use crate::support::{Answer, Database, Runs, eventually, pay, post, send};

type Transaction = IdempotentTransaction<SqliteTransaction>;

/// The answer of a run after the one that kept its transaction. The engine releases the key in the background.
async fn next_run(router: &Router) -> Answer {
    eventually("the release of the key", async || {
        Some(send(router, post("/p", "k")).await).filter(|answer| answer.problem != Some(ProblemKind::InProgress))
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_that_a_spawned_task_keeps_is_rolled_back_and_the_key_is_free() {
    let (database, runs, gate) = (Database::new().await, Runs::default(), Arc::new(Semaphore::new(0)));
    let handler = {
        let (runs, gate) = (runs.clone(), gate.clone());
        async move |mut transaction: Transaction| {
            pay(&mut transaction).await;
            let run = runs.next();
            if run == 1 {
                tokio::spawn(async move {
                    gate.acquire().await.unwrap().forget();
                    drop(transaction);
                });
            }
            (StatusCode::CREATED, format!("run {run}"))
        }
    };
    let router = Router::new().route("/p", on_post(handler).layer(database.layer()));
    let leaked = send(&router, post("/p", "k")).await;
    leaked.assert_problem(ProblemKind::HandlerFailed);
    assert!(leaked.json()["detail"].as_str().unwrap().contains("transaction"));
    gate.add_permits(1);
    next_run(&router).await.assert_run(2);
    assert_eq!((runs.count(), database.payments().await), (2, 1));
}

/// A body that owns the transaction until it ends.
fn body_with(transaction: Transaction, run: usize) -> Body {
    let chunks = [Ok::<_, std::io::Error>(Bytes::from(format!("run {run}")))];
    Body::from_stream(stream::unfold((chunks.into_iter(), transaction), |(mut chunks, transaction)| async {
        chunks.next().map(|chunk| (chunk, (chunks, transaction)))
    }))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_that_a_streamed_body_keeps_is_rolled_back_and_the_key_is_free() {
    let (database, runs) = (Database::new().await, Runs::default());
    let counting = runs.clone();
    let handler = async move |mut transaction: Transaction| -> Response {
        pay(&mut transaction).await;
        let run = counting.next();
        if run > 1 {
            return format!("run {run}").into_response();
        }
        let mut response = body_with(transaction, run).into_response();
        response.extensions_mut().insert(ResponseDirectives::new().do_not_retain_body());
        response
    };
    let router = Router::new().route("/p", on_post(handler).layer(database.layer()));
    send(&router, post("/p", "k")).await.assert_problem(ProblemKind::HandlerFailed);
    next_run(&router).await.assert_run(2);
    assert_eq!((runs.count(), database.payments().await), (2, 1));
}

#[tokio::test]
async fn a_body_that_is_kept_may_own_the_transaction_until_it_ends() {
    let database = Database::new().await;
    let handler = async |mut transaction: Transaction| {
        pay(&mut transaction).await;
        body_with(transaction, 1)
    };
    let router = Router::new().route("/p", on_post(handler).layer(database.layer()));
    let first = send(&router, post("/p", "k")).await;
    first.assert_run(1);
    send(&router, post("/p", "k")).await.assert_replay_of(&first);
    assert_eq!(database.payments().await, 1);
}
