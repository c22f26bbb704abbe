//! How a run ends: a panic, and a hundred that wait for it.

use std::sync::Arc;

use axum::Router;
use axum::routing::post as on_post;
use http::StatusCode;
use idem_axum::{IdempotencyLayer, ProblemKind, SingleTenant};
use tokio::sync::Semaphore;

use crate::support::{Answer, Database, Runs, at_most_once, eventually, memory, post, post_and_wait, send};

/// A route whose first run panics.
fn panicking(runs: &Runs, layer: IdempotencyLayer<SingleTenant>) -> Router {
    let runs = runs.clone();
    let handler = async move || {
        let run = runs.next();
        assert!(run != 1, "the first run panics");
        format!("run {run}")
    };
    Router::new().route("/p", on_post(handler).layer(layer))
}

async fn panicked(router: &Router) {
    let answer = send(router, post("/p", "k")).await;
    answer.assert_problem(ProblemKind::HandlerFailed);
    assert!(!answer.text().contains("the first run"), "the message of a panic is not for clients: {answer:?}");
}

#[tokio::test]
async fn a_panic_under_transactional_frees_the_key() {
    let (database, runs) = (Database::new().await, Runs::default());
    let router = panicking(&runs, database.layer());
    panicked(&router).await;
    send(&router, post("/p", "k")).await.assert_run(2);
}

#[tokio::test]
async fn a_panic_under_at_most_once_is_the_outcome() {
    let runs = Runs::default();
    let router = panicking(&runs, at_most_once());
    panicked(&router).await;
    let again = send(&router, post("/p", "k")).await;
    again.assert_problem_document(ProblemKind::HandlerFailed);
    assert!(again.is_replay());
    assert_eq!(runs.count(), 1);
}

#[tokio::test]
async fn a_panic_under_at_least_once_runs_again_after_its_backoff() {
    let runs = Runs::default();
    let router = panicking(&runs, IdempotencyLayer::at_least_once(memory()).single_tenant());
    panicked(&router).await;
    send(&router, post("/p", "k")).await.assert_problem(ProblemKind::Backoff);
    let second = eventually("the end of the backoff", async || {
        Some(send(&router, post("/p", "k")).await).filter(|answer| answer.problem != Some(ProblemKind::Backoff))
    });
    second.await.assert_run(2);
}

#[tokio::test(flavor = "multi_thread")]
async fn of_100_duplicates_that_wait_one_runs_and_all_get_its_answer() {
    let (runs, gate) = (Runs::default(), Arc::new(Semaphore::new(0)));
    let handler = {
        let (runs, gate) = (runs.clone(), gate.clone());
        async move || {
            let run = runs.next();
            gate.acquire().await.unwrap().forget();
            (StatusCode::CREATED, format!("run {run}"))
        }
    };
    let router = Router::new().route("/p", on_post(handler).layer(at_most_once()));
    let duplicates: Vec<_> = (0..100)
        .map(|_| {
            let router = router.clone();
            tokio::spawn(async move { send(&router, post_and_wait("/p", "k")).await })
        })
        .collect();
    eventually("the first run", async || (runs.count() > 0).then_some(())).await;
    // One that does not wait proves that the run is not over.
    send(&router, post("/p", "k")).await.assert_problem(ProblemKind::InProgress);
    // Were there more runs, all of them would end.
    gate.add_permits(100);
    let mut answers: Vec<Answer> = Vec::new();
    for duplicate in duplicates {
        answers.push(duplicate.await.unwrap());
    }
    assert_eq!(runs.count(), 1);
    assert_eq!(answers.iter().filter(|answer| !answer.is_replay()).count(), 1);
    for answer in answers {
        assert_eq!((answer.status, answer.text()), (StatusCode::CREATED, "run 1"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn of_100_duplicates_under_transactional_one_runs_and_all_get_its_answer() {
    let (database, runs) = (Database::new().await, Runs::default());
    let router = Router::new().route("/p", on_post(crate::support::counted(&runs)).layer(database.layer()));
    let duplicates: Vec<_> = (0..100)
        .map(|_| {
            let router = router.clone();
            tokio::spawn(async move { send(&router, post_and_wait("/p", "k")).await })
        })
        .collect();
    let mut firsts = 0;
    for duplicate in duplicates {
        let answer = duplicate.await.unwrap();
        assert_eq!((answer.status, answer.text()), (StatusCode::CREATED, "run 1"));
        firsts += usize::from(!answer.is_replay());
    }
    assert_eq!((runs.count(), firsts), (1, 1));
}
