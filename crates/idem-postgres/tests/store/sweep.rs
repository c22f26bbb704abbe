//! Every future of the store dropped at every await, directly and through a transaction-pooling proxy: nothing stays
//! open, no key stays held, and the store does everything afterwards.

use std::cell::RefCell;
use std::time::Duration;

use crate::world::{World, eventually, sql, transactional};
use idem_core::{
    Acquire, AcquireOutcome, Begin, IdempotencyStore, OwnerOutcome, Purge, RecordId, Settlement, Term,
    TransactionalStore, Writes,
};
use idem_testkit::drop_at_every_await;
use idem_testkit::fixture::{KEPT, checkpoint, completed, repeat_of, request, retryable};
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, Row};

/// Some answers and connections are ready without waiting, so that only many sweeps meet every await.
const SWEEPS: usize = 6;

async fn effects_of(world: &World, id: &RecordId) -> i64 {
    world.number(&format!("SELECT count(*) FROM $.effects WHERE id = {}", World::literal(id))).await
}

async fn sweep_verbs(world: World) {
    let store = &world.store;
    let current = RefCell::new(request());
    let make = || {
        let request = request();
        current.replace(request.clone());
        async move {
            let AcquireOutcome::Acquired(lease) = store.acquire(&request).await.unwrap() else { panic!() };
            store.renew(&lease, request.term).await.unwrap();
            store.checkpoint(&lease, &checkpoint("charged")).await.unwrap();
            store.peek(&lease.id).await.unwrap();
            store.settle(&lease, &retryable(), KEPT).await.unwrap();
        }
    };
    let mut awaits = 0;
    for _ in 0..SWEEPS {
        awaits += drop_at_every_await(make, |_| async {
            // Repeated with the same token, each verb does what it would have done.
            let request = current.borrow().clone();
            match store.acquire(&request).await.unwrap() {
                AcquireOutcome::Acquired(lease) => world.settle(&lease).await.unwrap(),
                AcquireOutcome::Backoff { .. } => {}
                other => panic!("{other:?}"),
            }
            world.quiet().await;
        })
        .await
        .awaits;
    }
    assert!(awaits >= 4 * SWEEPS, "each verb waits at least once: {awaits}");
    world.is_whole().await;
}

#[tokio::test]
async fn verbs_dropped_at_every_await_leave_the_record_before_or_after() {
    sweep_verbs(World::shared().await).await;
}

#[tokio::test]
async fn verbs_dropped_at_every_await_leave_the_record_before_or_after_through_a_pooler() {
    sweep_verbs(World::pooled().await).await;
}

/// A release whose answer is not awaited is done or not, and the next acquire gets the key in both cases.
async fn sweep_releases(world: World) {
    let store = &world.store;
    let current = RefCell::new(request());
    let make = || {
        let request = request();
        current.replace(request.clone());
        async move {
            let AcquireOutcome::Acquired(lease) = store.acquire(&request).await.unwrap() else { panic!() };
            store.settle(&lease, &Settlement::Released, KEPT).await.unwrap();
        }
    };
    for _ in 0..SWEEPS {
        drop_at_every_await(make, |_| async {
            let request = current.borrow().clone();
            let lease = world.lease(&request).await.unwrap();
            store.settle(&lease, &Settlement::Released, KEPT).await.unwrap();
            let lease = world.lease(&repeat_of(&request)).await.unwrap();
            world.settle(&lease).await.unwrap();
        })
        .await;
    }
    world.is_whole().await;
}

#[tokio::test]
async fn releases_dropped_at_every_await_leave_the_key_to_the_next() {
    sweep_releases(World::shared().await).await;
}

/// The next caller runs the operation or gets its outcome, as soon as the dropped transaction has ended.
async fn successor(world: &World, request: &Acquire, settlement: &Settlement, writes: Writes) {
    let next = repeat_of(request);
    let begun = eventually("the key is free or answered", async || match world.store.begin(&next).await.unwrap() {
        Begin::Answered(AcquireOutcome::InProgress { .. }) => None,
        begun => Some(begun),
    })
    .await;
    let effects = effects_of(world, &request.id).await;
    match begun {
        Begin::Acquired { mut transaction, .. } => {
            assert_eq!(effects, 0, "what was rolled back left a write");
            world.write(&mut *transaction, &request.id).await.unwrap();
            transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap();
            assert_eq!(effects_of(world, &request.id).await, 1);
        }
        Begin::Answered(AcquireOutcome::Replay(_)) => {
            assert!(matches!(settlement, Settlement::Completed(_)));
            assert_eq!(effects, i64::from(writes == Writes::Keep), "the write and the record went apart");
        }
        Begin::Answered(AcquireOutcome::Backoff { .. }) => {
            assert!(matches!(settlement, Settlement::FailedRetryable { .. }));
            assert_eq!(effects, i64::from(writes == Writes::Keep), "the write and the record went apart");
        }
        Begin::Answered(other) => panic!("{other:?}"),
    }
}

async fn sweep_transactions(world: World, ends: &[(Settlement, Writes)]) {
    for (settlement, writes) in ends {
        let current = RefCell::new(transactional());
        let make = || {
            let request = transactional();
            current.replace(request.clone());
            let world = &world;
            async move {
                let mut transaction = world.begin(&request).await.unwrap();
                world.write(&mut *transaction, &request.id).await.unwrap();
                let finished = transaction.finish(settlement, KEPT, *writes).await.unwrap();
                assert_eq!(finished, OwnerOutcome::Applied);
            }
        };
        let mut awaits = 0;
        for _ in 0..SWEEPS {
            awaits += drop_at_every_await(make, |_| async {
                let request = current.borrow().clone();
                successor(&world, &request, settlement, *writes).await;
                world.quiet().await;
            })
            .await
            .awaits;
        }
        println!("dropped at {awaits} awaits in {SWEEPS} sweeps");
        // How often a fast server makes a caller wait varies, but it does so at least once a sweep.
        assert!(awaits >= SWEEPS, "{awaits}");
    }
    // The successor has checked each run. Records and writes that are kept alone on purpose would disturb the count.
    let clear = format!("TRUNCATE {0}.effects, {0}.idem_records", world.name);
    sql(&mut world.beside().await, clear).await;
    world.is_whole().await;
}

#[tokio::test]
async fn transactions_dropped_at_every_await_leave_all_or_nothing() {
    let ends = [
        (completed(), Writes::Keep),
        (completed(), Writes::Discard),
        (retryable(), Writes::Keep),
        (Settlement::Released, Writes::Discard),
    ];
    sweep_transactions(World::shared().await, &ends).await;
}

#[tokio::test]
async fn transactions_dropped_at_every_await_leave_all_or_nothing_through_a_pooler() {
    let ends = [(completed(), Writes::Keep), (Settlement::Released, Writes::Discard)];
    sweep_transactions(World::pooled().await, &ends).await;
}

#[tokio::test]
async fn transactions_dropped_at_every_await_leave_all_or_nothing_in_a_pool_of_the_application() {
    let ends = [
        (completed(), Writes::Keep),
        (completed(), Writes::Discard),
        (retryable(), Writes::Keep),
        (Settlement::Released, Writes::Discard),
    ];
    sweep_transactions(World::from_pool().await, &ends).await;
}

#[tokio::test]
async fn a_handler_dropped_inside_a_statement_that_waits_gives_its_key_and_its_connection_back() {
    stuck_handlers(World::shared().await).await;
}

#[tokio::test]
async fn a_handler_dropped_inside_a_statement_that_waits_gives_a_pool_of_the_application_its_connection_back() {
    stuck_handlers(World::from_pool().await).await;
}

async fn stuck_handlers(world: World) {
    let mut beside = world.beside().await;
    sql(&mut beside, format!("BEGIN;LOCK TABLE {}.effects IN ACCESS EXCLUSIVE MODE", world.name)).await;
    // More of them than there are connections for handlers.
    for _ in 0..5 {
        let request = transactional();
        let mut transaction = world.begin(&request).await.unwrap();
        let stuck = tokio::time::timeout(Duration::from_millis(50), world.write(&mut *transaction, &request.id));
        assert!(stuck.await.is_err(), "the table was free");
        drop(transaction);
        eventually("the key is free", async || match world.store.begin(&repeat_of(&request)).await.unwrap() {
            Begin::Acquired { .. } => Some(()),
            Begin::Answered(AcquireOutcome::InProgress { .. }) => None,
            other => panic!("{other:?}"),
        })
        .await;
    }
    sql(&mut beside, "ROLLBACK").await;
    world.is_whole().await;
}

#[tokio::test]
async fn guards_dropped_at_every_await_hold_no_record() {
    let world = World::shared().await;
    let current = RefCell::new(request());
    let make = || {
        let request = transactional();
        current.replace(request.clone());
        let world = &world;
        async move {
            let lease = world.lease(&request).await.unwrap();
            let options: sqlx::postgres::PgConnectOptions = idem_servers::postgres_url().parse().unwrap();
            let mut business = options.application_name(&world.name).connect().await.unwrap();
            let mut transaction = business.begin().await.unwrap();
            let held = world.store.guard(&lease).hold(&mut transaction).await.unwrap();
            assert_eq!(held, OwnerOutcome::Applied);
            let insert = format!("INSERT INTO {}.effects (id) VALUES ($1)", world.name);
            let insert = sqlx::query(AssertSqlSafe(insert)).bind(lease.id.as_bytes().as_slice());
            insert.execute(&mut *transaction).await.unwrap();
            transaction.commit().await.unwrap();
            business.close().await.unwrap();
            world.settle(&lease).await.unwrap();
        }
    };
    for _ in 0..2 {
        let report = drop_at_every_await(make, |_| async {
            let request = current.borrow().clone();
            world.quiet().await;
            match world.store.acquire(&request).await.unwrap() {
                AcquireOutcome::Acquired(lease) => {
                    world.store.renew(&lease, request.term).await.unwrap();
                    world.store.settle(&lease, &Settlement::Released, KEPT).await.unwrap();
                    let undo =
                        format!("DELETE FROM {}.effects WHERE id NOT IN (SELECT id FROM {0}.idem_records)", world.name);
                    sql(&mut world.beside().await, undo).await;
                }
                AcquireOutcome::Replay(_) => assert_eq!(effects_of(&world, &request.id).await, 1),
                other => panic!("{other:?}"),
            }
        })
        .await;
        // Eight answers are awaited; some may be there already.
        assert!(report.awaits >= 3, "{report:?}");
    }
    world.is_whole().await;
}

async fn sweep_maintenance(world: World) {
    let over = "SELECT count(*) FROM $.idem_records WHERE state = 1";
    for _ in 0..SWEEPS {
        let report = drop_at_every_await(
            || {
                let world = &world;
                async move {
                    let short = Term { lease: Duration::from_secs(1), retention: Duration::from_secs(1) };
                    world.lease(&Acquire { term: short, ..request() }).await.unwrap();
                    world.offset.advance(Duration::from_secs(3));
                    world.store.purge(100.try_into().unwrap()).await.unwrap();
                    world.store.health().await.unwrap();
                    world.store.self_test().await.unwrap();
                }
            },
            |_| async {
                world.quiet().await;
                world.run().await.unwrap();
                world.transact().await.unwrap();
            },
        )
        .await;
        assert!(report.awaits >= 2, "{report:?}");
    }
    // The self-test may have been dropped with the record of its run, which is over with its lease.
    world.offset.advance(Duration::from_secs(600));
    while world.store.purge(100.try_into().unwrap()).await.unwrap() > 0 {}
    assert_eq!(world.number(over).await, 0, "the purge leaves what is over");
    world.is_whole().await;
}

#[tokio::test]
async fn purges_health_and_self_tests_dropped_at_every_await_leave_nothing_open() {
    sweep_maintenance(World::shared().await).await;
}

#[tokio::test]
async fn purges_health_and_self_tests_dropped_at_every_await_leave_nothing_open_through_a_pooler() {
    sweep_maintenance(World::pooled().await).await;
}

#[tokio::test]
async fn purges_health_and_self_tests_dropped_at_every_await_leave_nothing_open_in_a_pool_of_the_application() {
    sweep_maintenance(World::from_pool().await).await;
}

#[tokio::test]
async fn what_pg_stat_activity_says_of_an_open_transaction_is_what_these_tests_look_for() {
    let world = World::shared().await;
    let transaction = world.begin(&transactional()).await.unwrap();
    let open = format!("SELECT state FROM pg_stat_activity WHERE application_name = '{}'", world.name);
    let states = sql(&mut world.beside().await, open).await;
    let states: Vec<String> = states.iter().filter_map(|row| row.try_get(0).unwrap()).collect();
    assert!(states.iter().any(|state| state == "idle in transaction"), "{states:?}");
    let looks_quiet = tokio::time::timeout(Duration::from_millis(200), world.quiet()).await;
    assert!(looks_quiet.is_err(), "an open transaction was overlooked");
    drop(transaction);
    world.quiet().await;
}
