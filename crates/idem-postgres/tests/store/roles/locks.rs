//! Locks that a role which may only connect could take, and the error of a start that waits for one.

use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use idem_core::{AcquireOutcome, Begin, OwnerOutcome, Settlement, StoreErrorKind, TransactionalStore, Writes};
use idem_postgres::{PostgresStore, PostgresTransaction};
use idem_testkit::fixture::{KEPT, completed, repeat_of, request};
use sqlx::Row as _;

use crate::support::{Configure as _, Schema, connection, number, sql};

/// Every advisory lock that a session of the store holds while a handler has its transaction.
async fn locks_of_a_run(schema: &Schema, first: &idem_core::Acquire) -> Vec<i64> {
    let store = PostgresStore::open(schema.config()).await.unwrap();
    let begun = store.begin(&repeat_of(first)).await.unwrap();
    assert!(matches!(begun, Begin::Acquired { .. }));
    let locks = format!(
        "SELECT (classid::BIGINT << 32) | objid::BIGINT FROM pg_locks JOIN pg_stat_activity USING (pid)
         WHERE locktype = 'advisory' AND application_name = '{}'",
        schema.name
    );
    sql(&mut connection().await, locks).await.iter().map(|row| row.get(0)).collect()
}

#[tokio::test]
async fn the_lock_of_a_record_follows_from_nothing_that_another_role_knows() {
    let (schema, first) = (Schema::new(), request());
    let one = locks_of_a_run(&schema, &first).await;
    // The same names and the same record; what another role cannot read is different.
    sql(&mut connection().await, format!("DROP SCHEMA {} CASCADE", schema.name)).await;
    let other = locks_of_a_run(&schema, &first).await;
    // One lock marks the run, and the other one shows that to lookups.
    assert_eq!((one.len(), other.len()), (2, 2));
    assert!(one.iter().all(|lock| !other.contains(lock)), "{one:?} and {other:?}");
}

/// A role that may only connect reads a run's locks in `pg_locks`, and keeps one of the two. Repeats of that key get
/// an answer: that the operation is in progress, or the stored one. No session is lost, and no other key waits.
#[tokio::test(flavor = "multi_thread")]
async fn a_role_that_keeps_the_locks_of_a_record_keeps_nothing_else() {
    let (schema, first, other) = (Schema::new(), request(), request());
    // The locks have no order: `pg_locks` does not show which of them a transaction waits for.
    let locks = locks_of_a_run(&schema, &first).await;
    assert_eq!(locks.len(), 2);
    let store = PostgresStore::open(schema.config().max_transactions(NonZeroU32::MIN)).await.unwrap();
    let mut squatter = connection().await;
    for lock in &locks {
        sql(&mut squatter, format!("SELECT pg_advisory_lock({lock})")).await;
        for _ in 0..3 {
            let began = Instant::now();
            let refused = store.begin(&repeat_of(&first)).await.unwrap();
            assert!(matches!(refused, Begin::Answered(AcquireOutcome::InProgress { .. })), "not refused");
            assert!(began.elapsed() < Duration::from_secs(10), "it waited for {:?}", began.elapsed());
            settle_in_transaction(&store, &repeat_of(&other)).await;
        }
        sql(&mut squatter, "SELECT pg_advisory_unlock_all()").await;
    }
    settle_in_transaction(&store, &first).await;
    for lock in &locks {
        sql(&mut squatter, format!("SELECT pg_advisory_lock({lock})")).await;
        let replayed = store.begin(&repeat_of(&first)).await.unwrap();
        assert!(matches!(replayed, Begin::Answered(AcquireOutcome::Replay(_))), "not replayed");
        sql(&mut squatter, "SELECT pg_advisory_unlock_all()").await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_waited_for_a_lookup_leaves_the_limit_of_waits_as_it_was() {
    let (schema, first) = (Schema::new(), request());
    let locks = locks_of_a_run(&schema, &first).await;
    let patience = Duration::from_secs(30);
    let config = schema.config().lock_timeout(patience).statement_timeout(patience);
    let store = PostgresStore::open(config).await.unwrap();
    let [mut squatter, mut watch] = [connection().await, connection().await];
    let held = format!(
        "SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid)
        WHERE locktype = 'advisory' AND application_name = '{}'",
        schema.name
    );
    while number(&mut watch, held.clone()).await > 0 {
        tokio::task::yield_now().await;
    }
    let waiting = format!(
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND application_name = '{}'",
        schema.name
    );
    let mut runs = 0;
    for lock in locks {
        // It leaves an idle session. Without one, the operation is only looked up, and that meets the squatter's lock.
        settle_in_transaction(&store, &request()).await;
        sql(&mut squatter, format!("SELECT pg_advisory_lock({lock})")).await;
        let (beginning, repeat) = (store.clone(), repeat_of(&first));
        let begun = tokio::spawn(async move { beginning.begin(&repeat).await.unwrap() });
        // The lock of the operation is not waited for.
        while !begun.is_finished() && number(&mut watch, waiting.clone()).await == 0 {
            tokio::task::yield_now().await;
        }
        sql(&mut squatter, "SELECT pg_advisory_unlock_all()").await;
        if let Begin::Acquired { mut transaction, .. } = begun.await.unwrap() {
            let handlers = transaction.as_any_mut().downcast_mut::<PostgresTransaction>().unwrap();
            let timeout = sqlx::raw_sql("SHOW lock_timeout").fetch_one(&mut **handlers).await.unwrap();
            assert_eq!(timeout.get::<String, _>(0), "0");
            transaction.finish(&Settlement::Released, KEPT, Writes::Discard).await.unwrap();
            runs += 1;
        }
    }
    assert_eq!(runs, 1);
}

/// Runs an operation unless it is answered. The handler's statements keep the server's default `lock_timeout`.
async fn settle_in_transaction(store: &PostgresStore, first: &idem_core::Acquire) {
    match store.begin(first).await.unwrap() {
        Begin::Acquired { mut transaction, .. } => {
            let handlers = transaction.as_any_mut().downcast_mut::<PostgresTransaction>().unwrap();
            let timeout = sqlx::raw_sql("SHOW lock_timeout").fetch_one(&mut **handlers).await.unwrap();
            assert_eq!(timeout.get::<String, _>(0), "0", "the handler's statements have a timeout of the store's");
            let outcome = transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap();
            assert_eq!(outcome, OwnerOutcome::Applied);
        }
        Begin::Answered(AcquireOutcome::Replay(_)) => {}
        Begin::Answered(outcome) => panic!("{outcome:?}"),
    }
}

#[tokio::test]
async fn nothing_but_records_has_an_advisory_lock() {
    let schema = Schema::new();
    PostgresStore::open(schema.config().partitioned(Duration::from_secs(3600))).await.unwrap();
    let functions = format!(
        "SELECT proname::TEXT FROM pg_proc WHERE pronamespace = '{}'::REGNAMESPACE AND prosrc LIKE '%advisory%' ORDER BY 1",
        schema.name
    );
    let functions = sql(&mut connection().await, functions).await;
    let functions: Vec<String> = functions.iter().map(|row| row.get(0)).collect();
    // They are called with lock numbers that are derived from records.
    let of_records =
        ["idem_acquire_v1", "idem_exclude_v1", "idem_lookup_v1", "idem_owns_v1", "idem_replace_v1"].map(str::to_owned);
    assert_eq!(functions, of_records);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_that_waits_for_another_migration_ends_in_time_and_says_for_whom() {
    let schema = Schema::new();
    let config = || schema.config().verb_connections(NonZeroU32::MIN).migration_wait(Duration::from_secs(3));
    let mut other = connection().await;
    let process = number(&mut other, "SELECT pg_backend_pid()::INT8").await;
    sql(&mut other, "SET application_name = 'the other tool'").await;
    // The first start has nothing of the store's to lock yet.
    let create = format!("BEGIN;CREATE SCHEMA {}", schema.name);
    let lock = format!("BEGIN;LOCK TABLE {}.idem_migrations IN SHARE ROW EXCLUSIVE MODE", schema.name);
    for hold in [create, lock] {
        sql(&mut other, hold).await;
        // A start that finds the schema up to date needs no lock, so this one has to spread records over partitions.
        let opened = PostgresStore::open(config().partitioned(Duration::from_secs(3600)));
        let opened = tokio::time::timeout(Duration::from_secs(20), opened).await.expect("the wait has an end");
        let error = opened.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Timeout, "{error:?}");
        for said in [format!("process {process}"), "the other tool".to_owned(), "migration_wait".to_owned()] {
            assert!(error.to_string().contains(&said), "{error}");
        }
        sql(&mut other, "ROLLBACK").await;
        PostgresStore::open(config()).await.unwrap();
    }
    PostgresStore::open(config().partitioned(Duration::from_secs(3600))).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_that_only_reads_does_not_wait_for_ever_either() {
    let schema = Schema::new();
    PostgresStore::open(schema.config()).await.unwrap();
    let mut other = connection().await;
    sql(&mut other, format!("BEGIN;LOCK TABLE {}.idem_migrations", schema.name)).await;
    let config = schema.config().without_migrating().migration_wait(Duration::from_secs(3));
    let opened = tokio::time::timeout(Duration::from_secs(20), PostgresStore::open(config)).await;
    let error = opened.expect("the wait has an end").unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Timeout, "{error:?}");
    assert!(error.to_string().contains("process "), "{error}");
    sql(&mut other, "ROLLBACK").await;
}

#[tokio::test]
async fn a_start_that_finds_everything_done_waits_for_nobody() {
    let schema = Schema::new();
    let config = || schema.config().partitioned(Duration::from_secs(3600));
    PostgresStore::open(config()).await.unwrap();
    let mut other = connection().await;
    sql(&mut other, format!("BEGIN;LOCK TABLE {}.idem_migrations IN SHARE ROW EXCLUSIVE MODE", schema.name)).await;
    let opened = tokio::time::timeout(Duration::from_secs(20), PostgresStore::open(config())).await;
    opened.expect("it waits").unwrap();
}
