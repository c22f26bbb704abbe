//! How a run ends: a panic, and a hundred requests that wait for it.

use axum::Router;
use axum::routing::post as on_post;
use http::StatusCode;
use idem_axum::{IdempotencyLayer, ProblemKind, SingleTenant};

use crate::support::{Database, Runs, post, post_and_wait, send};

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
