//! `Idempotency::run`: operations without HTTP.

use std::time::Duration;

use idem_core::engine::{Context, RunError};

use crate::support::{World, operation, operation_with};

#[tokio::test(start_paused = true)]
async fn a_value_is_returned_now_and_again() {
    let world = World::new();
    let engine = world.at_least_once();
    let run = |value: u32| move |_: Context| async move { Ok::<_, String>(vec![value]) };
    let first = engine.run(operation(), run(7)).await.unwrap();
    let again = engine.run(operation(), run(8)).await.unwrap();
    assert_eq!((first.value, first.replayed), (vec![7], false));
    assert_eq!((again.value, again.replayed), (vec![7], true));
}

#[tokio::test(start_paused = true)]
async fn an_error_is_final_under_at_most_once_and_rests_under_at_least_once() {
    let world = World::new();
    let fails = |_: Context| async { Err::<u32, _>("no funds".to_owned()) };
    let engine = world.at_most_once();
    assert!(matches!(engine.run(operation(), fails).await, Err(RunError::Failed(error)) if error == "no funds"));
    assert!(matches!(engine.run(operation(), fails).await, Err(RunError::FailedBefore(error)) if error == "no funds"));

    let world = World::new();
    let engine = world.at_least_once();
    assert!(matches!(engine.run(operation(), fails).await, Err(RunError::Failed(_))));
    let resting = engine.run(operation(), fails).await;
    assert!(matches!(resting, Err(RunError::Backoff { retry_after }) if retry_after == Duration::from_secs(1)));
}

#[tokio::test(start_paused = true)]
async fn every_other_answer_is_an_error_of_its_own() {
    let world = World::new();
    let engine = world.at_most_once();
    let panics = |_: Context| async { panic!("as planned") };
    assert!(matches!(engine.run::<u32, String, _, _>(operation(), panics).await, Err(RunError::Panicked)));
    let run = |_: Context| async { Ok::<_, String>(1_u32) };
    assert!(matches!(engine.run(operation_with(b"other"), run).await, Err(RunError::Mismatch)));

    let world = World::new();
    let engine = world.at_most_once();
    let hangs = |_: Context| std::future::pending::<Result<u32, String>>();
    let stuck = tokio::time::timeout(Duration::from_millis(1), engine.run(operation(), hangs)).await;
    assert!(stuck.is_err());
    assert!(matches!(engine.run(operation(), run).await, Err(RunError::InProgress { .. })));
    world.clock.advance(Duration::from_secs(30));
    assert!(matches!(engine.run(operation(), run).await, Err(RunError::OutcomeUnknown)));
}

#[tokio::test(start_paused = true)]
async fn a_result_that_cannot_be_read_is_told_and_does_not_run_again() {
    let world = World::new();
    let engine = world.at_least_once();
    engine.run(operation(), |_| async { Ok::<_, String>("text".to_owned()) }).await.unwrap();
    let as_number = engine.run(operation(), |_| async { Ok::<_, String>(1_u32) }).await;
    assert!(matches!(as_number, Err(RunError::Result(_))), "{as_number:?}");
    // A map whose keys are no strings is not JSON.
    let world = World::new();
    let engine = world.at_least_once();
    let unwritable = |_: Context| async { Ok::<_, String>(std::collections::HashMap::from([((1, 2), 3)])) };
    for _ in 0..2 {
        assert!(matches!(engine.run(operation(), unwritable).await, Err(RunError::Result(_))));
    }
    assert_eq!(world.events.count("acquired"), 1);
}
