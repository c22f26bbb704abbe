//! Business writes and the record commit together, or not at all.

use std::num::NonZeroU32;
use std::sync::Arc;

use futures_util::future::join_all;
use idem_core::engine::{Idempotency, Operation, Settings};
use idem_core::{
    AcquireOutcome, Begin, DurableStore as _, Fingerprint, IdempotencyStore, Lease, OwnerOutcome, Scope,
    StoreErrorKind, StoreTransaction, TransactionalStore, Writes,
};
use idem_mysql::{MySqlConfig, MySqlStore, MySqlTransaction};
use idem_servers::MariaDb;
use idem_testkit::fixture::{KEPT, checkpoint, completed, repeat_of, request};
use sqlx::{Connection as _, MySqlConnection};

use crate::support::{Database, number, sql};

/// A store with one connection for handlers, so that each handler meets what the one before left.
async fn with_one_connection(config: impl FnOnce(&Database) -> MySqlConfig) -> (Database, MySqlStore) {
    let database = Database::new().await;
    let config =
        config(&database).max_transactions(NonZeroU32::MIN).transaction_wait(std::time::Duration::from_secs(20));
    let store = MySqlStore::open(config).await.unwrap();
    let table = "CREATE TABLE effects (id INT AUTO_INCREMENT PRIMARY KEY, note VARCHAR(10), UNIQUE KEY (note))";
    sql(&mut database.connection().await, table).await;
    (database, store)
}

async fn both() -> [(Database, MySqlStore); 2] {
    let pool = |database: &Database| MySqlConfig::from_pool(database.pool()).time_offset(database.offset.clone());
    [with_one_connection(Database::config).await, with_one_connection(pool).await]
}

async fn begin(store: &MySqlStore, request: &idem_core::Acquire) -> (Lease, Box<dyn StoreTransaction>) {
    match store.begin(request).await.unwrap() {
        Begin::Acquired { lease, transaction, renew: true } => (lease, transaction),
        other => panic!("not acquired: {other:?}"),
    }
}

fn inside(transaction: &mut Box<dyn StoreTransaction>) -> &mut MySqlConnection {
    transaction.as_any_mut().downcast_mut::<MySqlTransaction>().unwrap()
}

async fn effects(database: &Database) -> i64 {
    number(&mut database.connection().await, "SELECT COUNT(*) FROM effects").await
}

/// Settles a run that writes one row, which shows that what came before left nothing on the connection.
async fn expect_usable(database: &Database, store: &MySqlStore) {
    let before = effects(database).await;
    let (_, mut transaction) = begin(store, &request()).await;
    sql(inside(&mut transaction), "INSERT INTO effects () VALUES ()").await;
    assert_eq!(transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap(), OwnerOutcome::Applied);
    assert_eq!(effects(database).await, before + 1);
    // Outside of transactions, the sessions of the pool can write.
    sql(&mut store.pool().acquire().await.unwrap(), "INSERT INTO effects () VALUES ()").await;
}

#[tokio::test]
async fn a_handler_that_ends_the_transaction_is_noticed_and_writes_nothing_more() {
    for (database, store) in both().await {
        for (end, kept) in [("ROLLBACK", 0), ("COMMIT", 1), ("TRUNCATE TABLE other", 1), ("START TRANSACTION", 1)] {
            sql(&mut database.connection().await, "CREATE TABLE IF NOT EXISTS other (id INT); DELETE FROM effects")
                .await;
            let request = request();
            let (_, mut transaction) = begin(&store, &request).await;
            let connection = inside(&mut transaction);
            sql(connection, "INSERT INTO effects () VALUES ()").await;
            let ended = sqlx::raw_sql(sqlx::AssertSqlSafe(end)).execute(&mut *connection).await;
            let later = sqlx::raw_sql("INSERT INTO effects () VALUES ()").execute(&mut *connection).await;
            assert!(ended.is_err() || later.is_err(), "{end}: a write after the end of the transaction is accepted");
            let error = transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap_err();
            assert_eq!(error.kind(), StoreErrorKind::TransactionFailed, "{end}: {error:?}");
            assert_eq!(effects(&database).await, kept, "{end}");
            let repeated = store.acquire(&repeat_of(&request)).await.unwrap();
            assert!(matches!(repeated, AcquireOutcome::InProgress { .. }), "{end}: it is not settled: {repeated:?}");
            expect_usable(&database, &store).await;
        }
    }
}

/// A deadlock rolls the whole transaction back. The handler overlooks its error, and goes on writing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deadlock_that_the_handler_overlooks_commits_nothing() {
    for (database, store) in both().await {
        let mut other = database.connection().await;
        sql(&mut other, "INSERT INTO effects (id, note) VALUES (1, 'a'), (2, 'b'), (3, 'c'), (4, 'd'), (5, 'e')").await;
        let (_, mut transaction) = begin(&store, &request()).await;
        sql(inside(&mut transaction), "UPDATE effects SET note = 'mine' WHERE id = 1").await;
        // The server ends the transaction that has changed less.
        sql(&mut other, "START TRANSACTION; UPDATE effects SET note = CONCAT('x', id) WHERE id > 1").await;
        let waiting = tokio::spawn(async move {
            sql(&mut other, "UPDATE effects SET note = 'theirs' WHERE id = 1").await;
            sql(&mut other, "ROLLBACK").await;
        });
        let update = sqlx::raw_sql("UPDATE effects SET note = 'deadlock' WHERE id = 2");
        let deadlock = update.execute(inside(&mut transaction)).await.unwrap_err();
        assert!(deadlock.to_string().contains("Deadlock"), "{deadlock}");
        waiting.await.unwrap();
        for _ in 0..3 {
            // The server takes the first one: it has forgotten that the session only reads.
            let again = sqlx::raw_sql("INSERT INTO effects (note) VALUES ('mine')");
            let _ = again.execute(inside(&mut transaction)).await;
        }
        let error = transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::TransactionFailed, "{error:?}");
        let mine = "SELECT COUNT(*) FROM effects WHERE note = 'mine'";
        assert_eq!(number(&mut database.connection().await, mine).await, 0);
        expect_usable(&database, &store).await;
    }
}

#[tokio::test]
async fn nested_transactions_of_the_handler_are_savepoints() {
    for (database, store) in both().await {
        let (_, mut transaction) = begin(&store, &request()).await;
        let mut nested = inside(&mut transaction).begin().await.unwrap();
        sql(&mut nested, "INSERT INTO effects (note) VALUES ('nested')").await;
        nested.rollback().await.unwrap();
        let mut nested = inside(&mut transaction).begin().await.unwrap();
        sql(&mut nested, "INSERT INTO effects (note) VALUES ('kept')").await;
        nested.commit().await.unwrap();
        // Never ended.
        std::mem::forget(inside(&mut transaction).begin().await.unwrap());
        assert_eq!(transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap(), OwnerOutcome::Applied);
        assert_eq!(effects(&database).await, 1);
        expect_usable(&database, &store).await;
    }
}

/// What a handler sets for its session changes neither the record nor its time.
#[tokio::test]
async fn settings_of_the_handler_do_not_reach_the_record() {
    for (_database, store) in both().await {
        let request = request();
        let (lease, mut transaction) = begin(&store, &request).await;
        store.checkpoint(&lease, &checkpoint("gebüht €")).await.unwrap();
        let settings = "SET timestamp = 1000000, sql_mode = 'ANSI_QUOTES,NO_BACKSLASH_ESCAPES', time_zone = '+05:00';
            SET NAMES latin1; USE information_schema";
        sql(inside(&mut transaction), settings).await;
        assert_eq!(transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap(), OwnerOutcome::Applied);
        let record = store.live_record(&request.id).await.unwrap().expect("a record that has not expired");
        assert!(record.record.updated_at >= record.record.created_at, "{record:?}");
        assert!(record.remaining > KEPT / 2, "{record:?}");
        assert!(record.record.replay().is_some());
    }
}

#[tokio::test]
async fn a_dropped_transaction_leaves_nothing_on_its_connection() {
    for (database, store) in both().await {
        for _ in 0..5 {
            let (_, mut transaction) = begin(&store, &request()).await;
            sql(inside(&mut transaction), "INSERT INTO effects () VALUES ()").await;
            drop(transaction);
        }
        assert_eq!(effects(&database).await, 0);
        expect_usable(&database, &store).await;
    }
}

/// The record was settled in another transaction, whose writes are committed: these must not be committed as well.
#[tokio::test]
async fn a_run_that_was_settled_elsewhere_commits_nothing_more() {
    for (database, store) in both().await {
        let (lease, mut transaction) = begin(&store, &request()).await;
        sql(inside(&mut transaction), "INSERT INTO effects () VALUES ()").await;
        store.settle(&lease, &completed(), KEPT).await.unwrap();
        assert_eq!(transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap(), OwnerOutcome::LeaseLost);
        assert_eq!(effects(&database).await, 0);
        expect_usable(&database, &store).await;
    }
}

#[tokio::test]
async fn more_handlers_than_transactions_get_an_error_that_names_the_limit() {
    let database = Database::new().await;
    let wait = std::time::Duration::from_millis(200);
    let config = database.config().max_transactions(NonZeroU32::MIN).transaction_wait(wait);
    let store = MySqlStore::open(config).await.unwrap();
    let (_, first) = begin(&store, &request()).await;
    let second = request();
    let error = store.begin(&second).await.map(drop).unwrap_err();
    assert_eq!((error.kind(), error.is_indeterminate()), (StoreErrorKind::Busy, false));
    assert!(error.to_string().contains("1 that max_transactions allows"), "{error}");
    assert_eq!(store.peek(&second.id).await.unwrap(), None, "no attempt counts that had no transaction");
    first.finish(&completed(), KEPT, Writes::Keep).await.unwrap();
    begin(&store, &second).await;
    let pool = MySqlConfig::from_pool(database.pool()).max_transactions(10.try_into().unwrap());
    let error = MySqlStore::open(pool).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{error:?}");
}

/// The server ends all sessions, as a restart does, between two handlers.
#[tokio::test]
async fn handlers_go_on_when_all_connections_of_the_pool_have_ended() {
    let server: &'static MariaDb = Box::leak(Box::new(MariaDb::start_unsynced(&[]).unwrap()));
    let database = Database::on(server).await;
    let store = MySqlStore::open(database.config()).await.unwrap();
    let open = join_all((0..8).map(|_| async { begin(&store, &request()).await.1 })).await;
    for transaction in open {
        transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap();
    }
    while store.transactions().in_use > 0 {
        tokio::task::yield_now().await;
    }
    let mut root = database.connection().await;
    let sessions = "SELECT CAST(id AS SIGNED) FROM information_schema.processlist WHERE id <> CONNECTION_ID()";
    let sessions: Vec<i64> = sqlx::query_scalar(sessions).fetch_all(&mut root).await.unwrap();
    assert!(sessions.len() >= 8, "{sessions:?}");
    for session in sessions {
        // One of them may be the server's own.
        let _ = sqlx::raw_sql(sqlx::AssertSqlSafe(format!("KILL {session}"))).execute(&mut root).await;
    }
    begin(&store, &request()).await;
}

/// The lock of another session ends the wait of a settlement with an error that says that nothing was committed.
#[tokio::test]
async fn a_settlement_that_waits_for_a_lock_fails_in_time_and_commits_nothing() {
    for (database, store) in both().await {
        let (lease, mut transaction) = begin(&store, &request()).await;
        sql(inside(&mut transaction), "INSERT INTO effects () VALUES ()").await;
        let mut other = database.connection().await;
        let id: String = lease.id.as_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
        sql(&mut other, format!("START TRANSACTION; SELECT id FROM idem_records WHERE id = x'{id}' FOR UPDATE")).await;
        let error = transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap_err();
        assert!(!error.is_indeterminate() && error.to_string().contains("locked"), "{error:?}");
        sql(&mut other, "ROLLBACK").await;
        assert_eq!(effects(&database).await, 0);
        assert_eq!(store.settle(&lease, &completed(), KEPT).await.unwrap(), OwnerOutcome::Applied);
        expect_usable(&database, &store).await;
    }
}

/// By the engine: an error of the handler's rolls back, the next request runs, and repeats get its answer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_operation_of_the_engine_has_one_effect() {
    for (database, store) in both().await {
        let engine = Idempotency::transactional(Arc::new(store), Settings::new());
        for (fails, expected) in [(true, 0), (false, 1), (false, 1)] {
            let fingerprint = Fingerprint::of_bytes("pay", b"12.50");
            let operation = Operation::new(Scope::new("acme", "pay"), "order-4711".parse().unwrap(), fingerprint);
            let paid = engine.run(operation, move |context| async move {
                let mut transaction = context.transaction::<MySqlTransaction>().map_err(|error| error.to_string())?;
                sql(&mut transaction, "INSERT INTO effects () VALUES ()").await;
                if fails { Err("declined".to_owned()) } else { Ok("paid".to_owned()) }
            });
            let paid = paid.await.map(|paid| paid.value);
            assert_eq!(paid.is_err(), fails, "{paid:?}");
            assert_eq!(effects(&database).await, expected);
        }
        engine.shutdown(std::time::Duration::from_secs(25)).await.unwrap();
    }
}
