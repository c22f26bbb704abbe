//! Processes that are killed at every point of a step or of an undo.

use super::*;

/// Systems that repeat a call with the same key safely, and the place where the process is killed.
#[derive(Default)]
struct Systems {
    /// How often each key was used, and in which order the keys came first.
    calls: Mutex<(HashMap<String, usize>, Vec<String>)>,
    points: AtomicUsize,
    killed_at: Option<usize>,
}

impl Systems {
    /// A place where the process may be killed: there it does not go on.
    async fn point(&self) {
        if Some(self.points.fetch_add(1, Ordering::SeqCst)) == self.killed_at {
            std::future::pending::<()>().await;
        }
    }

    async fn call(&self, what: &str, key: &str) -> Result<String, String> {
        self.point().await;
        {
            let mut calls = self.calls.lock().unwrap();
            let (counts, order) = &mut *calls;
            let count = counts.entry(format!("{what} {key}")).or_default();
            *count += 1;
            if *count == 1 {
                order.push(what.to_owned());
            }
        }
        self.point().await;
        Ok(format!("{what} done"))
    }

    /// The effects in their order; a repeated call with a key has none.
    fn effects(&self) -> Vec<String> {
        self.calls.lock().unwrap().1.clone()
    }

    fn calls(&self) -> usize {
        self.calls.lock().unwrap().0.values().sum()
    }
}

/// Three steps; the third is refused if `is_refused`.
async fn sign_up(context: Context, systems: Arc<Systems>, is_refused: bool) -> Result<String, StepError> {
    let systems = &systems;
    let call = |what: &'static str| move |key: String| async move { systems.call(what, &key).await };
    let undo = |what: &'static str, expected: &'static str| {
        let systems = Arc::clone(systems);
        move |step: StepToUndo<String>| async move {
            assert_eq!(step.result.as_deref(), Some(expected));
            systems.call(what, &step.key).await.map(drop)
        }
    };
    let mut steps = context.steps()?;
    let account = steps.step("account").undo(undo("close account", "account done")).run(call("account")).await?;
    let plan = steps.step("plan").undo(undo("cancel plan", "plan done")).run(call("plan")).await?;
    let mail = steps
        .step("mail")
        .run_classified(
            |_| ErrorMeaning::Final,
            |key| async move {
                if is_refused { Err("no such address".to_owned()) } else { systems.call("mail", &key).await }
            },
        )
        .await?;
    Ok([account, plan, mail].join(", "))
}

/// Runs `run` in a process that nothing ends.
fn until_it_ends_itself<F, R>(world: &World, settings: impl FnOnce(Settings) -> Settings, run: F) -> Outcome
where
    F: FnOnce(Context) -> R + Send + 'static,
    R: Future<Output = Result<String, StepError>> + Send + 'static,
{
    let runtime = Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    runtime.block_on(async {
        let engine = Idempotency::at_least_once(world.store.clone(), settings(world.settings()));
        engine.run_classified(operation(), StepError::meaning, run).await
    })
}

const DONE: [&str; 3] = ["account", "plan", "mail"];

const UNDONE: [&str; 4] = ["account", "plan", "cancel plan", "close account"];

fn assert_ended(outcome: &Outcome, is_refused: bool) {
    match outcome {
        Ok(ran) => assert!(!is_refused && ran.value == "account done, plan done, mail done", "{outcome:?}"),
        Err(RunError::FailedBefore(message)) => {
            assert!(
                is_refused && message.contains("step `mail` failed") && message.contains("are undone"),
                "{message}"
            );
        }
        Err(RunError::Failed(StepError::Failed { step, message, .. })) => {
            assert_eq!((is_refused, step.as_str(), message.as_str()), (true, "mail", "no such address"));
        }
        Err(_) => panic!("{outcome:?}"),
    }
}

/// Kills the first process at a point, and lets the next ones run to the end.
fn check_a_kill(is_refused: bool, killed_at: Option<usize>, fault: Option<(Verb, usize, Fault)>) -> bool {
    let world = World::new();
    let systems = Arc::new(Systems { killed_at, ..Systems::default() });
    if let Some((verb, before, fault)) = fault {
        (0..before).for_each(|_| world.store.next(verb, Fault::None));
        world.store.next(verb, fault);
    }
    let run = || {
        let systems = Arc::clone(&systems);
        in_a_process(&world, |settings| settings, move |context| sign_up(context, systems, is_refused))
    };
    let first = run();
    let fired = world.store.fired();
    let ended = run().unwrap();
    assert_ended(&ended, is_refused);
    let again = run().unwrap();
    assert_ended(&again, is_refused);
    let expected: &[&str] = if is_refused { &UNDONE } else { &DONE };
    assert_eq!(systems.effects(), expected, "killed at {killed_at:?} or by {fault:?}");
    first.is_none() || fired > 0
}

/// Calls the first step, and ends the process in the second one; undoes both.
async fn crash_in_the_second(
    context: Context,
    calls: Arc<Mutex<Vec<String>>>,
    undo_crashes: bool,
) -> Result<String, StepError> {
    let attempt = context.attempt();
    let told = move |what: &str| calls.lock().unwrap().push(format!("{attempt} {what}"));
    let undo = |what: &'static str| {
        let told = told.clone();
        move |step: StepToUndo<String>| async move {
            told(&format!("undo {what} {:?}", step.result));
            if undo_crashes {
                std::future::pending::<()>().await;
            }
            Ok::<_, String>(())
        }
    };
    let mut steps = context.steps()?;
    let first = |_: String| async { Ok::<_, String>("one".to_owned()) };
    steps.step("first").undo(undo("first")).run(first).await?;
    let second = |_: String| async {
        told("second");
        std::future::pending::<Result<String, String>>().await
    };
    steps.step("second").undo(undo("second")).run(second).await
}

/// The calls, by attempt, of an operation that is repeated until it has ended.
fn until_it_ends(max_attempts: u32, undo_crashes: bool) -> (Vec<String>, String) {
    let world = World::new();
    let calls = Arc::<Mutex<Vec<String>>>::default();
    let run = || {
        let calls = Arc::clone(&calls);
        let run = move |context| crash_in_the_second(context, calls, undo_crashes);
        in_a_process(&world, attempts(max_attempts), run)
    };
    let ended = (0..20).find_map(|_| run()).unwrap();
    let Err(RunError::Failed(error)) = ended else { panic!("{ended:?}") };
    assert_eq!(error.meaning(), ErrorMeaning::Final);
    let Some(Err(RunError::FailedBefore(message))) = run() else { panic!("the failure is not stored") };
    assert_eq!(message, error.to_string());
    let calls = calls.lock().unwrap().clone();
    (calls, message)
}

#[test]
fn each_system_sees_one_effect_wherever_the_process_is_killed_in_a_call() {
    for (is_refused, points) in [(false, 2 * DONE.len()), (true, 2 * UNDONE.len())] {
        for killed_at in 0..points {
            assert!(check_a_kill(is_refused, Some(killed_at), None), "the process was not killed at {killed_at}");
        }
        assert!(!check_a_kill(is_refused, Some(points), None), "there are more points");
    }
}

#[test]
fn each_system_sees_one_effect_wherever_the_process_is_killed_in_a_call_of_the_store() {
    let hour = Duration::from_secs(3600);
    // Three completed steps, or two, the failure, its place in the undoing, and two undone steps.
    for (is_refused, checkpoints) in [(false, 3), (true, 6)] {
        for fault in [Fault::Delay(hour), Fault::LostAnswer] {
            for number in 0..checkpoints {
                let kill = Some((Verb::Checkpoint, number, fault));
                assert!(check_a_kill(is_refused, None, kill), "no checkpoint {number}");
            }
            assert!(!check_a_kill(is_refused, None, Some((Verb::Checkpoint, checkpoints, fault))), "more checkpoints");
            assert!(check_a_kill(is_refused, None, Some((Verb::Settle, 0, fault))), "no settlement");
        }
    }
}

#[test]
fn a_completed_step_does_not_run_again() {
    let world = World::new();
    let systems = Arc::new(Systems { killed_at: Some(4), ..Systems::default() });
    let run = || {
        let systems = Arc::clone(&systems);
        in_a_process(&world, |settings| settings, move |context| sign_up(context, systems, false))
    };
    assert!(run().is_none(), "it is killed before its third call");
    assert_eq!(systems.calls(), 2);
    assert_ended(&run().unwrap(), false);
    assert_eq!(systems.calls(), 3);
}

#[test]
fn an_undone_step_is_not_undone_again_and_a_failed_one_does_not_run_again() {
    let world = World::new();
    let systems = Arc::new(Systems { killed_at: Some(6), ..Systems::default() });
    let run = |is_refused| {
        let systems = Arc::clone(&systems);
        in_a_process(&world, |settings| settings, move |context| sign_up(context, systems, is_refused))
    };
    assert!(run(true).is_none(), "it is killed before its second undo");
    assert_eq!(systems.calls(), 3);
    // The step would succeed now.
    assert_ended(&run(false).unwrap(), true);
    assert_eq!(systems.effects(), UNDONE);
    assert_eq!(systems.calls(), 4);
}

#[test]
fn an_operation_that_kills_its_process_ends_undone_and_with_a_stored_failure() {
    for (max_attempts, forward) in [(2, 1), (3, 1), (4, 2), (10, 5)] {
        let (calls, message) = until_it_ends(max_attempts, false);
        let mut expected: Vec<_> = (1..=forward).map(|attempt| format!("{attempt} second")).collect();
        expected.push(format!("{} undo second None", forward + 1));
        expected.push(format!("{} undo first Some(\"one\")", forward + 1));
        assert_eq!(calls, expected);
        let told = format!("it was not done in the {forward} attempts that go forward");
        assert!(message.contains(&told), "{message}");
    }
}

#[test]
fn an_undo_that_kills_its_process_ends_with_a_stored_failure_that_says_so() {
    for (max_attempts, forward, last) in [(2, 1, 2), (3, 1, 3), (10, 5, 10)] {
        let (calls, message) = until_it_ends(max_attempts, true);
        let mut expected: Vec<_> = (1..=forward).map(|attempt| format!("{attempt} second")).collect();
        expected.extend((forward + 1..=last).map(|attempt| format!("{attempt} undo second None")));
        assert_eq!(calls, expected);
        assert!(message.contains("step `second` and those before it are not undone"), "{message}");
    }
}

#[test]
fn a_step_whose_result_the_store_did_not_keep_runs_again_with_its_key() {
    let world = World::new();
    let keys = Arc::<Mutex<Vec<String>>>::default();
    let step = || {
        let keys = Arc::clone(&keys);
        move |context: Context| async move {
            let call = |key: String| async move {
                keys.lock().unwrap().push(key);
                Ok::<_, String>("done".to_owned())
            };
            context.steps()?.step("call").run(call).await
        }
    };
    (0..1000).for_each(|_| world.store.next(Verb::Checkpoint, Fault::ErrorBefore));
    let ended = until_it_ends_itself(&world, |settings| settings, step());
    assert!(matches!(&ended, Err(RunError::Failed(StepError::NotKept { step, .. })) if step == "call"), "{ended:?}");
    world.store.heal();
    world.clock.advance(Duration::from_secs(100));
    let run = || in_a_process(&world, |settings| settings, step());
    assert_eq!(run().unwrap().unwrap().value, "done");
    let keys = keys.lock().unwrap().clone();
    assert_eq!(keys.len(), 2);
    assert_eq!(keys[0], keys[1]);
}

#[test]
fn a_run_that_lost_its_lease_starts_no_step_and_no_undo() {
    for is_undo in [false, true] {
        let world = World::new();
        let (clock, store) = (Arc::clone(&world.clock), Arc::clone(&world.store));
        let lose = move || async move {
            // Another process takes over meanwhile.
            clock.advance(Duration::from_secs(100));
            let engine = Idempotency::at_least_once(store, Settings::new().renewals_on(Handle::current()));
            let hangs = |_: Context| std::future::pending::<Result<String, String>>();
            let _ = tokio::time::timeout(Duration::from_millis(1), engine.run(operation(), hangs)).await;
        };
        let ran = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&ran);
        let run = move |context: Context| async move {
            let count = Arc::clone(&counted);
            let undo = move |_: StepToUndo<u32>| async move {
                count.fetch_add(1, Ordering::SeqCst);
                Ok::<_, String>(())
            };
            let mut steps = context.steps()?;
            steps.step("first").undo(undo).run(|_| async { Ok::<_, String>(1_u32) }).await?;
            lose().await;
            // The renewals would notice it, too.
            let second = |_: String| async {
                counted.fetch_add(usize::from(!is_undo), Ordering::SeqCst);
                if is_undo { Err("refused".to_owned()) } else { Ok("ran".to_owned()) }
            };
            let lost = context.lease_lost();
            if !is_undo {
                lost.await;
            }
            steps.step("second").run_classified(|_| ErrorMeaning::Final, second).await
        };
        let runtime = Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        let ended = runtime
            .block_on(async { world.at_least_once().run_classified(operation(), StepError::meaning, run).await });
        assert!(ended.is_err(), "{ended:?}");
        assert_eq!(ran.load(Ordering::SeqCst), 0, "is_undo: {is_undo}");
    }
}

#[test]
fn an_operation_whose_steps_are_undone_says_so_after_a_crash_before_its_answer() {
    for max_attempts in [2, 3, 10] {
        let world = World::new();
        let fails = |dies: bool| {
            move |context: Context| async move {
                let mut steps = context.steps()?;
                let undo = |_: StepToUndo<u32>| async { Ok::<_, String>(()) };
                steps.step("first").undo(undo).run(|_| async { Ok::<_, String>(1_u32) }).await?;
                let refused = |_: String| async { Err::<String, _>("refused") };
                let failed = steps.step("second").run_classified(|_| ErrorMeaning::Final, refused).await;
                if dies {
                    std::future::pending::<()>().await;
                }
                failed
            }
        };
        for _ in 0..=max_attempts {
            assert!(in_a_process(&world, attempts(max_attempts), fails(true)).is_none());
        }
        let ended = in_a_process(&world, attempts(max_attempts), fails(false));
        assert!(matches!(ended, Some(Err(RunError::Failed(StepError::Failed { .. })))), "{ended:?}");
    }
}

/// With a transient outage of the store in the last attempt.
#[test]
fn an_undo_is_recorded_although_the_store_is_away_for_a_moment() {
    let world = World::new();
    let run = |context: Context| async move {
        let mut steps = context.steps()?;
        let undo = |_: StepToUndo<u32>| async { Ok::<_, String>(()) };
        steps.step("first").undo(undo).run(|_| async { Ok::<_, String>(1_u32) }).await?;
        steps.step("second").run_classified(|_| ErrorMeaning::Final, |_| async { Err::<String, _>("refused") }).await
    };
    world.store.next(Verb::Checkpoint, Fault::None);
    world.store.next(Verb::Checkpoint, Fault::ErrorBefore);
    let ended = until_it_ends_itself(&world, attempts(2), run);
    assert!(matches!(ended, Err(RunError::Failed(StepError::Failed { .. }))), "{ended:?}");
}

#[test]
fn an_undo_is_tried_even_if_crashes_have_used_up_the_attempts() {
    let world = World::new();
    let undone = Arc::new(AtomicUsize::new(0));
    let run = |dies: bool| {
        let undone = Arc::clone(&undone);
        move |context: Context| async move {
            let undo = move |_: StepToUndo<u32>| async move {
                undone.fetch_add(1, Ordering::SeqCst);
                Ok::<_, String>(())
            };
            let mut steps = context.steps()?;
            steps.step("first").undo(undo).run(|_| async { Ok::<_, String>(1_u32) }).await?;
            if dies {
                std::future::pending::<()>().await;
            }
            steps.step("second").run(|_| async { Ok::<_, String>(String::new()) }).await
        }
    };
    for _ in 0..5 {
        assert!(in_a_process(&world, attempts(3), run(true)).is_none());
    }
    let ended = in_a_process(&world, attempts(3), run(false));
    assert!(matches!(ended, Some(Err(RunError::Failed(StepError::Failed { .. })))), "{ended:?}");
    assert_eq!(undone.load(Ordering::SeqCst), 1);
}
