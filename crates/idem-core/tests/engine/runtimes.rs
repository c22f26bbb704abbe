//! Where operations run.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use idem_core::engine::{Answer, Conclusion, Context, Idempotency};
use idem_testkit::{Fault, Verb};
use tokio::runtime;
use tokio::sync::{Semaphore, oneshot};
use tracing::dispatcher::get_default;
use tracing::span::Id;
use tracing::{Instrument as _, Span};
use tracing_subscriber::Registry;
use tracing_subscriber::registry::LookupSpan as _;

use crate::support::{World, assert_ran, assert_replays, done, operation, panicked};
use idem_log::Log;

#[test]
fn an_operation_outlives_the_runtime_of_whoever_asked() {
    for is_attended in [false, true] {
        let world = World::new();
        let home = runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let engine = if is_attended {
            world.at_most_once().default_runtime(home.handle().clone())
        } else {
            Idempotency::at_most_once(world.store.clone(), world.settings().runtime(home.handle().clone()))
        };
        let (started, gate) = (Arc::new(Semaphore::new(0)), Arc::new(Semaphore::new(0)));
        let asker = runtime::Builder::new_current_thread().enable_all().build().unwrap();
        asker.block_on(async {
            let (began, opened) = (Arc::clone(&started), Arc::clone(&gate));
            let run = move |_: Context| async move {
                began.add_permits(1);
                opened.acquire().await.unwrap().forget();
                Conclusion { value: "ran", disposition: done(), retention: None }
            };
            let engine = engine.clone();
            tokio::spawn(async move { engine.execute(operation(), run, panicked).await });
            started.acquire().await.unwrap().forget();
        });
        drop(asker);
        gate.add_permits(1);
        let waiting = operation().wait(Duration::from_secs(20));
        let again = home.block_on(world.run_as(&engine, waiting, Duration::ZERO, done()));
        assert!(matches!(again.unwrap(), Answer::Replay(_)), "attended: {is_attended}");
        assert_eq!(world.runs(), 0, "it did not run again");
    }
}

/// Where the handler of an operation runs.
async fn task_of_a_run(engine: &Idempotency) -> Option<tokio::task::Id> {
    let (tell, told) = oneshot::channel();
    let run = move |_: Context| async move {
        tell.send(tokio::task::try_id()).unwrap();
        Conclusion { value: "ran", disposition: done(), retention: None }
    };
    let answer = engine.execute(operation(), run, panicked).await;
    assert!(matches!(answer, Ok(Answer::Ran { value: "ran", .. })), "{answer:?}");
    told.await.unwrap()
}

#[tokio::test]
async fn only_an_attended_operation_runs_in_the_task_of_whoever_asked() {
    let home = runtime::Handle::current();
    let asked = tokio::spawn(async move {
        let world = World::new;
        let here = tokio::task::try_id();
        let attended = world().at_least_once().default_runtime(home.clone());
        assert_eq!(task_of_a_run(&attended).await, here);
        assert_ne!(task_of_a_run(&world().at_least_once()).await, here);
        let settings = world().settings().runtime(home.clone());
        let named = Idempotency::at_least_once(world().store, settings).default_runtime(home);
        assert_ne!(task_of_a_run(&named).await, here, "the settings name a runtime");
    });
    asked.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn an_attended_operation_goes_on_wherever_it_is_left() {
    const STEP: Duration = Duration::from_millis(100);
    // It is left while the store is asked, while it runs, while it is settled, and before it is asked for at all.
    for (asked_for, left_after, runs) in [
        (STEP, STEP / 2, 1),
        (Duration::ZERO, STEP / 2, 1),
        (Duration::ZERO, STEP * 3 / 2, 1),
        (STEP, Duration::ZERO, 0),
    ] {
        let world = World::new();
        if !asked_for.is_zero() {
            world.store.next(Verb::Acquire, Fault::Delay(asked_for));
        }
        world.store.next(Verb::Settle, Fault::Delay(STEP));
        let engine = world.at_most_once().default_runtime(runtime::Handle::current());
        let asking = world.run(&engine, STEP, done());
        if left_after.is_zero() {
            drop(asking);
        } else {
            assert!(tokio::time::timeout(left_after, asking).await.is_err());
        }
        // Ends when all that was begun is settled.
        engine.shutdown(Duration::from_secs(60)).await.unwrap();
        assert_eq!(world.runs(), runs, "left after {left_after:?}");
        assert_eq!(world.record().await.is_some_and(|record| record.replay().is_some()), runs == 1);
    }
}

/// The name of the current span, and the span around it.
fn current_span() -> (&'static str, Option<Id>) {
    let span = Span::current();
    let parent = get_default(|dispatch| {
        let registry = dispatch.downcast_ref::<Registry>()?;
        registry.span(&span.id()?)?.parent().map(|parent| parent.id())
    });
    (span.metadata().map_or("", |metadata| metadata.name()), parent)
}

#[tokio::test]
async fn a_run_has_a_span_inside_its_callers_from_its_first_poll_to_its_last() {
    Log::of_process();
    let span = tracing::info_span!("request");
    let home = runtime::Handle::current();
    for settings in [World::new().settings(), World::new().settings().runtime(home)] {
        let engine = Idempotency::at_most_once(World::new().store, settings);
        let expected = ("idempotent_operation", span.id());
        let run = move |_: Context| async move {
            assert_eq!(current_span(), expected);
            tokio::task::yield_now().await;
            assert_eq!(current_span(), expected);
            Conclusion { value: "ran", disposition: done(), retention: None }
        };
        let answer = engine.execute(operation(), run, panicked).instrument(span.clone()).await;
        assert!(matches!(answer, Ok(Answer::Ran { value: "ran", .. })), "{answer:?}");
    }
}

/// sqlx enters the current span at each message of the server.
#[tokio::test(start_paused = true)]
async fn verbs_of_the_store_have_the_span_of_the_caller_wherever_they_are_driven() {
    let log = Log::of_process();
    for is_attended in [false, true] {
        let world = World::new();
        let mut engine = world.at_most_once();
        if is_attended {
            engine = engine.default_runtime(runtime::Handle::current());
        }
        for verb in [Verb::Acquire, Verb::Settle] {
            world.store.next(verb, Fault::ErrorBefore);
        }
        let span = tracing::info_span!(target: "idem_test", "caller_of_verbs", is_attended);
        assert_ran(&world.run(&engine, Duration::ZERO, done()).instrument(span).await);
        let failed = log.lines(&["could not answer", &format!("caller_of_verbs{{is_attended={is_attended}}}")]);
        assert_eq!(failed.len(), 2, "{failed:?}");
        assert!(failed.iter().all(|line| !line.contains("idempotent_operation")), "{failed:?}");
    }
}

#[tokio::test]
async fn a_replay_that_the_store_has_at_hand_takes_one_poll() {
    let world = World::new();
    let engine = world.at_least_once();
    assert_ran(&world.run(&engine, Duration::ZERO, done()).await);
    let again = world.run(&engine, Duration::ZERO, done()).now_or_never();
    assert_replays(&again.expect("a task would not have begun yet"), "paid");
}
