//! What handlers, other sessions and settings can do to a store, and how it withstands them.

use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use crate::support::{Configure as _, Schema, connection, number, sql};
use idem_core::{
    Acquire, AcquireOutcome, Begin, IdempotencyStore, Lease, OwnerOutcome, Settlement, StoreTransaction,
    TransactionalStore, Writes,
};
use idem_postgres::{Isolation, PostgresConfig, PostgresStore, PostgresTransaction};
use idem_testkit::fixture::{KEPT, completed, repeat_of, request, retryable};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{AssertSqlSafe, Connection, PgConnection};
use tokio::task::JoinSet;

struct Setup {
    schema: Schema,
    store: PostgresStore,
}

async fn setup(configure: impl FnOnce(PostgresConfig) -> PostgresConfig) -> Setup {
    let schema = Schema::new();
    let store = PostgresStore::open(configure(schema.config())).await.unwrap();
    sql(&mut connection().await, format!("CREATE TABLE {}.effects (key BYTEA)", schema.name)).await;
    Setup { schema, store }
}

/// The same through a pooler that knows neither start-up options nor prepared statements.
async fn pooled() -> Setup {
    let schema = Schema::new();
    let config = schema.config_at(&idem_servers::pgbouncer_url()).through_transaction_pooler();
    let store = PostgresStore::open(config).await.unwrap();
    sql(&mut connection().await, format!("CREATE TABLE {}.effects (key BYTEA)", schema.name)).await;
    Setup { schema, store }
}

/// The same with a pool of the application.
async fn from_pool() -> Setup {
    let schema = Schema::new();
    let options: PgConnectOptions = idem_servers::postgres_url().parse().unwrap();
    let pool = PgPoolOptions::new().max_connections(2).connect_lazy_with(options);
    let store = PostgresStore::open(PostgresConfig::from_pool(pool).schema(&schema.name)).await.unwrap();
    sql(&mut connection().await, format!("CREATE TABLE {}.effects (key BYTEA)", schema.name)).await;
    Setup { schema, store }
}

/// Each way to have handlers' transactions: on one session of the store's, through a pooler, and in the application's pool.
async fn each_way() -> [Setup; 3] {
    let [own, pooled] = sessions_of_its_own().await;
    [own, pooled, from_pool().await]
}

async fn sessions_of_its_own() -> [Setup; 2] {
    [setup(|config| config.max_transactions(NonZeroU32::MIN)).await, pooled().await]
}

impl Setup {
    async fn begin(&self) -> (Acquire, Box<dyn StoreTransaction>) {
        let request = request();
        match self.store.begin(&request).await.unwrap() {
            Begin::Acquired { transaction, .. } => (request, transaction),
            other => panic!("{other:?}"),
        }
    }

    async fn write(&self, connection: &mut PgConnection) -> Result<(), sqlx::Error> {
        let insert = format!("INSERT INTO {}.effects VALUES ('')", self.schema.name);
        sqlx::raw_sql(AssertSqlSafe(insert)).execute(connection).await.map(drop)
    }

    async fn effects(&self) -> i64 {
        number(&mut connection().await, format!("SELECT count(*) FROM {}.effects", self.schema.name)).await
    }

    /// A payment without a fault, on the connection that earlier runs have left.
    async fn pay(&self) {
        let before = self.effects().await;
        let (_, mut transaction) = self.begin().await;
        self.write(handlers(&mut *transaction)).await.unwrap();
        assert_eq!(transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap(), OwnerOutcome::Applied);
        assert_eq!(self.effects().await, before + 1);
    }
}

fn handlers(transaction: &mut dyn StoreTransaction) -> &mut PgConnection {
    transaction.as_any_mut().downcast_mut::<PostgresTransaction>().unwrap()
}

#[tokio::test]
async fn a_begin_of_the_handlers_that_is_cancelled_commits_nothing_without_its_record() {
    for setup in each_way().await {
        for writes in [Writes::Keep, Writes::Discard] {
            let (request, mut transaction) = setup.begin().await;
            let connection = handlers(&mut *transaction);
            // As by a timeout in the handler. A `begin` that is ready at its first poll is not cancelled, so it is repeated.
            while futures_util::poll!(&mut Box::pin(connection.begin())).is_ready() {}
            if let Ok(mut nested) = connection.begin().await
                && setup.write(&mut nested).await.is_ok()
            {
                let _ = nested.commit().await;
            }
            let settled = transaction.finish(&completed(), KEPT, writes).await.is_ok();
            let is_there = setup.store.peek(&request.id).await.unwrap().is_some();
            assert_eq!(settled, is_there, "it says what is so");
            assert_eq!(setup.effects().await, 0, "the transaction had failed");
        }
        setup.pay().await;
    }
}

#[tokio::test]
async fn a_handler_that_tries_again_after_an_error_commits_nothing_without_its_record() {
    for setup in each_way().await {
        let (request, mut transaction) = setup.begin().await;
        let connection = handlers(&mut *transaction);
        sqlx::raw_sql("SELECT 1 / 0").execute(&mut *connection).await.unwrap_err();
        begin_again(&setup, connection, 50).await;
        transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap_err();
        assert_eq!(setup.store.peek(&request.id).await.unwrap(), None);
        assert_eq!(setup.effects().await, 0);
        setup.pay().await;
    }
}

#[tokio::test]
async fn what_a_handler_writes_after_it_has_ended_its_transaction_is_refused() {
    // Through a pooler it is not.
    for setup in [setup(|config| config.max_transactions(NonZeroU32::MIN)).await, from_pool().await] {
        for end in ["COMMIT", "ROLLBACK"] {
            let (_, mut transaction) = setup.begin().await;
            let connection = handlers(&mut *transaction);
            sqlx::raw_sql(end).execute(&mut *connection).await.unwrap();
            setup.write(connection).await.unwrap_err();
            transaction.finish(&Settlement::Released, KEPT, Writes::Discard).await.unwrap_err();
            assert_eq!(setup.effects().await, 0);
            setup.pay().await;
            sql(&mut crate::support::connection().await, format!("DELETE FROM {}.effects", setup.schema.name)).await;
        }
    }
}

#[tokio::test]
async fn a_handler_may_take_the_role_of_a_tenant_and_need_not_give_it_back() {
    for setup in each_way().await {
        let role = format!("{}_tenant", setup.schema.name);
        let grants = format!("CREATE ROLE {role};GRANT USAGE ON SCHEMA {0} TO {role}", setup.schema.name);
        let grants = format!("{grants};GRANT INSERT ON {0}.effects TO {role}", setup.schema.name);
        sql(&mut connection().await, grants).await;
        for set in ["SET ROLE", "SET LOCAL ROLE", "SET SESSION AUTHORIZATION", "SET LOCAL SESSION AUTHORIZATION"] {
            for writes in [Writes::Keep, Writes::Discard] {
                for settlement in [completed(), retryable(), Settlement::Released] {
                    let before = setup.effects().await;
                    let (request, mut transaction) = setup.begin().await;
                    let connection = handlers(&mut *transaction);
                    sqlx::raw_sql(AssertSqlSafe(format!("{set} {role}"))).execute(&mut *connection).await.unwrap();
                    setup.write(connection).await.unwrap();
                    let finished = transaction.finish(&settlement, KEPT, writes).await;
                    assert_eq!(finished.unwrap(), OwnerOutcome::Applied, "{set}");
                    let is_there = setup.store.peek(&request.id).await.unwrap().is_some();
                    assert_eq!(is_there, settlement != Settlement::Released);
                    assert_eq!(setup.effects().await - before, i64::from(writes == Writes::Keep), "{set}");
                    let (_, mut next) = setup.begin().await;
                    let user = "SELECT (current_user <> 'postgres')::INT::INT8";
                    assert_eq!(number(handlers(&mut *next), user).await, 0, "the next handler is a tenant after {set}");
                }
            }
        }
        let records = format!("DROP OWNED BY {role};DROP ROLE {role}");
        sql(&mut connection().await, records).await;
    }
}

#[tokio::test]
async fn a_handler_that_only_reads_may_say_so() {
    for setup in each_way().await {
        for writes in [Writes::Keep, Writes::Discard] {
            let (request, mut transaction) = setup.begin().await;
            let read_only = "SET TRANSACTION READ ONLY";
            sqlx::raw_sql(read_only).execute(handlers(&mut *transaction)).await.unwrap();
            assert_eq!(transaction.finish(&completed(), KEPT, writes).await.unwrap(), OwnerOutcome::Applied);
            assert!(setup.store.peek(&request.id).await.unwrap().is_some());
        }
        setup.pay().await;
    }
}

#[tokio::test]
async fn a_handler_that_resets_its_session_does_not_let_the_next_write_outside_of_its_transaction() {
    for setup in [setup(|config| config.max_transactions(NonZeroU32::MIN)).await, from_pool().await] {
        for reset in ["RESET ALL", "SET default_transaction_read_only = off"] {
            let (_, mut transaction) = setup.begin().await;
            sqlx::raw_sql(reset).execute(handlers(&mut *transaction)).await.unwrap();
            assert_eq!(transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap(), OwnerOutcome::Applied);
            let (_, mut transaction) = setup.begin().await;
            let connection = handlers(&mut *transaction);
            sqlx::raw_sql("ROLLBACK").execute(&mut *connection).await.unwrap();
            assert!(setup.write(connection).await.is_err(), "it was committed without a record after {reset}");
            transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap_err();
            assert_eq!(setup.effects().await, 0);
        }
    }
}

/// A handler that calls a failing `begin` again and again, and writes and commits if it succeeds.
async fn begin_again(setup: &Setup, connection: &mut PgConnection, rounds: usize) {
    for _ in 0..rounds {
        if let Ok(mut nested) = connection.begin().await
            && setup.write(&mut nested).await.is_ok()
        {
            let _ = nested.commit().await;
        }
    }
}

#[tokio::test]
async fn what_sqlx_believes_does_not_wear_off() {
    for setup in sessions_of_its_own().await {
        for _ in 0..20 {
            let (_, mut transaction) = setup.begin().await;
            let connection = handlers(&mut *transaction);
            sqlx::raw_sql("SELECT 1 / 0").execute(&mut *connection).await.unwrap_err();
            begin_again(&setup, connection, 2).await;
            // The handler goes on with other writes, and ignores their errors.
            for _ in 0..4 {
                let _ = setup.write(connection).await;
            }
            transaction.finish(&completed(), KEPT, Writes::Discard).await.unwrap();
        }
        let (request, mut transaction) = setup.begin().await;
        let mut nested = handlers(&mut *transaction).begin().await.unwrap();
        setup.write(&mut nested).await.unwrap();
        nested.commit().await.unwrap();
        drop(transaction);
        assert_eq!(setup.store.peek(&request.id).await.unwrap(), None);
        assert_eq!(setup.effects().await, 0, "the handler's commit is none");
    }
}

#[tokio::test]
async fn a_proxy_that_takes_no_options_is_found_at_the_start() {
    let schema = Schema::new();
    let error = PostgresStore::open(schema.config_at(&idem_servers::pgbouncer_url())).await.unwrap_err();
    assert_eq!(error.kind(), idem_core::StoreErrorKind::Misconfigured, "{error:?}");
    assert!(error.to_string().contains("through_transaction_pooler()"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_isolation_that_sees_one_moment_runs_nothing_twice_in_partitions_either() {
    let day = Duration::from_secs(86_400);
    for pooled in [false, true] {
        let configure = |config: PostgresConfig| {
            let config = config.isolation(Isolation::RepeatableRead).partitioned(day);
            // Opening eight sessions takes long on a loaded machine, which this test is not about.
            let config = config.statement_timeout(Duration::from_secs(20));
            if pooled { config.through_transaction_pooler() } else { config }
        };
        let setup = setup(configure).await;
        let until = Instant::now() + Duration::from_secs(3);
        let mut keys = 0;
        while Instant::now() < until {
            keys += 1;
            let first = request();
            let mut runs = JoinSet::new();
            for _ in 0..4 {
                let (store, schema, request) = (setup.store.clone(), setup.schema.name.clone(), repeat_of(&first));
                runs.spawn(async move { run_until_answered(&store, &schema, &request).await });
            }
            let runs = runs.join_all().await;
            assert_eq!(runs.iter().filter(|ran| **ran).count(), 1);
        }
        assert_eq!(setup.effects().await, keys);
    }
}

/// Repeats the request until it is answered; returns whether it ran in the end.
async fn run_until_answered(store: &PostgresStore, schema: &str, request: &Acquire) -> bool {
    loop {
        match store.begin(request).await {
            Ok(Begin::Acquired { mut transaction, .. }) => {
                let insert = format!("INSERT INTO {schema}.effects VALUES ('')");
                sqlx::raw_sql(AssertSqlSafe(insert)).execute(handlers(&mut *transaction)).await.unwrap();
                if let Ok(OwnerOutcome::Applied) = transaction.finish(&completed(), KEPT, Writes::Keep).await {
                    return true;
                }
            }
            Ok(Begin::Answered(AcquireOutcome::InProgress { .. })) => tokio::task::yield_now().await,
            Ok(Begin::Answered(AcquireOutcome::Replay(_))) => return false,
            other => panic!("{other:?}"),
        }
    }
}

async fn lease(store: &PostgresStore) -> (Acquire, Lease) {
    let request = request();
    match store.acquire(&request).await.unwrap() {
        AcquireOutcome::Acquired(lease) => (request, lease),
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn renewals_that_wait_for_guards_do_not_keep_others_waiting_one_after_another() {
    let setup = setup(|config| config.verb_connections(NonZeroU32::MIN)).await;
    let mut leases = Vec::new();
    for _ in 0..16 {
        leases.push(lease(&setup.store).await);
    }
    let mut guards = connection().await;
    sql(&mut guards, format!("BEGIN;SELECT FROM {}.idem_records FOR SHARE", setup.schema.name)).await;
    let mut renewals = JoinSet::new();
    for (request, lease) in leases {
        let store = setup.store.clone();
        renewals.spawn(async move { store.renew(&lease, request.term).await.is_err() });
    }
    let mut others = JoinSet::new();
    for _ in 0..8 {
        let store = setup.store.clone();
        others.spawn(async move { store.acquire(&request()).await.unwrap() });
    }
    // Twice the lock_timeout, for the statement under way and the one in which they wait, and some work.
    let answered = tokio::time::timeout(Duration::from_secs(2), others.join_all()).await;
    assert!(answered.is_ok(), "others waited for each of the guards");
    assert!(renewals.join_all().await.into_iter().all(|failed| failed));
    sql(&mut guards, "COMMIT").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_verb_whose_caller_has_left_is_not_done_late() {
    let short = Duration::from_millis(100);
    let setup = setup(|config| config.verb_connections(NonZeroU32::MIN).lock_timeout(short)).await;
    let mut holder = connection().await;
    sql(&mut holder, format!("BEGIN;LOCK TABLE {}.idem_records", setup.schema.name)).await;
    let mut callers = JoinSet::new();
    for _ in 0..40 {
        let store = setup.store.clone();
        callers.spawn(async move { tokio::time::timeout(2 * short, store.acquire(&request())).await.is_ok() });
    }
    callers.join_all().await;
    // This verb is queued behind all earlier ones.
    setup.store.peek(&request().id).await.unwrap_err();
    sql(&mut holder, "COMMIT").await;
    setup.store.peek(&request().id).await.unwrap();
    let records = format!("SELECT count(*) FROM {}.idem_records", setup.schema.name);
    let records = number(&mut connection().await, records).await;
    assert_eq!(records, 0);
}

#[tokio::test]
async fn health_and_purge_need_none_of_the_handlers_connections() {
    let setup = setup(|config| config.max_transactions(NonZeroU32::MIN)).await;
    let (_, transaction) = setup.begin().await;
    setup.store.health().await.unwrap();
    setup.store.self_test().await.unwrap();
    idem_core::Purge::purge(&setup.store, NonZeroU32::MIN).await.unwrap();
    let error = setup.store.begin(&request()).await.unwrap_err();
    assert!(error.to_string().contains("max_transactions"), "{error}");
    drop(transaction);
}

#[tokio::test]
async fn settings_of_a_session_change_nothing() {
    for (name, value) in [("array_nulls", "off"), ("default_transaction_isolation", "serializable")] {
        let schema = Schema::new();
        let options: PgConnectOptions = idem_servers::postgres_url().parse().unwrap();
        let config = PostgresConfig::from_options(options.options([(name, value)])).schema(&schema.name);
        let store = PostgresStore::open(config).await.unwrap();
        store.self_test().await.unwrap();
        let (request, lease) = lease(&store).await;
        store.settle(&lease, &retryable(), KEPT).await.unwrap();
        assert!(store.peek(&request.id).await.unwrap().is_some(), "{name}");
    }
}

#[tokio::test]
async fn a_server_on_which_writing_was_turned_off_is_not_written_to() {
    let setup = setup(|config| config.max_transactions(NonZeroU32::MIN)).await;
    setup.pay().await;
    let database = format!("{}_database", setup.schema.name);
    let mut admin = connection().await;
    sql(&mut admin, format!("CREATE DATABASE {database}")).await;
    let options: PgConnectOptions = idem_servers::postgres_url().parse().unwrap();
    let store = PostgresStore::open(PostgresConfig::from_options(options.database(&database))).await.unwrap();
    sql(&mut admin, format!("ALTER DATABASE {database} SET default_transaction_read_only = on")).await;
    let terminate = format!("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{database}'");
    sql(&mut admin, terminate).await;
    let error = store.begin(&request()).await.unwrap_err();
    assert!(error.is_retryable() && error.to_string().contains("default_transaction_read_only"), "{error:?}");
    let error = store.acquire(&request()).await.unwrap_err();
    assert!(error.is_retryable(), "{error:?}");
    drop(store);
    sql(&mut admin, format!("DROP DATABASE {database} WITH (FORCE)")).await;
}

#[tokio::test]
async fn one_owner_token_for_two_keys_runs_no_settled_one() {
    let setup = setup(|config| config.verb_connections(NonZeroU32::MIN)).await;
    let (first, lease) = lease(&setup.store).await;
    setup.store.settle(&lease, &completed(), KEPT).await.unwrap();
    for _ in 0..20 {
        let fresh = request();
        let again = Acquire { owner: fresh.owner, ..first.clone() };
        // A lookup that is under way, so that both acquires share the next statement.
        let (_, outcome, replay) =
            tokio::join!(setup.store.peek(&first.id), setup.store.acquire(&fresh), setup.store.acquire(&again));
        assert!(matches!(outcome.unwrap(), AcquireOutcome::Acquired(_)));
        assert!(matches!(replay.unwrap(), AcquireOutcome::Replay(_)));
    }
}

#[tokio::test]
async fn times_beyond_all_reason_are_no_reason_to_panic() {
    let schema = Schema::new();
    let waits = || schema.config().transaction_wait(Duration::MAX).migration_wait(Duration::MAX);
    let config = || waits().statement_timeout(Duration::MAX).lock_timeout(Duration::MAX);
    let store = PostgresStore::open(config().idle_in_transaction_timeout(Duration::MAX)).await.unwrap();
    let Begin::Acquired { transaction, .. } = store.begin(&request()).await.unwrap() else { panic!() };
    assert_eq!(transaction.finish(&completed(), Duration::MAX, Writes::Keep).await.unwrap(), OwnerOutcome::Applied);
    PostgresStore::open(config().partitioned(Duration::MAX)).await.unwrap_err();
    PostgresStore::open(config().partitioned(Duration::from_secs(60)).without_migrating()).await.unwrap_err();
}
