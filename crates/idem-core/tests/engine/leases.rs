//! How a lease is kept, lost, taken over.

use std::sync::Arc;
use std::time::Duration;

use idem_core::engine::{
    Answer, CheckpointError, Conclusion, Context, Disposition, ErrorMeaning, Idempotency, Operation, StepError,
    StepToUndo,
};
use idem_core::{Acquisition, Fingerprint, RecordId, ReplayKind, Scope, State, StoredResponse};
use idem_testkit::{Fault, Verb};
use tokio::runtime::Runtime;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::support::{World, assert_in_progress, assert_ran, assert_replays, done, operation, panicked};

const LEASE: Duration = Duration::from_secs(30);

/// A crash: an operation that has begun and never ends, on a separate engine.
async fn crashed(world: &World, engine: Idempotency, checkpoint: Option<&'static str>) {
    let begun = Arc::new(Notify::new());
    let run = {
        let begun = Arc::clone(&begun);
        move |context: Context| async move {
            if let Some(name) = checkpoint {
                context.checkpoint(name, "data").await.unwrap();
            }
            begun.notify_one();
            std::future::pending::<Conclusion<&'static str>>().await
        }
    };
    tokio::spawn(async move { engine.execute(operation(), run, panicked).await });
    begun.notified().await;
    // Its process is gone, so its renewals fail; the world's clock moves on.
    for _ in 0..1000 {
        world.store.next(Verb::Renew, Fault::ErrorBefore);
    }
    world.clock.advance(LEASE);
}

#[tokio::test(start_paused = true)]
async fn a_lease_is_renewed_at_a_third_until_the_operation_ends() {
    let world = World::new();
    let engine = world.at_least_once();
    assert_ran(&world.run(&engine, Duration::from_secs(95), done()).await);
    assert_eq!(world.store.calls(Verb::Renew), 9);
    tokio::time::sleep(Duration::from_secs(100)).await;
    assert_eq!(world.store.calls(Verb::Renew), 9, "and not after");
}

#[tokio::test(start_paused = true)]
async fn a_lease_is_renewed_in_time_also_when_its_acquire_was_slow() {
    let world = World::new();
    let engine = world.at_least_once();
    let start = Instant::now();
    world.store.next(Verb::Acquire, Fault::Delay(Duration::from_millis(1500)));
    let slow = world.run_as(&engine, operation(), Duration::from_secs(15), done());
    let quick = async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        // The renewal task then waits for this lease, which was requested later and is due later than the slow one.
        world.run_as(&engine, operation_of("other"), Duration::from_secs(60), done()).await
    };
    let renewed = async {
        while world.store.calls(Verb::Renew) == 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        start.elapsed()
    };
    let renewed = tokio::time::timeout(Duration::from_secs(60), renewed);
    let (slow, quick, renewed) = tokio::join!(slow, quick, renewed);
    assert_ran(&slow);
    assert_ran(&quick);
    assert_eq!(renewed.unwrap().as_secs(), 10, "a third of the lease after it was asked for");
}

/// Waits until the lease of the operation that awaits this is renewed once more.
async fn renewed_once_more(world: &World) -> Conclusion<&'static str> {
    let before = world.store.calls(Verb::Renew);
    let renewed = async {
        while world.store.calls(Verb::Renew) == before {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    assert!(tokio::time::timeout(Duration::from_secs(20), renewed).await.is_ok(), "nothing is renewed");
    Conclusion { value: "ran", disposition: done(), retention: None }
}

fn operation_of(key: &str) -> Operation {
    Operation::new(Scope::new("acme", "pay"), key.parse().unwrap(), Fingerprint::of_bytes("pay", b""))
}

fn one_thread() -> Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

/// The first operation of an engine, or the first after a while, finds nothing that would renew leases.
#[test]
fn an_operation_that_never_yields_keeps_no_other_lease_from_being_renewed() {
    let world = World::new();
    let settings = world.settings().lease(Duration::from_millis(150));
    let engine = Idempotency::at_least_once(world.store.clone(), settings);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(4).enable_all().build().unwrap();
    let (begun, begins) = std::sync::mpsc::channel();
    let (end, ends) = std::sync::mpsc::channel::<()>();
    let computes = {
        let engine = engine.clone();
        let run = move |_: Context| async move {
            begun.send(()).unwrap();
            let _ = ends.recv();
            Conclusion { value: "ran", disposition: done(), retention: None }
        };
        let computing = operation_of("computes");
        runtime.spawn(async move { engine.execute(computing, run, panicked).await })
    };
    begins.recv().unwrap();
    let renewing = world.clone();
    let run = move |_: Context| async move { renewed_once_more(&renewing).await };
    assert_ran(&runtime.block_on(engine.execute(operation_of("waits"), run, panicked)));
    drop(end);
    assert_ran(&runtime.block_on(computes).unwrap());
}

/// Awaits further renewals from outside of the runtime that is to make them.
fn assert_renewed(world: &World, times: u64) {
    let before = world.store.calls(Verb::Renew);
    let deadline = Instant::now() + Duration::from_secs(10);
    while world.store.calls(Verb::Renew) < before + times {
        assert!(Instant::now() < deadline, "no lease is renewed");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// An event wakes one thread of an idle runtime, and the operation keeps that one busy. Another thread has to be woken,
/// or no thread drives timers.
#[test]
fn an_operation_that_never_yields_is_renewed_in_a_process_that_does_nothing_else() {
    let world = World::new();
    let settings = world.settings().lease(Duration::from_millis(600));
    let engine = Idempotency::at_least_once(world.store.clone(), settings);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(3).enable_all().build().unwrap();
    for (name, another_before) in [("soon", Some("another")), ("later", None)] {
        let (end, ends) = std::sync::mpsc::channel::<()>();
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        let engine = engine.clone();
        let run = move |_: Context| async move {
            let _ = ends.recv();
            Conclusion { value: "ran", disposition: done(), retention: None }
        };
        let computes = runtime.spawn(async move {
            if let Some(another) = another_before {
                let ends = |_: Context| async { Conclusion { value: "ran", disposition: done(), retention: None } };
                assert_ran(&engine.execute(operation_of(another), ends, panicked).await);
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
            engine.execute(operation_of(name), run, panicked).await
        });
        assert_renewed(&world, 2);
        // The thread that drives timers now becomes busy as well, with something else.
        let disturbs = runtime.spawn(async move {
            tokio::time::sleep(Duration::from_millis(50)).await;
            let _ = stopped.recv();
        });
        assert_renewed(&world, 3);
        drop((end, stop));
        assert_ran(&runtime.block_on(computes).unwrap());
        runtime.block_on(disturbs).unwrap();
    }
}

/// Operations of one engine on several runtimes: what becomes of one of them must not stop the renewals on another one.
#[test]
fn leases_are_renewed_whatever_becomes_of_another_runtime_of_the_same_engine() {
    let world = World::new();
    let settings = world.settings().lease(Duration::from_millis(150));
    let engine = Idempotency::at_least_once(world.store.clone(), settings);
    let renewed = |name: &str| {
        let renewing = world.clone();
        let run = move |_: Context| async move { renewed_once_more(&renewing).await };
        assert_ran(&one_thread().block_on(engine.execute(operation_of(name), run, panicked)));
    };
    let first = one_thread();
    let begun = Arc::new(Notify::new());
    let hangs = {
        let begun = Arc::clone(&begun);
        move |_: Context| async move {
            begun.notify_one();
            std::future::pending::<Conclusion<&'static str>>().await
        }
    };
    first.block_on(async {
        let engine = engine.clone();
        let hanging = operation_of("hangs");
        tokio::spawn(async move { engine.execute(hanging, hangs, panicked).await });
        begun.notified().await;
    });
    // No thread drives the first runtime now, as if all of its threads were busy.
    renewed("while-the-first-stands-still");
    drop(first);
    renewed("after-the-first-has-ended");
}

#[tokio::test(start_paused = true)]
async fn a_lease_is_not_renewed_for_ever() {
    let world = World::new();
    let engine =
        Idempotency::at_least_once(world.store.clone(), world.settings().renewal_limit(Duration::from_secs(60)));
    let start = Instant::now();
    let run = move |context: Context| async move {
        context.lease_lost().await;
        assert_eq!(start.elapsed().as_secs(), 50 + 27, "a tenth before the end of the last renewal's lease");
        Conclusion { value: "ran", disposition: done(), retention: None }
    };
    assert_ran(&engine.execute(operation(), run, panicked).await);
    assert_eq!(world.store.calls(Verb::Renew), 5);
}

#[tokio::test(start_paused = true)]
async fn the_loss_of_a_lease_is_told_before_it_ends_when_renewals_fail_or_hang() {
    for trouble in [Fault::ErrorBefore, Fault::LostAnswer] {
        let world = World::new();
        for _ in 0..100 {
            world.store.next(Verb::Renew, trouble);
        }
        let start = Instant::now();
        let run = move |context: Context| async move {
            context.lease_lost().await;
            assert_eq!(start.elapsed(), LEASE - LEASE / 10, "{trouble:?}");
            Conclusion { value: "ran", disposition: done(), retention: None }
        };
        assert_ran(&world.at_least_once().execute(operation(), run, panicked).await);
        assert_eq!(world.events.count("lease-lost"), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn two_failed_renewals_do_not_lose_a_lease() {
    let world = World::new();
    world.store.next(Verb::Renew, Fault::ErrorBefore);
    world.store.next(Verb::Renew, Fault::ErrorBefore);
    assert_ran(&world.run(&world.at_least_once(), Duration::from_secs(60), done()).await);
    assert_eq!(world.events.count("lease-lost"), 0);
}

#[tokio::test(start_paused = true)]
async fn a_run_that_was_taken_over_is_told_and_gets_its_successors_answer() {
    let world = World::new();
    let slow = world.at_least_once();
    let told = Arc::new(Notify::new());
    let run = {
        let (told, world) = (Arc::clone(&told), world.clone());
        move |context: Context| async move {
            // As if the process had been suspended: no renewal, and a successor in the meantime.
            world.clock.advance(LEASE);
            let successor = world.run(&world.at_least_once(), Duration::ZERO, done()).await;
            assert!(matches!(successor, Ok(Answer::Ran { attempt: 2, .. })), "{successor:?}");
            context.lease_lost().await;
            told.notify_one();
            let late = idem_core::StoredResponse::new(201, "paid again");
            let disposition =
                idem_core::engine::Disposition::Complete { response: late, writes: idem_core::Writes::Keep };
            Conclusion { value: "ran", disposition, retention: None }
        }
    };
    let answer = slow.execute(operation(), run, panicked).await;
    told.notified().await;
    assert_replays(&answer, "paid");
    assert_replays(&world.run(&slow, Duration::ZERO, done()).await, "paid");
}

#[tokio::test(start_paused = true)]
async fn after_a_crash_at_least_once_runs_again_with_the_last_checkpoint() {
    let world = World::new();
    crashed(&world, world.at_least_once(), Some("charged")).await;
    let run = |context: Context| async move {
        assert_eq!((context.attempt(), context.acquisition()), (2, Acquisition::Takeover));
        let checkpoint = context.last_checkpoint().unwrap();
        assert_eq!((checkpoint.name.as_ref(), checkpoint.data.as_ref()), ("charged", b"data".as_slice()));
        Conclusion { value: "ran", disposition: done(), retention: None }
    };
    assert_ran(&world.at_least_once().execute(operation(), run, panicked).await);
}

/// A store that stalled delivers a checkpoint after a later one was acknowledged.
#[tokio::test(start_paused = true)]
async fn a_checkpoint_that_a_stalled_store_delivers_late_does_not_undo_a_later_one() {
    let world = World::new();
    let (engine, begun) = (world.at_least_once(), Arc::new(Notify::new()));
    world.store.next(Verb::Checkpoint, Fault::Late(Duration::from_secs(5)));
    let run = {
        let begun = Arc::clone(&begun);
        move |context: Context| async move {
            let unanswered = context.checkpoint("intended", "ch_1").await;
            assert!(matches!(unanswered, Err(CheckpointError::Store(_))), "{unanswered:?}");
            context.checkpoint("intended", "ch_1").await.unwrap();
            context.checkpoint("charged", "ch_1").await.unwrap();
            begun.notify_one();
            std::future::pending::<Conclusion<&'static str>>().await
        }
    };
    tokio::spawn(async move { engine.execute(operation(), run, panicked).await });
    begun.notified().await;
    tokio::time::sleep(Duration::from_secs(10)).await;
    let checkpoint = world.record().await.unwrap().checkpoint.unwrap();
    assert_eq!((checkpoint.sequence, checkpoint.name.as_ref()), (3, "charged"));
    for _ in 0..1000 {
        world.store.next(Verb::Renew, Fault::ErrorBefore);
    }
    world.clock.advance(LEASE);
    let run = |context: Context| async move {
        assert_eq!(context.last_checkpoint().map(|checkpoint| checkpoint.name.as_ref()), Some("charged"));
        context.checkpoint("shipped", "ch_1").await.unwrap();
        std::future::pending::<Conclusion<&'static str>>().await
    };
    let engine = world.at_least_once();
    tokio::spawn(async move { engine.execute(operation(), run, panicked).await });
    tokio::time::sleep(Duration::from_secs(1)).await;
    let checkpoint = world.record().await.unwrap().checkpoint.unwrap();
    assert_eq!((checkpoint.sequence, checkpoint.name.as_ref()), (4, "shipped"));
}

#[tokio::test(start_paused = true)]
async fn after_a_crash_the_next_attempt_has_the_same_keys_for_others() {
    let world = World::new();
    crashed(&world, world.at_least_once(), None).await;
    let expected = world.record_id().downstream_key("charge");
    let run = |context: Context| async move {
        assert_eq!((context.attempt(), context.downstream_key("charge")), (2, expected));
        Conclusion { value: "ran", disposition: done(), retention: None }
    };
    assert_ran(&world.at_least_once().execute(operation(), run, panicked).await);
}

#[tokio::test(start_paused = true)]
async fn an_operation_may_have_the_downstream_keys_of_the_one_that_it_repeats() {
    let world = World::new();
    let first = RecordId::from_bytes([7; 32]);
    let run = move |context: Context| async move {
        assert_eq!(context.downstream_key("charge"), first.downstream_key("charge"));
        assert_ne!(*context.record_id(), first);
        let mut steps = context.steps().unwrap();
        let key = steps.step("ship").run(|key: String| async move { Ok::<_, String>(key) }).await.unwrap();
        let expected = context.record_id().downstream_key("undo:pay");
        let undo = |step: StepToUndo<u32>| async move {
            assert_eq!(step.key, expected);
            Ok::<_, String>(())
        };
        assert_eq!(key, context.record_id().downstream_key("step:ship"));
        steps.step("pay").undo(undo).run(|_| async { Ok::<_, String>(1_u32) }).await.unwrap();
        let refused = |_: String| async { Err::<u32, _>("refused") };
        let failed = steps.step("tell").run_classified(|_| ErrorMeaning::Final, refused).await;
        assert!(matches!(failed, Err(StepError::Failed { .. })), "{failed:?}");
        Conclusion {
            value: "ran",
            disposition: Disposition::Fail { response: StoredResponse::new(402, "refused") },
            retention: None,
        }
    };
    assert_ran(&world.at_least_once().execute(operation().downstream_keys_of(first), run, panicked).await);
}

#[tokio::test(start_paused = true)]
async fn after_a_crash_at_most_once_is_unknown_for_ever() {
    let world = World::new();
    crashed(&world, world.at_most_once(), None).await;
    for engine in [world.at_most_once(), world.at_least_once()] {
        let answer = world.run(&engine, Duration::ZERO, done()).await;
        let Ok(Answer::Replay(replay)) = answer else { panic!("{answer:?}") };
        assert_eq!((replay.kind, replay.response.status), (ReplayKind::OutcomeUnknown, 504));
    }
    assert_eq!(world.runs(), 0);
}

#[tokio::test(start_paused = true)]
async fn before_its_lease_is_over_a_crashed_key_is_in_progress() {
    let world = World::new();
    let engine = world.at_least_once();
    let stuck = world.run(&engine, Duration::from_secs(1_000_000), done());
    assert!(tokio::time::timeout(Duration::from_millis(1), stuck).await.is_err());
    world.clock.advance(LEASE - Duration::from_micros(1));
    assert_in_progress(&world.run(&world.at_least_once(), Duration::ZERO, done()).await);
    world.clock.advance(Duration::from_micros(1));
    assert_ran(&world.run(&world.at_least_once(), Duration::ZERO, done()).await);
}

#[tokio::test(start_paused = true)]
async fn a_context_has_keys_for_others_and_refuses_what_makes_no_sense() {
    let world = World::new();
    let run = |context: Context| async move {
        assert!(context.is_protected());
        assert_eq!(context.downstream_key("charge"), context.clone().downstream_key("charge"));
        let large = context.checkpoint("large", vec![0; 64 * 1024 + 1]).await;
        assert!(matches!(large, Err(CheckpointError::TooLarge { bytes: 65_537 })), "{large:?}");
        context.checkpoint("largest", vec![0; 64 * 1024]).await.unwrap();
        let none = context.transaction::<String>();
        assert_eq!(none.unwrap_err(), idem_core::engine::TransactionError::NotTransactional);
        Conclusion { value: "ran", disposition: done(), retention: None }
    };
    assert_ran(&world.at_least_once().execute(operation(), run, panicked).await);
    let run = |context: Context| async move {
        let pointless = context.checkpoint("name", "data").await;
        assert!(matches!(pointless, Err(CheckpointError::NeverRerun)), "{pointless:?}");
        Conclusion { value: "ran", disposition: done(), retention: None }
    };
    let world = World::new();
    assert_ran(&world.at_most_once().execute(operation(), run, panicked).await);
    assert!(matches!(world.record().await.unwrap().state, State::Completed { .. }));
}

#[tokio::test(start_paused = true)]
async fn a_lease_is_counted_from_the_first_acquire_even_if_its_answer_was_lost() {
    let world = World::new();
    // A third of it is more than the time after which an answer counts as lost.
    let lease = Duration::from_secs(9);
    let engine = Idempotency::at_least_once(world.store.clone(), world.settings().lease(lease));
    world.store.next(Verb::Acquire, Fault::LostAnswer);
    for _ in 0..100 {
        world.store.next(Verb::Renew, Fault::LostAnswer);
    }
    let start = Instant::now();
    let run = move |context: Context| async move {
        context.lease_lost().await;
        assert!(start.elapsed() <= lease, "told {:?} after the acquire", start.elapsed());
        Conclusion { value: "ran", disposition: done(), retention: None }
    };
    assert_ran(&engine.execute(operation(), run, panicked).await);
}

#[tokio::test(start_paused = true)]
async fn a_run_that_outlived_its_record_is_not_answered_with_another_requests_answer() {
    let world = World::new();
    let settings = world.settings().retention(Duration::from_secs(60)).renewal_limit(Duration::from_secs(20));
    let engine = Idempotency::at_most_once(world.store.clone(), settings);
    let slow = tokio::spawn({
        let world = world.clone();
        async move { world.run(&engine, Duration::from_secs(1000), done()).await }
    });
    tokio::time::sleep(Duration::from_secs(500)).await;
    world.clock.advance(Duration::from_secs(500));
    let other = crate::support::operation_with(b"another request");
    assert_ran(&world.run_as(&world.at_most_once(), other, Duration::ZERO, done()).await);
    assert_ran(&slow.await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn limits_beyond_all_reason_are_as_good_as_none() {
    let world = World::new();
    let settings = world.settings().renewal_limit(Duration::MAX).max_wait(Duration::MAX).store_timeout(Duration::MAX);
    let engine = Idempotency::at_least_once(world.store.clone(), settings.lease(Duration::MAX));
    let forever = operation().wait(Duration::MAX);
    assert_ran(&world.run_as(&engine, forever, Duration::from_secs(1), done()).await);
}

#[tokio::test(start_paused = true)]
async fn an_operation_whose_acquire_was_slow_begins_only_under_a_lease_that_was_confirmed() {
    let lease = Duration::from_secs(3);
    let settings = |world: &World| world.settings().lease(lease).store_timeout(Duration::from_secs(10));
    // Slower than a third of the lease: a renewal is acknowledged first.
    let world = World::new();
    let engine = Idempotency::at_most_once(world.store.clone(), settings(&world));
    world.store.next(Verb::Acquire, Fault::Delay(Duration::from_millis(1100)));
    let renewed = world.clone();
    let run = move |_: Context| async move {
        assert!(renewed.store.calls(Verb::Renew) >= 1, "nothing has confirmed the lease");
        Conclusion { value: "ran", disposition: done(), retention: None }
    };
    assert_ran(&engine.execute(operation(), run, panicked).await);

    // Its answer comes after the lease is over, and another run is there: it does not run.
    let world = World::new();
    let engine = Idempotency::at_least_once(world.store.clone(), settings(&world));
    world.store.next(Verb::Acquire, Fault::AnswerLater(Duration::from_secs(4)));
    let slow = tokio::spawn({
        let (world, engine) = (world.clone(), engine.clone());
        async move { world.run(&engine, Duration::ZERO, done()).await }
    });
    tokio::time::sleep(Duration::from_secs(3)).await;
    world.clock.advance(lease);
    let other = tokio::spawn({
        let (world, engine) = (world.clone(), engine.clone());
        async move { world.run(&engine, Duration::from_secs(5), done()).await }
    });
    assert_in_progress(&slow.await.unwrap());
    assert_ran(&other.await.unwrap());
    assert_eq!(world.runs(), 1);
}
