//! Verbs that arrive together share a statement. No verb suffers from the errors of others, from callers that go away, or
//! from another process that does the same in another order.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::support::{Configure as _, Schema, connection, number};
use crate::world::{World, at_port, eventually, join_all, port_of_shared, sql};
use idem_core::{Acquire, AcquireOutcome, IdempotencyStore, Lease, OwnerOutcome, Settlement, StoreErrorKind};
use idem_postgres::{PostgresConfig, PostgresStore};
use idem_proxy::postgres::Losses;
use idem_proxy::{Ended, Proxy};
use idem_testkit::fixture::{KEPT, checkpoint, completed, request};
use sqlx::PgConnection;
use sqlx::postgres::PgConnectOptions;

const MANY: usize = 200;

/// A store with one connection for its verbs, and the proxy that counts its statements.
async fn one_lane(configure: impl FnOnce(PostgresConfig) -> PostgresConfig) -> (Proxy<Losses>, World) {
    let proxy = Proxy::<Losses>::to_port(port_of_shared()).await.unwrap();
    let configure = |config: PostgresConfig| configure(config.verb_connections(NonZeroU32::MIN));
    let world = World::shared_through(proxy.port(), configure).await;
    (proxy, world)
}

/// Holds the row of `lease`, so that a statement about it waits.
async fn hold(world: &World, lease: &Lease) -> PgConnection {
    let mut holder = world.beside().await;
    let id = World::literal(&lease.id);
    let held = format!("BEGIN;SELECT FROM {}.idem_records WHERE id = {id} FOR UPDATE", world.name);
    assert_eq!(sql(&mut holder, held).await.len(), 1);
    holder
}

/// Waits until a statement of the store waits for a row.
async fn waits(world: &World) {
    let waiting = format!(
        "SELECT count(*) FROM pg_stat_activity WHERE application_name = '{}' AND wait_event_type = 'Lock'",
        world.name
    );
    let mut beside = world.beside().await;
    eventually("a statement waits for the row", async || (number(&mut beside, &waiting).await > 0).then_some(())).await;
}

fn patient(config: PostgresConfig) -> PostgresConfig {
    config.lock_timeout(Duration::from_secs(20)).statement_timeout(Duration::from_secs(30))
}

#[tokio::test]
async fn verbs_that_arrive_while_a_statement_is_on_its_way_go_together() {
    let (proxy, world) = one_lane(patient).await;
    let first = world.lease(&request()).await.unwrap();
    let mut holder = hold(&world, &first).await;
    let before = proxy.statements();
    let requests: Vec<_> = std::iter::repeat_with(request).take(MANY).collect();
    let acquires = join_all(requests.iter().map(|request| world.store.acquire(request)));
    let release = async {
        waits(&world).await;
        // The acquires were polled after the settlement and are in the queue by now.
        sql(&mut holder, "ROLLBACK").await;
    };
    let (settled, outcomes, ()) = tokio::join!(world.settle(&first), acquires, release);
    settled.unwrap();
    for (outcome, request) in outcomes.into_iter().zip(&requests) {
        let AcquireOutcome::Acquired(lease) = outcome.unwrap() else { panic!("another's answer") };
        assert_eq!((lease.id, lease.owner), (request.id, request.owner), "another's answer");
    }
    let statements = proxy.statements() - before;
    println!("{statements} statements carried a settlement and {MANY} acquires");
    // One settlement, and as many batches of 64 as it takes.
    assert!((2..=1 + MANY.div_ceil(64)).contains(&statements), "{statements} statements");
    assert_eq!(world.number("SELECT count(*) FROM $.idem_records").await, 1 + MANY as i64);
}

#[tokio::test]
async fn many_at_once_take_far_fewer_statements_than_they_are() {
    let proxy = Proxy::<Losses>::to_port(port_of_shared()).await.unwrap();
    let world = World::shared_through(proxy.port(), |config| config).await;
    let before = proxy.statements();
    for run in join_all((0..MANY).map(|_| world.run())).await {
        run.unwrap();
    }
    let statements = proxy.statements() - before;
    println!("{statements} statements carried {MANY} acquires and {MANY} settlements");
    assert!(statements < MANY / 4, "{statements} statements");
}

#[tokio::test]
async fn the_error_of_one_stays_its_own() {
    let (proxy, world) = one_lane(|config| config).await;
    let leases = join_all((0..20).map(|_| async { world.lease(&request()).await.unwrap() })).await;
    let mut holder = hold(&world, &leases[7]).await;
    let before = proxy.statements();
    let start = Instant::now();
    let end = completed();
    let outcomes = join_all(leases.iter().map(|lease| world.store.settle(lease, &end, KEPT))).await;
    let took = start.elapsed();
    for (number, outcome) in outcomes.into_iter().enumerate() {
        match outcome {
            Ok(outcome) => assert!(outcome == OwnerOutcome::Applied && number != 7, "{number}"),
            Err(error) => {
                assert_eq!((error.kind(), number), (StoreErrorKind::Timeout, 7), "{error:?}");
                assert!(
                    error.is_retryable() && error.to_string().contains("another session holds the lock"),
                    "{error:?}"
                );
            }
        }
    }
    // The batch and the single retry each waited for the row; no other verb did.
    assert!(took < Duration::from_secs(3), "{took:?}");
    assert!(proxy.statements() - before > 20, "they did not go together, which this test is about");
    assert_eq!(world.number("SELECT count(*) FROM $.idem_records WHERE state = 2").await, 19);
    sql(&mut holder, "ROLLBACK").await;
    world.settle(&leases[7]).await.unwrap();
}

#[tokio::test]
async fn a_row_is_waited_for_as_long_as_was_said_after_an_impatient_try_too_and_on_a_new_connection() {
    const LIMIT: Duration = Duration::from_millis(400);
    let (_proxy, world) = one_lane(|config| patient(config).lock_timeout(LIMIT)).await;
    let (held, free) = (world.lease(&request()).await.unwrap(), world.lease(&request()).await.unwrap());
    let _holder = hold(&world, &held).await;
    let wait = async || {
        let start = Instant::now();
        let error = world.settle(&held).await.unwrap_err();
        let waited = start.elapsed();
        assert_eq!(error.kind(), StoreErrorKind::Timeout, "{error:?}");
        assert!(waited >= LIMIT && waited < 20 * LIMIT, "{waited:?}");
    };
    wait().await;
    // The batch waits once for `lock_timeout`. Then each verb is retried alone, with a short wait.
    let (of_held, of_free) = tokio::join!(world.settle(&held), world.settle(&free));
    assert_eq!(of_held.unwrap_err().kind(), StoreErrorKind::Timeout);
    of_free.unwrap();
    wait().await;
    let mut beside = world.beside().await;
    let ended = format!(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = '{}' AND pid <> pg_backend_pid()",
        world.name
    );
    assert!(!sql(&mut beside, ended).await.is_empty());
    wait().await;
}

#[tokio::test]
async fn who_goes_away_takes_only_its_own_answer_along() {
    let (_proxy, world) = one_lane(patient).await;
    let leases = join_all((0..31).map(|_| async { world.lease(&request()).await.unwrap() })).await;
    let (first, queued) = leases.split_first().unwrap();
    let (mut holder, mut other) = (hold(&world, first).await, hold(&world, &queued[29]).await);
    let settle = |lease: &Lease| {
        let (store, lease) = (world.store.clone(), lease.clone());
        tokio::spawn(async move { store.settle(&lease, &completed(), KEPT).await })
    };
    let first_task = settle(first);
    waits(&world).await;
    // They wait in the queue behind the first statement, and will share the next one.
    let mut tasks: Vec<_> = queued.iter().map(settle).collect();
    for _ in 0..10 {
        tokio::task::yield_now().await;
    }
    tasks[..10].iter().for_each(tokio::task::JoinHandle::abort);
    sql(&mut holder, "ROLLBACK").await;
    assert_eq!(first_task.await.unwrap().unwrap(), OwnerOutcome::Applied);
    waits(&world).await;
    // Now their statement is on its way.
    tasks[10..20].iter().for_each(tokio::task::JoinHandle::abort);
    sql(&mut other, "ROLLBACK").await;
    for task in tasks.split_off(20) {
        assert_eq!(task.await.unwrap().unwrap(), OwnerOutcome::Applied);
    }
    for task in tasks {
        assert!(task.await.unwrap_err().is_cancelled());
    }
    let settled = async |lease: &Lease| world.store.peek(&lease.id).await.unwrap().unwrap().replay().is_some();
    for (number, lease) in queued.iter().enumerate() {
        // A verb whose caller goes away before its statement begins is not run. A statement under way is not cut off.
        assert_eq!(settled(lease).await, number >= 10, "{number}");
        world.settle(lease).await.unwrap();
    }
}

/// Two processes on a separate database. Their `deadlock_timeout` is shorter than any wait.
struct Two {
    stores: [PostgresStore; 2],
    database: String,
}

impl Two {
    async fn start() -> Self {
        let database = format!("test_{}", uuid::Uuid::new_v4().simple());
        sql(&mut connection().await, format!("CREATE DATABASE {database}")).await;
        let options: PgConnectOptions = idem_servers::postgres_url().parse().unwrap();
        let options = options.database(&database).options([("deadlock_timeout", "20ms")]);
        let config = patient(PostgresConfig::from_options(options)).verb_connections(NonZeroU32::MIN);
        let first = PostgresStore::open(config.clone()).await.unwrap();
        let second = PostgresStore::open(config).await.unwrap();
        Self { stores: [first, second], database }
    }

    /// How many deadlocks the server has counted. Sessions report them at their end.
    async fn deadlocks(self) -> i64 {
        let Self { stores, database } = self;
        drop(stores);
        let mut beside = connection().await;
        let sessions = format!("SELECT count(*) FROM pg_stat_activity WHERE datname = '{database}'");
        eventually("the sessions end", async || (number(&mut beside, &sessions).await == 0).then_some(())).await;
        let deadlocks = format!("SELECT deadlocks FROM pg_stat_database WHERE datname = '{database}'");
        let deadlocks = number(&mut beside, deadlocks).await;
        sql(&mut beside, format!("DROP DATABASE {database}")).await;
        deadlocks
    }
}

/// The records that both processes own: both acquire with the same tokens.
async fn own_together(two: &Two) -> [Vec<Lease>; 2] {
    let requests: Vec<Acquire> = std::iter::repeat_with(request).take(16).collect();
    let reversed: Vec<Acquire> = requests.iter().rev().cloned().collect();
    let acquires = |store: &PostgresStore, requests: Vec<Acquire>| {
        let store = store.clone();
        tokio::spawn(async move { join_all(requests.iter().map(|request| store.acquire(request))).await })
    };
    let (one, other) = (acquires(&two.stores[0], requests), acquires(&two.stores[1], reversed));
    let lease = |outcome| match outcome {
        Ok(AcquireOutcome::Acquired(lease)) => lease,
        other => panic!("{other:?}"),
    };
    let (one, other) = (one.await.unwrap(), other.await.unwrap());
    [one.into_iter().map(lease).collect(), other.into_iter().map(lease).collect()]
}

/// Both processes settle the same records, in opposite orders.
async fn settle_together(two: &Two, settlement: &Settlement, before: impl AsyncFn(&PostgresStore, &Lease)) {
    const ROUNDS: usize = 200;
    for _ in 0..ROUNDS {
        let leases = own_together(two).await;
        for lease in &leases[0] {
            before(&two.stores[0], lease).await;
        }
        let [one, other] = [0, 1].map(|number| {
            let (store, leases, settlement) = (two.stores[number].clone(), leases[number].clone(), settlement.clone());
            tokio::spawn(
                async move { join_all(leases.iter().map(|lease| store.settle(lease, &settlement, KEPT))).await },
            )
        });
        for outcome in [one.await.unwrap(), other.await.unwrap()].into_iter().flatten() {
            assert_eq!(outcome.unwrap(), OwnerOutcome::Applied);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn processes_that_do_the_same_in_opposite_orders_never_deadlock() {
    let two = Two::start().await;
    settle_together(&two, &completed(), async |_, _| {}).await;
    assert_eq!(two.deadlocks().await, 0, "statements waited for each other in a circle");
}

/// The state machine decides on a release after a checkpoint, and the statement replaces the record.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn decisions_that_processes_place_in_opposite_orders_never_deadlock() {
    let (two, point) = (Two::start().await, checkpoint("x"));
    let point = async |store: &PostgresStore, lease: &Lease| {
        assert_eq!(store.checkpoint(lease, &point).await.unwrap(), OwnerOutcome::Applied);
    };
    settle_together(&two, &Settlement::Released, point).await;
    assert_eq!(two.deadlocks().await, 0, "statements waited for each other in a circle");
}

/// A statement runs the kinds of verbs one after another, each in the order of ids. A batch that renews A and checkpoints B
/// must not deadlock with one that renews B and checkpoints A.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn different_verbs_on_the_same_records_never_deadlock() {
    const ROUNDS: usize = 100;
    let two = Two::start().await;
    let [here, there] = two.stores.clone();
    for _ in 0..ROUNDS {
        let [leases, _] = own_together(&two).await;
        // A heartbeat and a checkpoint of the same run may be on their way at once, and here they are of many runs.
        let work = |store: PostgresStore, odd: usize| {
            let leases = leases.clone();
            tokio::spawn(async move {
                let term = request().term;
                let point = checkpoint("x");
                let outcomes = join_all(leases.iter().enumerate().map(async |(number, lease)| {
                    if number % 2 == odd {
                        store.renew(lease, term).await
                    } else {
                        store.checkpoint(lease, &point).await
                    }
                }));
                outcomes.await
            })
        };
        let (one, other) = (work(here.clone(), 0), work(there.clone(), 1));
        for outcome in [one.await.unwrap(), other.await.unwrap()].into_iter().flatten() {
            assert_eq!(outcome.unwrap(), OwnerOutcome::Applied);
        }
    }
    drop((here, there));
    assert_eq!(two.deadlocks().await, 0, "statements waited for each other in a circle");
}

#[tokio::test]
async fn clients_who_begin_and_clients_who_settle_share_no_statement() {
    let (proxy, world) = one_lane(patient).await;
    let held = world.lease(&request()).await.unwrap();
    let leases = join_all((0..20).map(|_| async { world.lease(&request()).await.unwrap() })).await;
    let mut holder = hold(&world, &held).await;
    let before = proxy.statements();
    let requests: Vec<_> = std::iter::repeat_with(request).take(leases.len()).collect();
    let end = completed();
    let pairs = join_all(leases.iter().zip(&requests).map(|(lease, request)| async {
        tokio::join!(world.store.settle(lease, &end, KEPT), world.store.acquire(request))
    }));
    let meanwhile = async {
        waits(&world).await;
        // The others are polled first, and so in the queue when the row is let go.
        tokio::join!(pairs, sql(&mut holder, "ROLLBACK")).0
    };
    let (settled, pairs) = tokio::join!(world.settle(&held), meanwhile);
    settled.unwrap();
    for ((settled, acquired), request) in pairs.into_iter().zip(&requests) {
        assert_eq!(settled.unwrap(), OwnerOutcome::Applied);
        let AcquireOutcome::Acquired(lease) = acquired.unwrap() else { panic!("another's answer") };
        assert_eq!((lease.id, lease.owner), (request.id, request.owner), "another's answer");
    }
    assert_eq!(proxy.statements() - before, 3, "the one that waits, one of settlements, one of acquires");
}

#[tokio::test]
async fn a_call_is_prepared_once_whatever_the_url_says() {
    let proxy = Proxy::<Losses>::to_port(port_of_shared()).await.unwrap();
    let schema = Schema::new();
    let url = at_port(proxy.port());
    let separator = if url.contains('?') { '&' } else { '?' };
    let url = format!("{url}{separator}statement-cache-capacity=0");
    let store = PostgresStore::open(schema.config_at(&url).verb_connections(NonZeroU32::MIN)).await.unwrap();
    for _ in 0..20 {
        let AcquireOutcome::Acquired(lease) = store.acquire(&request()).await.unwrap() else { panic!("not acquired") };
        assert_eq!(store.settle(&lease, &completed(), KEPT).await.unwrap(), OwnerOutcome::Applied);
    }
    assert_eq!(proxy.preparations(), 2, "one for acquires and one for settlements");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn those_who_are_answered_together_come_again_together() {
    const CLIENTS: usize = 32;
    const CYCLES: usize = 40;
    let (proxy, world) = one_lane(patient).await;
    let world = Arc::new(world);
    let before = proxy.statements();
    let clients: Vec<_> = std::iter::repeat_with(|| {
        let world = Arc::clone(&world);
        tokio::spawn(async move {
            for _ in 0..CYCLES {
                let lease = world.lease(&request()).await.unwrap();
                world.settle(&lease).await.unwrap();
            }
        })
    })
    .take(CLIENTS)
    .collect();
    for client in clients {
        client.await.unwrap();
    }
    let statements = proxy.statements() - before;
    println!("{statements} statements carried {CYCLES} cycles of {CLIENTS} clients");
    // Two statements for each cycle, and some more if the worker wakes before all clients have come.
    assert!(2 * statements <= 7 * CYCLES, "{statements} statements");
}

#[tokio::test]
async fn a_proxy_that_comes_between_later_and_gives_sessions_to_others_is_an_outage_that_says_why() {
    let (proxy, world) = one_lane(|config| config).await;
    let lease = world.lease(&request()).await.unwrap();
    let refused = async || {
        let error = world.settle(&lease).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error:?}");
        assert!(error.to_string().contains("through_transaction_pooler()"), "{error}");
    };
    let pooler: PgConnectOptions = idem_servers::pgbouncer_url().parse().unwrap();
    proxy.lead_to(pooler.get_port());
    proxy.end_all(Ended::Closed);
    refused().await;
    proxy.lead_to(port_of_shared());
    world.settle(&lease).await.unwrap();
    // A proxy that ignores start-up options without an error.
    proxy.ignore_options();
    proxy.end_all(Ended::Closed);
    refused().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_caller_who_keeps_its_thread_keeps_nobody_elses_verbs() {
    const KEPT_BUSY: Duration = Duration::from_secs(1);
    let (_proxy, world) = one_lane(patient).await;
    let world = Arc::new(world);
    let mut waited = Duration::ZERO;
    for round in 0..8 {
        let held = world.lease(&request()).await.unwrap();
        let mut holder = hold(&world, &held).await;
        let first = tokio::spawn({
            let world = Arc::clone(&world);
            async move { world.settle(&held).await.unwrap() }
        });
        waits(&world).await;
        let (busy, is_busy) = tokio::sync::oneshot::channel();
        let mut busy = Some(busy);
        let callers: Vec<_> = std::iter::repeat_with(|| {
            let (world, busy) = (Arc::clone(&world), busy.take());
            tokio::spawn(async move {
                world.lease(&request()).await.unwrap();
                if let Some(busy) = busy {
                    busy.send(()).unwrap();
                    std::thread::sleep(KEPT_BUSY);
                }
            })
        })
        .take(8)
        .collect();
        sql(&mut holder, "ROLLBACK").await;
        is_busy.await.unwrap();
        let start = Instant::now();
        world.lease(&request()).await.unwrap();
        waited = waited.max(start.elapsed());
        println!("round {round}: {:?}", start.elapsed());
        first.await.unwrap();
        for caller in callers {
            caller.await.unwrap();
        }
    }
    assert!(waited < KEPT_BUSY / 2, "{waited:?}");
}
