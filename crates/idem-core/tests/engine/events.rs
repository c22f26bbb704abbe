//! What an engine tells its observer: one decision for each request, and what happened on the way.

use std::sync::Arc;
use std::time::Duration;

use idem_core::engine::{Conclusion, Context, Contract, Disposition, Durations, Idempotency, Operation};
use idem_core::{Fingerprint, Scope, StoredBody, StoredResponse, Writes};
use idem_testkit::{Fault, Verb};
use tokio::sync::Semaphore;

use crate::support::{World, assert_ran, assert_replays, done, fault, operation, operation_with, panicked};
use idem_log::Log;

const RUN: Duration = Duration::from_millis(300);
const SLOW: Duration = Duration::from_millis(70);

/// Runs an operation that takes no time, and returns the names of the reported events.
async fn told(world: &World, engine: &Idempotency, operation: Operation, end: Disposition) -> Vec<&'static str> {
    let _ = world.run_as(engine, operation, Duration::ZERO, end).await;
    world.events.take_names()
}

#[tokio::test(start_paused = true)]
async fn each_request_is_decided_once() {
    let world = World::new();
    let engine = world.at_most_once();
    assert_eq!(told(&world, &engine, operation(), done()).await, ["acquired", "executed"]);
    assert_eq!(told(&world, &engine, operation(), done()).await, ["replayed"]);
    assert_eq!(told(&world, &engine, operation_with(b"other"), done()).await, ["mismatch"]);

    let world = World::new();
    let engine = world.at_most_once();
    assert_eq!(told(&world, &engine, operation(), fault()).await, ["acquired", "executed"]);
    assert_eq!(told(&world, &engine, operation(), done()).await, ["replayed-failure"]);

    let world = World::new();
    let engine = world.at_least_once();
    assert_eq!(told(&world, &engine, operation(), fault()).await, ["acquired", "executed"]);
    assert_eq!(told(&world, &engine, operation(), done()).await, ["backoff"]);
    world.clock.advance(Duration::from_secs(2));
    let response = StoredResponse { body: StoredBody::NotRetained, ..StoredResponse::new(201, "") };
    let tombstone = Disposition::Complete { response, writes: Writes::Keep };
    assert_eq!(told(&world, &engine, operation(), tombstone).await, ["retry", "executed"]);
    assert_eq!(told(&world, &engine, operation(), done()).await, ["tombstone"]);
}

#[tokio::test(start_paused = true)]
async fn a_replay_names_the_trace_of_the_run_that_answered() {
    let world = World::new();
    let trace = |number: u8| Some(format!("00-{:032x}-{:016x}-01", number, 7).parse().unwrap());
    let engine = world.at_least_once();
    let traced = async |of_request, end: Disposition| {
        let run = move |context: Context| async move {
            assert_eq!(context.trace(), of_request);
            Conclusion { value: "ran", disposition: end, retention: None }
        };
        let result = engine.execute(operation().trace(of_request), run, panicked).await;
        (result, world.events.take().iter().map(|event| event.traces).collect::<Vec<_>>())
    };
    let (result, events) = traced(trace(1), fault()).await;
    assert_ran(&result);
    assert_eq!(events, [[trace(1), None]; 2]);
    world.clock.advance(Duration::from_secs(2));
    assert_ran(&traced(trace(2), done()).await.0);
    for of_request in [trace(3), None] {
        let (result, events) = traced(of_request, done()).await;
        assert_replays(&result, "paid");
        assert_eq!(events, [[of_request, trace(2)]], "the second run answered");
    }
    let world = World::new();
    assert_ran(&world.run(&world.at_most_once(), Duration::ZERO, done()).await);
    world.events.take();
    assert_replays(&world.run(&world.at_most_once(), Duration::ZERO, done()).await, "paid");
    assert_eq!(world.events.take()[0].traces, [None; 2]);
}

#[tokio::test(start_paused = true)]
async fn a_request_without_an_answer_is_decided_once_too() {
    let world = World::new();
    let engine = world.at_most_once();
    for _ in 0..2 {
        world.store.next(Verb::Acquire, Fault::ErrorBefore);
    }
    let failed = ["store-failed", "store-failed", "store-unavailable"];
    assert_eq!(told(&world, &engine, operation(), done()).await, failed);
    world.store.next(Verb::Acquire, Fault::Panic);
    assert_eq!(told(&world, &engine, operation(), done()).await, ["interrupted"]);
    engine.shutdown(Duration::from_secs(60)).await.unwrap();
    assert_eq!(told(&world, &engine, operation(), done()).await, ["shutting-down"]);
    engine.refused("POST /p", "key-missing");
    let refused = &world.events.take()[0];
    assert_eq!((refused.name, refused.about.as_str()), ("key-missing", "None POST /p AtMostOnce"));
    assert!(refused.is_decision && refused.record.is_none());
}

#[tokio::test(start_paused = true)]
async fn each_decision_is_logged_with_its_operation() {
    let (world, log) = (World::new(), Log::of_process());
    let engine = world.at_most_once();
    // A name that no other test has.
    let logged =
        || Operation::new(Scope::new("acme", "logged"), "k".parse().unwrap(), Fingerprint::of_bytes("logged", b""));
    let run = async || world.run_as(&engine, logged(), Duration::ZERO, done()).await;
    assert_ran(&run().await);
    assert_replays(&run().await, "paid");
    engine.shutdown(Duration::from_secs(60)).await.unwrap();
    assert!(run().await.is_err());
    engine.refused("logged", "key-missing");
    let decided = log.lines(&["DEBUG", "decided", "operation=\"logged\""]);
    for (line, outcome) in decided.iter().zip(["executed", "replayed", "shutting-down", "key-missing"]) {
        assert!(line.contains(&format!("outcome=\"{outcome}\"")), "{line}");
    }
    assert_eq!(decided.len(), 4, "{decided:?}");
    let record = engine.acquire_for(&logged()).id;
    let named = log.lines(&["decided", &format!("record={record}")]);
    assert_eq!(named.len(), 2, "two came as far as an operation: {named:?}");
}

#[tokio::test(start_paused = true)]
async fn each_warning_names_the_record() {
    let (world, log) = (World::new(), Log::of_process());
    let named = |name: &str| {
        Operation::new(Scope::new("acme", name), "k".parse().unwrap(), Fingerprint::of_bytes("warned", b""))
    };
    let engine = world.at_most_once();
    let fail_twice = || [(); 2].map(|()| world.store.next(Verb::Acquire, Fault::ErrorBefore));
    fail_twice();
    assert!(world.run_as(&engine, named("warned: no answer"), Duration::ZERO, done()).await.is_err());
    let open = Idempotency::at_least_once(world.store.clone(), world.settings().dangerous_fail_open());
    fail_twice();
    world.run_as(&open, named("warned: open"), Duration::ZERO, done()).await.unwrap();
    let panics = named("warned: panic");
    engine.execute(panics, |_| async { panic!("the operation") }, panicked).await.unwrap();
    for (operation, warned) in [
        ("warned: no answer", "the idempotency store could not answer"),
        ("warned: open", "an operation runs without protection"),
        ("warned: panic", "an idempotent operation panicked"),
    ] {
        let record = engine.acquire_for(&named(operation)).id;
        let named = log.lines(&[warned]).iter().filter_map(|line| line.split_once(warned)).any(|(_, fields)| {
            // Apart from the span, which a log of warnings does not have.
            fields.contains(&format!("record={record}"))
        });
        assert!(named, "{operation}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_has_gone_changes_no_decision() {
    let world = World::new();
    let engine = world.at_most_once();
    assert!(tokio::time::timeout(RUN / 2, world.run(&engine, RUN, done())).await.is_err());
    let waiting = operation().wait(RUN * 10);
    assert!(tokio::time::timeout(RUN / 4, world.run_as(&engine, waiting, RUN, done())).await.is_err());
    tokio::time::sleep(Duration::from_millis(1)).await;
    engine.shutdown(Duration::from_secs(60)).await.unwrap();
    let mut told = world.events.take_names();
    told.sort_unstable();
    assert_eq!(told, ["acquired", "executed", "interrupted"], "the waiter had gone before the answer");
}

#[tokio::test(start_paused = true)]
async fn a_decision_names_its_operation_and_says_how_long_each_part_took() {
    let world = World::new();
    let engine = world.at_most_once();
    world.store.next(Verb::Acquire, Fault::Delay(SLOW));
    world.store.next(Verb::Settle, Fault::Delay(SLOW * 2));
    let first = world.run(&engine, RUN, done());
    let again = async {
        tokio::time::sleep(SLOW * 2).await;
        world.run_as(&engine, operation().wait(Duration::from_secs(9)), RUN, done()).await
    };
    let (first, again) = tokio::join!(first, again);
    assert!(first.is_ok() && again.is_ok(), "{first:?} {again:?}");
    let decisions: Vec<_> = world.events.take().into_iter().filter(|event| event.is_decision).collect();
    let [executed, replayed] = &decisions[..] else { panic!("{decisions:?}") };
    for decision in [executed, replayed] {
        assert_eq!(decision.about, "Some(\"acme\") pay AtMostOnce");
        assert_eq!((decision.record, decision.attempt), (Some(world.record_id()), Some(1)));
    }
    let Durations { store, wait, run, settle, .. } = executed.durations;
    assert_eq!((executed.name, store, wait, run, settle), ("executed", SLOW, Duration::ZERO, RUN, SLOW * 2));
    let Durations { store, wait, run, settle, .. } = replayed.durations;
    assert_eq!((replayed.name, store, run, settle), ("replayed", Duration::ZERO, Duration::ZERO, Duration::ZERO));
    // From 140 ms to the settlement at 510 ms.
    assert_eq!(wait, RUN + SLOW);
}

#[tokio::test(start_paused = true)]
async fn too_many_operations_are_a_refusal_of_their_operation() {
    let world = World::new();
    let settings = world.settings().max_running(1.try_into().unwrap());
    let engine = Idempotency::at_most_once(world.store.clone(), settings);
    let gate = Arc::new(Semaphore::new(0));
    let opened = Arc::clone(&gate);
    let run = move |_: Context| async move {
        opened.acquire().await.unwrap().forget();
        Conclusion { value: "ran", disposition: done(), retention: None }
    };
    let first = tokio::spawn(engine.execute(operation(), run, panicked));
    tokio::task::yield_now().await;
    let _ = world.run(&engine, Duration::ZERO, done()).await;
    let refused = world.events.take().pop().unwrap();
    assert_eq!((refused.name, refused.about.as_str()), ("overloaded", "Some(\"acme\") pay AtMostOnce"));
    gate.add_permits(1);
    assert!(first.await.unwrap().is_ok());
    assert_eq!((world.events.take_names(), engine.contract()), (vec!["executed"], Contract::AtMostOnce));
}
