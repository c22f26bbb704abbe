//! How many operations may run.

use std::num::NonZeroUsize;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use idem_core::engine::{Contract, ExecuteError, Idempotency, Operation};
use idem_core::{Fingerprint, IdempotencyStore as _, Scope};
use idem_testkit::Verb;
use tokio::time::Instant;

use crate::support::{World, assert_ran, assert_replays, done, operation};

#[tokio::test(start_paused = true)]
async fn as_many_operations_run_as_may_and_others_are_refused_before_the_store_is_asked() {
    let world = World::new();
    let engine = Idempotency::at_least_once(world.store.clone(), world.settings().max_running(NonZeroUsize::MIN));
    let first = tokio::spawn({
        let (world, engine) = (world.clone(), engine.clone());
        async move { world.run(&engine, Duration::from_secs(10), done()).await }
    });
    tokio::time::sleep(Duration::from_secs(1)).await;
    // Its client leaves, and it runs on.
    first.abort();
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(engine.running(), 1);
    let asked = world.store.calls(Verb::Acquire);
    let refused = world.run(&engine, Duration::ZERO, done()).await;
    assert!(matches!(refused, Err(ExecuteError::Overloaded { limit: 1 })), "{refused:?}");
    assert_eq!((world.store.calls(Verb::Acquire), world.events.count("overloaded")), (asked, 1));
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert_eq!(engine.running(), 0);
    assert_replays(&world.run(&engine, Duration::ZERO, done()).await, "paid");
}

#[tokio::test(start_paused = true)]
async fn a_duplicate_that_waits_takes_no_place_from_operations() {
    let world = World::new();
    let two = NonZeroUsize::new(2).unwrap();
    let engine = Idempotency::at_least_once(world.store.clone(), world.settings().max_running(two));
    let run = |operation, takes| {
        let (world, engine) = (world.clone(), engine.clone());
        tokio::spawn(async move { world.run_as(&engine, operation, takes, done()).await })
    };
    let first = run(operation(), Duration::from_secs(10));
    tokio::time::sleep(Duration::from_millis(100)).await;
    let waits = run(operation().wait(Duration::from_secs(20)), Duration::ZERO);
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!((engine.running(), engine.waiting()), (1, 1));
    // Another operation takes the second place: the duplicate goes on waiting, and gets its answer.
    let other = Operation::new(Scope::new("acme", "pay"), "other".parse().unwrap(), Fingerprint::of_bytes("pay", b""));
    let other = run(other, Duration::from_secs(30));
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(engine.running(), 2);
    assert_ran(&first.await.unwrap());
    assert_replays(&waits.await.unwrap(), "paid");
    assert_ran(&other.await.unwrap());
}

/// Two routes with different contracts and settings.
#[tokio::test(start_paused = true)]
async fn attached_engines_share_their_limit_and_their_shutdown_and_nothing_else() {
    let world = World::new();
    let engine = Idempotency::at_least_once(world.store.clone(), world.settings().max_running(NonZeroUsize::MIN));
    let hour = Duration::from_secs(3600);
    let attached =
        Idempotency::at_most_once(world.store.clone(), world.settings().retention(hour)).attached_to(&engine);
    assert_eq!((attached.contract(), engine.contract()), (Contract::AtMostOnce, Contract::AtLeastOnce));
    let first = tokio::spawn({
        let (world, attached) = (world.clone(), attached.clone());
        async move { world.run(&attached, Duration::from_secs(10), done()).await }
    });
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!((engine.running(), attached.running()), (1, 1));
    let refused = world.run(&engine, Duration::ZERO, done()).await;
    assert!(matches!(refused, Err(ExecuteError::Overloaded { limit: 1 })), "{refused:?}");
    // The shutdown of one waits for what the other runs, and both refuse what comes.
    let start = Instant::now();
    engine.shutdown(Duration::from_secs(60)).await.unwrap();
    assert!(start.elapsed() >= Duration::from_secs(8), "{:?}", start.elapsed());
    assert_ran(&first.await.unwrap());
    for engine in [&engine, &attached] {
        let refused = world.run(engine, Duration::ZERO, done()).await;
        assert!(matches!(refused, Err(ExecuteError::ShuttingDown)), "{refused:?}");
    }
    let id = attached.acquire_for(&operation()).id;
    let record = world.store.peek(&id).await.unwrap().unwrap();
    assert_eq!(record.expires_at.saturating_duration_since(record.updated_at), hour);
}

#[tokio::test]
async fn an_engine_that_others_know_already_cannot_be_attached() {
    let world = World::new();
    let engine = || Idempotency::at_least_once(world.store.clone(), world.settings());
    let attach = |one: Idempotency| catch_unwind(AssertUnwindSafe(|| one.attached_to(&engine()))).is_ok();
    let (cloned, base) = (engine(), engine());
    let _clone = cloned.clone();
    let _attached = engine().attached_to(&base);
    assert!(!attach(cloned) && !attach(base), "a clone or an attached engine would be left behind");
    assert!(attach(engine()));
}
