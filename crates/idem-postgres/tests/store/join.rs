//! Runs in transactions that the caller opened, from a pool of the application.

use std::cell::RefCell;
use std::time::Duration;

use idem_core::engine::{Idempotency, Operation, Settings};
use idem_core::{
    Acquire, AcquireOutcome, Begin, DurableStore, Fingerprint, IdempotencyKey, IdempotencyStore, Purge, Scope,
    Settlement, StoreErrorKind, TransactionalStore, Writes,
};
use idem_postgres::{Join, JoinedRun, PostgresTransaction};
use idem_proxy::Proxy;
use idem_proxy::postgres::{Lose, Losses};
use idem_testkit::drop_at_every_await;
use idem_testkit::fixture::{BACKOFF, KEPT, completed, mismatch_of, repeat_of, retryable};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{AssertSqlSafe, Connection, PgConnection, PgPool};

use crate::world::{World, at_port, eventually, port_of_shared, sql, transactional};

/// The application's pool. Its sessions have the name of the store's, so that the checks of [`World`] include them.
fn pool_of(world: &World, url: &str) -> PgPool {
    let options: PgConnectOptions = url.parse().unwrap();
    PgPoolOptions::new().max_connections(4).connect_lazy_with(options.application_name(&world.name))
}

fn pool(world: &World) -> PgPool {
    pool_of(world, &idem_servers::postgres_url())
}

/// The business write. Nothing is prepared, because a pooler may be on the way.
async fn write(world: &World, connection: &mut PgConnection, request: &Acquire) {
    let insert = format!("INSERT INTO {}.effects (id) VALUES ({})", world.name, World::literal(&request.id));
    sqlx::raw_sql(AssertSqlSafe(insert)).execute(connection).await.unwrap();
}

async fn joined(world: &World, connection: &mut PgConnection, request: &Acquire) -> JoinedRun {
    match world.store.join(connection, request).await.unwrap() {
        Join::Acquired(run) => run,
        answered @ Join::Answered(_) => panic!("not acquired: {answered:?}"),
    }
}

async fn answered(world: &World, connection: &mut PgConnection, request: &Acquire) -> AcquireOutcome {
    match world.store.join(connection, request).await.unwrap() {
        Join::Answered(outcome) => outcome,
        run @ Join::Acquired(_) => panic!("acquired: {run:?}"),
    }
}

fn is_in_progress(outcome: &AcquireOutcome) -> bool {
    matches!(outcome, AcquireOutcome::InProgress { .. })
}

async fn effects(world: &World) -> i64 {
    world.number("SELECT count(*) FROM $.effects").await
}

async fn is_replayed(world: &World, request: &Acquire) -> bool {
    matches!(world.store.acquire(&repeat_of(request)).await.unwrap(), AcquireOutcome::Replay(_))
}

#[tokio::test]
async fn writes_and_record_commit_with_the_callers_transaction() {
    let (world, request) = (World::shared().await, transactional());
    let pool = pool(&world);
    let mut transaction = pool.begin().await.unwrap();
    let run = joined(&world, &mut transaction, &request).await;
    assert_eq!((run.lease().attempt, run.lease().owner), (1, request.owner));
    write(&world, &mut transaction, &request).await;
    run.settle(&mut transaction, &completed(), KEPT).await.unwrap();
    assert_eq!(world.store.peek(&request.id).await.unwrap(), None, "it was there before the commit");
    assert!(is_in_progress(&world.store.acquire(&repeat_of(&request)).await.unwrap()), "it was answered too early");
    transaction.commit().await.unwrap();
    assert_eq!(effects(&world).await, 1);
    let record = world.store.peek(&request.id).await.unwrap().unwrap();
    assert_eq!(record.expires_at.saturating_duration_since(record.updated_at), KEPT);
    assert!(is_replayed(&world, &request).await);
    // A repeat in a transaction gets the answer, and its transaction goes on.
    let mut transaction = pool.begin().await.unwrap();
    let replay = answered(&world, &mut transaction, &repeat_of(&request)).await;
    assert!(matches!(replay, AcquireOutcome::Replay(_)), "{replay:?}");
    let mismatch = answered(&world, &mut transaction, &mismatch_of(&request)).await;
    assert!(matches!(mismatch, AcquireOutcome::Mismatch { .. }), "{mismatch:?}");
    write(&world, &mut transaction, &request).await;
    transaction.commit().await.unwrap();
    assert_eq!(effects(&world).await, 2);
}

#[tokio::test]
async fn a_rollback_leaves_nothing_and_frees_the_key_at_once() {
    let (world, request) = (World::shared().await, transactional());
    let pool = pool(&world);
    for settle in [false, true] {
        let mut transaction = pool.begin().await.unwrap();
        let run = joined(&world, &mut transaction, &repeat_of(&request)).await;
        write(&world, &mut transaction, &request).await;
        if settle {
            run.settle(&mut transaction, &completed(), KEPT).await.unwrap();
        }
        transaction.rollback().await.unwrap();
        assert_eq!(world.store.peek(&request.id).await.unwrap(), None);
        assert_eq!(effects(&world).await, 0);
    }
    world.begin(&request).await.unwrap();
}

#[tokio::test]
async fn who_runs_turns_others_away_whichever_way_they_come() {
    let (world, request) = (World::shared().await, transactional());
    let pool = pool(&world);
    let (mut first, mut second) = (pool.begin().await.unwrap(), pool.begin().await.unwrap());
    let run = joined(&world, &mut first, &request).await;
    assert!(is_in_progress(&answered(&world, &mut second, &repeat_of(&request)).await));
    let begun = world.store.begin(&repeat_of(&request)).await.unwrap();
    assert!(matches!(&begun, Begin::Answered(outcome) if is_in_progress(outcome)), "{begun:?}");
    assert!(is_in_progress(&world.store.acquire(&repeat_of(&request)).await.unwrap()));
    run.settle(&mut first, &completed(), KEPT).await.unwrap();
    first.commit().await.unwrap();
    // A refused join holds nothing: it may ask again in the same transaction.
    let replay = answered(&world, &mut second, &repeat_of(&request)).await;
    assert!(matches!(replay, AcquireOutcome::Replay(_)), "{replay:?}");
    // A join is also refused while the store's own transaction or a lease runs the operation.
    let other = transactional();
    let begun = world.begin(&other).await.unwrap();
    assert!(is_in_progress(&answered(&world, &mut second, &repeat_of(&other)).await));
    begun.finish(&completed(), KEPT, Writes::Keep).await.unwrap();
    let leased = transactional();
    let lease = world.lease(&leased).await.unwrap();
    assert!(is_in_progress(&answered(&world, &mut second, &repeat_of(&leased)).await));
    world.settle(&lease).await.unwrap();
    assert!(matches!(answered(&world, &mut second, &leased).await, AcquireOutcome::Replay(_)));
    second.rollback().await.unwrap();
    world.quiet().await;
}

#[tokio::test]
async fn many_at_once_run_once() {
    let world = World::shared().await;
    let pool = pool(&world);
    for _ in 0..20 {
        let request = transactional();
        let attempt = async || {
            let mut transaction = pool.begin().await.unwrap();
            let Join::Acquired(run) = world.store.join(&mut transaction, &repeat_of(&request)).await.unwrap() else {
                return;
            };
            write(&world, &mut transaction, &request).await;
            run.settle(&mut transaction, &completed(), KEPT).await.unwrap();
            transaction.commit().await.unwrap();
        };
        futures_util::future::join_all((0..4).map(|_| attempt())).await;
        assert!(is_replayed(&world, &request).await);
    }
    assert_eq!(effects(&world).await, 20);
    world.writes_and_records_agree().await;
}

#[tokio::test]
async fn a_failure_to_be_retried_is_taken_over_with_the_next_attempt() {
    let (world, request) = (World::shared().await, transactional());
    let pool = pool(&world);
    let mut transaction = pool.begin().await.unwrap();
    let run = joined(&world, &mut transaction, &request).await;
    run.settle(&mut transaction, &retryable(), KEPT).await.unwrap();
    transaction.commit().await.unwrap();
    let mut transaction = pool.begin().await.unwrap();
    let backoff = answered(&world, &mut transaction, &repeat_of(&request)).await;
    assert!(matches!(backoff, AcquireOutcome::Backoff { .. }), "{backoff:?}");
    world.offset.advance(BACKOFF);
    let run = joined(&world, &mut transaction, &repeat_of(&request)).await;
    assert_eq!(run.lease().attempt, 2);
    write(&world, &mut transaction, &request).await;
    run.settle(&mut transaction, &completed(), KEPT).await.unwrap();
    transaction.commit().await.unwrap();
    assert!(is_replayed(&world, &request).await);
    assert_eq!(effects(&world).await, 1);
}

#[tokio::test]
async fn one_transaction_joins_many_operations_and_the_same_one_once() {
    let (world, one, other) = (World::shared().await, transactional(), transactional());
    let pool = pool(&world);
    let mut transaction = pool.begin().await.unwrap();
    let first = joined(&world, &mut transaction, &one).await;
    assert!(is_in_progress(&answered(&world, &mut transaction, &repeat_of(&one)).await));
    let second = joined(&world, &mut transaction, &other).await;
    write(&world, &mut transaction, &one).await;
    write(&world, &mut transaction, &other).await;
    // In the order in which they were joined, which is not that of their savepoints.
    first.settle(&mut transaction, &completed(), KEPT).await.unwrap();
    let replay = answered(&world, &mut transaction, &repeat_of(&one)).await;
    assert!(matches!(replay, AcquireOutcome::Replay(_)), "{replay:?}");
    second.settle(&mut transaction, &completed(), KEPT).await.unwrap();
    transaction.commit().await.unwrap();
    assert!(is_replayed(&world, &one).await && is_replayed(&world, &other).await);
    world.writes_and_records_agree().await;
}

#[tokio::test]
async fn what_cannot_be_joined_is_refused_with_its_reason() {
    let world = World::shared().await;
    let pool = pool(&world);
    let failed = StoreErrorKind::TransactionFailed;
    let mut connection = pool.acquire().await.unwrap();
    let error = world.store.join(&mut connection, &transactional()).await.unwrap_err();
    assert_eq!(error.kind(), failed, "{error:?}");
    assert!(error.to_string().contains("no transaction to join"), "{error}");
    let mut transaction = connection.begin_with("BEGIN READ ONLY").await.unwrap();
    let error = world.store.join(&mut transaction, &transactional()).await.unwrap_err();
    assert!(error.kind() == failed && error.to_string().contains("read-only"), "{error:?}");
    transaction.rollback().await.unwrap();
    let mut transaction = connection.begin().await.unwrap();
    sqlx::raw_sql("SELECT 1/0").execute(&mut *transaction).await.unwrap_err();
    let error = world.store.join(&mut transaction, &transactional()).await.unwrap_err();
    assert_eq!(error.kind(), failed, "{error:?}");
    transaction.rollback().await.unwrap();
    let mut transaction = connection.begin().await.unwrap();
    let run = joined(&world, &mut transaction, &transactional()).await;
    let error = run.settle(&mut transaction, &Settlement::Released, KEPT).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{error:?}");
    transaction.rollback().await.unwrap();
    world.quiet().await;
}

/// The three ways to lose the transaction of the join on the way to its settlement.
#[tokio::test]
async fn a_settlement_outside_of_its_transaction_is_refused() {
    let world = World::shared().await;
    let pool = pool(&world);
    for end in ["COMMIT", "COMMIT; BEGIN", "SELECT 1/0"] {
        let request = transactional();
        let mut connection = pool.acquire().await.unwrap();
        sqlx::raw_sql("BEGIN").execute(&mut *connection).await.unwrap();
        let run = joined(&world, &mut connection, &request).await;
        let _ = sqlx::raw_sql(end).execute(&mut *connection).await;
        let error = run.settle(&mut connection, &completed(), KEPT).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::TransactionFailed, "{end}: {error:?}");
        sqlx::raw_sql("ROLLBACK").execute(&mut *connection).await.unwrap();
        assert_eq!(world.store.peek(&request.id).await.unwrap(), None, "{end}");
    }
}

/// The server answers COMMIT by a rollback then, and sqlx takes that for a success.
#[tokio::test]
async fn the_ticket_knows_of_an_error_that_was_overlooked_after_the_settlement() {
    let (world, request) = (World::shared().await, transactional());
    let pool = pool(&world);
    let mut transaction = pool.begin().await.unwrap();
    let run = joined(&world, &mut transaction, &request).await;
    write(&world, &mut transaction, &request).await;
    let ticket = run.settle(&mut transaction, &completed(), KEPT).await.unwrap();
    sqlx::raw_sql("SELECT 1/0").execute(&mut *transaction).await.unwrap_err();
    transaction.commit().await.unwrap();
    assert!(!ticket.is_committed().await.unwrap());
    assert_eq!((effects(&world).await, world.store.peek(&request.id).await.unwrap()), (0, None));
}

#[tokio::test]
async fn a_run_whose_lock_was_given_back_by_the_caller_cannot_commit_over_another_one() {
    let (world, request) = (World::shared().await, transactional());
    let pool = pool(&world);
    let mut transaction = pool.begin().await.unwrap();
    let mut nested = transaction.begin().await.unwrap();
    let run = joined(&world, &mut nested, &request).await;
    nested.rollback().await.unwrap();
    // The lock went with the savepoint.
    let other = world.begin(&repeat_of(&request)).await.unwrap();
    other.finish(&completed(), KEPT, Writes::Keep).await.unwrap();
    write(&world, &mut transaction, &request).await;
    let error = run.settle(&mut transaction, &completed(), KEPT).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::TransactionFailed, "{error:?}");
    drop(transaction);
    world.quiet().await;
    assert_eq!(effects(&world).await, 0);
}

/// Its savepoint is gone, and the savepoint of another run has the same name.
#[tokio::test]
async fn a_run_that_was_rolled_back_is_not_settled_by_the_savepoint_of_another_one() {
    let (world, kept, undone) = (World::shared().await, transactional(), transactional());
    let pool = pool(&world);
    let mut transaction = pool.begin().await.unwrap();
    let _kept = joined(&world, &mut transaction, &kept).await;
    let mut nested = transaction.begin().await.unwrap();
    let run = joined(&world, &mut nested, &undone).await;
    write(&world, &mut nested, &undone).await;
    nested.rollback().await.unwrap();
    let error = run.settle(&mut transaction, &completed(), KEPT).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::TransactionFailed, "{error:?}");
    transaction.rollback().await.unwrap();
    assert_eq!(world.store.peek(&undone.id).await.unwrap(), None, "it was told as done");
}

/// A handler joins another operation in the store's transaction, and its own.
#[tokio::test]
async fn the_stores_own_transactions_can_be_joined() {
    for writes in [Writes::Keep, Writes::Discard] {
        let (world, outer, inner) = (World::shared().await, transactional(), transactional());
        let mut transaction = world.begin(&outer).await.unwrap();
        let handlers: &mut PostgresTransaction = transaction.as_any_mut().downcast_mut().unwrap();
        assert!(is_in_progress(&answered(&world, handlers, &repeat_of(&outer)).await));
        let _unsettled = joined(&world, handlers, &inner).await;
        write(&world, handlers, &outer).await;
        transaction.finish(&completed(), KEPT, writes).await.unwrap();
        assert!(is_replayed(&world, &outer).await);
        assert_eq!(effects(&world).await, i64::from(writes == Writes::Keep));
        world.begin(&inner).await.unwrap();
    }
}

#[tokio::test]
async fn what_a_locked_table_turned_away_holds_nothing() {
    let (world, request) = (World::shared().await, transactional());
    let pool = pool(&world);
    let mut beside = world.beside().await;
    sql(&mut beside, format!("BEGIN;LOCK TABLE {}.idem_records IN ACCESS EXCLUSIVE MODE", world.name)).await;
    let mut transaction = pool.begin().await.unwrap();
    let joining = world.store.join(&mut transaction, &request);
    let unlock = async {
        tokio::time::sleep(Duration::from_millis(800)).await;
        sql(&mut beside, "ROLLBACK").await;
    };
    // The join waits for `lock_timeout`, and then asks for the answer on another connection.
    let (_, ()) = tokio::join!(joining, unlock);
    let mut other = pool.begin().await.unwrap();
    let _run = joined(&world, &mut other, &repeat_of(&request)).await;
    drop((transaction, other));
}

/// The transaction was committed, and its record taken over since. The ticket must not report a rollback.
#[tokio::test]
async fn a_ticket_does_not_take_a_successor_for_a_rollback() {
    let (world, request) = (World::shared().await, transactional());
    let pool = pool(&world);
    let mut transaction = pool.begin().await.unwrap();
    let run = joined(&world, &mut transaction, &request).await;
    let ticket = run.settle(&mut transaction, &retryable(), KEPT).await.unwrap();
    transaction.commit().await.unwrap();
    world.offset.advance(BACKOFF);
    let successor = world.begin(&repeat_of(&request)).await.unwrap();
    successor.finish(&completed(), KEPT, Writes::Keep).await.unwrap();
    assert_eq!(ticket.is_committed().await.unwrap_err().kind(), StoreErrorKind::Timeout);
}

/// With one snapshot a transaction does not see what was committed after it began.
#[tokio::test]
async fn an_old_snapshot_neither_runs_again_nor_misses_the_answer() {
    let world = World::shared().await;
    let pool = pool(&world);
    for level in ["REPEATABLE READ", "SERIALIZABLE"] {
        let begin = format!("BEGIN ISOLATION LEVEL {level}");
        let request = transactional();
        let mut transaction = pool.begin_with(AssertSqlSafe(begin.clone())).await.unwrap();
        sqlx::raw_sql("SELECT 1").execute(&mut *transaction).await.unwrap();
        let other = world.begin(&request).await.unwrap();
        other.finish(&completed(), KEPT, Writes::Keep).await.unwrap();
        let replay = answered(&world, &mut transaction, &repeat_of(&request)).await;
        assert!(matches!(replay, AcquireOutcome::Replay(_)), "{level}: {replay:?}");
        // A record that may run again, and that this snapshot does not show.
        let again = transactional();
        let other = world.begin(&again).await.unwrap();
        other.finish(&retryable(), KEPT, Writes::Keep).await.unwrap();
        world.offset.advance(BACKOFF);
        let error = world.store.join(&mut transaction, &repeat_of(&again)).await.unwrap_err();
        assert!(error.kind() == StoreErrorKind::Unavailable && error.to_string().contains("snapshot"), "{error:?}");
        transaction.rollback().await.unwrap();
        let mut transaction = pool.begin_with(AssertSqlSafe(begin)).await.unwrap();
        let run = joined(&world, &mut transaction, &repeat_of(&again)).await;
        assert_eq!(run.lease().attempt, 2, "{level}");
        run.settle(&mut transaction, &completed(), KEPT).await.unwrap();
        // Its own record is no reason to begin again.
        let replay = answered(&world, &mut transaction, &repeat_of(&again)).await;
        assert!(matches!(replay, AcquireOutcome::Replay(_)), "{level}: {replay:?}");
        transaction.commit().await.unwrap();
    }
}

#[tokio::test]
async fn what_the_session_and_the_transaction_have_set_stays() {
    let world = World::shared().await;
    let pool = pool(&world);
    let mut transaction = pool.begin().await.unwrap();
    let set = "SET LOCAL lock_timeout = '7s'; SET LOCAL bytea_output = escape; SET LOCAL enable_seqscan = off";
    sqlx::raw_sql(set).execute(&mut *transaction).await.unwrap();
    let settings = "SELECT string_agg(name || '=' || setting, ';' ORDER BY name) FROM pg_settings \
        WHERE name NOT LIKE 'transaction%' AND name NOT LIKE '%.%'";
    let before: String = sqlx::query_scalar(settings).fetch_one(&mut *transaction).await.unwrap();
    let run = joined(&world, &mut transaction, &transactional()).await;
    let between: String = sqlx::query_scalar(settings).fetch_one(&mut *transaction).await.unwrap();
    assert_eq!(between, before);
    run.settle(&mut transaction, &completed(), KEPT).await.unwrap();
    let after: String = sqlx::query_scalar(settings).fetch_one(&mut *transaction).await.unwrap();
    assert_eq!(after, before);
    transaction.commit().await.unwrap();
}

/// COMMIT gets lost on the way to the server, with the connection, or on the way back. The ticket says what the database
/// holds.
#[tokio::test]
async fn a_lost_commit_is_told_by_the_ticket_as_it_was() {
    let world = World::shared().await;
    let proxy = Proxy::<Losses>::to_port(port_of_shared()).await.unwrap();
    let pool = pool_of(&world, &at_port(proxy.port()));
    for lose in [Lose::Statement, Lose::Connection, Lose::Answer].into_iter().cycle().take(9) {
        let request = transactional();
        let mut transaction = pool.begin().await.unwrap();
        let run = joined(&world, &mut transaction, &request).await;
        write(&world, &mut transaction, &request).await;
        let ticket = run.settle(&mut transaction, &completed(), KEPT).await.unwrap();
        proxy.lose(lose, "COMMIT", 1);
        transaction.commit().await.unwrap_err();
        assert!(proxy.has_lost());
        let told = ticket.is_committed().await.unwrap();
        assert_eq!(world.store.peek(&request.id).await.unwrap().is_some(), told, "{lose:?}");
        match lose {
            Lose::Statement => assert!(!told, "what never arrived was told as committed"),
            Lose::Answer => assert!(told, "what was committed was told as lost"),
            _ => {}
        }
    }
    world.writes_and_records_agree().await;
    // A transaction that goes on is neither committed nor rolled back.
    let mut transaction = pool.begin().await.unwrap();
    let run = joined(&world, &mut transaction, &transactional()).await;
    let ticket = run.settle(&mut transaction, &completed(), KEPT).await.unwrap();
    let error = ticket.is_committed().await.unwrap_err();
    assert!(error.kind() == StoreErrorKind::Timeout && error.is_indeterminate(), "{error:?}");
    transaction.commit().await.unwrap();
    assert!(ticket.is_committed().await.unwrap());
}

async fn sweep(world: World, pool: PgPool) {
    let current = RefCell::new(transactional());
    let make = || {
        let request = transactional();
        current.replace(request.clone());
        let (world, pool) = (&world, &pool);
        async move {
            // In a task: when `begin` of sqlx is dropped, the transaction may stay open.
            let begun = tokio::spawn({
                let pool = pool.clone();
                async move { pool.begin().await.unwrap() }
            });
            let mut transaction = begun.await.unwrap();
            let run = joined(world, &mut transaction, &request).await;
            write(world, &mut transaction, &request).await;
            run.settle(&mut transaction, &completed(), KEPT).await.unwrap();
            transaction.commit().await.unwrap();
        }
    };
    let mut awaits = 0;
    for _ in 0..6 {
        let swept = drop_at_every_await(make, |_| async {
            let next = repeat_of(&current.borrow());
            // The next caller runs the operation or gets its answer, as soon as the dropped transaction has ended.
            eventually("the key is free or answered", async || {
                let mut transaction = pool.begin().await.unwrap();
                match world.store.join(&mut transaction, &next).await.unwrap() {
                    Join::Answered(AcquireOutcome::Replay(_)) => Some(()),
                    Join::Answered(outcome) if is_in_progress(&outcome) => None,
                    Join::Answered(other) => panic!("{other:?}"),
                    Join::Acquired(run) => {
                        write(&world, &mut transaction, &next).await;
                        run.settle(&mut transaction, &completed(), KEPT).await.unwrap();
                        transaction.commit().await.unwrap();
                        Some(())
                    }
                }
            })
            .await;
            world.quiet().await;
        });
        awaits += swept.await.awaits;
    }
    // How often a fast server makes a caller wait varies, but it does so at least once a sweep.
    assert!(awaits >= 6, "{awaits}");
    world.writes_and_records_agree().await;
}

#[tokio::test]
async fn joins_dropped_at_every_await_leave_all_or_nothing() {
    let world = World::shared().await;
    let pool = pool(&world);
    sweep(world, pool).await;
}

#[tokio::test]
async fn joins_dropped_at_every_await_leave_all_or_nothing_through_a_pooler() {
    let world = World::pooled().await;
    let options: PgConnectOptions = world.pooler_url().parse().unwrap();
    let options = options.application_name(&world.name).statement_cache_capacity(0).extra_float_digits(None);
    let pool = PgPoolOptions::new().max_connections(4).connect_lazy_with(options);
    sweep(world, pool).await;
}

#[tokio::test]
async fn an_engine_makes_the_request() {
    let world = World::shared().await;
    let pool = pool(&world);
    let store = std::sync::Arc::new(world.store.clone());
    let engine = Idempotency::transactional(store, Settings::new());
    let key = IdempotencyKey::new("order-4711").unwrap();
    let operation = Operation::new(Scope::single_tenant("pay"), key, Fingerprint::of_bytes("pay", b"12 EUR"));
    let mut transaction = pool.begin().await.unwrap();
    let run = joined(&world, &mut transaction, &engine.acquire_for(&operation)).await;
    let settlement = Settlement::Completed(idem_core::StoredResponse::new(200, "\"paid\""));
    run.settle(&mut transaction, &settlement, KEPT).await.unwrap();
    transaction.commit().await.unwrap();
    // The engine knows the record.
    let ran = engine.run::<String, String, _, _>(operation, |_| async { panic!("it ran again") }).await.unwrap();
    assert_eq!(ran.value, "paid");
}

/// Two modules of one service have their records in different schemas.
#[tokio::test]
async fn operations_of_two_stores_are_settled_in_any_order() {
    let worlds = [World::shared().await, World::shared().await];
    let pool = pool(&worlds[0]);
    for order in [[0, 1], [1, 0]] {
        let requests = [transactional(), transactional()];
        let mut transaction = pool.begin().await.unwrap();
        let mut runs = Vec::new();
        for (world, request) in worlds.iter().zip(&requests) {
            runs.push(Some(joined(world, &mut transaction, request).await));
            write(world, &mut transaction, request).await;
        }
        for place in order {
            runs[place].take().unwrap().settle(&mut transaction, &completed(), KEPT).await.unwrap();
        }
        transaction.commit().await.unwrap();
        for (world, request) in worlds.iter().zip(&requests) {
            assert!(is_replayed(world, request).await);
        }
    }
}

#[tokio::test]
async fn an_answer_is_kept_for_a_second_at_least() {
    let (world, request) = (World::shared().await, transactional());
    let pool = pool(&world);
    let mut transaction = pool.begin().await.unwrap();
    let run = joined(&world, &mut transaction, &request).await;
    let ticket = run.settle(&mut transaction, &completed(), Duration::ZERO).await.unwrap();
    let endless = transactional();
    let run = joined(&world, &mut transaction, &endless).await;
    run.settle(&mut transaction, &completed(), Duration::MAX).await.unwrap();
    transaction.commit().await.unwrap();
    assert!(ticket.is_committed().await.unwrap());
    let record = world.store.peek(&request.id).await.unwrap().unwrap();
    assert_eq!(record.expires_at.saturating_duration_since(record.updated_at), Duration::from_secs(1));
    // When it may have been purged, its absence proves nothing.
    world.offset.advance(Duration::from_secs(2));
    tokio::time::sleep(Duration::from_secs(1)).await;
    world.store.purge(100.try_into().unwrap()).await.unwrap();
    let unknown = ticket.is_committed().await.unwrap_err();
    assert_eq!(unknown.kind(), StoreErrorKind::Timeout, "{unknown:?}");
}

/// A database for each tenant, each with a schema of the same name.
#[tokio::test]
async fn a_transaction_in_another_database_is_not_joined() {
    let (world, request) = (World::shared().await, transactional());
    let mut beside = world.beside().await;
    let other = format!("{}_other", world.name);
    sqlx::raw_sql(AssertSqlSafe(format!("CREATE DATABASE {other}"))).execute(&mut beside).await.unwrap();
    let url = idem_servers::postgres_url();
    let options = url.parse::<PgConnectOptions>().unwrap().database(&other);
    let pool = PgPoolOptions::new().max_connections(4).connect_with(options).await.unwrap();
    let identity = format!("SELECT identity::TEXT FROM {}.idem_identity", world.name);
    let identity: String = sqlx::query_scalar(AssertSqlSafe(identity)).fetch_one(&mut beside).await.unwrap();
    // Without the schema, with one of this name, and with a copy of the store's.
    for (place, wanted) in [(0, "schema"), (1, "another database"), (2, "another database")] {
        match place {
            0 => {}
            1 => {
                let config = idem_postgres::PostgresConfig::from_pool(pool.clone()).schema(&world.name);
                drop(idem_postgres::PostgresStore::open(config.max_transactions(2.try_into().unwrap())).await.unwrap());
            }
            // Then it differs by its database alone.
            _ => {
                let copy = format!("UPDATE {}.idem_identity SET identity = '{identity}'", world.name);
                sqlx::raw_sql(AssertSqlSafe(copy)).execute(&pool).await.unwrap();
            }
        }
        if place > 0 {
            // Redis in front of both must not take the records of one for those of the other.
            let config = idem_postgres::PostgresConfig::from_pool(pool.clone()).schema(&world.name);
            let copy =
                idem_postgres::PostgresStore::open(config.max_transactions(2.try_into().unwrap())).await.unwrap();
            assert_ne!(copy.identity(), world.store.identity());
        }
        let mut transaction = pool.begin().await.unwrap();
        let refused = world.store.join(&mut transaction, &request).await.unwrap_err();
        assert_eq!(refused.kind(), StoreErrorKind::Misconfigured, "{refused:?}");
        assert!(refused.to_string().contains(wanted), "{refused}");
        transaction.rollback().await.unwrap();
    }
    sqlx::raw_sql(AssertSqlSafe(format!("DROP DATABASE {other} WITH (FORCE)"))).execute(&mut beside).await.unwrap();
}

/// The driver does not read the answer to a COPY that is dropped, so that the next answers are those to earlier statements.
#[tokio::test]
async fn a_transaction_with_a_dropped_copy_is_not_settled() {
    let (world, request) = (World::shared().await, transactional());
    let pool = pool(&world);
    let mut transaction = pool.begin().await.unwrap();
    let run = joined(&world, &mut transaction, &request).await;
    let copy = format!("COPY {}.effects (id) FROM STDIN", world.name);
    crate::support::cancel_the_end_of(&mut transaction, &copy).await;
    let failed = run.settle(&mut transaction, &completed(), KEPT).await.unwrap_err();
    assert_eq!(failed.kind(), StoreErrorKind::TransactionFailed, "{failed:?}");
    assert!(failed.to_string().contains("COPY"), "{failed}");
    drop(transaction);
    assert!(!is_replayed_or_runs(&world, &request).await);
}

/// Whether a repeat is answered; if it is not, it runs.
async fn is_replayed_or_runs(world: &World, request: &Acquire) -> bool {
    eventually("the transaction has ended", async || match world.store.acquire(&repeat_of(request)).await.unwrap() {
        AcquireOutcome::Replay(_) => Some(true),
        AcquireOutcome::Acquired(_) => Some(false),
        _ => None,
    })
    .await
}
