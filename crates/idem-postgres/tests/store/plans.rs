//! The plans that connections keep, however small the table was when they were made.

use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use crate::support::{Configure as _, Schema, connection, number, sql};
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use idem_core::{Acquire, AcquireOutcome, IdempotencyStore, Lease, Settlement};
use idem_postgres::{PostgresConfig, PostgresStore};
use idem_testkit::fixture::{KEPT, checkpoint, completed, request};

const ROUNDS: i64 = 200;

/// The verbs of a round.
const VERBS: i64 = 7;

async fn acquired(store: &PostgresStore, request: &Acquire) -> Lease {
    match store.acquire(request).await.unwrap() {
        AcquireOutcome::Acquired(lease) => lease,
        other => panic!("a fresh key was not acquired: {other:?}"),
    }
}

async fn round(store: &PostgresStore) {
    let (kept, given_back) = (request(), request());
    let lease = acquired(store, &kept).await;
    store.renew(&lease, kept.term).await.unwrap();
    store.checkpoint(&lease, &checkpoint("half")).await.unwrap();
    store.settle(&lease, &completed(), KEPT).await.unwrap();
    store.peek(&kept.id).await.unwrap();
    let lease = acquired(store, &given_back).await;
    store.settle(&lease, &Settlement::Released, KEPT).await.unwrap();
}

/// Plans are made on an empty table, and kept while `together` rounds at a time fill it.
async fn reads_little(configure: fn(PostgresConfig) -> PostgresConfig, together: i64) {
    let schema = Schema::new();
    let name = &schema.name;
    let mut beside = connection().await;
    let store = PostgresStore::open(configure(schema.config().verb_connections(NonZeroU32::MIN))).await.unwrap();
    // Without statistics, the planner assumes that the table is larger than it is.
    sql(&mut beside, format!("VACUUM ANALYZE {name}.idem_records")).await;
    for _ in 0..ROUNDS / together {
        (0..together).map(|_| round(&store)).collect::<FuturesUnordered<_>>().collect::<()>().await;
    }
    drop(store);
    // A session has reported what it read once it has ended.
    let sessions = format!("SELECT count(*) FROM pg_stat_activity WHERE application_name = '{name}'");
    let deadline = Instant::now() + Duration::from_secs(10);
    while number(&mut beside, &sessions).await > 0 {
        assert!(Instant::now() < deadline, "the connection of the verbs does not end");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let read = "SELECT coalesce(sum(idx_tup_read), 0)::BIGINT FROM pg_stat_all_indexes";
    let read = number(&mut beside, format!("{read} WHERE schemaname = '{name}'")).await;
    assert!(read >= ROUNDS, "{read} entries of indexes were counted for {ROUNDS} rounds");
    assert!(read <= ROUNDS * VERBS * 2, "{read} entries of indexes were read for {} verbs", ROUNDS * VERBS);
    let rows = "SELECT coalesce(sum(seq_tup_read), 0)::BIGINT FROM pg_stat_all_tables";
    let rows = number(&mut beside, format!("{rows} WHERE schemaname = '{name}'")).await;
    assert!(rows <= ROUNDS, "{rows} rows were read one after another for {} verbs", ROUNDS * VERBS);
}

#[tokio::test]
async fn a_plan_that_was_made_on_an_empty_table_does_not_read_all_of_a_full_one() {
    reads_little(|config| config, 1).await;
}

#[tokio::test]
async fn nor_does_one_that_was_made_for_many_verbs() {
    reads_little(|config| config, 20).await;
}

#[tokio::test]
async fn nor_does_one_in_partitions() {
    reads_little(|config| config.partitioned(Duration::from_secs(3600)), 20).await;
}
