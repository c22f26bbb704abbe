//! Business writes and the record commit together, or not at all.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::support::{Configure as _, Schema, connection, number, sql};
use idem_core::engine::{Context, ExecuteError, Idempotency, Operation, RunError, Settings};
use idem_core::{
    Acquire, AcquireOutcome, Begin, Fingerprint, IdempotencyKey, IdempotencyStore, Lease, OwnerOutcome, Scope,
    Settlement, StoreErrorKind, StoreTransaction, TransactionalStore, Writes,
};
use idem_postgres::{Isolation, PostgresConfig, PostgresStore, PostgresTransaction, TimeOffset};
use idem_testkit::fixture::{BACKOFF, KEPT, LEASE, RETENTION, completed, repeat_of, request, retryable};
use idem_testkit::{FaultyStore, Verb};
use sqlx::{AssertSqlSafe, Connection};

struct Database {
    schema: Schema,
    offset: TimeOffset,
    store: PostgresStore,
}

impl Database {
    async fn new() -> Self {
        Self::with(|config| config).await
    }

    async fn with(configure: impl FnOnce(PostgresConfig) -> PostgresConfig) -> Self {
        let (schema, offset) = (Schema::new(), TimeOffset::default());
        let config = configure(schema.config()).time_offset(offset.clone());
        let store = PostgresStore::open(config).await.unwrap();
        sql(&mut connection().await, format!("CREATE TABLE {}.effects (id BIGSERIAL PRIMARY KEY)", schema.name)).await;
        Self { schema, offset, store }
    }

    async fn effects(&self) -> i64 {
        number(&mut connection().await, format!("SELECT count(*) FROM {}.effects", self.schema.name)).await
    }

    async fn write(&self, transaction: &mut dyn StoreTransaction) {
        let insert = format!("INSERT INTO {}.effects DEFAULT VALUES", self.schema.name);
        sqlx::query(AssertSqlSafe(insert)).execute(&mut **handlers(transaction)).await.unwrap();
    }

    async fn begin(&self, request: &Acquire) -> (Lease, Box<dyn StoreTransaction>) {
        begin(&self.store, request).await
    }

    async fn is_replayed(&self, request: &Acquire) -> bool {
        let outcome = self.store.acquire(&repeat_of(request)).await.unwrap();
        matches!(outcome, AcquireOutcome::Replay(_))
    }
}

/// Begins a transaction. A request that was answered holds the lock of its key until its rollback, in a task, is done.
async fn begin(store: &PostgresStore, request: &Acquire) -> (Lease, Box<dyn StoreTransaction>) {
    for _ in 0..2_000 {
        match store.begin(request).await.unwrap() {
            Begin::Acquired { lease, transaction, renew: false } => return (lease, transaction),
            Begin::Answered(AcquireOutcome::InProgress { .. }) => tokio::time::sleep(Duration::from_millis(5)).await,
            other => panic!("not acquired: {other:?}"),
        }
    }
    panic!("not acquired: it stays in progress")
}

/// What the handler gets.
fn handlers(transaction: &mut dyn StoreTransaction) -> &mut PostgresTransaction {
    transaction.as_any_mut().downcast_mut().unwrap()
}

fn is_in_progress(begin: &Begin) -> bool {
    matches!(begin, Begin::Answered(AcquireOutcome::InProgress { .. }))
}

#[tokio::test]
async fn writes_and_record_commit_together() {
    let database = Database::new().await;
    let request = request();
    let (lease, mut transaction) = database.begin(&request).await;
    assert_eq!(lease.attempt, 1);
    database.write(&mut *transaction).await;
    assert_eq!(database.effects().await, 0, "nobody sees what is not committed");
    assert_eq!(database.store.peek(&request.id).await.unwrap(), None, "the lock is the mark of a run");
    assert_eq!(transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap(), OwnerOutcome::Applied);
    assert_eq!(database.effects().await, 1);
    let record = database.store.peek(&request.id).await.unwrap().unwrap();
    assert_eq!((record.owner, record.attempt), (request.owner, 1));
    assert_eq!(record.expires_at.saturating_duration_since(record.updated_at), KEPT);
    assert!(database.is_replayed(&request).await);
}

#[tokio::test]
async fn duplicates_are_turned_away_at_once_whatever_their_contract_and_fingerprint() {
    let database = Database::new().await;
    let request = request();
    let (_, transaction) = database.begin(&request).await;
    let other = Acquire { fingerprint: Fingerprint::of_bytes("pay", b"11 EUR"), ..repeat_of(&request) };
    for duplicate in [repeat_of(&request), other] {
        assert!(is_in_progress(&database.store.begin(&duplicate).await.unwrap()));
        let leased = database.store.acquire(&duplicate).await.unwrap();
        assert!(matches!(leased, AcquireOutcome::InProgress { .. }), "{leased:?}");
    }
    drop(transaction);
}

#[tokio::test]
async fn a_key_is_free_as_soon_as_its_transaction_is_gone() {
    let database = Database::new().await;
    let request = request();
    let (_, mut transaction) = database.begin(&request).await;
    database.write(&mut *transaction).await;
    drop(transaction);
    let next = repeat_of(&request);
    let transaction = loop {
        match database.store.begin(&next).await.unwrap() {
            Begin::Acquired { transaction, .. } => break transaction,
            Begin::Answered(AcquireOutcome::InProgress { .. }) => tokio::task::yield_now().await,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap(), OwnerOutcome::Applied);
    assert_eq!(database.effects().await, 0);
}

#[tokio::test]
async fn discarded_writes_are_gone_and_the_record_is_settled_all_the_same() {
    let database = Database::new().await;
    let request = request();
    let (_, mut transaction) = database.begin(&request).await;
    database.write(&mut *transaction).await;
    // An error that the handler answered with a 409, say.
    sqlx::raw_sql("SELECT 1 / 0").execute(&mut **handlers(&mut *transaction)).await.unwrap_err();
    assert_eq!(transaction.finish(&completed(), KEPT, Writes::Discard).await.unwrap(), OwnerOutcome::Applied);
    assert_eq!(database.effects().await, 0);
    assert!(database.is_replayed(&request).await);
}

#[tokio::test]
async fn a_release_may_keep_the_writes() {
    let database = Database::new().await;
    for (writes, expected) in [(Writes::Discard, 0), (Writes::Keep, 1)] {
        let request = request();
        let (_, mut transaction) = database.begin(&request).await;
        database.write(&mut *transaction).await;
        assert_eq!(transaction.finish(&Settlement::Released, KEPT, writes).await.unwrap(), OwnerOutcome::Applied);
        assert_eq!(database.effects().await, expected);
        assert_eq!(database.store.peek(&request.id).await.unwrap(), None);
    }
}

#[tokio::test]
async fn a_retryable_failure_is_run_again_at_its_time_until_the_attempts_are_used_up() {
    let database = Database::new().await;
    let request = request();
    for attempt in 1..=request.max_attempts.get() {
        let next = repeat_of(&request);
        let (lease, mut transaction) = database.begin(&next).await;
        assert_eq!(lease.attempt, attempt);
        database.write(&mut *transaction).await;
        transaction.finish(&retryable(), KEPT, Writes::Discard).await.unwrap();
        let early = database.store.begin(&repeat_of(&request)).await.unwrap();
        assert!(matches!(early, Begin::Answered(AcquireOutcome::Backoff { .. })), "{early:?}");
        database.offset.advance(BACKOFF);
    }
    let last = database.store.begin(&repeat_of(&request)).await.unwrap();
    assert!(matches!(last, Begin::Answered(AcquireOutcome::Replay(_))), "{last:?}");
    assert_eq!(database.effects().await, 0);
    assert!(database.is_replayed(&request).await, "it is written down");
}

#[tokio::test]
async fn a_record_whose_retention_is_over_runs_as_if_it_were_new() {
    let database = Database::new().await;
    let request = request();
    for _ in 0..2 {
        let (lease, mut transaction) = database.begin(&repeat_of(&request)).await;
        assert_eq!(lease.attempt, 1);
        database.write(&mut *transaction).await;
        transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap();
        database.offset.advance(KEPT);
    }
    assert_eq!(database.effects().await, 2);
}

#[tokio::test]
async fn a_transaction_that_took_over_commits_nothing_when_the_owner_comes_back() {
    let database = Database::new().await;
    let crashed = request();
    let AcquireOutcome::Acquired(owner) = database.store.acquire(&crashed).await.unwrap() else { panic!() };
    database.offset.advance(LEASE);
    let (lease, mut transaction) = database.begin(&repeat_of(&crashed)).await;
    assert_eq!(lease.attempt, 2);
    database.write(&mut *transaction).await;
    // Its lease has run out, but it stays the owner as long as nothing is committed.
    assert_eq!(database.store.settle(&owner, &completed(), KEPT).await.unwrap(), OwnerOutcome::Applied);
    assert_eq!(transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap(), OwnerOutcome::LeaseLost);
    assert_eq!(database.effects().await, 0);
}

#[tokio::test]
async fn a_takeover_that_commits_makes_the_late_owner_stale() {
    let database = Database::new().await;
    let crashed = request();
    let AcquireOutcome::Acquired(owner) = database.store.acquire(&crashed).await.unwrap() else { panic!() };
    database.offset.advance(LEASE);
    let (_, transaction) = database.begin(&repeat_of(&crashed)).await;
    assert_eq!(transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap(), OwnerOutcome::Applied);
    assert_eq!(database.store.settle(&owner, &completed(), KEPT).await.unwrap(), OwnerOutcome::LeaseLost);
    assert_eq!(database.store.peek(&crashed.id).await.unwrap().unwrap().attempt, 2);
}

#[tokio::test]
async fn when_handlers_have_all_transactions_the_next_operation_is_told_which_limit_it_met() {
    // The default `transaction_wait`, which the engine's default `store_timeout` must exceed.
    const WAIT: Duration = Duration::from_secs(1);
    let database = Database::with(|config| config.max_transactions(NonZeroU32::MIN)).await;
    let slots = || {
        let slots = database.store.transactions();
        (slots.in_use, slots.waiting, slots.most)
    };
    assert_eq!(slots(), (0, 0, 1));
    let held = database.begin(&request()).await;
    assert_eq!(slots(), (1, 0, 1));
    let start = Instant::now();
    let turned_away = tokio::spawn({
        let store = database.store.clone();
        async move { store.begin(&request()).await }
    });
    while slots() != (1, 1, 1) {
        assert!(start.elapsed() < Duration::from_secs(5), "nobody waits");
        tokio::task::yield_now().await;
    }
    let error = turned_away.await.unwrap().unwrap_err();
    assert!(start.elapsed() >= WAIT);
    assert_eq!((error.kind(), error.is_indeterminate()), (StoreErrorKind::Busy, false));
    assert_eq!(error.to_string(), "no transaction was free within 1s: all 1 that max_transactions allows are in use");
    // An engine says the same, and does not let its caller wait twice. Its own limit is for stores that do not answer.
    let store = Arc::new(FaultyStore::new(Arc::new(database.store.clone())));
    let engine = Idempotency::transactional(store.clone(), Settings::new().store_timeout(Duration::from_secs(30)));
    let key = IdempotencyKey::new("k").unwrap();
    let operation = Operation::new(Scope::single_tenant("op"), key, Fingerprint::of_bytes("op", b"body"));
    let refused = engine.run::<(), String, _, _>(operation, |_| async { Ok(()) }).await;
    let Err(RunError::Engine(ExecuteError::Busy(error))) = refused else { panic!("{refused:?}") };
    assert!(error.to_string().contains("max_transactions"), "{error}");
    assert_eq!(store.calls(Verb::Begin), 1);
    drop(held);
    let (_, transaction) = database.begin(&request()).await;
    transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap();
    assert_eq!(slots(), (0, 0, 1));
}

#[tokio::test]
async fn nested_transactions_of_the_handler_are_savepoints() {
    let database = Database::with(|config| config.max_transactions(NonZeroU32::MIN)).await;
    let insert = format!("INSERT INTO {}.effects DEFAULT VALUES", database.schema.name);
    for round in 1..=3 {
        let (_, mut transaction) = database.begin(&request()).await;
        let nested = handlers(&mut *transaction).begin().await;
        let mut nested = nested.unwrap();
        sqlx::raw_sql(AssertSqlSafe(insert.clone())).execute(&mut *nested).await.unwrap();
        drop(nested);
        let mut nested = handlers(&mut *transaction).begin().await.unwrap();
        sqlx::raw_sql(AssertSqlSafe(insert.clone())).execute(&mut *nested).await.unwrap();
        nested.commit().await.unwrap();
        assert_eq!(database.effects().await, round - 1, "its commit is none");
        // Left open for ever.
        std::mem::forget(handlers(&mut *transaction).begin().await.unwrap());
        assert_eq!(transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap(), OwnerOutcome::Applied);
        assert_eq!(database.effects().await, round);
    }
}

#[tokio::test]
async fn a_handler_that_ends_the_transaction_itself_is_noticed() {
    let database = Database::with(|config| config.max_transactions(NonZeroU32::MIN)).await;
    for end in ["COMMIT", "ROLLBACK", "COMMIT AND CHAIN", "ROLLBACK;BEGIN", "COMMIT;BEGIN;SAVEPOINT idem"] {
        for writes in [Writes::Keep, Writes::Discard] {
            let request = request();
            let (_, mut transaction) = database.begin(&request).await;
            sqlx::raw_sql(end).execute(&mut **handlers(&mut *transaction)).await.unwrap();
            let error = transaction.finish(&completed(), KEPT, writes).await.unwrap_err();
            assert!(error.to_string().contains("the handler ended it"), "{end}: {error}");
            assert_eq!((error.kind(), error.is_indeterminate()), (StoreErrorKind::TransactionFailed, false));
            assert_eq!(database.store.peek(&request.id).await.unwrap(), None, "{end}: it is not settled");
            // The one connection can serve again.
            let (_, mut next) = database.begin(&idem_testkit::fixture::request()).await;
            let before = database.effects().await;
            database.write(&mut *next).await;
            assert_eq!(next.finish(&completed(), KEPT, Writes::Keep).await.unwrap(), OwnerOutcome::Applied);
            assert_eq!(database.effects().await - before, 1, "told that it is committed after {end}");
        }
    }
}

#[tokio::test]
async fn an_error_that_the_handler_overlooked_keeps_nothing() {
    let database = Database::new().await;
    let request = request();
    let (_, mut transaction) = database.begin(&request).await;
    database.write(&mut *transaction).await;
    sqlx::raw_sql("SELECT 1 / 0").execute(&mut **handlers(&mut *transaction)).await.unwrap_err();
    let error = transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::TransactionFailed, "{error:?}");
    assert_eq!(database.effects().await, 0);
    assert_eq!(database.store.peek(&request.id).await.unwrap(), None);
}

#[tokio::test]
async fn an_engine_says_that_a_transaction_failed_and_runs_the_repeat() {
    let database = Database::new().await;
    let engine = Idempotency::transactional(Arc::new(database.store.clone()), Settings::new());
    let insert = format!("INSERT INTO {}.effects DEFAULT VALUES", database.schema.name);
    let run = async |then: &'static str| {
        let key = IdempotencyKey::new("k").unwrap();
        let operation = Operation::new(Scope::single_tenant("op"), key, Fingerprint::of_bytes("op", b"body"));
        let insert = insert.clone();
        let work = move |context: Context| async move {
            let mut transaction = context.transaction::<PostgresTransaction>().unwrap();
            sqlx::raw_sql(AssertSqlSafe(insert)).execute(&mut **transaction).await.unwrap();
            // The handler ignores whether it fails.
            let _ = sqlx::raw_sql(then).execute(&mut **transaction).await;
            Ok::<_, String>(())
        };
        engine.run(operation, work).await
    };
    let failed = run("SELECT 1 / 0").await;
    assert!(matches!(failed, Err(RunError::Engine(ExecuteError::TransactionFailed(_)))), "{failed:?}");
    assert_eq!(database.effects().await, 0);
    assert!(!run("SELECT 1").await.unwrap().replayed);
    assert!(run("SELECT 1").await.unwrap().replayed);
    assert_eq!(database.effects().await, 1);
}

#[tokio::test]
async fn a_commit_that_the_database_refuses_keeps_nothing() {
    let database = Database::new().await;
    let schema = &database.schema.name;
    let tables = format!(
        "CREATE TABLE {schema}.accounts (id INT PRIMARY KEY);
         CREATE TABLE {schema}.bookings (account INT REFERENCES {schema}.accounts DEFERRABLE INITIALLY DEFERRED)"
    );
    sql(&mut connection().await, tables).await;
    let request = request();
    let (_, mut transaction) = database.begin(&request).await;
    let insert = format!("INSERT INTO {schema}.bookings VALUES (1)");
    sqlx::raw_sql(AssertSqlSafe(insert)).execute(&mut **handlers(&mut *transaction)).await.unwrap();
    let error = transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::TransactionFailed, "{error:?}");
    assert!(!error.is_indeterminate(), "the server said no: {error:?}");
    assert_eq!(database.store.peek(&request.id).await.unwrap(), None);
    assert_eq!(number(&mut connection().await, format!("SELECT count(*) FROM {schema}.bookings")).await, 0);
}

#[tokio::test]
async fn the_handlers_transaction_has_the_isolation_that_was_asked_for() {
    for (isolation, name) in [
        (Isolation::ReadCommitted, "read committed"),
        (Isolation::RepeatableRead, "repeatable read"),
        (Isolation::Serializable, "serializable"),
    ] {
        let database = Database::with(|config| config.isolation(isolation)).await;
        let request = request();
        let (_, mut transaction) = database.begin(&request).await;
        let shown: String = sqlx::query_scalar("SHOW transaction_isolation")
            .fetch_one(&mut **handlers(&mut *transaction))
            .await
            .unwrap();
        assert_eq!(shown, name);
        database.write(&mut *transaction).await;
        transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap();
        assert!(database.is_replayed(&request).await);
    }
}

#[tokio::test]
async fn a_handler_that_hangs_is_ended_by_the_server() {
    let database = Database::with(|config| config.idle_in_transaction_timeout(Duration::from_millis(300))).await;
    let request = request();
    let (_, mut transaction) = database.begin(&request).await;
    database.write(&mut *transaction).await;
    let free = async {
        while is_in_progress(&database.store.begin(&repeat_of(&request)).await.unwrap()) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), free).await.unwrap();
    let error = transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap_err();
    assert!(error.is_retryable(), "{error:?}");
    assert_eq!(database.effects().await, 0);
}

#[tokio::test]
async fn handlers_at_once_all_commit_through_two_connections_of_a_pooler() {
    let schema = Schema::new();
    let config = schema.config_at(&idem_servers::pgbouncer_url()).through_transaction_pooler();
    // Half of the handlers wait for the others, and most statements for a connection of the pooler, however slow the machine is.
    let patient = config.transaction_wait(Duration::from_secs(60)).statement_timeout(Duration::from_secs(30));
    let store = PostgresStore::open(patient).await.unwrap();
    sql(&mut connection().await, format!("CREATE TABLE {}.effects (id BIGSERIAL PRIMARY KEY)", schema.name)).await;
    let database = std::sync::Arc::new(Database { schema, offset: TimeOffset::default(), store });
    let handlers: Vec<_> = (0..32)
        .map(|_| {
            let database = std::sync::Arc::clone(&database);
            tokio::spawn(async move {
                let request = request();
                let (_, mut transaction) = database.begin(&request).await;
                database.write(&mut *transaction).await;
                transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap();
                assert!(database.is_replayed(&request).await);
            })
        })
        .collect();
    for handler in handlers {
        handler.await.unwrap();
    }
    assert_eq!(database.effects().await, 32);
}

#[tokio::test]
async fn a_commit_may_take_as_long_as_the_application_lets_it() {
    let database = Database::with(|config| config.statement_timeout(Duration::from_millis(200))).await;
    let schema = &database.schema.name;
    let slow = format!(
        "CREATE FUNCTION {schema}.slow() RETURNS TRIGGER LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(0.6); RETURN NULL; END';
         CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON {schema}.effects DEFERRABLE INITIALLY DEFERRED
         FOR EACH ROW EXECUTE FUNCTION {schema}.slow()"
    );
    sql(&mut connection().await, slow).await;
    let (_, mut transaction) = database.begin(&request()).await;
    database.write(&mut *transaction).await;
    assert_eq!(transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap(), OwnerOutcome::Applied);
    assert_eq!(database.effects().await, 1);
}

#[tokio::test]
async fn what_a_handler_sees_is_set_as_the_application_has_it() {
    let options: sqlx::postgres::PgConnectOptions = idem_servers::postgres_url().parse().unwrap();
    let options = options.options([("lock_timeout", "7s"), ("statement_timeout", "8s"), ("bytea_output", "escape")]);
    let schema = Schema::new();
    let config = PostgresConfig::from_options(options).schema(&schema.name);
    let store = PostgresStore::open(config.max_transactions(NonZeroU32::MIN)).await.unwrap();
    // In the second transaction on the same connection too.
    for _ in 0..2 {
        let (_, mut transaction) = begin(&store, &request()).await;
        for (name, value) in [("lock_timeout", "7s"), ("statement_timeout", "8s"), ("bytea_output", "escape")] {
            let show = sqlx::query_scalar(AssertSqlSafe(format!("SHOW {name}")));
            let shown: String = show.fetch_one(&mut **handlers(&mut *transaction)).await.unwrap();
            assert_eq!(shown, value, "{name}");
        }
        transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap();
    }
}

/// Settles a run while another session has what `lock` locks. The handler has set no limit for waits, and the store gives up; or one
/// of 5 ms, and the other session gives its lock back after a longer wait.
async fn waits_as_the_store_says(database: &Database, request: &Acquire, lock: &str, sets_limit: bool) {
    let (_, mut transaction) = database.begin(request).await;
    database.write(&mut *transaction).await;
    let set = format!("SET LOCAL lock_timeout = {}", if sets_limit { "'5ms'" } else { "0" });
    let inside = handlers(&mut *transaction);
    sqlx::raw_sql(AssertSqlSafe(set)).execute(&mut **inside).await.unwrap();
    let pid: i32 = sqlx::query_scalar("SELECT pg_backend_pid()").fetch_one(&mut **inside).await.unwrap();
    let [mut other, mut watch] = [connection().await, connection().await];
    sql(&mut other, format!("BEGIN;{}", lock.replace('$', &database.schema.name))).await;
    let finishing = tokio::spawn(async move { transaction.finish(&completed(), KEPT, Writes::Keep).await });
    if sets_limit {
        let waiting = format!(
            "SELECT count(*) FROM pg_locks
            WHERE NOT granted AND waitstart < clock_timestamp() - INTERVAL '20 ms' AND pid = {pid}"
        );
        while number(&mut watch, waiting.clone()).await == 0 && !finishing.is_finished() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        sql(&mut other, "ROLLBACK").await;
        assert_eq!(finishing.await.unwrap().unwrap(), OwnerOutcome::Applied);
    } else {
        let error = finishing.await.unwrap().unwrap_err();
        assert!(error.kind() == StoreErrorKind::Timeout && error.to_string().contains("holds the lock"), "{error:?}");
        sql(&mut other, "ROLLBACK").await;
    }
}

#[tokio::test]
async fn a_record_waits_for_others_as_long_as_the_store_says_whatever_the_handler_has_set() {
    let database = Database::with(|config| config.lock_timeout(Duration::from_millis(300))).await;
    for sets_limit in [false, true] {
        let lock = "LOCK TABLE $.idem_records IN ACCESS EXCLUSIVE MODE";
        waits_as_the_store_says(&database, &request(), lock, sets_limit).await;
    }
    assert_eq!(database.effects().await, 1);
}

#[tokio::test]
async fn a_trigger_at_the_commit_waits_as_long_as_the_handler_has_set() {
    let database = Database::with(|config| config).await;
    let trigger = format!(
        "CREATE TABLE {0}.seen (lock_timeout TEXT);
        CREATE FUNCTION {0}.see() RETURNS TRIGGER LANGUAGE plpgsql AS
            'BEGIN INSERT INTO {0}.seen VALUES (current_setting(''lock_timeout'')); RETURN NULL; END';
        CREATE CONSTRAINT TRIGGER see AFTER INSERT ON {0}.effects DEFERRABLE INITIALLY DEFERRED
            FOR EACH ROW EXECUTE FUNCTION {0}.see()",
        database.schema.name
    );
    sql(&mut connection().await, trigger).await;
    for settlement in [completed(), retryable()] {
        let (_, mut transaction) = database.begin(&request()).await;
        let set = "SET LOCAL lock_timeout = '7s'";
        sqlx::raw_sql(set).execute(&mut **handlers(&mut *transaction)).await.unwrap();
        database.write(&mut *transaction).await;
        assert_eq!(transaction.finish(&settlement, KEPT, Writes::Keep).await.unwrap(), OwnerOutcome::Applied);
    }
    let seen = format!("SELECT count(*) FROM {}.seen WHERE lock_timeout = '7s'", database.schema.name);
    assert_eq!(number(&mut connection().await, seen).await, 2);
}

#[tokio::test]
async fn a_record_waits_for_its_row_as_long_as_the_store_says_whatever_the_handler_has_set() {
    let database = Database::with(|config| config.lock_timeout(Duration::from_millis(300))).await;
    // The row of an attempt that is over, and that of a record that has expired.
    for passed in [LEASE, LEASE + RETENTION] {
        let crashed = request();
        assert!(matches!(database.store.acquire(&crashed).await.unwrap(), AcquireOutcome::Acquired(_)));
        database.offset.advance(passed);
        for sets_limit in [false, true] {
            let lock = "SELECT FROM $.idem_records FOR UPDATE";
            waits_as_the_store_says(&database, &repeat_of(&crashed), lock, sets_limit).await;
        }
        sql(&mut connection().await, format!("DELETE FROM {}.idem_records", database.schema.name)).await;
    }
    assert_eq!(database.effects().await, 2);
}

#[tokio::test]
async fn a_handler_that_makes_its_session_forget_fails_alone() {
    let database = Database::with(|config| config.max_transactions(NonZeroU32::MIN)).await;
    for forget in ["DEALLOCATE ALL", "DEALLOCATE idem_wait", "DEALLOCATE idem_insert"] {
        let request = request();
        let (_, mut transaction) = database.begin(&request).await;
        database.write(&mut *transaction).await;
        sqlx::raw_sql(forget).execute(&mut **handlers(&mut *transaction)).await.unwrap();
        let error = transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::TransactionFailed);
        assert!(error.to_string().contains("the handler has deallocated a statement"), "{error}");
        let (_, mut transaction) = database.begin(&request).await;
        database.write(&mut *transaction).await;
        assert_eq!(transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap(), OwnerOutcome::Applied);
        assert!(database.is_replayed(&request).await);
    }
    assert_eq!(database.effects().await, 3);
}

#[tokio::test]
async fn a_connection_serves_until_sqlx_believes_less_of_it_than_is_so() {
    let database = Database::with(|config| config.max_transactions(NonZeroU32::MIN)).await;
    let serve = async |writes, spoil: bool| {
        let (_, mut transaction) = database.begin(&request()).await;
        let connection = handlers(&mut *transaction);
        let pid: i32 = sqlx::query_scalar("SELECT pg_backend_pid()").fetch_one(&mut **connection).await.unwrap();
        if spoil {
            sqlx::raw_sql("SELECT 1 / 0").execute(&mut **connection).await.unwrap_err();
            assert!(connection.begin().await.is_err());
        }
        assert_eq!(transaction.finish(&completed(), KEPT, writes).await.unwrap(), OwnerOutcome::Applied);
        pid
    };
    let first = serve(Writes::Keep, false).await;
    assert_eq!(serve(Writes::Discard, false).await, first);
    assert_eq!(serve(Writes::Discard, true).await, first);
    assert_ne!(serve(Writes::Keep, false).await, first, "the failed begin has brought it up");
}

#[tokio::test]
async fn a_handler_that_lets_its_session_hang_for_ever_does_so_for_itself_only() {
    let limit = Duration::from_secs(77);
    let database =
        Database::with(|config| config.max_transactions(NonZeroU32::MIN).idle_in_transaction_timeout(limit)).await;
    for _ in 0..2 {
        let (_, mut transaction) = database.begin(&request()).await;
        let handlers = handlers(&mut *transaction);
        let show = sqlx::query_scalar("SHOW idle_in_transaction_session_timeout");
        let shown: String = show.fetch_one(&mut **handlers).await.unwrap();
        assert_eq!(shown, "77s");
        sqlx::raw_sql("SET idle_in_transaction_session_timeout = 0").execute(&mut **handlers).await.unwrap();
        transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap();
    }
}
