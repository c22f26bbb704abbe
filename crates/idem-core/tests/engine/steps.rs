//! Steps: kept results, undoing, and crashes at every point of both.

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::FutureExt as _;
use idem_core::engine::{
    CheckpointError, Conclusion, Context, Disposition, ErrorMeaning, Event, EventKind, ExecuteError, Idempotency,
    Observer, Ran, RunError, Settings, StandingStep, StepError, StepToUndo,
};
use idem_core::{StoreErrorKind, StoredResponse, Writes};
use idem_testkit::{Fault, Verb};
use tokio::runtime::{Builder, Handle};

use crate::support::{World, done, operation, panicked};

type Outcome = Result<Ran<String>, RunError<StepError>>;

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

/// Runs `run` in a process that ends at once: killed if it is not done by then. The next process finds its lease over.
fn in_a_process<F, R>(world: &World, settings: impl FnOnce(Settings) -> Settings, run: F) -> Option<Outcome>
where
    F: FnOnce(Context) -> R + Send + 'static,
    R: Future<Output = Result<String, StepError>> + Send + 'static,
{
    let runtime = Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    let outcome = runtime.block_on(async {
        let engine = Idempotency::at_least_once(world.store.clone(), settings(world.settings()));
        let running = engine.run_classified(operation(), StepError::meaning, run);
        tokio::time::timeout(Duration::from_millis(1), running).await.ok()
    });
    drop(runtime);
    world.store.heal();
    world.clock.advance(Duration::from_secs(100));
    outcome
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

fn attempts(limit: u32) -> impl Fn(Settings) -> Settings {
    move |settings| settings.max_attempts(NonZeroU32::new(limit).unwrap())
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

/// Runs an operation that completes a step and then fails, and waits for its next attempt.
async fn leave_a_step(world: &World) {
    let fails = |context: Context| async move {
        context.steps()?.step("first").run(|_| async { Ok::<_, String>(1_u32) }).await?;
        Err::<String, _>(StepError::Interrupted { step: "own".into(), message: "away".into(), retry_after: None })
    };
    assert!(world.at_least_once().run_classified(operation(), StepError::meaning, fails).await.is_err());
    world.clock.advance(Duration::from_secs(100));
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
