//! What steps may be, and how long their record is kept.

use super::*;

/// Runs `run` in the first process, and `then` in the second.
fn one_after_the_other<F, R, G, S>(run: F, then: G) -> StepError
where
    F: FnOnce(Context) -> R + Send + 'static,
    R: Future<Output = Result<String, StepError>> + Send + 'static,
    G: FnOnce(Context) -> S + Send + 'static,
    S: Future<Output = Result<String, StepError>> + Send + 'static,
{
    let world = World::new();
    in_a_process(&world, |settings| settings, run);
    match in_a_process(&world, |settings| settings, then) {
        Some(Err(RunError::Failed(error))) => error,
        other => panic!("{other:?}"),
    }
}

async fn two_steps(context: Context, names: [&str; 2]) -> Result<String, StepError> {
    let mut steps = context.steps()?;
    steps.step(names[0]).run(|_| async { Ok::<_, String>(1_u32) }).await?;
    steps.step(names[1]).run(|_| async { Err::<String, _>("again") }).await
}

#[test]
fn steps_that_change_between_attempts_are_refused_before_they_run() {
    let error = one_after_the_other(|context| two_steps(context, ["a", "b"]), |context| two_steps(context, ["b", "a"]));
    assert_eq!(error, StepError::OrderChanged { expected: "a".into(), found: "b".into() });
    let error = one_after_the_other(|context| two_steps(context, ["a", "b"]), |context| two_steps(context, ["a", "a"]));
    assert_eq!(error, StepError::NameUsedTwice { step: "a".into() });
    let as_text = |context: Context| async move {
        context.steps()?.step("a").run(|_| async { Ok::<_, String>("text".to_owned()) }).await
    };
    let error = one_after_the_other(|context| two_steps(context, ["a", "b"]), as_text);
    assert!(matches!(&error, StepError::Unreadable { step, .. } if step == "a"), "{error:?}");
    assert_eq!(error.meaning(), ErrorMeaning::Fault);
}

#[test]
fn an_operation_that_cannot_resume_has_no_steps() {
    let twice = |context: Context| async move {
        let _steps = context.steps()?;
        context.steps().map(|_| String::new())
    };
    let refused = |error: &StepError, why: &str| {
        assert!(matches!(error, StepError::Refused(reason) if reason.contains(why)), "{error:?}");
    };
    refused(&one_after_the_other(twice, twice), "asked for its steps before");
    let own = |context: Context| async move {
        context.checkpoint("mine", "data").await.unwrap();
        Err(StepError::Refused("again"))
    };
    refused(&one_after_the_other(own, |context| two_steps(context, ["a", "b"])), "a checkpoint of its own");

    let runtime = Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    runtime.block_on(async {
        let world = World::new();
        let run = |context| two_steps(context, ["a", "b"]);
        let ended = world.at_most_once().run_classified(operation(), StepError::meaning, run).await;
        let Err(RunError::Failed(error)) = ended else { panic!("{ended:?}") };
        refused(&error, "only the AtLeastOnce contract");
        let world = World::new();
        let settings = world.settings().dangerous_fail_open();
        (0..9).for_each(|_| world.store.next(Verb::Acquire, Fault::Refuse(StoreErrorKind::Unavailable)));
        let engine = Idempotency::at_least_once(world.store.clone(), settings);
        let ended = engine.run_classified(operation(), StepError::meaning, run).await;
        let Err(RunError::Failed(error)) = ended else { panic!("{ended:?}") };
        refused(&error, "no record protects it");
        let world = World::new();
        let engine = Idempotency::at_least_once(world.store.clone(), attempts(1)(world.settings()));
        let ended = engine.run_classified(operation(), StepError::meaning, run).await;
        let Err(RunError::Failed(error)) = ended else { panic!("{ended:?}") };
        refused(&error, "one attempt is too few");
    });
}

#[test]
fn no_name_of_a_step_leads_to_the_key_of_an_undo() {
    let world = World::new();
    let keys = Arc::<Mutex<Vec<String>>>::default();
    let seen = Arc::clone(&keys);
    let run = move |context: Context| async move {
        let keys = &seen;
        let call = |key: String| async move {
            keys.lock().unwrap().push(key);
            Ok::<_, String>(1_u32)
        };
        let seen = Arc::clone(keys);
        let undo = move |step: StepToUndo<u32>| async move {
            seen.lock().unwrap().extend([step.step_key, step.key]);
            Ok::<_, String>(())
        };
        let mut steps = context.steps()?;
        steps.step("a").undo(undo).run(call).await?;
        steps.step("undo:a").run(call).await?;
        steps.step("step:a").run(call).await?;
        let refused = |_: String| async { Err::<String, _>("refused") };
        steps.step("b").run_classified(|_| ErrorMeaning::Final, refused).await
    };
    let ended = in_a_process(&world, |settings| settings, run);
    assert!(matches!(ended, Some(Err(RunError::Failed(StepError::Failed { .. })))), "{ended:?}");
    let mut keys = keys.lock().unwrap().clone();
    assert_eq!(keys.len(), 5);
    assert_eq!(keys[0], keys[3], "an undo knows the key of its step");
    keys.sort_unstable();
    keys.dedup();
    assert_eq!(keys.len(), 4);
}

#[test]
fn steps_and_checkpoints_of_the_handler_exclude_each_other() {
    let world = World::new();
    let steps_first = |context: Context| async move {
        let mut steps = context.steps()?;
        steps.step("first").run(|_| async { Ok::<_, String>(1_u32) }).await?;
        let refused = context.checkpoint("mine", "data").await;
        assert!(matches!(refused, Err(CheckpointError::HasSteps)), "{refused:?}");
        steps.step("second").run(|_| async { Ok::<_, String>("done".to_owned()) }).await
    };
    assert!(matches!(in_a_process(&world, |settings| settings, steps_first), Some(Ok(_))));
    let world = World::new();
    let checkpoint_first = |context: Context| async move {
        context.checkpoint("mine", "data").await.unwrap();
        context.steps().map(|_| String::new())
    };
    let ended = in_a_process(&world, |settings| settings, checkpoint_first);
    assert!(matches!(ended, Some(Err(RunError::Failed(StepError::Refused(_))))), "{ended:?}");
}

#[test]
fn a_name_that_is_empty_or_too_long_is_refused() {
    for name in [String::new(), "n".repeat(129)] {
        let run = |context: Context| async move {
            context.steps()?.step(&name).run(|_| async { Ok::<_, String>(String::new()) }).await
        };
        let ended = in_a_process(&World::new(), |settings| settings, run);
        assert!(matches!(ended, Some(Err(RunError::Failed(StepError::Refused(_))))), "{ended:?}");
    }
    let longest = |context: Context| async move {
        context.steps()?.step(&"n".repeat(128)).run(|_| async { Ok::<_, String>(String::new()) }).await
    };
    assert!(matches!(in_a_process(&World::new(), |settings| settings, longest), Some(Ok(_))));
}

#[tokio::test(start_paused = true)]
async fn an_error_is_what_its_meaning_says_under_every_contract() {
    for engine in [World::new().at_least_once(), World::new().at_most_once()] {
        let fails = |_: Context| async { Err::<String, _>("no such address") };
        let run = || engine.run_classified(operation(), |_| ErrorMeaning::Final, fails);
        assert!(matches!(run().await, Err(RunError::Failed("no such address"))));
        assert!(matches!(run().await, Err(RunError::FailedBefore(message)) if message == "no such address"));
    }
    for engine in [World::new().at_least_once(), World::new().at_most_once()] {
        let fails = |_: Context| async { Err::<String, _>("away") };
        let meaning = |_: &&str| ErrorMeaning::Retry { after: Duration::from_secs(7) };
        let run = || engine.run_classified(operation(), meaning, fails);
        assert!(matches!(run().await, Err(RunError::Failed("away"))));
        let resting = run().await;
        assert!(matches!(resting, Err(RunError::Backoff { retry_after }) if retry_after == Duration::from_secs(7)));
    }
}

#[tokio::test(start_paused = true)]
async fn an_operation_is_kept_as_long_as_it_says_whatever_its_end() {
    let week = Duration::from_secs(7 * 24 * 3600);
    let asked = || operation().retention(week);
    let is_kept = |world: &World| {
        let world = world.clone();
        async move {
            world.clock.advance(week - Duration::from_secs(60));
            let before = world.record().await.is_some();
            world.clock.advance(Duration::from_secs(120));
            (before, world.record().await.is_some())
        }
    };
    let ends = |what: &'static str| {
        move |_: Context| async move {
            match what {
                "done" => Ok("done".to_owned()),
                "panic" => panic!("as planned"),
                _ => Err("failed"),
            }
        }
    };
    for what in ["done", "failed", "panic"] {
        let world = World::new();
        let _ = world.at_most_once().run(asked(), ends(what)).await;
        assert_eq!(is_kept(&world).await, (true, false), "{what}");
    }
    // A crash, with renewals before it.
    let world = World::new();
    let engine = world.at_most_once();
    let hangs = |_: Context| std::future::pending::<Result<String, String>>();
    let stuck = tokio::time::timeout(Duration::from_secs(60), engine.run(asked(), hangs)).await;
    assert!(stuck.is_err() && world.store.calls(Verb::Renew) > 0);
    world.clock.advance(week);
    let unknown = engine.run(asked(), ends("done")).await;
    assert!(matches!(unknown, Err(RunError::OutcomeUnknown)), "{unknown:?}");
}
