//! What is left of steps when their operation has ended.

use super::*;

/// Keeps the steps that an engine reports as not undone.
#[derive(Debug, Default)]
struct Standing(Mutex<Vec<Vec<StandingStep>>>);

impl Observer for Standing {
    fn observe(&self, event: &Event<'_>) {
        if let EventKind::StepsNotUndone(steps) = event.kind {
            self.0.lock().unwrap().push(steps.to_vec());
        }
    }
}

/// Runs `run` in `processes` one after the other, and returns what was reported: names and results.
fn reported<F, R>(max_attempts: u32, processes: usize, run: F) -> Vec<Vec<(String, Option<String>)>>
where
    F: FnOnce(Context) -> R + Clone + Send + 'static,
    R: Future<Output = Result<String, StepError>> + Send + 'static,
{
    let (world, told) = (World::new(), Arc::<Standing>::default());
    for _ in 0..processes {
        let settings = |settings| attempts(max_attempts)(settings).observer(told.clone());
        in_a_process(&world, settings, run.clone());
    }
    let told = told.0.lock().unwrap();
    assert!(told.iter().flatten().all(|step| !step.key.is_empty()));
    told.iter().map(|steps| steps.iter().map(|step| (step.step.clone(), step.result.clone())).collect()).collect()
}

/// Runs an operation that completes a step and then fails, and waits for its next attempt.
async fn leave_a_step(world: &World) {
    let fails = |context: Context| async move {
        context.steps()?.step("first").run(|_| async { Ok::<_, String>(1_u32) }).await?;
        Err::<String, _>(StepError::Interrupted { step: "own".into(), message: "away".into(), retry_after: None })
    };
    assert!(world.at_least_once().run_classified(operation(), StepError::meaning, fails).await.is_err());
    world.clock.advance(Duration::from_secs(100));
}

#[test]
fn what_keeps_steps_from_being_undone_is_told_when_no_attempt_is_left() {
    let other = |context: Context| async move {
        context.steps()?.step("a").run(|_| async { Ok::<_, String>("text".to_owned()) }).await
    };
    let world = World::new();
    let one = |context: Context| async move {
        context.steps()?.step("a").run(|_| async { Ok::<_, String>(1_u32) }).await?;
        std::future::pending().await
    };
    assert!(in_a_process(&world, attempts(2), one).is_none());
    let ended = in_a_process(&world, attempts(2), other);
    let Some(Err(RunError::Failed(StepError::NotUndone { step, message, .. }))) = ended else { panic!("{ended:?}") };
    assert!(step == "a" && message.contains("cannot be read"), "{step}: {message}");
}

#[test]
fn steps_that_stay_are_reported_once_with_their_results() {
    let first = ("first".to_owned(), Some("1".to_owned()));
    let failing_undo = |context: Context| async move {
        let mut steps = context.steps()?;
        let undo = |_: StepToUndo<u32>| async { Err("away") };
        steps.step("first").undo(undo).run(|_| async { Ok::<_, String>(1_u32) }).await?;
        let refused = |_: String| async { Err::<String, _>("refused") };
        steps.step("second").run_classified(|_| ErrorMeaning::Final, refused).await
    };
    assert_eq!(reported(3, 5, failing_undo), [vec![first.clone()]]);
    let panic_between = |context: Context| async move {
        let mut steps = context.steps()?;
        steps.step("first").run(|_| async { Ok::<_, String>(1_u32) }).await?;
        panic!("between the steps")
    };
    assert_eq!(reported(3, 5, panic_between), [vec![first.clone()]]);
    let no_undo = |context: Context| async move {
        let mut steps = context.steps()?;
        let undo = |_: StepToUndo<u32>| async { Ok::<_, String>(()) };
        steps.step("first").undo(undo).run(|_| async { Ok::<_, String>(1_u32) }).await?;
        steps.step("second").run(|_| async { Err::<String, _>("no answer") }).await
    };
    assert_eq!(reported(2, 3, no_undo), [vec![("second".to_owned(), None)]]);
    let refuses_itself = |context: Context| async move {
        context.steps()?.step("first").run(|_| async { Ok::<_, String>(1_u32) }).await?;
        Err(StepError::Failed { step: "own".into(), message: "out of stock".into(), may_stand: false })
    };
    assert_eq!(reported(3, 3, refuses_itself), [vec![first.clone()]]);
    let panics_before_its_steps = |context: Context| async move {
        assert!(context.attempt() == 1, "cannot load the order");
        context.steps()?.step("first").run(|_| async { Ok::<_, String>(1_u32) }).await?;
        panic!("between the steps")
    };
    assert_eq!(reported(3, 5, panics_before_its_steps), [vec![first]]);
}

/// A classifier may release a 429, such as that of an operation whose undo has failed.
#[tokio::test(start_paused = true)]
async fn a_release_does_not_keep_steps_from_ending() {
    let (world, told) = (World::new(), Arc::<Standing>::default());
    let engine = Idempotency::at_least_once(world.store.clone(), attempts(2)(world.settings()).observer(told.clone()));
    for _ in 0..4 {
        let run = |context: Context| async move {
            let mut steps = context.steps().unwrap();
            let undo = |_: StepToUndo<u32>| async { Err("away") };
            let _ = steps.step("first").undo(undo).run(|_| async { Ok::<_, String>(1_u32) }).await;
            let refused = |_: String| async { Err::<u32, _>("refused") };
            let _ = steps.step("second").run_classified(|_| ErrorMeaning::Final, refused).await;
            Conclusion { value: "ran", disposition: Disposition::Release { writes: Writes::Keep }, retention: None }
        };
        let _ = engine.execute(operation(), run, panicked).await;
        world.clock.advance(Duration::from_secs(100));
    }
    assert!(world.record().await.unwrap().replay().is_some());
    assert_eq!(told.0.lock().unwrap().len(), 1);
}

/// The call may have taken effect, and the store could not keep that.
#[tokio::test(start_paused = true)]
async fn a_release_does_not_forget_a_step_that_could_not_be_recorded() {
    let world = World::new();
    (0..1000).for_each(|_| world.store.next(Verb::Checkpoint, Fault::ErrorBefore));
    let run = |context: Context| async move {
        let mut steps = context.steps().unwrap();
        let _ = steps.step("first").run(|_| async { Err::<u32, _>("no answer") }).await;
        Conclusion { value: "ran", disposition: Disposition::Release { writes: Writes::Keep }, retention: None }
    };
    let engine = Idempotency::at_least_once(world.store.clone(), attempts(2)(world.settings()));
    let _ = engine.execute(operation(), run, panicked).await;
    assert_eq!(world.record().await.unwrap().attempt, 1);
}

#[tokio::test(start_paused = true)]
async fn a_success_under_another_contract_counts_whatever_steps_there_were() {
    let world = World::new();
    leave_a_step(&world).await;
    let succeeds = |_: Context| async { Ok::<_, String>("done".to_owned()) };
    assert_eq!(world.at_most_once().run(operation(), succeeds).await.unwrap().value, "done");
}

#[tokio::test(start_paused = true)]
async fn a_checkpoint_of_the_handler_never_replaces_steps_of_an_earlier_attempt() {
    let world = World::new();
    leave_a_step(&world).await;
    let records = |context: Context| async move {
        let refused = context.checkpoint("mine", "data").await;
        assert!(matches!(refused, Err(CheckpointError::HasSteps)), "{refused:?}");
        Err::<String, _>("away")
    };
    assert!(matches!(world.at_least_once().run(operation(), records).await, Err(RunError::Failed("away"))));
    let reserved = |context: Context| async move {
        assert!(matches!(context.checkpoint("idem:steps", "data").await, Err(CheckpointError::HasSteps)));
        Ok::<_, String>("done".to_owned())
    };
    assert!(World::new().at_least_once().run(operation(), reserved).await.is_ok());
}

/// HTTP stores a 422 with kept writes so.
#[tokio::test(start_paused = true)]
async fn a_refusal_that_keeps_its_writes_is_no_success() {
    let (world, told) = (World::new(), Arc::<Standing>::default());
    let engine = Idempotency::at_least_once(world.store.clone(), world.settings().observer(told.clone()));
    let run = |context: Context| async move {
        context.steps().unwrap().step("first").run(|_| async { Ok::<_, String>(1_u32) }).await.unwrap();
        let disposition = Disposition::Complete { response: StoredResponse::new(422, "no"), writes: Writes::Keep };
        Conclusion { value: "ran", disposition, retention: None }
    };
    engine.execute(operation(), run, panicked).await.unwrap();
    assert_eq!(told.0.lock().unwrap().len(), 1);
    assert_eq!(StandingStep::of(&world.record_id(), &world.record().await.unwrap()).unwrap().len(), 1);
}

/// What an operator finds in the record of an operation that has failed for good.
#[tokio::test(start_paused = true)]
async fn the_record_of_a_failed_operation_has_the_steps_that_stay() {
    let world = World::new();
    let engine = Idempotency::at_least_once(world.store.clone(), attempts(2)(world.settings()));
    let run = || {
        let fails = |context: Context| async move {
            context.steps()?.step("first").run(|_| async { Ok::<_, String>(1_u32) }).await?;
            panic!("between the steps")
        };
        engine.run_classified::<String, StepError, _, _, _>(operation(), StepError::meaning, fails)
    };
    for _ in 0..2 {
        assert!(matches!(run().await, Err(RunError::Panicked)));
        world.clock.advance(Duration::from_secs(100));
    }
    assert!(matches!(run().await, Err(RunError::FailedBefore(_))));
    let standing = StandingStep::of(&world.record_id(), &world.record().await.unwrap()).unwrap();
    assert_eq!(standing.len(), 1);
    assert_eq!((standing[0].step.as_str(), standing[0].result.as_deref()), ("first", Some("1")));
}

#[tokio::test(start_paused = true)]
async fn steps_that_are_needed_are_kept_as_long_as_usual() {
    for result in [Ok(1), Err("away")] {
        let world = World::new();
        let run = move |context: Context| async move {
            let mut steps = context.steps().unwrap();
            let _ = steps.step("first").run(|_| async move { result }).await;
            let disposition = Disposition::Fault { response: StoredResponse::new(500, "away") };
            Conclusion { value: "ran", disposition, retention: Some(Duration::from_secs(1)) }
        };
        world.at_least_once().execute(operation(), run, panicked).await.unwrap();
        let record = world.record().await.unwrap();
        let kept = record.expires_at.saturating_duration_since(record.updated_at);
        assert!(kept > Duration::from_secs(3600), "{result:?}: {kept:?}");
    }
}

#[test]
fn steps_that_succeed_or_are_undone_are_not_reported() {
    let succeeds = |context: Context| async move {
        context.steps()?.step("first").run(|_| async { Ok::<_, String>("done".to_owned()) }).await
    };
    assert!(reported(2, 3, succeeds).is_empty());
    let undone = |context: Context| async move {
        let mut steps = context.steps()?;
        let undo = |_: StepToUndo<u32>| async { Ok::<_, String>(()) };
        steps.step("first").undo(undo).run(|_| async { Ok::<_, String>(1_u32) }).await?;
        let undo = |_: StepToUndo<String>| async { Ok::<_, String>(()) };
        steps.step("second").undo(undo).run(|_| async { Err::<String, _>("no answer") }).await
    };
    assert!(reported(2, 3, undone).is_empty());
}
