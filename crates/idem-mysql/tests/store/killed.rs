//! A server that is killed by `kill -9`, with default settings.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use idem_core::{
    AcquireOutcome, Begin, Durability, IdempotencyStore as _, OwnerOutcome, TransactionalStore as _, Writes,
};
use idem_mysql::{MySqlConfig, MySqlStore, MySqlTransaction};
use idem_servers::MariaDb;
use idem_testkit::fixture::{KEPT, completed, request};
use sqlx::{Connection as _, MySqlConnection};
use tokio::sync::Notify;

use crate::support::{number, sql};

const RUNS: usize = 60;

/// How many runs have ended when the server is killed.
const KILLED_AFTER: usize = 20;

#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn what_was_acknowledged_before_a_kill_is_there_and_the_rest_is_as_told() {
    let mut server = MariaDb::start().unwrap();
    let config = MySqlConfig::new(server.url()).verb_connections(8.try_into().unwrap());
    let store = Arc::new(MySqlStore::open(config.max_transactions(8.try_into().unwrap())).await.unwrap());
    assert_eq!(store.durability().durability, Durability::Power, "{}", store.durability());
    sql(
        &mut MySqlConnection::connect(&server.url()).await.unwrap(),
        "CREATE TABLE effects (id BINARY(32) PRIMARY KEY)",
    )
    .await;
    let (ended, enough) = (Arc::new(AtomicUsize::new(0)), Arc::new(Notify::new()));
    let mut runs = Vec::new();
    for number in 0..RUNS {
        let (store, ended, enough) = (store.clone(), ended.clone(), enough.clone());
        runs.push(tokio::spawn(async move {
            // Every second run settles by a verb.
            let is_transactional = number % 2 == 0;
            let request = request();
            let outcome =
                if is_transactional { transactional(&store, &request).await } else { leased(&store, &request).await };
            if ended.fetch_add(1, Ordering::SeqCst) + 1 == KILLED_AFTER {
                enough.notify_one();
            }
            (request.id, is_transactional, outcome)
        }));
    }
    enough.notified().await;
    server.kill().unwrap();
    let mut answers = Vec::new();
    for run in runs {
        answers.push(run.await.unwrap());
    }
    server.start_again().unwrap();
    let mut connection = MySqlConnection::connect(&server.url()).await.unwrap();
    let mut told = [0, 0];
    for (id, is_transactional, outcome) in answers {
        let record = store.peek(&id).await.unwrap();
        let settled = record.is_some_and(|record| record.replay().is_some());
        let literal: String = id.as_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
        let effect = number(&mut connection, format!("SELECT COUNT(*) FROM effects WHERE id = x'{literal}'")).await;
        assert_eq!(effect == 1, settled && is_transactional, "the write and the record went apart");
        told[usize::from(outcome == Some(true))] += 1;
        if let Some(outcome) = outcome {
            assert_eq!(settled, outcome, "it is not as told");
        }
    }
    assert!(told[1] >= KILLED_AFTER && told[0] > 0, "settled and not: {told:?}");
    store.self_test().await.unwrap();
}

/// Whether the run was settled; `None` if the store does not know.
async fn leased(store: &MySqlStore, request: &idem_core::Acquire) -> Option<bool> {
    let Ok(AcquireOutcome::Acquired(lease)) = store.acquire(request).await else { return Some(false) };
    match store.settle(&lease, &completed(), KEPT).await {
        Ok(outcome) => Some(outcome == OwnerOutcome::Applied),
        Err(error) => (!error.is_indeterminate()).then_some(false),
    }
}

async fn transactional(store: &MySqlStore, request: &idem_core::Acquire) -> Option<bool> {
    let Ok(Begin::Acquired { mut transaction, .. }) = store.begin(request).await else { return Some(false) };
    let literal: String = request.id.as_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    let connection = transaction.as_any_mut().downcast_mut::<MySqlTransaction>().unwrap();
    let insert = sqlx::raw_sql(sqlx::AssertSqlSafe(format!("INSERT INTO effects VALUES (x'{literal}')")));
    if insert.execute(&mut **connection).await.is_err() {
        return Some(false);
    }
    match transaction.finish(&completed(), KEPT, Writes::Keep).await {
        Ok(outcome) => Some(outcome == OwnerOutcome::Applied),
        Err(error) => (!error.is_indeterminate()).then_some(false),
    }
}
