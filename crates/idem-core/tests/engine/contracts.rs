//! What a run's end means under each contract, and the answers that follow.

use std::time::Duration;

use idem_core::engine::{Answer, Conclusion, Context, Disposition};
use idem_core::{OnMismatch, ReplayKind, Writes};

use crate::support::{
    World, assert_in_progress, assert_ran, assert_replays, done, fault, operation, operation_with, panicked,
};

#[tokio::test(start_paused = true)]
async fn an_operation_runs_once_and_is_replayed_ever_after() {
    let world = World::new();
    for engine in [world.at_least_once(), world.at_most_once(), world.at_least_once()] {
        let result = world.run(&engine, Duration::ZERO, done()).await;
        if world.events.count("replayed") == 0 { assert_ran(&result) } else { assert_replays(&result, "paid") }
    }
    assert_eq!((world.runs(), world.events.count("executed"), world.events.count("replayed")), (1, 1, 2));
}

#[tokio::test(start_paused = true)]
async fn another_request_under_the_key_neither_runs_nor_is_answered() {
    let world = World::new();
    let engine = world.at_least_once();
    world.run(&engine, Duration::ZERO, done()).await.unwrap();
    let other = world.run_as(&engine, operation_with(b"99 EUR"), Duration::ZERO, done()).await;
    assert!(matches!(other, Ok(Answer::Mismatch)), "{other:?}");
    assert_eq!(world.runs(), 1);
    let lenient = world.settings().on_mismatch(OnMismatch::ReplayOriginal);
    let lenient = idem_core::engine::Idempotency::at_least_once(world.store.clone(), lenient);
    let other = world.run_as(&lenient, operation_with(b"99 EUR"), Duration::ZERO, done()).await;
    assert_replays(&other, "paid");
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_goes_away_cancels_nothing() {
    let world = World::new();
    let engine = world.at_least_once();
    let call = world.run(&engine, Duration::from_secs(1), done());
    assert!(tokio::time::timeout(Duration::from_millis(500), call).await.is_err());
    engine.shutdown(Duration::from_secs(60)).await.unwrap();
    assert_eq!(world.runs(), 1);
    assert_replays(&world.run(&world.at_least_once(), Duration::ZERO, done()).await, "paid");
}

#[tokio::test(start_paused = true)]
async fn a_fault_rests_under_at_least_once_and_is_final_under_at_most_once() {
    let world = World::new();
    let engine = world.at_least_once();
    assert_ran(&world.run(&engine, Duration::ZERO, fault()).await);
    let resting = world.run(&engine, Duration::ZERO, done()).await;
    assert!(matches!(resting, Ok(Answer::Backoff { retry_after }) if retry_after == Duration::from_secs(1)));
    world.clock.advance(Duration::from_secs(1));
    let second = world.run(&engine, Duration::ZERO, done()).await;
    assert!(matches!(second, Ok(Answer::Ran { attempt: 2, .. })), "{second:?}");

    let world = World::new();
    let engine = world.at_most_once();
    assert_ran(&world.run(&engine, Duration::ZERO, fault()).await);
    world.clock.advance(Duration::from_secs(3600));
    let repeat = world.run(&engine, Duration::ZERO, done()).await;
    assert!(matches!(&repeat, Ok(Answer::Replay(replay)) if replay.kind == ReplayKind::Failed), "{repeat:?}");
}

#[tokio::test(start_paused = true)]
async fn a_panic_is_a_fault_and_the_engine_goes_on() {
    let world = World::new();
    let engine = world.at_most_once();
    let run = |_: Context| async { panic!("as planned") };
    let result = engine.execute(operation(), run, panicked).await;
    assert!(matches!(result, Ok(Answer::Ran { value: "panicked", .. })), "{result:?}");
    assert_replays(&world.run(&engine, Duration::ZERO, done()).await, "panicked");
    assert_eq!(world.events.count("panicked"), 1);
}

#[tokio::test(start_paused = true)]
async fn a_released_operation_runs_again_and_a_retryable_one_after_its_time() {
    let world = World::new();
    let engine = world.at_most_once();
    assert_ran(&world.run(&engine, Duration::ZERO, Disposition::Release { writes: Writes::Discard }).await);
    assert_eq!(world.record().await, None);
    let after = Some(Duration::from_secs(7));
    let retry = Disposition::Retry { response: idem_core::StoredResponse::new(503, "later"), after };
    assert_ran(&world.run(&engine, Duration::ZERO, retry).await);
    let resting = world.run(&engine, Duration::ZERO, done()).await;
    assert!(matches!(resting, Ok(Answer::Backoff { retry_after }) if retry_after == Duration::from_secs(7)));
    world.clock.advance(Duration::from_secs(7));
    assert_ran(&world.run(&engine, Duration::ZERO, done()).await);
    assert_eq!(world.runs(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_conclusion_may_have_a_retention_of_its_own() {
    let world = World::new();
    let engine = world.at_least_once();
    let run = |_: Context| async {
        Conclusion { value: "ran", disposition: done(), retention: Some(Duration::from_secs(5)) }
    };
    assert_ran(&engine.execute(operation(), run, panicked).await);
    world.clock.advance(Duration::from_secs(5));
    assert_ran(&world.run(&engine, Duration::ZERO, done()).await);
}

#[tokio::test(start_paused = true)]
async fn a_conclusion_cannot_ask_for_no_retention_at_all_and_a_backoff_is_not_forgotten_before_its_end() {
    let world = World::new();
    let engine = world.at_most_once();
    let run = |_: Context| async { Conclusion { value: "ran", disposition: done(), retention: Some(Duration::ZERO) } };
    assert_ran(&engine.execute(operation(), run, panicked).await);
    assert_replays(&world.run(&engine, Duration::ZERO, done()).await, "paid");

    let world = World::new();
    let engine = world.at_least_once();
    let after = Some(Duration::from_secs(3600));
    let disposition = Disposition::Retry { response: idem_core::StoredResponse::new(503, "later"), after };
    let run = move |_: Context| async move {
        Conclusion { value: "ran", disposition, retention: Some(Duration::from_secs(60)) }
    };
    assert_ran(&engine.execute(operation(), run, panicked).await);
    world.clock.advance(Duration::from_secs(3599));
    let resting = world.run(&engine, Duration::ZERO, done()).await;
    assert!(matches!(resting, Ok(Answer::Backoff { .. })), "{resting:?}");
}

#[tokio::test(start_paused = true)]
async fn shutdown_refuses_what_is_new_and_awaits_what_runs() {
    let world = World::new();
    let engine = world.at_least_once();
    let running = tokio::spawn({
        let (world, engine) = (world.clone(), engine.clone());
        async move { world.run(&engine, Duration::from_secs(5), done()).await }
    });
    tokio::time::sleep(Duration::from_secs(1)).await;
    let start = tokio::time::Instant::now();
    engine.shutdown(Duration::from_secs(60)).await.unwrap();
    assert_eq!(start.elapsed(), Duration::from_secs(4));
    assert_ran(&running.await.unwrap());
    let refused = world.run(&engine, Duration::ZERO, done()).await;
    assert!(matches!(refused, Err(idem_core::engine::ExecuteError::ShuttingDown)), "{refused:?}");
}

#[tokio::test(start_paused = true)]
async fn two_at_once_never_both_run() {
    let world = World::new();
    let engine = world.at_least_once();
    let calls = (0..50).map(|_| world.run(&engine, Duration::from_secs(1), done()));
    let results = futures_util::future::join_all(calls).await;
    assert_eq!(results.iter().filter(|result| matches!(result, Ok(Answer::Ran { .. }))).count(), 1);
    results.iter().filter(|result| !matches!(result, Ok(Answer::Ran { .. }))).for_each(assert_in_progress);
    assert_eq!(world.runs(), 1);
}
