//! A business write outside of the store's transaction happens only while the run owns its operation.

use std::time::Duration;

use crate::support::{Configure as _, Schema, connection, number, sql};
use idem_core::{AcquireOutcome, Checkpoint, IdempotencyStore, Lease, OwnerOutcome, StoreErrorKind};
use idem_postgres::{PostgresStore, TimeOffset};
use idem_testkit::fixture::{KEPT, LEASE, completed, repeat_of, request};

struct Setup {
    schema: Schema,
    offset: TimeOffset,
    store: PostgresStore,
}

async fn setup() -> Setup {
    let (schema, offset) = (Schema::new(), TimeOffset::default());
    let config = schema.config().time_offset(offset.clone()).lock_timeout(Duration::from_millis(200));
    let store = PostgresStore::open(config).await.unwrap();
    sql(&mut connection().await, format!("CREATE TABLE {}.transfers (amount BIGINT)", schema.name)).await;
    Setup { schema, offset, store }
}

async fn lease(store: &PostgresStore, request: &idem_core::Acquire) -> Lease {
    match store.acquire(request).await.unwrap() {
        AcquireOutcome::Acquired(lease) => lease,
        other => panic!("{other:?}"),
    }
}

impl Setup {
    /// One statement: the write, if the run still owns its operation.
    async fn transfer(&self, lease: &Lease) -> u64 {
        let guard = self.store.guard(lease);
        let insert = format!("INSERT INTO {}.transfers SELECT 1250 WHERE {}", self.schema.name, guard.condition());
        let done = sqlx::raw_sql(sqlx::AssertSqlSafe(insert)).execute(&mut connection().await).await.unwrap();
        done.rows_affected()
    }

    async fn transfers(&self) -> i64 {
        number(&mut connection().await, format!("SELECT count(*) FROM {}.transfers", self.schema.name)).await
    }
}

#[tokio::test]
async fn a_write_happens_only_while_its_run_owns_the_operation() {
    let setup = setup().await;
    let request = request();
    let crashed = lease(&setup.store, &request).await;
    assert_eq!(setup.transfer(&crashed).await, 1);
    let stranger = Lease { owner: idem_core::OwnerToken::random(), ..crashed.clone() };
    assert_eq!(setup.transfer(&stranger).await, 0);
    setup.offset.advance(LEASE);
    assert_eq!(setup.transfer(&crashed).await, 1, "nobody has taken over");
    let successor = lease(&setup.store, &repeat_of(&request)).await;
    assert_eq!(setup.transfer(&crashed).await, 0);
    assert_eq!(setup.transfer(&successor).await, 1);
    setup.store.settle(&successor, &completed(), KEPT).await.unwrap();
    assert_eq!(setup.transfer(&successor).await, 0, "it is settled");
    assert_eq!(setup.transfers().await, 3);
}

#[tokio::test]
async fn nobody_takes_over_between_the_guard_and_the_commit() {
    let setup = setup().await;
    let request = request();
    let owner = lease(&setup.store, &request).await;
    setup.offset.advance(LEASE);
    let mut business = connection().await;
    sql(&mut business, "BEGIN").await;
    assert_eq!(setup.store.guard(&owner).hold(&mut business).await.unwrap(), OwnerOutcome::Applied);
    sql(&mut business, format!("INSERT INTO {}.transfers VALUES (1250)", setup.schema.name)).await;
    let error = setup.store.acquire(&repeat_of(&request)).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Timeout, "it waits as long as it may: {error:?}");
    sql(&mut business, "COMMIT").await;
    let successor = lease(&setup.store, &repeat_of(&request)).await;
    assert_eq!(successor.attempt, 2);
    sql(&mut business, "BEGIN").await;
    assert_eq!(setup.store.guard(&owner).hold(&mut business).await.unwrap(), OwnerOutcome::LeaseLost);
    sql(&mut business, "ROLLBACK").await;
    assert_eq!(setup.transfers().await, 1);
}

/// A driver may end a transaction unnoticed, and commit what comes next by itself.
#[tokio::test]
async fn nothing_is_held_without_a_transaction() {
    let setup = setup().await;
    let owner = lease(&setup.store, &request()).await;
    let (guard, mut business) = (setup.store.guard(&owner), connection().await);
    let checkpoint = Checkpoint { sequence: 1, name: "charged".into(), data: "7".into() };
    let failed = guard.hold(&mut business).await.unwrap_err();
    assert_eq!(failed.kind(), StoreErrorKind::TransactionFailed, "{failed:?}");
    let failed = guard.checkpoint(&mut business, &checkpoint).await.unwrap_err();
    assert_eq!(failed.kind(), StoreErrorKind::TransactionFailed, "{failed:?}");
    assert_eq!(setup.store.peek(&owner.id).await.unwrap().unwrap().checkpoint, None);
    // The connection can go on.
    sql(&mut business, "BEGIN").await;
    assert_eq!(guard.checkpoint(&mut business, &checkpoint).await.unwrap(), OwnerOutcome::Applied);
    sql(&mut business, "COMMIT").await;
    assert_eq!(setup.store.peek(&owner.id).await.unwrap().unwrap().checkpoint, Some(checkpoint));
}

#[tokio::test]
async fn a_stored_checkpoint_is_read_at_any_setting_of_the_session() {
    let setup = setup().await;
    let owner = lease(&setup.store, &request()).await;
    let (guard, mut business) = (setup.store.guard(&owner), connection().await);
    sql(&mut business, "SET bytea_output = escape").await;
    for (sequence, outcome) in [(1, OwnerOutcome::Applied), (2, OwnerOutcome::Applied), (2, OwnerOutcome::LeaseLost)] {
        let checkpoint = Checkpoint { sequence, name: "charged".into(), data: "7".into() };
        sql(&mut business, "BEGIN").await;
        assert_eq!(guard.checkpoint(&mut business, &checkpoint).await.unwrap(), outcome);
        sql(&mut business, "COMMIT").await;
    }
}

/// A process that freezes between the guard and its COMMIT must not keep the operation for ever.
#[tokio::test]
async fn a_transaction_with_a_guard_may_not_be_idle_for_long() {
    let setup = setup().await;
    let owner = lease(&setup.store, &request()).await;
    for (before, after) in [("0", "10s"), ("3s", "3s")] {
        let mut business = connection().await;
        sql(&mut business, format!("SET idle_in_transaction_session_timeout = '{before}'; BEGIN")).await;
        assert_eq!(setup.store.guard(&owner).hold(&mut business).await.unwrap(), OwnerOutcome::Applied);
        let limit = sql(&mut business, "SHOW idle_in_transaction_session_timeout").await;
        assert_eq!(sqlx::Row::get::<String, _>(&limit[0], 0), after);
        sql(&mut business, "COMMIT").await;
        let limit = sql(&mut business, "SHOW idle_in_transaction_session_timeout").await;
        assert_eq!(sqlx::Row::get::<String, _>(&limit[0], 0), before);
    }
}
