//! Handlers' transactions from a pool of the application.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use idem_core::{
    AcquireOutcome, Begin, IdempotencyStore, OwnerOutcome, Purge, StoreErrorKind, StoreTransaction, TransactionalStore,
    Writes,
};
use idem_postgres::{PostgresConfig, PostgresStore, PostgresTransaction};
use idem_servers::PgBouncer;
use idem_testkit::fixture::{KEPT, completed, repeat_of, request};
use sqlx::pool::PoolConnection;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{Connection, PgConnection, PgPool, Postgres};
use tokio::sync::Semaphore;

use crate::support::{self, Schema, sql};
use crate::world::{World, eventually, join_all, transactional};

fn handlers(transaction: &mut dyn StoreTransaction) -> &mut PgConnection {
    transaction.as_any_mut().downcast_mut::<PostgresTransaction>().unwrap()
}

/// The connect options for sessions of this name.
fn options(name: &str) -> PgConnectOptions {
    idem_servers::postgres_url().parse::<PgConnectOptions>().unwrap().application_name(name)
}

/// How many sessions of this name the server has.
async fn sessions(connection: &mut PgConnection, name: &str) -> i64 {
    support::number(connection, format!("SELECT count(*) FROM pg_stat_activity WHERE application_name = '{name}'"))
        .await
}

#[tokio::test]
async fn the_store_adds_one_connection_to_those_of_the_pool() {
    let schema = Schema::new();
    let pool = PgPoolOptions::new().max_connections(5).connect_lazy_with(options(&schema.name));
    let store = PostgresStore::open(PostgresConfig::from_pool(pool.clone()).schema(&schema.name)).await.unwrap();
    store.self_test().await.unwrap();
    let mut beside = support::connection().await;
    let watch = async {
        let mut most = 0;
        for _ in 0..20 {
            most = most.max(sessions(&mut beside, &schema.name).await);
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        most
    };
    let work = join_all((0..40).map(|number| {
        let store = &store;
        async move {
            if number % 2 == 0 {
                let Begin::Acquired { transaction, .. } = store.begin(&transactional()).await.unwrap() else {
                    panic!()
                };
                transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap();
            } else {
                let AcquireOutcome::Acquired(lease) = store.acquire(&request()).await.unwrap() else { panic!() };
                store.settle(&lease, &completed(), KEPT).await.unwrap();
            }
            store.purge(10.try_into().unwrap()).await.unwrap();
        }
    }));
    let (most, _) = tokio::join!(watch, work);
    assert!((2..=6).contains(&most), "{most} sessions");
    assert_eq!(store.transactions().most, 4, "one connection is left to the application");
}

#[tokio::test]
async fn a_pool_without_a_connection_to_spare_is_refused() {
    let schema = Schema::new();
    let of = |connections| PgPoolOptions::new().max_connections(connections).connect_lazy_with(options(&schema.name));
    let five = 5.try_into().unwrap();
    for config in [PostgresConfig::from_pool(of(1)), PostgresConfig::from_pool(of(5)).max_transactions(five)] {
        let error = PostgresStore::open(config.schema(&schema.name)).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{error:?}");
        assert!(error.to_string().contains("max_transactions"), "{error}");
    }
    PostgresStore::open(PostgresConfig::from_pool(of(2)).schema(&schema.name)).await.unwrap();
}

/// The application has taken all of the pool's connections: repeats are answered, settlements go on, and the error of a
/// new run says why it cannot begin.
#[tokio::test]
async fn an_exhausted_pool_keeps_neither_answers_nor_settlements_back() {
    let world = World::from_pool().await;
    let (settled, leased) = (transactional(), request());
    let mut transaction = world.begin(&settled).await.unwrap();
    world.write(&mut *transaction, &settled.id).await.unwrap();
    transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap();
    let lease = world.lease(&leased).await.unwrap();
    let mut taken = Vec::new();
    for _ in 0..3 {
        taken.push(world.pool().acquire().await.unwrap());
    }
    let replay = world.store.begin(&repeat_of(&settled)).await.unwrap();
    assert!(matches!(replay, Begin::Answered(AcquireOutcome::Replay(_))), "{replay:?}");
    world.settle(&lease).await.unwrap();
    let start = Instant::now();
    let error = world.store.begin(&transactional()).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Busy, "{error:?}");
    assert!(error.to_string().contains("the application's pool gave no connection within 1s"), "{error}");
    assert!(start.elapsed() < Duration::from_secs(10));
    drop(taken);
    world.transact().await.unwrap();
    world.is_whole().await;
}

/// Handlers may need a connection that takes longer to make than they wait for it.
#[tokio::test]
async fn a_connection_on_its_way_is_for_the_next_handler() {
    let schema = Schema::new();
    let (entered, gate) = (Arc::new(AtomicUsize::new(0)), Arc::new(Semaphore::new(1)));
    let hook = (Arc::clone(&entered), Arc::clone(&gate));
    let pool = PgPoolOptions::new()
        .max_connections(2)
        .after_connect(move |_, _| {
            let (entered, gate) = hook.clone();
            Box::pin(async move {
                entered.fetch_add(1, Ordering::SeqCst);
                gate.acquire().await.unwrap().forget();
                Ok(())
            })
        })
        .connect_lazy_with(options(&schema.name));
    let store = PostgresStore::open(PostgresConfig::from_pool(pool.clone()).schema(&schema.name)).await.unwrap();
    eventually("the first connection is back", async || (pool.num_idle() == 1).then_some(())).await;
    let _busy = pool.acquire().await.unwrap();
    let error = store.begin(&transactional()).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error:?}");
    gate.add_permits(1);
    let begun = store.begin(&transactional()).await.unwrap();
    assert!(matches!(begun, Begin::Acquired { .. }), "{begun:?}");
    assert_eq!(entered.load(Ordering::SeqCst), 2, "one for the application, one for the handlers");
}

/// sqlx does not count a transaction that the application begins by SQL, so the pool gets its connection back as it is.
#[tokio::test]
async fn what_the_application_left_in_a_transaction_is_not_committed() {
    let schema = Schema::new();
    let pool = PgPoolOptions::new().max_connections(2).connect_lazy_with(options(&schema.name));
    let store = PostgresStore::open(PostgresConfig::from_pool(pool.clone()).schema(&schema.name)).await.unwrap();
    let mut beside = support::connection().await;
    sql(&mut beside, format!("CREATE TABLE {}.payments (amount INT)", schema.name)).await;
    for mut connection in both_of(&pool).await {
        sql(&mut connection, format!("BEGIN; INSERT INTO {}.payments VALUES (7)", schema.name)).await;
    }
    let request = transactional();
    let begun = eventually("a connection without a transaction serves", async || store.begin(&request).await.ok());
    let Begin::Acquired { transaction, .. } = begun.await else { panic!("it is new") };
    transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap();
    assert_eq!(support::number(&mut beside, format!("SELECT count(*) FROM {}.payments", schema.name)).await, 0);
}

#[tokio::test]
async fn handlers_get_what_the_application_sets_in_its_sessions() {
    let schema = Schema::new();
    let pool = PgPoolOptions::new()
        .max_connections(2)
        .after_connect(|connection, _| {
            Box::pin(async move { sqlx::query("SET lock_timeout = '7s'").execute(connection).await.map(drop) })
        })
        .connect_lazy_with(options(&schema.name));
    let store = PostgresStore::open(PostgresConfig::from_pool(pool.clone()).schema(&schema.name)).await.unwrap();
    // In the second transaction too, and for the application afterwards.
    for _ in 0..2 {
        let Begin::Acquired { mut transaction, .. } = store.begin(&transactional()).await.unwrap() else { panic!() };
        let shown: String =
            sqlx::query_scalar("SHOW lock_timeout").fetch_one(handlers(&mut *transaction)).await.unwrap();
        assert_eq!(shown, "7s");
        transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap();
    }
    let settings = "SELECT current_setting('lock_timeout') || coalesce(current_setting('idem.mark', TRUE), '')
        || coalesce(current_setting('idem.joined', TRUE), '')
        || current_setting('idle_in_transaction_session_timeout') || current_setting('default_transaction_read_only')";
    for connection in &mut both_of(&pool).await {
        let after: String = sqlx::query_scalar(settings).fetch_one(&mut **connection).await.unwrap();
        assert_eq!(after, "7s0off");
    }
}

/// All connections of a pool of two, so that the one of the handler is among them.
async fn both_of(pool: &PgPool) -> [PoolConnection<Postgres>; 2] {
    [pool.acquire().await.unwrap(), pool.acquire().await.unwrap()]
}

/// A login with many rights, and the role that the application works in.
#[tokio::test]
async fn the_role_of_the_applications_sessions_stays() {
    let schema = Schema::new();
    let pool = PgPoolOptions::new()
        .max_connections(2)
        .after_connect(|connection, _| {
            Box::pin(async move { sqlx::query("SET ROLE pg_write_all_data").execute(connection).await.map(drop) })
        })
        .connect_lazy_with(options(&schema.name));
    let store = PostgresStore::open(PostgresConfig::from_pool(pool.clone()).schema(&schema.name)).await.unwrap();
    let grant = format!(
        "GRANT USAGE ON SCHEMA {0} TO pg_write_all_data; GRANT ALL ON ALL TABLES IN SCHEMA {0} TO pg_write_all_data",
        schema.name
    );
    sql(&mut support::connection().await, grant).await;
    for writes in [Writes::Keep, Writes::Discard] {
        let Begin::Acquired { mut transaction, .. } = store.begin(&transactional()).await.unwrap() else { panic!() };
        sqlx::query("RESET ROLE").execute(handlers(&mut *transaction)).await.unwrap();
        transaction.finish(&completed(), KEPT, writes).await.unwrap();
        for connection in &mut both_of(&pool).await {
            let role: String =
                sqlx::query_scalar("SELECT current_user::TEXT").fetch_one(&mut **connection).await.unwrap();
            assert_eq!(role, "pg_write_all_data", "{writes:?}");
        }
    }
}

/// The next connection of the store has the options that the pool was given meanwhile.
#[tokio::test]
async fn rotated_options_reach_the_stores_own_connection() {
    let world = World::from_pool().await;
    world.run().await.unwrap();
    let rotated = format!("{}_rotated", world.name);
    world.pool().set_connect_options(options(&rotated));
    let mut beside = world.beside().await;
    let end =
        format!("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = '{}'", world.name);
    sql(&mut beside, end).await;
    world.run().await.unwrap();
    world.transact().await.unwrap();
    assert_eq!(sessions(&mut beside, &world.name).await, 0);
    assert_eq!(sessions(&mut beside, &rotated).await, 2, "one of the store and one of the pool");
}

#[tokio::test]
async fn sessions_without_a_name_are_called_idem() {
    let schema = Schema::new();
    let options: PgConnectOptions = idem_servers::postgres_url().parse().unwrap();
    let pool = PgPool::connect_lazy_with(options);
    let store = PostgresStore::open(PostgresConfig::from_pool(pool).schema(&schema.name)).await.unwrap();
    store.acquire(&request()).await.unwrap();
    // Other tests may have some, too.
    assert!(sessions(&mut support::connection().await, "idem").await >= 1);
}

/// The server's processes behind the three connections of a pool.
async fn pids(pool: &PgPool) -> BTreeSet<i64> {
    let connections = join_all((0..3).map(|_| pool.acquire())).await;
    let mut connections: Vec<_> = connections.into_iter().map(Result::unwrap).collect();
    let mut pids = BTreeSet::new();
    for connection in &mut connections {
        pids.insert(support::number(connection, "SELECT pg_backend_pid()::BIGINT").await);
    }
    pids
}

/// What a handler does to its transaction, whether its run then commits, and whether the pool may keep the connection.
#[tokio::test]
async fn whatever_a_handler_does_the_pool_gets_a_clean_connection_back() {
    const DEEDS: [(&str, bool, bool); 17] = [
        ("nested and committed", true, true),
        ("nested and dropped", true, true),
        ("nested and forgotten", true, false),
        ("an error in a savepoint", true, true),
        ("an error that was overlooked", false, true),
        ("a begin that failed", false, false),
        ("a begin that failed, and a role", false, false),
        ("a begin that was cancelled", false, false),
        ("another user", true, true),
        ("all settings reset", true, true),
        ("committed", false, false),
        ("committed, and a role", false, false),
        ("rolled back", false, false),
        ("a query that was not awaited", true, true),
        ("a COPY that was dropped", false, false),
        ("a COPY whose end was cancelled", false, false),
        ("a COPY to the client that was dropped", false, false),
    ];
    let world = World::from_pool().await;
    for (deed, commits, keeps) in DEEDS {
        for writes in [Writes::Keep, Writes::Discard] {
            let before = pids(world.pool()).await;
            let request = transactional();
            let mut transaction = world.begin(&request).await.unwrap();
            world.write(&mut *transaction, &request.id).await.unwrap();
            let connection = handlers(&mut *transaction);
            let say = async |connection: &mut PgConnection, text: &'static str| {
                let _ = sqlx::raw_sql(text).execute(connection).await;
            };
            match deed {
                "nested and committed" => connection.begin().await.unwrap().commit().await.unwrap(),
                "nested and dropped" => drop(connection.begin().await.unwrap()),
                "nested and forgotten" => std::mem::forget(connection.begin().await.unwrap()),
                "an error in a savepoint" => {
                    let mut nested = connection.begin().await.unwrap();
                    say(&mut nested, "SELECT 1/0").await;
                    nested.rollback().await.unwrap();
                }
                "an error that was overlooked" => say(connection, "SELECT 1/0").await,
                "a begin that failed" => {
                    say(connection, "SELECT 1/0").await;
                    connection.begin().await.unwrap_err();
                }
                // A `begin` that is ready at its first poll is not cancelled, so it is repeated.
                "a begin that was cancelled" => {
                    while futures_util::poll!(&mut Box::pin(connection.begin())).is_ready() {}
                }
                "a begin that failed, and a role" => {
                    say(connection, "SELECT 1/0").await;
                    connection.begin().await.unwrap_err();
                    say(connection, "SET ROLE pg_monitor").await;
                }
                "another user" => say(connection, "SET SESSION AUTHORIZATION pg_monitor").await,
                "all settings reset" => say(connection, "RESET ALL").await,
                "committed" => say(connection, "COMMIT").await,
                "committed, and a role" => say(connection, "COMMIT;SET ROLE pg_monitor;SET work_mem = '77MB'").await,
                "rolled back" => say(connection, "ROLLBACK").await,
                "a query that was not awaited" => {
                    let query = sqlx::raw_sql("SELECT pg_sleep(0.01)").execute(connection);
                    let _ = tokio::time::timeout(Duration::ZERO, query).await;
                }
                "a COPY that was dropped" => {
                    say(connection, "CREATE TEMPORARY TABLE items (name TEXT) ON COMMIT DROP").await;
                    let mut copy = connection.copy_in_raw("COPY pg_temp.items FROM STDIN").await.unwrap();
                    copy.send(b"one\n".as_slice()).await.unwrap();
                }
                "a COPY whose end was cancelled" => {
                    say(connection, "CREATE TEMPORARY TABLE items (name TEXT) ON COMMIT DROP").await;
                    support::cancel_the_end_of(connection, "COPY pg_temp.items FROM STDIN").await;
                }
                "a COPY to the client that was dropped" => {
                    let copy = "COPY (SELECT generate_series(1, 100000)) TO STDOUT";
                    let mut rows = connection.copy_out_raw(copy).await.unwrap();
                    assert!(rows.next().await.is_some());
                }
                other => panic!("{other}"),
            }
            let finished = transaction.finish(&completed(), KEPT, writes).await;
            // What is discarded may be discarded after an error, too.
            let commits = commits || writes == Writes::Discard && deed == "an error that was overlooked";
            match &finished {
                Ok(outcome) => assert_eq!((*outcome, commits), (OwnerOutcome::Applied, true), "{deed}, {writes:?}"),
                Err(error) => {
                    assert!(!commits, "{deed}, {writes:?}: {error:?}");
                    assert_eq!(error.kind(), StoreErrorKind::TransactionFailed, "{deed}, {writes:?}: {error:?}");
                }
            }
            let record = world.store.peek(&request.id).await.unwrap();
            assert_eq!(record.is_some(), commits, "{deed}, {writes:?}");
            world.quiet().await;
            assert_eq!(pids(world.pool()).await == before, keeps, "{deed}, {writes:?}");
            // sqlx counts no transaction that is not there: this begins one, and does not make a savepoint.
            for mut connection in join_all((0..3).map(|_| world.pool().acquire())).await.into_iter().map(Result::unwrap)
            {
                let mut begun = connection.begin().await.unwrap();
                let id: Option<String> =
                    sqlx::query_scalar("SELECT pg_current_xact_id()::TEXT").fetch_one(&mut *begun).await.unwrap();
                assert!(id.is_some());
                begun.commit().await.unwrap();
                let state = "SELECT concat_ws(' ', session_user, current_user, current_setting('work_mem') = '77MB',
                    current_setting('default_transaction_read_only'),
                    (SELECT source FROM pg_settings WHERE name = 'default_transaction_read_only'),
                    (SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory'))";
                let state: String = sqlx::query_scalar(state).fetch_one(&mut *connection).await.unwrap();
                assert_eq!(state, "postgres postgres f off default 0", "{deed}, {writes:?}");
            }
        }
    }
}

/// A run that is dropped gives its key back at once, and the pool has as many connections as before.
#[tokio::test]
async fn a_dropped_run_frees_its_key_and_its_place_in_the_pool() {
    let world = World::from_pool().await;
    for _ in 0..6 {
        let request = transactional();
        let mut transaction = world.begin(&request).await.unwrap();
        world.write(&mut *transaction, &request.id).await.unwrap();
        drop(transaction);
        world.begin_when_free(&repeat_of(&request)).await;
    }
    eventually("all connections are there", async || {
        let taken = join_all((0..3).map(|_| world.pool().acquire())).await;
        taken.iter().all(Result::is_ok).then_some(())
    })
    .await;
    world.is_whole().await;
}

/// The application's next connection comes when the server has ended the session of the run that was dropped, and not before.
#[tokio::test]
async fn the_server_never_has_more_sessions_than_the_pool() {
    let world = World::from_pool().await;
    let mut transaction = world.begin(&transactional()).await.unwrap();
    let others = join_all((0..2).map(|_| world.pool().acquire())).await;
    let sleeping = sqlx::raw_sql("SELECT pg_sleep(0.5)").execute(handlers(&mut *transaction));
    tokio::time::timeout(Duration::from_millis(50), sleeping).await.unwrap_err();
    let sleeping = format!(
        "SELECT count(*) FROM pg_stat_activity WHERE application_name = '{}' AND state = 'active' AND query ~ 'sleep'",
        world.name
    );
    assert_eq!(world.number(&sleeping).await, 1);
    drop(transaction);
    world.pool().acquire().await.unwrap();
    assert_eq!(world.number(&sleeping).await, 0);
    assert_eq!(others.iter().filter(|other| other.is_ok()).count(), 2);
}

/// A repeat finds an idle connection, but does not get it in time.
#[tokio::test]
async fn a_repeat_is_answered_when_the_idle_connection_goes_to_another_caller() {
    let schema = Schema::new();
    let gate = Arc::new(Semaphore::new(100));
    let pool = PgPoolOptions::new()
        .max_connections(2)
        .before_acquire({
            let gate = Arc::clone(&gate);
            move |_, _| {
                let gate = Arc::clone(&gate);
                Box::pin(
                    async move { gate.acquire().await.map(|permit| permit.forget()).map(|()| true).map_err(closed) },
                )
            }
        })
        .connect_lazy_with(options(&schema.name));
    let store = PostgresStore::open(PostgresConfig::from_pool(pool.clone()).schema(&schema.name)).await.unwrap();
    let settled = transactional();
    let Begin::Acquired { transaction, .. } = store.begin(&settled).await.unwrap() else { panic!() };
    transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap();
    let taken = [pool.acquire().await.unwrap(), pool.acquire().await.unwrap()];
    let [one, other] = taken;
    drop(one);
    eventually("a connection is idle", async || (pool.num_idle() > 0).then_some(())).await;
    gate.forget_permits(100);
    let replay = store.begin(&repeat_of(&settled)).await.unwrap();
    assert!(matches!(replay, Begin::Answered(AcquireOutcome::Replay(_))), "{replay:?}");
    gate.add_permits(100);
    drop(other);
}

fn closed(error: tokio::sync::AcquireError) -> sqlx::Error {
    sqlx::Error::Io(std::io::Error::other(error))
}

/// As when a runtime ends while another one, or none, has the transaction.
#[tokio::test]
async fn a_run_that_is_dropped_outside_of_its_runtime_frees_its_key() {
    let schema = Schema::new();
    let pool = PgPoolOptions::new().min_connections(1).max_connections(3).connect_with(options(&schema.name)).await;
    let config = PostgresConfig::from_pool(pool.unwrap()).schema(&schema.name);
    let store = PostgresStore::open(config).await.unwrap();
    let request = transactional();
    let begun = store.begin(&request).await.unwrap();
    std::thread::spawn(move || drop(begun)).join().unwrap();
    eventually("the key is free", async || {
        matches!(store.begin(&repeat_of(&request)).await.unwrap(), Begin::Acquired { .. }).then_some(())
    })
    .await;
}

/// A caller that waits no longer leaves the pool's queue.
#[tokio::test]
async fn a_run_that_found_no_connection_takes_none_later() {
    let schema = Schema::new();
    let taken_from_idle = Arc::new(AtomicUsize::new(0));
    let pool = PgPoolOptions::new()
        .max_connections(2)
        .before_acquire({
            let count = Arc::clone(&taken_from_idle);
            move |_, _| {
                count.fetch_add(1, Ordering::SeqCst);
                Box::pin(std::future::ready(Ok(true)))
            }
        })
        .connect_lazy_with(options(&schema.name));
    let config = PostgresConfig::from_pool(pool.clone()).schema(&schema.name);
    let store = PostgresStore::open(config.transaction_wait(Duration::from_millis(10))).await.unwrap();
    let [one, _other] = both_of(&pool).await;
    for _ in 0..3 {
        let error = store.begin(&transactional()).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Busy, "{error:?}");
    }
    let before = taken_from_idle.load(Ordering::SeqCst);
    drop(one);
    pool.acquire().await.unwrap();
    assert_eq!(taken_from_idle.load(Ordering::SeqCst) - before, 1, "the queue holds callers that have gone");
}

#[tokio::test]
async fn a_store_opens_although_transactions_wait_for_nothing() {
    let schema = Schema::new();
    let pool = PgPoolOptions::new().max_connections(2).connect_lazy_with(options(&schema.name));
    let config = PostgresConfig::from_pool(pool).schema(&schema.name).transaction_wait(Duration::ZERO);
    let store = PostgresStore::open(config).await.unwrap();
    assert!(matches!(store.begin(&transactional()).await.unwrap(), Begin::Acquired { .. }));
}

/// sqlx expects to find the statements that it has prepared.
#[tokio::test]
async fn statements_that_the_application_has_prepared_stay() {
    let schema = Schema::new();
    let pooler = PgBouncer::start_with(&idem_servers::postgres_url(), 5, &["pool_mode = session"]).unwrap();
    let options = pooler.url().parse::<PgConnectOptions>().unwrap().extra_float_digits(None);
    let pool = PgPoolOptions::new().max_connections(2).connect_lazy_with(options);
    let config = PostgresConfig::from_pool(pool.clone()).schema(&schema.name).through_transaction_pooler();
    let store = PostgresStore::open(config).await.unwrap();
    for _ in 0..4 {
        // On both connections, as the store takes either of them.
        let mut both = [pool.acquire().await.unwrap(), pool.acquire().await.unwrap()];
        for connection in &mut both {
            let found = sqlx::query_scalar::<_, i64>("SELECT $1::BIGINT").bind(7_i64).fetch_one(&mut **connection);
            assert_eq!(found.await.unwrap(), 7);
        }
        drop(both);
        let Begin::Acquired { transaction, .. } = store.begin(&transactional()).await.unwrap() else { panic!() };
        transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap();
    }
}

/// While the database takes no writes, the application still reads over the same connections.
#[tokio::test]
async fn a_database_without_writes_costs_the_pool_no_connections() {
    let world = World::from_pool().await;
    world.transact().await.unwrap();
    let reading = options(&format!("{}_reading", world.name)).options([("default_transaction_read_only", "on")]);
    world.pool().set_connect_options(reading);
    let end =
        format!("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = '{}'", world.name);
    sql(&mut world.beside().await, end).await;
    let before = pids(world.pool()).await;
    for _ in 0..3 {
        let error = world.store.begin(&transactional()).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error:?}");
    }
    eventually("the connections are there", async || (pids(world.pool()).await == before).then_some(())).await;
}

#[tokio::test]
async fn a_pooler_that_was_not_announced_is_found_at_the_start() {
    let schema = Schema::new();
    let through: PgConnectOptions = idem_servers::pgbouncer_url().parse().unwrap();
    let pool = PgPoolOptions::new().max_connections(2).connect_lazy_with(through);
    let error = PostgresStore::open(PostgresConfig::from_pool(pool).schema(&schema.name)).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{error:?}");
    assert!(error.to_string().contains("through_transaction_pooler()"), "{error}");
}

#[tokio::test]
async fn a_pool_that_is_closed_is_told_as_an_outage() {
    let world = World::from_pool().await;
    world.transact().await.unwrap();
    world.pool().close().await;
    let error = world.store.begin(&transactional()).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error:?}");
    assert!(error.to_string().contains("closed"), "{error}");
}

#[tokio::test]
async fn self_test_says_what_a_pool_and_a_pooler_weaken() {
    fn from_pool(options: PgConnectOptions) -> PostgresConfig {
        // PgBouncer refuses this start-up parameter of sqlx.
        let options = options.extra_float_digits(None);
        PostgresConfig::from_pool(PgPoolOptions::new().max_connections(2).connect_lazy_with(options))
    }
    let report = async |configure: fn(PgConnectOptions) -> PostgresConfig, url: String| {
        let schema = Schema::new();
        let config = configure(url.parse().unwrap()).schema(&schema.name);
        PostgresStore::open(config).await.unwrap().self_test().await.unwrap().to_string()
    };
    let (direct, pooler) = (idem_servers::postgres_url(), idem_servers::pgbouncer_url());
    for (report, has_pool, has_pooler) in [
        (report(PostgresConfig::from_options, direct.clone()).await, false, false),
        (report(from_pool, direct).await, true, false),
        (
            report(|options| PostgresConfig::from_options(options).through_transaction_pooler(), pooler.clone()).await,
            false,
            true,
        ),
        (report(|options| from_pool(options).through_transaction_pooler(), pooler).await, true, true),
    ] {
        assert_eq!(report.contains("the application's pool"), has_pool, "{report}");
        assert_eq!(report.contains("through a transaction pooler"), has_pooler, "{report}");
    }
}
