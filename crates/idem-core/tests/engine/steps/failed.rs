//! Steps that fail.

use super::*;

/// Runs two steps, of which the second fails with `error`; the undo of the first fails if `undo_fails`.
async fn fail_in_the_second(
    context: Context,
    meaning: ErrorMeaning,
    calls: Arc<Mutex<Vec<String>>>,
    undo_fails: bool,
) -> Result<String, StepError> {
    let attempt = context.attempt();
    let told = |what: String| calls.lock().unwrap().push(format!("{attempt} {what}"));
    let told_later = Arc::clone(&calls);
    let undo = move |step: StepToUndo<u32>| async move {
        told_later.lock().unwrap().push(format!("{attempt} undo {:?}", step.result));
        if undo_fails { Err("away") } else { Ok(()) }
    };
    let mut steps = context.steps()?;
    steps.step("first").undo(undo).run(|_| async { Ok::<_, String>(7_u32) }).await?;
    let told_later = Arc::clone(&calls);
    let undo_second = move |step: StepToUndo<String>| async move {
        told_later.lock().unwrap().push(format!("{attempt} undo second {:?}", step.result));
        Ok::<_, String>(())
    };
    let second = |_: String| async {
        told("second".to_owned());
        Err::<String, _>("no funds")
    };
    let failed = steps.step("second").undo(undo_second).run_classified(|_| meaning, second).await;
    // A handler that ignores the error cannot go on.
    let third = |_: String| async {
        told("third".to_owned());
        Ok::<_, String>("third".to_owned())
    };
    let third = steps.step("third").run(third).await;
    assert_eq!(third.unwrap_err(), *failed.as_ref().unwrap_err());
    failed
}

fn fail_until_it_ends(max_attempts: u32, meaning: ErrorMeaning, undo_fails: bool) -> (Vec<String>, StepError) {
    let world = World::new();
    let calls = Arc::<Mutex<Vec<String>>>::default();
    let run = || {
        let calls = Arc::clone(&calls);
        in_a_process(&world, attempts(max_attempts), move |context| {
            fail_in_the_second(context, meaning, calls, undo_fails)
        })
    };
    let is_final = |error: &StepError| error.meaning() == ErrorMeaning::Final;
    let ended = (0..20).find_map(|_| match run() {
        Some(Err(RunError::Failed(error))) if is_final(&error) => Some(error),
        Some(Err(RunError::Failed(_))) => None,
        other => panic!("{other:?}"),
    });
    let error = ended.unwrap();
    assert!(matches!(run(), Some(Err(RunError::FailedBefore(message))) if message == error.to_string()));
    let calls = calls.lock().unwrap().clone();
    (calls, error)
}

#[test]
fn a_final_error_undoes_at_once_and_not_the_step_that_took_no_effect() {
    let (calls, error) = fail_until_it_ends(10, ErrorMeaning::Final, false);
    assert_eq!(calls, ["1 second", "1 undo Some(7)"]);
    assert_eq!(error, StepError::Failed { step: "second".into(), message: "no funds".into(), may_stand: false });
}

#[test]
fn an_error_is_tried_again_in_half_of_the_attempts_and_then_undone_with_its_step() {
    for (max_attempts, forward) in [(2, 1), (3, 1), (5, 2), (10, 5)] {
        let (calls, error) = fail_until_it_ends(max_attempts, ErrorMeaning::Fault, false);
        let mut expected: Vec<_> = (1..=forward).map(|attempt| format!("{attempt} second")).collect();
        expected.extend([format!("{forward} undo second None"), format!("{forward} undo Some(7)")]);
        assert_eq!(calls, expected);
        assert_eq!(error, StepError::Failed { step: "second".into(), message: "no funds".into(), may_stand: false });
    }
}

#[test]
fn an_undo_that_fails_is_tried_again_until_no_attempt_is_left() {
    for max_attempts in [2, 3, 10] {
        let (calls, error) = fail_until_it_ends(max_attempts, ErrorMeaning::Final, true);
        let mut expected = vec!["1 second".to_owned()];
        expected.extend((1..=max_attempts).map(|attempt| format!("{attempt} undo Some(7)")));
        assert_eq!(calls, expected);
        let not_undone = StepError::NotUndone { failed: "second".into(), step: "first".into(), message: "away".into() };
        assert_eq!(error, not_undone);
    }
}

#[test]
fn a_step_says_when_it_may_be_tried_again() {
    let world = World::new();
    let after = Duration::from_secs(1000);
    let run = || {
        let meaning = ErrorMeaning::Retry { after };
        in_a_process(
            &world,
            |settings| settings,
            move |context| fail_in_the_second(context, meaning, Arc::default(), false),
        )
    };
    let interrupted = run();
    let Some(Err(RunError::Failed(StepError::Interrupted { retry_after, .. }))) = interrupted else {
        panic!("{interrupted:?}")
    };
    assert_eq!(retry_after, Some(after));
    // Each process takes 100 s of the clock.
    assert!(matches!(run(), Some(Err(RunError::Backoff { retry_after })) if retry_after == Duration::from_secs(900)));
}

#[test]
fn a_result_that_cannot_be_kept_ends_the_operation_and_is_undone() {
    let undone = Arc::<Mutex<Vec<String>>>::default();
    let run = |size: usize| {
        let undone = Arc::clone(&undone);
        move |context: Context| async move {
            let undo = move |step: StepToUndo<String>| async move {
                undone.lock().unwrap().push(format!("{:?}", step.result));
                Ok::<_, String>(())
            };
            let mut steps = context.steps()?;
            steps.step("big").undo(undo).run(|_| async move { Ok::<_, String>("x".repeat(size)) }).await
        }
    };
    let world = World::new();
    let fits = in_a_process(&world, |settings| settings, run(60 * 1024 - 200));
    assert!(matches!(fits, Some(Ok(_))), "{fits:?}");
    let world = World::new();
    let ended = in_a_process(&world, |settings| settings, run(60 * 1024));
    let Some(Err(RunError::Failed(StepError::Failed { message, .. }))) = ended else { panic!("{ended:?}") };
    assert!(message.contains("at most 61440 are kept, so return an identifier"), "{message}");
    assert_eq!(*undone.lock().unwrap(), ["None"]);

    let world = World::new();
    let unwritable = |context: Context| async move {
        let map = || std::collections::BTreeMap::from([((1, 2), 3)]);
        context.steps()?.step("map").run(|_| async move { Ok::<_, String>(map()) }).await.map(|_| String::new())
    };
    let ended = in_a_process(&world, |settings| settings, unwritable);
    let Some(Err(RunError::Failed(StepError::Failed { message, .. }))) = ended else { panic!("{ended:?}") };
    assert!(message.contains("its result cannot be written as JSON"), "{message}");
}

#[test]
fn the_longest_message_fits_beside_the_longest_results() {
    let world = World::new();
    let run = |context: Context| async move {
        let mut steps = context.steps()?;
        steps.step("big").run(|_| async move { Ok::<_, String>("x".repeat(60 * 1024 - 100)) }).await?;
        let refuse = |_: String| async { Err::<String, _>("\u{1}é".repeat(10_000)) };
        steps.step("refused").run_classified(|_| ErrorMeaning::Final, refuse).await
    };
    let ended = in_a_process(&world, |settings| settings, run);
    let Some(Err(RunError::Failed(StepError::Failed { message, .. }))) = ended else { panic!("{ended:?}") };
    assert_eq!(message.len(), 511);
}

#[test]
fn a_panic_fails_its_step_or_its_undo_alone() {
    let world = World::new();
    let undone = Arc::<Mutex<Vec<u32>>>::default();
    let run = || {
        let undone = Arc::clone(&undone);
        let steps = move |context: Context| async move {
            let attempt = context.attempt();
            let undo = move |_: StepToUndo<u32>| async move {
                assert!(attempt > 2, "as planned");
                undone.lock().unwrap().push(attempt);
                Ok::<_, String>(())
            };
            let mut steps = context.steps()?;
            steps.step("first").undo(undo).run(|_| async { Ok::<_, String>(1_u32) }).await?;
            steps.step("second").run(|_| -> std::future::Ready<Result<String, String>> { panic!("as planned") }).await
        };
        in_a_process(&world, attempts(3), steps).unwrap().unwrap_err()
    };
    let errors = [run(), run(), run()];
    let [RunError::Failed(first), RunError::Failed(second), RunError::Failed(third)] = &errors else {
        panic!("{errors:?}")
    };
    assert!(matches!(first, StepError::UndoFailed { message, .. } if message == "its undo panicked"), "{first:?}");
    assert!(matches!(second, StepError::UndoFailed { .. }), "{second:?}");
    assert_eq!(third, &StepError::Failed { step: "second".into(), message: "it panicked".into(), may_stand: true });
    assert_eq!(*undone.lock().unwrap(), [3]);
}

#[test]
fn no_step_starts_after_one_that_was_dropped() {
    let world = World::new();
    let run = |context: Context| async move {
        let mut steps = context.steps()?;
        let hangs = |_: String| std::future::pending::<Result<String, String>>();
        // Polled once, and dropped.
        assert!(steps.step("first").run(hangs).now_or_never().is_none());
        steps.step("second").run(|_| async { Ok::<_, String>("ran".to_owned()) }).await
    };
    let ended = in_a_process(&world, |settings| settings, run);
    let Some(Err(RunError::Failed(StepError::Interrupted { step, message, .. }))) = ended else { panic!("{ended:?}") };
    assert_eq!((step.as_str(), message.as_str()), ("first", "its future was dropped before it was done"));
}

#[test]
fn a_refusal_after_a_call_without_an_answer_undoes_that_call() {
    let world = World::new();
    let undone = Arc::<Mutex<Vec<String>>>::default();
    let run = |error: &'static str| {
        let undone = Arc::clone(&undone);
        let steps = move |context: Context| async move {
            let undo = |name: &'static str| {
                let undone = Arc::clone(&undone);
                move |step: StepToUndo<u32>| async move {
                    undone.lock().unwrap().push(format!("{name} {:?}", step.result));
                    Ok::<_, String>(())
                }
            };
            let mut steps = context.steps()?;
            steps.step("first").undo(undo("first")).run(|_| async { Ok::<_, String>(1_u32) }).await?;
            let meaning = |error: &&str| if *error == "refused" { ErrorMeaning::Final } else { ErrorMeaning::Fault };
            let second = steps.step("second").undo(undo("second"));
            second.run_classified(meaning, |_| async move { Err::<u32, _>(error) }).await.map(|_| String::new())
        };
        in_a_process(&world, |settings| settings, steps).unwrap().unwrap_err()
    };
    assert!(matches!(run("no answer"), RunError::Failed(StepError::Interrupted { .. })));
    assert!(matches!(run("refused"), RunError::Failed(StepError::Failed { .. })));
    assert_eq!(*undone.lock().unwrap(), ["second None", "first Some(1)"]);
}

#[test]
fn a_value_is_not_stored_after_a_failed_step() {
    let ignore = |context: Context| async move {
        let mut steps = context.steps()?;
        steps.step("first").run(|_| async { Ok::<_, String>(1_u32) }).await?;
        let _ = steps.step("second").run(|_| async { Err::<u32, _>("away") }).await;
        Ok("done".to_owned())
    };
    let world = World::new();
    let run = || in_a_process(&world, attempts(4), ignore).unwrap();
    let denied = |outcome| match outcome {
        Err(RunError::Engine(ExecuteError::Steps(error))) => error,
        other => panic!("{other:?}"),
    };
    assert!(matches!(denied(run()), StepError::Interrupted { .. }));
    assert!(matches!(denied(run()), StepError::Failed { .. }));
    assert!(matches!(run(), Err(RunError::FailedBefore(message)) if message.contains("its steps had not succeeded")));

    // A version without the second step.
    let world = World::new();
    assert!(in_a_process(&world, attempts(4), ignore).unwrap().is_err());
    let shorter = |context: Context| async move {
        context.steps()?;
        Ok("done".to_owned())
    };
    let ended = denied(in_a_process(&world, attempts(4), shorter).unwrap());
    assert!(matches!(&ended, StepError::OrderChanged { expected, .. } if expected == "first"), "{ended:?}");
    // A version without steps.
    let without = |_: Context| async { Ok("done".to_owned()) };
    let ended = denied(in_a_process(&world, attempts(4), without).unwrap());
    assert!(matches!(&ended, StepError::OrderChanged { expected, .. } if expected == "first"), "{ended:?}");
}

#[tokio::test(start_paused = true)]
async fn an_answer_neither_ends_nor_forgets_steps_that_go_on() {
    for disposition in [done(), Disposition::Release { writes: Writes::Keep }] {
        let world = World::new();
        let stored = disposition.clone();
        let run = |context: Context| async move {
            let mut steps = context.steps().unwrap();
            steps.step("first").run(|_| async { Err::<u32, _>("away") }).await.unwrap_err();
            Conclusion { value: "ran", disposition: stored, retention: None }
        };
        let ended = world.at_least_once().execute(operation(), run, panicked).await;
        let is_denied = matches!(ended, Err(ExecuteError::Steps(StepError::Interrupted { .. })));
        assert_eq!(is_denied, matches!(disposition, Disposition::Complete { .. }), "{ended:?}");
        let record = world.record().await.unwrap();
        assert!(record.replay().is_none(), "{disposition:?}: {record:?}");
        assert_eq!(record.attempt, 1);
    }
}
