//! Where operations run.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use idem_core::engine::{Answer, Conclusion, Context, Event, ExecuteError, Idempotency, Observer};
use tokio::runtime;
use tokio::sync::Semaphore;
use tracing::Instrument as _;

use crate::support::{World, assert_ran, assert_replays, done, operation, panicked};

#[test]
fn an_operation_outlives_the_runtime_of_whoever_asked_on_the_one_that_the_settings_name() {
    let world = World::new();
    let home = runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let engine = Idempotency::at_most_once(world.store.clone(), world.settings().runtime(home.handle().clone()));
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
    assert!(matches!(again.unwrap(), Answer::Replay(_)));
    assert_eq!(world.runs(), 0, "it did not run again");
}

#[tokio::test]
async fn an_operation_is_in_the_span_of_whoever_asked_from_its_first_poll_to_its_last() {
    let _guard = tracing::subscriber::set_default(tracing_subscriber::registry());
    let span = tracing::info_span!("request");
    let home = runtime::Handle::current();
    for settings in [World::new().settings(), World::new().settings().runtime(home)] {
        let engine = Idempotency::at_most_once(World::new().store, settings);
        let expected = span.id();
        let run = move |_: Context| async move {
            assert_eq!(tracing::Span::current().id(), expected);
            tokio::task::yield_now().await;
            assert_eq!(tracing::Span::current().id(), expected);
            Conclusion { value: "ran", disposition: done(), retention: None }
        };
        let answer = engine.execute(operation(), run, panicked).instrument(span.clone()).await;
        assert!(matches!(answer, Ok(Answer::Ran { value: "ran", .. })), "{answer:?}");
    }
}

/// An observer is somebody else's code.
#[derive(Debug)]
struct Panics;

impl Observer for Panics {
    fn observe(&self, _: &Event<'_>) {
        panic!("an observer's bug");
    }
}

#[tokio::test]
async fn a_panic_of_an_observer_interrupts_the_operation_and_not_whoever_asked() {
    let world = World::new();
    let engine = Idempotency::at_most_once(world.store.clone(), world.settings().observer(Arc::new(Panics)));
    let answer = world.run(&engine, Duration::ZERO, done()).await;
    assert!(matches!(answer, Err(ExecuteError::Interrupted)), "{answer:?}");
}

#[tokio::test]
async fn a_replay_that_the_store_has_at_hand_takes_one_poll() {
    let world = World::new();
    let engine = world.at_least_once();
    assert_ran(&world.run(&engine, Duration::ZERO, done()).await);
    let again = world.run(&engine, Duration::ZERO, done()).now_or_never();
    assert_replays(&again.expect("a task would not have begun yet"), "paid");
}

#[tokio::test]
async fn an_operation_runs_in_a_task_even_if_the_store_answers_at_once() {
    let asked_in = tokio::task::try_id();
    let engine = World::new().at_least_once();
    let run = move |_: Context| async move {
        assert_ne!(tokio::task::try_id(), asked_in);
        Conclusion { value: "ran", disposition: done(), retention: None }
    };
    let mut asking = Box::pin(engine.execute(operation(), run, panicked));
    assert!(asking.as_mut().now_or_never().is_none());
    let answer = asking.await;
    assert!(matches!(answer, Ok(Answer::Ran { value: "ran", .. })), "{answer:?}");
}
