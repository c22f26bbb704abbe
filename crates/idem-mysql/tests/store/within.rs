//! Settlements and checkpoints in a transaction of the caller.

use idem_core::{AcquireOutcome, IdempotencyStore as _, Lease, OwnerOutcome, Settlement, StoreErrorKind};
use idem_mysql::MySqlStore;
use idem_servers::MariaDb;
use idem_testkit::fixture::{KEPT, LEASE, checkpoint, completed, repeat_of, request};
use sqlx::{Connection as _, MySqlConnection};

use crate::support::{Database, PRECISION, number, sql};

async fn world() -> (Database, MySqlStore, Lease) {
    let database = Database::new().await;
    let store = database.store().await;
    sql(&mut database.connection().await, "CREATE TABLE effects (id INT AUTO_INCREMENT PRIMARY KEY)").await;
    let AcquireOutcome::Acquired(lease) = store.acquire(&request()).await.unwrap() else { panic!() };
    (database, store, lease)
}

async fn effects(database: &Database) -> i64 {
    number(&mut database.connection().await, "SELECT COUNT(*) FROM effects").await
}

async fn is_settled(store: &MySqlStore, lease: &Lease) -> bool {
    store.peek(&lease.id).await.unwrap().is_some_and(|record| record.replay().is_some())
}

#[tokio::test]
async fn writes_of_the_caller_and_the_settlement_commit_together() {
    for isolation in ["READ UNCOMMITTED", "READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"] {
        for commits in [false, true] {
            let (database, store, lease) = world().await;
            let mut connection = database.connection().await;
            sql(&mut connection, format!("SET SESSION TRANSACTION ISOLATION LEVEL {isolation}")).await;
            sql(&mut connection, "SET SESSION innodb_snapshot_isolation = OFF").await;
            let mut transaction = connection.begin().await.unwrap();
            // At REPEATABLE READ this takes the snapshot, which the renewal is not in.
            number(&mut transaction, "SELECT COUNT(*) FROM effects").await;
            store.renew(&lease, request().term).await.unwrap();
            sql(&mut transaction, "INSERT INTO effects () VALUES ()").await;
            let settled = store.settle_within(&mut transaction, &lease, &completed(), KEPT).await.unwrap();
            assert_eq!(settled, OwnerOutcome::Applied, "{isolation}");
            assert!(!is_settled(&store, &lease).await, "{isolation}: it is seen before COMMIT");
            if commits {
                transaction.commit().await.unwrap();
            } else {
                transaction.rollback().await.unwrap();
            }
            assert_eq!(is_settled(&store, &lease).await, commits, "{isolation}");
            assert_eq!(effects(&database).await, i64::from(commits), "{isolation}");
        }
    }
}

/// The default from MariaDB 11.6.2 on refuses to lock a record that was renewed after the snapshot.
#[tokio::test]
async fn a_transaction_with_an_older_snapshot_is_refused_where_the_server_isolates_snapshots() {
    let (database, store, lease) = world().await;
    let mut connection = database.connection().await;
    sql(&mut connection, "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ").await;
    sql(&mut connection, "SET SESSION innodb_snapshot_isolation = ON").await;
    for is_settled in [false, true] {
        let mut transaction = connection.begin().await.unwrap();
        number(&mut transaction, "SELECT COUNT(*) FROM effects").await;
        if !is_settled {
            store.renew(&lease, request().term).await.unwrap();
        }
        sql(&mut transaction, "INSERT INTO effects () VALUES ()").await;
        let told = store.settle_within(&mut transaction, &lease, &completed(), KEPT).await;
        match told {
            Ok(outcome) => {
                assert!(is_settled && outcome == OwnerOutcome::Applied);
                transaction.commit().await.unwrap();
            }
            Err(error) => {
                assert!(!is_settled && error.is_retryable() && !error.is_indeterminate(), "{error:?}");
                transaction.rollback().await.unwrap();
            }
        }
        assert_eq!(effects(&database).await, i64::from(is_settled));
    }
}

#[tokio::test]
async fn a_run_is_settled_in_one_transaction_only() {
    let (database, store, lease) = world().await;
    for expected in [OwnerOutcome::Applied, OwnerOutcome::LeaseLost] {
        let mut connection = database.connection().await;
        let mut transaction = connection.begin().await.unwrap();
        sql(&mut transaction, "INSERT INTO effects () VALUES ()").await;
        let settled = store.settle_within(&mut transaction, &lease, &completed(), KEPT).await.unwrap();
        assert_eq!(settled, expected);
        if settled == OwnerOutcome::Applied {
            transaction.commit().await.unwrap();
        } else {
            transaction.rollback().await.unwrap();
        }
    }
    assert_eq!(effects(&database).await, 1);
    // By the verb, a repeat is answered as the first time.
    assert_eq!(store.settle(&lease, &completed(), KEPT).await.unwrap(), OwnerOutcome::Applied);
}

#[tokio::test]
async fn a_run_that_was_taken_over_or_released_is_refused() {
    let (database, store, lease) = world().await;
    database.offset.advance(LEASE + PRECISION);
    let successor = idem_core::Acquire { id: lease.id, ..repeat_of(&request()) };
    assert!(matches!(store.acquire(&successor).await.unwrap(), AcquireOutcome::Acquired(_)));
    let AcquireOutcome::Acquired(released) = store.acquire(&request()).await.unwrap() else { panic!() };
    store.settle(&released, &Settlement::Released, KEPT).await.unwrap();
    for lease in [lease, released] {
        let mut connection = database.connection().await;
        let mut transaction = connection.begin().await.unwrap();
        for settlement in [completed(), Settlement::Released] {
            let settled = store.settle_within(&mut transaction, &lease, &settlement, KEPT).await.unwrap();
            assert_eq!(settled, OwnerOutcome::LeaseLost, "{settlement:?}");
        }
    }
}

#[tokio::test]
async fn without_a_transaction_nothing_is_written() {
    let (database, store, lease) = world().await;
    let mut connection = database.connection().await;
    for end in ["SELECT 1", "START TRANSACTION; COMMIT", "START TRANSACTION; CREATE TABLE other (id INT)"] {
        sql(&mut connection, end).await;
        let error = store.settle_within(&mut connection, &lease, &completed(), KEPT).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::TransactionFailed, "{end}: {error:?}");
        let error = store.checkpoint_within(&mut connection, &lease, &checkpoint("a")).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::TransactionFailed, "{end}: {error:?}");
        assert!(!is_settled(&store, &lease).await, "{end}");
    }
}

/// With autocommit off, a savepoint would stay after the transaction was ended.
#[tokio::test]
async fn a_session_without_autocommit_and_a_transaction_that_only_reads_are_refused() {
    for (begin, expected) in [
        (
            "SET autocommit = 0; START TRANSACTION; INSERT INTO effects () VALUES (); CREATE TABLE other (id INT)",
            "autocommit",
        ),
        ("START TRANSACTION READ ONLY", "READ ONLY"),
    ] {
        let (database, store, lease) = world().await;
        let mut connection = database.connection().await;
        sql(&mut connection, begin).await;
        let error = store.settle_within(&mut connection, &lease, &completed(), KEPT).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::TransactionFailed, "{begin}: {error:?}");
        assert!(error.to_string().contains(expected), "{error}");
        sql(&mut connection, "ROLLBACK").await;
        assert!(!is_settled(&store, &lease).await, "{begin}");
    }
}

#[tokio::test]
async fn a_transaction_in_another_server_is_refused() {
    let (database, store, lease) = world().await;
    let other = MariaDb::start_unsynced(&[]).unwrap();
    let mut connection = MySqlConnection::connect(&other.url()).await.unwrap();
    // Without the tables, and with tables of the same name.
    for is_migrated in [false, true] {
        if is_migrated {
            sql(&mut connection, format!("CREATE DATABASE {}; USE {}", database.name, database.name)).await;
            sql(&mut connection, idem_mysql::migrations()[0].sql).await;
        }
        let mut transaction = connection.begin().await.unwrap();
        let error = store.settle_within(&mut transaction, &lease, &completed(), KEPT).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{error:?}");
    }
}

#[tokio::test]
async fn a_checkpoint_is_written_in_one_transaction_only() {
    let (database, store, lease) = world().await;
    for (commits, expected) in
        [(false, OwnerOutcome::Applied), (true, OwnerOutcome::Applied), (true, OwnerOutcome::LeaseLost)]
    {
        let mut connection = database.connection().await;
        let mut transaction = connection.begin().await.unwrap();
        sql(&mut transaction, "INSERT INTO effects () VALUES ()").await;
        let written = store.checkpoint_within(&mut transaction, &lease, &checkpoint("charged")).await.unwrap();
        assert_eq!(written, expected);
        if commits && written == OwnerOutcome::Applied {
            transaction.commit().await.unwrap();
        } else {
            transaction.rollback().await.unwrap();
        }
    }
    assert_eq!(effects(&database).await, 1);
    assert_eq!(store.peek(&lease.id).await.unwrap().unwrap().checkpoint, Some(checkpoint("charged")));
}
