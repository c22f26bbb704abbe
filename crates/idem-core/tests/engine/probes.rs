//! Finding out what a crashed run did.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use idem_core::engine::{
    Answer, Conclusion, Context, CrashedRun, Disposition, ExecuteError, Idempotency, Probe, ProbeOutcome,
};
use idem_core::{RecordId, ReplayKind, StoredResponse, Writes};
use idem_testkit::{Fault, Verb};

use crate::support::{World, assert_in_progress, assert_ran, assert_replays, done, operation, panicked};

#[derive(Debug)]
struct Asked {
    finding: Option<ProbeOutcome>,
    times: AtomicUsize,
}

#[async_trait]
impl Probe for Asked {
    async fn probe(&self, run: CrashedRun<'_>) -> Result<ProbeOutcome, Box<dyn std::error::Error + Send + Sync>> {
        assert!(run.next_attempt() > 1);
        assert_eq!(run.downstream_key("charge").len(), 64);
        self.times.fetch_add(1, Ordering::SeqCst);
        self.finding.clone().ok_or_else(|| "the other system is away".into())
    }
}

/// A world in which a run crashed, an engine with a probe, and the probe.
async fn crashed(finding: Option<ProbeOutcome>) -> (World, Idempotency, Arc<Asked>) {
    let world = World::new();
    let asked = Arc::new(Asked { finding, times: AtomicUsize::new(0) });
    let engine = Idempotency::at_most_once(world.store.clone(), world.settings().probe(asked.clone()));
    let stuck = world.run(&engine, Duration::from_secs(1_000_000), done());
    assert!(tokio::time::timeout(Duration::from_millis(1), stuck).await.is_err());
    assert_in_progress(&world.run(&engine, Duration::ZERO, done()).await);
    world.clock.advance(Duration::from_secs(30));
    (world, engine, asked)
}

fn times(asked: &Asked) -> usize {
    asked.times.load(Ordering::SeqCst)
}

#[tokio::test(start_paused = true)]
async fn what_happened_is_settled_with_its_answer_and_not_run() {
    let (world, engine, asked) = crashed(Some(ProbeOutcome::Happened(StoredResponse::new(201, "found")))).await;
    for _ in 0..3 {
        assert_replays(&world.run(&engine, Duration::ZERO, done()).await, "found");
    }
    assert_eq!((world.runs(), times(&asked)), (0, 1));
}

#[tokio::test(start_paused = true)]
async fn what_did_not_happen_runs() {
    let (world, engine, asked) = crashed(Some(ProbeOutcome::DidNotHappen)).await;
    assert_ran(&world.run(&engine, Duration::ZERO, done()).await);
    assert_replays(&world.run(&engine, Duration::ZERO, done()).await, "paid");
    assert_eq!((world.runs(), times(&asked)), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn what_nobody_will_know_is_unknown_for_good() {
    let (world, engine, asked) = crashed(Some(ProbeOutcome::Unknown)).await;
    for _ in 0..2 {
        let answer = world.run(&engine, Duration::ZERO, done()).await;
        assert!(
            matches!(&answer, Ok(Answer::Replay(replay)) if replay.kind == ReplayKind::OutcomeUnknown),
            "{answer:?}"
        );
    }
    assert_eq!((world.runs(), times(&asked)), (0, 1));
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_found_out_now_is_asked_again_by_the_next_repeat() {
    let (world, engine, asked) = crashed(None).await;
    for repeat in 1..4 {
        assert_in_progress(&world.run(&engine, Duration::ZERO, done()).await);
        assert_eq!((world.runs(), times(&asked)), (0, repeat));
    }
    // An engine without a probe must not run it either.
    let answer = world.run(&world.at_most_once(), Duration::ZERO, done()).await;
    assert!(matches!(&answer, Ok(Answer::Replay(replay)) if replay.kind == ReplayKind::OutcomeUnknown), "{answer:?}");
}

#[derive(Debug)]
struct KeyOf(RecordId);

#[async_trait]
impl Probe for KeyOf {
    async fn probe(&self, run: CrashedRun<'_>) -> Result<ProbeOutcome, Box<dyn std::error::Error + Send + Sync>> {
        let is_same = run.downstream_key("charge") == self.0.downstream_key("charge");
        Ok(if is_same { ProbeOutcome::Happened(StoredResponse::new(201, "found")) } else { ProbeOutcome::DidNotHappen })
    }
}

#[tokio::test(start_paused = true)]
async fn a_probe_asks_with_the_downstream_keys_of_the_run() {
    let (world, ..) = crashed(None).await;
    let first = RecordId::from_bytes([7; 32]);
    let engine = Idempotency::at_most_once(world.store.clone(), world.settings().probe(Arc::new(KeyOf(first))));
    let repeat = operation().downstream_keys_of(first);
    assert_replays(&world.run_as(&engine, repeat, Duration::ZERO, done()).await, "found");
    assert_eq!(world.runs(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_lost_acquire_does_not_make_the_crash_forgotten() {
    let (world, engine, asked) = crashed(Some(ProbeOutcome::DidNotHappen)).await;
    world.store.next(Verb::Acquire, Fault::LostAnswer);
    world.store.next(Verb::Acquire, Fault::LostAnswer);
    world.run(&engine, Duration::ZERO, done()).await.unwrap_err();
    // The engine releases the key after its answer.
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_ran(&world.run(&engine, Duration::ZERO, done()).await);
    assert_eq!((world.runs(), times(&asked)), (1, 1), "it was asked before it ran");
}

#[tokio::test(start_paused = true)]
async fn a_run_after_the_probe_that_is_released_is_probed_again() {
    let (world, engine, asked) = crashed(Some(ProbeOutcome::DidNotHappen)).await;
    let release = || Disposition::Release { writes: Writes::Discard };
    assert_ran(&world.run(&engine, Duration::ZERO, release()).await);
    assert_ran(&world.run(&engine, Duration::ZERO, release()).await);
    assert_eq!((world.runs(), times(&asked)), (2, 2));
}

#[tokio::test(start_paused = true)]
async fn a_panic_of_the_probe_runs_nothing() {
    #[derive(Debug)]
    struct Panics;
    #[async_trait]
    impl Probe for Panics {
        async fn probe(&self, _: CrashedRun<'_>) -> Result<ProbeOutcome, Box<dyn std::error::Error + Send + Sync>> {
            panic!("as planned")
        }
    }
    let (world, _, _) = crashed(None).await;
    let engine = Idempotency::at_most_once(world.store.clone(), world.settings().probe(Arc::new(Panics)));
    let run = |_: Context| async { Conclusion { value: "ran", disposition: done(), retention: None } };
    assert_in_progress(&engine.execute(operation(), run, panicked).await);
}

/// Says after a while that it did not happen.
#[derive(Debug)]
struct Slow(Duration);

#[async_trait]
impl Probe for Slow {
    async fn probe(&self, _: CrashedRun<'_>) -> Result<ProbeOutcome, Box<dyn std::error::Error + Send + Sync>> {
        tokio::time::sleep(self.0).await;
        Ok(ProbeOutcome::DidNotHappen)
    }
}

#[tokio::test(start_paused = true)]
async fn an_operation_whose_lease_was_lost_while_it_was_probed_does_not_run() {
    // Lost by the renewal limit, and by a process that stood still meanwhile.
    for renewed in [false, true] {
        let (world, _, _) = crashed(None).await;
        let probing = |takes| {
            let settings = world.settings().probe(Arc::new(Slow(takes)));
            let renewal_limit = if renewed { Duration::from_secs(600) } else { Duration::from_secs(5) };
            Idempotency::at_most_once(world.store.clone(), settings.renewal_limit(renewal_limit))
        };
        let slow = tokio::spawn({
            let (world, engine) = (world.clone(), probing(Duration::from_secs(9)));
            async move { world.run(&engine, Duration::ZERO, done()).await }
        });
        tokio::time::sleep(Duration::from_secs(1)).await;
        // By the store's clock its lease is over.
        world.clock.advance(Duration::from_secs(30));
        assert_ran(&world.run(&probing(Duration::ZERO), Duration::ZERO, done()).await);
        // It gets the answer that the other run has settled.
        assert_replays(&slow.await.unwrap(), "paid");
        assert_eq!(world.runs(), 1, "renewed: {renewed}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_operation_does_not_run_when_the_store_does_not_confirm_its_lease_after_the_probe() {
    let (world, _, _) = crashed(None).await;
    let settings = world.settings().probe(Arc::new(Slow(Duration::from_secs(1))));
    let engine = Idempotency::at_most_once(world.store.clone(), settings);
    world.store.next(Verb::Renew, Fault::ErrorBefore);
    let refused = world.run(&engine, Duration::ZERO, done()).await;
    assert!(matches!(refused, Err(ExecuteError::NotAdmitted(_))), "{refused:?}");
    assert_eq!(world.runs(), 0);
    assert_eq!(decided_after(&world), (Duration::ZERO, Duration::from_secs(1)));
    // The engine releases its key after the answer, and the next repeat probes again.
    tokio::time::sleep(Duration::from_secs(1)).await;
    world.store.next(Verb::Renew, Fault::Delay(Duration::from_secs(2)));
    assert_ran(&world.run(&engine, Duration::from_secs(4), done()).await);
    assert_eq!(world.runs(), 1);
    assert_eq!(decided_after(&world), (Duration::from_secs(2), Duration::from_secs(5)));
}

/// How long the store was asked, and how long the probe and the operation took, by the last decision.
fn decided_after(world: &World) -> (Duration, Duration) {
    let durations = world.events.take().into_iter().rfind(|event| event.is_decision).unwrap().durations;
    (durations.store, durations.run)
}

#[tokio::test(start_paused = true)]
async fn a_probe_that_takes_longer_than_a_lease_is_renewed_meanwhile_and_then_runs() {
    let (world, _, _) = crashed(None).await;
    let settings = world.settings().probe(Arc::new(Slow(Duration::from_secs(100))));
    let engine = Idempotency::at_most_once(world.store.clone(), settings);
    let run = |context: Context| async move {
        let lost = tokio::time::timeout(Duration::from_secs(40), context.lease_lost()).await.is_ok();
        assert!(!lost, "its lease is renewed");
        Conclusion { value: "ran", disposition: done(), retention: None }
    };
    assert_ran(&engine.execute(operation(), run, panicked).await);
}
