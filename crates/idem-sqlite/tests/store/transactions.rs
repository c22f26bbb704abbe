//! Business writes and the record commit together, or not at all.

use std::sync::Arc;
use std::time::Duration;

use crate::support::Database;
use idem_core::{
    AcquireOutcome, Begin, IdempotencyStore, Lease, OwnerOutcome, Settlement, StoreTransaction, TransactionalStore,
    Writes,
};
use idem_sqlite::{SqliteConfig, SqliteStore, SqliteTransaction};
use idem_testkit::fixture::{KEPT, LEASE, completed, repeat_of, request};
use sqlx::{Connection, Row};

async fn with_table() -> Database {
    let database = Database::new().await;
    sqlx::raw_sql("CREATE TABLE effects (id INTEGER PRIMARY KEY)").execute(database.store.pool()).await.unwrap();
    database
}

async fn begin(store: &SqliteStore, request: &idem_core::Acquire) -> (Lease, Box<dyn StoreTransaction>) {
    match store.begin(request).await.unwrap() {
        Begin::Acquired { lease, transaction, renew: true } => (lease, transaction),
        other => panic!("not acquired: {other:?}"),
    }
}

async fn write(transaction: &mut dyn StoreTransaction) {
    let connection: &mut SqliteTransaction = transaction.as_any_mut().downcast_mut().unwrap();
    sqlx::raw_sql("INSERT INTO effects DEFAULT VALUES").execute(&mut **connection).await.unwrap();
}

async fn effects(store: &SqliteStore) -> i64 {
    sqlx::query("SELECT count(*) FROM effects").fetch_one(store.pool()).await.unwrap().get(0)
}

#[tokio::test]
async fn writes_and_record_commit_together() {
    let database = with_table().await;
    let request = request();
    let (_, mut transaction) = begin(&database.store, &request).await;
    write(&mut *transaction).await;
    let duplicate = database.store.acquire(&repeat_of(&request)).await.unwrap();
    assert!(matches!(duplicate, AcquireOutcome::InProgress { .. }), "answered at once, although a writer is at work");
    assert_eq!(effects(&database.store).await, 0, "nobody sees what is not committed");
    assert_eq!(transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap(), OwnerOutcome::Applied);
    assert_eq!(effects(&database.store).await, 1);
    assert!(matches!(database.store.acquire(&repeat_of(&request)).await.unwrap(), AcquireOutcome::Replay(_)));
}

#[tokio::test]
async fn discarded_writes_are_gone_and_the_record_is_settled_all_the_same() {
    let database = with_table().await;
    let request = request();
    let (_, mut transaction) = begin(&database.store, &request).await;
    write(&mut *transaction).await;
    assert_eq!(transaction.finish(&completed(), KEPT, Writes::Discard).await.unwrap(), OwnerOutcome::Applied);
    assert_eq!(effects(&database.store).await, 0);
    assert!(matches!(database.store.acquire(&repeat_of(&request)).await.unwrap(), AcquireOutcome::Replay(_)));
}

#[tokio::test]
async fn a_release_may_keep_the_writes() {
    let database = with_table().await;
    for (writes, expected) in [(Writes::Discard, 0), (Writes::Keep, 1)] {
        let request = request();
        let (_, mut transaction) = begin(&database.store, &request).await;
        write(&mut *transaction).await;
        assert_eq!(transaction.finish(&Settlement::Released, KEPT, writes).await.unwrap(), OwnerOutcome::Applied);
        assert_eq!(effects(&database.store).await, expected);
        assert_eq!(database.store.peek(&request.id).await.unwrap(), None);
    }
}

#[tokio::test]
async fn a_transaction_that_lost_its_lease_commits_nothing() {
    let database = with_table().await;
    let request = request();
    let (_, mut late) = begin(&database.store, &request).await;
    database.clock.advance(LEASE);
    let successor = repeat_of(&request);
    let (lease, transaction) = begin(&database.store, &successor).await;
    assert_eq!(lease.attempt, 2);
    write(&mut *late).await;
    assert_eq!(late.finish(&completed(), KEPT, Writes::Keep).await.unwrap(), OwnerOutcome::LeaseLost);
    assert_eq!(effects(&database.store).await, 0);
    assert_eq!(transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap(), OwnerOutcome::Applied);
}

#[tokio::test]
async fn a_dropped_transaction_is_rolled_back_and_its_connection_is_clean() {
    let database = with_table().await;
    for _ in 0..40 {
        let (_, mut transaction) = begin(&database.store, &request()).await;
        write(&mut *transaction).await;
        drop(transaction);
    }
    let (_, mut transaction) = begin(&database.store, &request()).await;
    write(&mut *transaction).await;
    transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap();
    assert_eq!(effects(&database.store).await, 1);
}

#[tokio::test]
async fn a_handler_that_only_read_settles_although_somebody_wrote_since() {
    let database = with_table().await;
    let request = request();
    let (_, mut transaction) = begin(&database.store, &request).await;
    let connection: &mut SqliteTransaction = transaction.as_any_mut().downcast_mut().unwrap();
    sqlx::query("SELECT count(*) FROM effects").fetch_one(&mut **connection).await.unwrap();
    sqlx::raw_sql("INSERT INTO effects DEFAULT VALUES").execute(database.store.pool()).await.unwrap();
    assert_eq!(transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap(), OwnerOutcome::Applied);
    assert!(matches!(database.store.acquire(&repeat_of(&request)).await.unwrap(), AcquireOutcome::Replay(_)));
}

#[tokio::test]
async fn nested_transactions_of_the_handler_are_savepoints() {
    let database = with_table().await;
    let (_, mut transaction) = begin(&database.store, &request()).await;
    let connection: &mut SqliteTransaction = transaction.as_any_mut().downcast_mut().unwrap();
    let mut nested = connection.begin().await.unwrap();
    sqlx::raw_sql("INSERT INTO effects DEFAULT VALUES").execute(&mut *nested).await.unwrap();
    nested.rollback().await.unwrap();
    write(&mut *transaction).await;
    transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap();
    assert_eq!(effects(&database.store).await, 1);
}

#[tokio::test]
async fn a_handler_that_ends_the_transaction_itself_is_noticed() {
    for end in ["COMMIT", "ROLLBACK"] {
        let database = with_table().await;
        let request = request();
        let (_, mut transaction) = begin(&database.store, &request).await;
        let connection: &mut SqliteTransaction = transaction.as_any_mut().downcast_mut().unwrap();
        sqlx::raw_sql(end).execute(&mut **connection).await.unwrap();
        let error = transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap_err();
        assert!(error.to_string().contains("was ended before"), "{error}");
        let duplicate = database.store.acquire(&repeat_of(&request)).await.unwrap();
        assert!(matches!(duplicate, AcquireOutcome::InProgress { .. }), "it is not settled: {duplicate:?}");
    }
}

/// A store on the same file with one connection for transactions, so that each meets what the previous one left.
async fn with_one_connection(database: &Database) -> SqliteStore {
    let url = format!("sqlite://{}", database.folder.path().join("records.db").display());
    let one = SqliteConfig::new(url).max_transactions(std::num::NonZeroU32::MIN).clock(database.clock.clone());
    SqliteStore::open(one.busy_timeout(Duration::from_secs(1))).await.unwrap()
}

#[tokio::test]
async fn when_no_transaction_can_be_had_the_key_stays_free() {
    let database = with_table().await;
    let store = with_one_connection(&database).await;
    store.pool().close().await;
    let request = request();
    assert!(!store.begin(&request).await.unwrap_err().is_indeterminate());
    assert_eq!(store.peek(&request.id).await.unwrap(), None);
    // A repetition by the owner of a record, as after an earlier call without an answer: the owner has to give the key back.
    let AcquireOutcome::Acquired(_) = store.acquire(&request).await.unwrap() else { panic!("the key is free") };
    assert!(store.begin(&request).await.unwrap_err().is_indeterminate());
}

#[tokio::test]
async fn a_transaction_that_ended_by_itself_leaves_no_trace_for_the_next() {
    let by_itself = "INSERT OR ROLLBACK INTO effects VALUES (1)";
    for end in [by_itself, "COMMIT", "ROLLBACK"] {
        for (first, second) in [(Writes::Discard, Writes::Discard), (Writes::Keep, Writes::Keep)] {
            let database = with_table().await;
            sqlx::raw_sql("INSERT INTO effects VALUES (1)").execute(database.store.pool()).await.unwrap();
            let store = with_one_connection(&database).await;
            let (_, mut ended) = begin(&store, &request()).await;
            let connection: &mut SqliteTransaction = ended.as_any_mut().downcast_mut().unwrap();
            let _ = sqlx::raw_sql(end).execute(&mut **connection).await;
            // Without writes to keep, the settlement succeeds. With writes to keep, it fails, because they are lost.
            assert_eq!(ended.finish(&completed(), KEPT, first).await.is_ok(), first == Writes::Discard, "{end}");
            let (_, next) = begin(&store, &request()).await;
            assert_eq!(next.finish(&completed(), KEPT, second).await.unwrap(), OwnerOutcome::Applied);
            let before = effects(&database.store).await;
            let (_, mut payment) = begin(&store, &request()).await;
            write(&mut *payment).await;
            assert_eq!(payment.finish(&completed(), KEPT, Writes::Keep).await.unwrap(), OwnerOutcome::Applied);
            assert_eq!(effects(&database.store).await - before, 1, "told that it is committed after {end}");
            begin(&store, &request()).await;
        }
    }
}

#[tokio::test]
async fn handlers_that_write_at_once_queue_for_the_lock_and_all_commit() {
    let database = Arc::new(with_table().await);
    let handlers: Vec<_> = (0..32)
        .map(|_| {
            let database = Arc::clone(&database);
            tokio::spawn(async move {
                let (_, mut transaction) = begin(&database.store, &request()).await;
                write(&mut *transaction).await;
                tokio::time::sleep(Duration::from_millis(2)).await;
                transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap()
            })
        })
        .collect();
    for handler in handlers {
        assert_eq!(handler.await.unwrap(), OwnerOutcome::Applied);
    }
    assert_eq!(effects(&database.store).await, 32);
}

async fn write_on(connection: &mut sqlx::SqliteConnection) -> Result<(), sqlx::Error> {
    sqlx::raw_sql("INSERT INTO effects DEFAULT VALUES").execute(connection).await.map(drop)
}

/// What a handler may do after its own `begin` failed: begin again, or write without one.
async fn go_on(connection: &mut sqlx::SqliteConnection, nested: bool) {
    if !nested {
        let _ = write_on(connection).await;
    } else if let Ok(mut inner) = connection.begin().await
        && write_on(&mut inner).await.is_ok()
    {
        let _ = inner.commit().await;
    }
}

#[tokio::test]
async fn a_begin_of_the_handlers_that_fails_commits_nothing_without_its_record() {
    for (nested, cancelled) in [(false, false), (true, false), (false, true), (true, true)] {
        let database = with_table().await;
        let (_, mut transaction) = begin(&database.store, &request()).await;
        let connection: &mut SqliteTransaction = transaction.as_any_mut().downcast_mut().unwrap();
        if cancelled {
            let mut context = std::task::Context::from_waker(std::task::Waker::noop());
            let _ = Box::pin(connection.begin()).as_mut().poll(&mut context).is_pending();
        } else {
            assert!(connection.begin_with("BEGIN IMMEDIATE").await.is_err());
        }
        go_on(connection, nested).await;
        let finished = transaction.finish(&completed(), KEPT, Writes::Keep).await;
        if finished.is_err() {
            assert_eq!(effects(&database.store).await, 0, "nested {nested}, cancelled {cancelled}");
        }
    }
}

#[tokio::test]
async fn what_a_handler_writes_after_the_end_of_its_transaction_is_not_committed() {
    for end in ["COMMIT", "ROLLBACK", "INSERT OR ROLLBACK INTO effects VALUES (1)"] {
        let database = with_table().await;
        sqlx::raw_sql("INSERT INTO effects VALUES (1)").execute(database.store.pool()).await.unwrap();
        let (_, mut transaction) = begin(&database.store, &request()).await;
        let connection: &mut SqliteTransaction = transaction.as_any_mut().downcast_mut().unwrap();
        write_on(&mut *connection).await.unwrap();
        let _ = sqlx::raw_sql(end).execute(&mut **connection).await;
        let _ = write_on(&mut *connection).await;
        transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap_err();
        assert_eq!(effects(&database.store).await, 1, "{end}");
        sqlx::raw_sql("INSERT INTO effects DEFAULT VALUES").execute(database.store.pool()).await.unwrap();
        assert_eq!(effects(&database.store).await, 2, "the pool's connections commit as usual");
    }
}

#[tokio::test]
async fn a_transaction_that_the_handler_began_by_itself_locks_nobody_out() {
    let database = with_table().await;
    let store = with_one_connection(&database).await;
    let (_, mut transaction) = begin(&store, &request()).await;
    let connection: &mut SqliteTransaction = transaction.as_any_mut().downcast_mut().unwrap();
    assert!(connection.begin_with("BEGIN IMMEDIATE").await.is_err());
    let _ = sqlx::raw_sql("BEGIN IMMEDIATE").execute(&mut **connection).await;
    transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap_err();
    let (_, next) = begin(&store, &request()).await;
    assert_eq!(next.finish(&completed(), KEPT, Writes::Keep).await.unwrap(), OwnerOutcome::Applied);
}
