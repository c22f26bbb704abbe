//! Duplicates that wait for the answer.

use std::num::NonZeroUsize;
use std::time::Duration;

use idem_core::Writes;
use idem_core::engine::{Answer, Disposition, Idempotency};
use idem_testkit::{Fault, Verb};
use tokio::time::Instant;

use crate::support::{World, assert_in_progress, assert_ran, assert_replays, done, fault, operation};

const MINUTE: Duration = Duration::from_secs(60);

/// Begins an operation that runs for `takes`.
async fn begun(
    world: &World,
    engine: &Idempotency,
    takes: Duration,
) -> tokio::task::JoinHandle<crate::support::Result> {
    begun_that(world, engine, takes, done()).await
}

/// Begins an operation that runs for `takes` and ends with `ends`.
async fn begun_that(
    world: &World,
    engine: &Idempotency,
    takes: Duration,
    ends: Disposition,
) -> tokio::task::JoinHandle<crate::support::Result> {
    let (world, engine) = (world.clone(), engine.clone());
    let running = tokio::spawn({
        let world = world.clone();
        async move { world.run(&engine, takes, ends).await }
    });
    while world.record().await.is_none() {
        tokio::task::yield_now().await;
    }
    running
}

#[tokio::test(start_paused = true)]
async fn a_waiter_in_the_same_process_is_woken_at_once() {
    let world = World::new();
    let engine = world.at_least_once();
    let running = begun(&world, &engine, Duration::from_millis(10_001)).await;
    let start = Instant::now();
    let waited = world.run_as(&engine, operation().wait(MINUTE), Duration::ZERO, done()).await;
    assert_replays(&waited, "paid");
    assert!(start.elapsed() <= Duration::from_millis(10_010), "{:?}", start.elapsed());
    assert_ran(&running.await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn a_waiter_in_another_process_looks_again_and_again_but_not_often() {
    let world = World::new();
    let running = begun(&world, &world.at_least_once(), Duration::from_secs(10)).await;
    let before = world.store.calls(Verb::Acquire);
    let start = Instant::now();
    let waited = world.run_as(&world.at_least_once(), operation().wait(MINUTE), Duration::ZERO, done()).await;
    assert_replays(&waited, "paid");
    assert!(start.elapsed() <= Duration::from_millis(11_100), "{:?}", start.elapsed());
    let looks = world.store.calls(Verb::Acquire) - before;
    assert!((10..=30).contains(&looks), "{looks} looks in ten seconds");
    assert_ran(&running.await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn a_waiter_in_another_process_is_woken_when_the_store_is_told() {
    let world = World::new();
    let running = begun(&world, &world.at_least_once(), Duration::from_millis(10_001)).await;
    let telling = {
        let world = world.clone();
        tokio::spawn(async move {
            tokio::time::sleep(Duration::from_millis(10_002)).await;
            // A settlement of another record changes nothing.
            world.store.announce(&idem_core::RecordId::from_bytes([7; 32]));
            world.store.announce(&world.record_id());
        })
    };
    let start = Instant::now();
    let waited = world.run_as(&world.at_least_once(), operation().wait(MINUTE), Duration::ZERO, done()).await;
    assert_replays(&waited, "paid");
    assert!(start.elapsed() <= Duration::from_millis(10_010), "{:?}", start.elapsed());
    assert_ran(&running.await.unwrap());
    telling.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn nobody_waits_longer_than_asked_nor_than_the_limit() {
    for (asked, limit, expected) in [(3, 30, 3), (100, 30, 30), (0, 30, 0)] {
        let world = World::new();
        let settings = world.settings().max_wait(Duration::from_secs(limit));
        let engine = Idempotency::at_least_once(world.store.clone(), settings);
        let _running = begun(&world, &engine, Duration::from_secs(1000)).await;
        let start = Instant::now();
        let wait = operation().wait(Duration::from_secs(asked));
        assert_in_progress(&world.run_as(&engine, wait, Duration::ZERO, done()).await);
        assert_eq!(start.elapsed().as_secs(), expected);
    }
}

#[tokio::test(start_paused = true)]
async fn the_settings_say_how_long_to_wait_when_the_operation_does_not() {
    let world = World::new();
    let engine = Idempotency::at_least_once(world.store.clone(), world.settings().wait(MINUTE));
    let running = begun(&world, &engine, Duration::from_secs(2)).await;
    assert_replays(&world.run(&engine, Duration::ZERO, done()).await, "paid");
    assert_ran(&running.await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn the_waiters_of_one_key_are_bounded() {
    let world = World::new();
    let settings = world.settings().wait(MINUTE).max_waiters_per_key(NonZeroUsize::new(3).unwrap());
    let engine = Idempotency::at_least_once(world.store.clone(), settings);
    let running = begun(&world, &engine, Duration::from_secs(5)).await;
    let calls = (0..10).map(|_| world.run(&engine, Duration::ZERO, done()));
    let results = futures_util::future::join_all(calls).await;
    let replays = results.iter().filter(|result| matches!(result, Ok(Answer::Replay(_)))).count();
    assert_eq!((replays, results.len() - replays), (3, 7));
    assert_ran(&running.await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn a_waiter_of_a_failed_run_is_told_to_rest() {
    let world = World::new();
    let engine = world.at_least_once();
    let failing = tokio::spawn({
        let (world, engine) = (world.clone(), engine.clone());
        async move { world.run(&engine, Duration::from_secs(2), fault()).await }
    });
    while world.record().await.is_none() {
        tokio::task::yield_now().await;
    }
    let waited = world.run_as(&engine, operation().wait(MINUTE), Duration::ZERO, done()).await;
    assert!(matches!(waited, Ok(Answer::Backoff { .. })), "{waited:?}");
    assert_ran(&failing.await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn a_waiter_that_goes_away_stops_asking() {
    let world = World::new();
    let engine = world.at_least_once();
    let _running = begun(&world, &engine, Duration::from_secs(1000)).await;
    let waiting = world.run_as(&engine, operation().wait(MINUTE), Duration::ZERO, done());
    assert!(tokio::time::timeout(Duration::from_secs(2), waiting).await.is_err());
    tokio::time::sleep(Duration::from_millis(1)).await;
    let asked = world.store.calls(Verb::Acquire);
    tokio::time::sleep(Duration::from_secs(20)).await;
    assert_eq!(world.store.calls(Verb::Acquire), asked);
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_does_not_wait_for_those_who_wait() {
    let world = World::new();
    let _running = begun(&world, &world.at_least_once(), Duration::from_secs(1000)).await;
    let engine = world.at_least_once();
    let waiting = tokio::spawn({
        let (world, engine) = (world.clone(), engine.clone());
        async move { world.run_as(&engine, operation().wait(MINUTE), Duration::ZERO, done()).await }
    });
    tokio::time::sleep(Duration::from_secs(1)).await;
    let start = Instant::now();
    engine.shutdown(Duration::from_secs(60)).await.unwrap();
    assert!(start.elapsed() < Duration::from_millis(1), "{:?}", start.elapsed());
    assert_in_progress(&waiting.await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn a_waiter_whose_store_goes_away_does_not_run_what_it_saw_running() {
    let world = World::new();
    let settings = world.settings().wait(MINUTE).dangerous_fail_open();
    let engine = Idempotency::at_least_once(world.store.clone(), settings);
    let _running = begun(&world, &engine, Duration::from_secs(1000)).await;
    world.store.next(Verb::Acquire, Fault::None);
    for _ in 0..10 {
        world.store.next(Verb::Acquire, Fault::ErrorBefore);
    }
    assert_in_progress(&world.run(&engine, Duration::ZERO, done()).await);
    assert_eq!((world.runs(), world.events.count("failed-open")), (0, 0));
}

/// Starts `count` duplicates that wait for one key, in one process that does not run it.
async fn crowd(world: &World, count: usize) -> Vec<tokio::task::JoinHandle<crate::support::Result>> {
    let many = NonZeroUsize::new(2 * count).unwrap();
    let settings = world.settings().max_waiters_per_key(many).max_waiters(many).max_running(many);
    let engine = Idempotency::at_least_once(world.store.clone(), settings);
    let waiting = (0..count).map(|_| {
        let (world, engine) = (world.clone(), engine.clone());
        tokio::spawn(async move { world.run_as(&engine, operation().wait(MINUTE), Duration::ZERO, done()).await })
    });
    let waiting = waiting.collect();
    while engine.waiting() < count {
        tokio::task::yield_now().await;
    }
    waiting
}

#[tokio::test(start_paused = true)]
async fn a_thousand_who_wait_for_one_key_ask_the_store_as_one() {
    let world = World::new();
    let running = begun(&world, &world.at_least_once(), Duration::from_millis(10_001)).await;
    let before = world.store.calls(Verb::Acquire);
    let waiting = crowd(&world, 1_000).await;
    let asked = || world.store.calls(Verb::Acquire) - before - 1_000;
    for second in 1..=10 {
        let earlier = asked();
        tokio::time::sleep(Duration::from_secs(1)).await;
        let looks = asked() - earlier;
        assert!(looks <= 5, "{looks} looks in second {second}");
    }
    assert!(asked() >= 8, "{} looks in ten seconds", asked());
    let earlier = asked();
    world.store.announce(&world.record_id());
    for waiting in waiting {
        assert_replays(&waiting.await.unwrap(), "paid");
    }
    assert!(asked() - earlier <= 2, "{} looks at the settlement", asked() - earlier);
    assert_ran(&running.await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn when_the_one_that_asks_for_others_goes_away_another_one_asks() {
    let world = World::new();
    let running = begun(&world, &world.at_least_once(), Duration::from_secs(10)).await;
    let mut waiting = crowd(&world, 10).await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    // The waiter that asks is among the first nine, or is the tenth and asks on.
    for gone in waiting.drain(..9) {
        gone.abort();
    }
    let start = Instant::now();
    assert_replays(&waiting.pop().unwrap().await.unwrap(), "paid");
    assert!(start.elapsed() <= Duration::from_millis(10_600), "{:?}", start.elapsed());
    assert_ran(&running.await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn a_store_that_goes_away_is_asked_for_all_who_wait_and_not_by_each() {
    let world = World::new();
    let _running = begun(&world, &world.at_least_once(), Duration::from_secs(1000)).await;
    let waiting = crowd(&world, 100).await;
    tokio::time::sleep(Duration::from_millis(1)).await;
    let before = world.store.calls(Verb::Acquire);
    for _ in 0..10 {
        world.store.next(Verb::Acquire, Fault::ErrorBefore);
    }
    for waiting in waiting {
        assert_in_progress(&waiting.await.unwrap());
    }
    let asked = world.store.calls(Verb::Acquire) - before;
    assert!(asked <= 2, "{asked}: once, and once more for the answer that may be lost");
}

#[tokio::test(start_paused = true)]
async fn of_those_who_wait_for_a_run_that_gives_back_one_runs_and_the_others_get_its_answer() {
    let world = World::new();
    let released = Disposition::Release { writes: Writes::Discard };
    let releasing = begun_that(&world, &world.at_least_once(), Duration::from_secs(2), released).await;
    let waiting = crowd(&world, 20).await;
    let mut answers = Vec::new();
    for waiting in waiting {
        answers.push(waiting.await.unwrap());
    }
    let ran = answers.iter().filter(|answer| matches!(answer, Ok(Answer::Ran { .. }))).count();
    let replayed = answers.iter().filter(|answer| matches!(answer, Ok(Answer::Replay(_)))).count();
    assert_eq!((ran, replayed), (1, 19));
    assert_ran(&releasing.await.unwrap());
}
