//! Many callers at once.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use idem_core::{AcquireOutcome, IdempotencyStore, StoreErrorKind};
use idem_mysql::MySqlStore;
use idem_servers::MariaDb;
use idem_testkit::fixture::{KEPT, LEASE, RETENTION, completed, repeat_of, request};

use crate::support::{Database, PRECISION, number, sql};

/// How many of these callers, who ask at once, get the key.
async fn owners(stores: &[Arc<MySqlStore>; 2], request: &idem_core::Acquire) -> usize {
    let acquires = (0..32).map(|number| {
        let (store, repeat) = (stores[number % 2].clone(), repeat_of(request));
        tokio::spawn(async move { store.acquire(&repeat).await })
    });
    let outcomes = join_all(acquires.collect::<Vec<_>>()).await;
    outcomes.into_iter().filter(|outcome| matches!(outcome.as_ref().unwrap(), Ok(AcquireOutcome::Acquired(_)))).count()
}

async fn two_stores() -> (Database, [Arc<MySqlStore>; 2]) {
    let database = Database::new().await;
    let config = || database.config().verb_connections(16.try_into().unwrap());
    let open = async || Arc::new(MySqlStore::open(config()).await.unwrap());
    let stores = [open().await, open().await];
    (database, stores)
}

/// The row is absent, under a lease that is over, and expired.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn thirty_two_acquires_of_one_key_have_one_owner() {
    let (database, stores) = two_stores().await;
    for _ in 0..10 {
        let request = request();
        for _ in 0..2 {
            assert_eq!(owners(&stores, &request).await, 1);
            database.offset.advance(LEASE + PRECISION);
        }
        database.offset.advance(RETENTION + LEASE + PRECISION);
        assert_eq!(owners(&stores, &request).await, 1);
    }
}

/// A look for an absent row would lock the gap around it at the server's default isolation level, and inserts would deadlock.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn acquires_of_many_new_keys_do_not_meet() {
    // Its counter of deadlocks is that of this test alone.
    let server: &'static MariaDb = Box::leak(Box::new(MariaDb::start_unsynced(&[]).unwrap()));
    let database = Database::on(server).await;
    let stores = [Arc::new(database.store().await), Arc::new(database.store().await)];
    let acquires = (0..400).map(|number: usize| {
        let store = stores[number % 2].clone();
        tokio::spawn(async move {
            let AcquireOutcome::Acquired(lease) = store.acquire(&request()).await.unwrap() else { panic!() };
            store.settle(&lease, &completed(), KEPT).await.unwrap();
        })
    });
    for acquire in acquires.collect::<Vec<_>>() {
        acquire.await.unwrap();
    }
    let deadlocks = "SELECT CAST(variable_value AS SIGNED) FROM information_schema.global_status \
         WHERE variable_name = 'Innodb_deadlocks'";
    assert_eq!(number(&mut database.connection().await, deadlocks).await, 0);
}

#[tokio::test]
async fn a_record_that_another_session_locks_is_refused_in_time_and_its_repeats_are_answered() {
    let database = Database::new().await;
    let store = database.store().await;
    let request = request();
    let AcquireOutcome::Acquired(lease) = store.acquire(&request).await.unwrap() else { panic!() };
    let mut other = database.connection().await;
    sql(&mut other, "START TRANSACTION; SELECT * FROM idem_records FOR UPDATE").await;
    let begun = Instant::now();
    let error = store.settle(&lease, &completed(), KEPT).await.unwrap_err();
    assert!(begun.elapsed() < Duration::from_secs(30), "not the server's default of 50 s");
    assert_eq!((error.kind(), error.is_indeterminate()), (StoreErrorKind::Unavailable, false), "{error:?}");
    assert!(error.to_string().contains("another session kept the record locked"), "{error}");
    let repeated = store.acquire(&repeat_of(&request)).await.unwrap();
    assert!(matches!(repeated, AcquireOutcome::InProgress { .. }), "{repeated:?}");
    sql(&mut other, "ROLLBACK").await;
    store.settle(&lease, &completed(), KEPT).await.unwrap();
}

/// Its run may have had effects, so that no engine may run the operation without protection.
#[tokio::test]
async fn an_error_says_that_there_is_a_record_of_another_run() {
    let database = Database::new().await;
    let store = database.store().await;
    let request = request();
    store.acquire(&request).await.unwrap();
    database.offset.advance(LEASE + PRECISION);
    let mut other = database.connection().await;
    sql(&mut other, "START TRANSACTION; SELECT * FROM idem_records FOR UPDATE").await;
    let error = store.acquire(&repeat_of(&request)).await.unwrap_err();
    assert_eq!((error.kind(), error.has_existing_record()), (StoreErrorKind::Unavailable, true), "{error:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_purge_leaves_rows_that_another_session_locks() {
    use idem_core::Purge as _;
    let database = Database::new().await;
    let store = database.store().await;
    let (locked, free) = (request(), request());
    for request in [&locked, &free] {
        store.acquire(request).await.unwrap();
    }
    database.offset.advance(LEASE + RETENTION + PRECISION);
    let mut other = database.connection().await;
    let id: String = locked.id.as_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    sql(&mut other, format!("START TRANSACTION; SELECT * FROM idem_records WHERE id = x'{id}' FOR UPDATE")).await;
    assert_eq!(store.purge(10.try_into().unwrap()).await.unwrap(), 1);
    sql(&mut other, "ROLLBACK").await;
    assert_eq!(store.purge(10.try_into().unwrap()).await.unwrap(), 1);
}

/// The server may find the rows of one DELETE by reading a small table as a whole, and would then wait for each row that is locked.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_purge_of_many_rows_does_not_wait_for_a_living_one() {
    use idem_core::Purge as _;
    let database = Database::new().await;
    let store = database.store().await;
    for _ in 0..400 {
        store.acquire(&request()).await.unwrap();
    }
    database.offset.advance(LEASE + RETENTION + PRECISION);
    let living = request();
    store.acquire(&living).await.unwrap();
    let mut other = database.connection().await;
    sql(&mut other, "ANALYZE TABLE idem_records").await;
    let id: String = living.id.as_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    sql(&mut other, format!("START TRANSACTION; SELECT * FROM idem_records WHERE id = x'{id}' FOR UPDATE")).await;
    assert_eq!(store.purge(500.try_into().unwrap()).await.unwrap(), 400);
}
