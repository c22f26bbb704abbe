//! Stores that fail before, after, late, or never answer.

use std::num::NonZeroUsize;
use std::sync::{Arc, Weak};
use std::time::Duration;

use idem_core::engine::{Answer, Conclusion, Context, Disposition, ExecuteError, Idempotency};
use idem_core::{
    Acquire, AcquireOutcome, Capabilities, Checkpoint, IdempotencyStore, Lease, LeaseRenewer, MemoryStore,
    OwnerOutcome, Record, RecordId, ReplayKind, Settlement, SettlementListener, State, StoreError, StoreErrorKind,
    StoredResponse, Term, Writes,
};
use idem_testkit::{Fault, Verb};
use tokio::time::Instant;

use crate::support::{World, assert_ran, assert_replays, done, operation, panicked};

const TROUBLES: [Fault; 3] = [Fault::ErrorBefore, Fault::ErrorAfter, Fault::LostAnswer];

async fn is_completed(world: &World) -> bool {
    matches!(world.record().await.map(|record| record.state), Some(State::Completed { .. }))
}

#[tokio::test(start_paused = true)]
async fn an_acquire_that_fails_once_is_repeated_with_the_same_token() {
    for trouble in TROUBLES {
        let world = World::new();
        world.store.next(Verb::Acquire, trouble);
        assert_ran(&world.run(&world.at_least_once(), Duration::ZERO, done()).await);
        assert_eq!((world.runs(), world.store.fired()), (1, 1), "{trouble:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_acquire_that_keeps_failing_runs_nothing_and_leaves_no_key_stuck() {
    for trouble in TROUBLES {
        let world = World::new();
        let engine = world.at_least_once();
        world.store.next(Verb::Acquire, trouble);
        world.store.next(Verb::Acquire, trouble);
        let refused = world.run(&engine, Duration::ZERO, done()).await;
        assert!(matches!(refused, Err(ExecuteError::NotAdmitted(_))), "{refused:?}");
        assert_eq!(world.runs(), 0);
        // The engine releases what the lost acquires may have taken after its answer, without waiting for a lease.
        engine.shutdown(Duration::from_secs(60)).await.unwrap();
        assert_eq!(world.record().await, None, "{trouble:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_store_that_hangs_is_an_error_within_its_time() {
    let world = World::new();
    let settings = world.settings().store_timeout(Duration::from_secs(3));
    let engine = Idempotency::at_least_once(world.store.clone(), settings);
    world.store.next(Verb::Acquire, Fault::LostAnswer);
    world.store.next(Verb::Acquire, Fault::LostAnswer);
    let start = Instant::now();
    let refused = world.run(&engine, Duration::ZERO, done()).await;
    let Err(ExecuteError::NotAdmitted(error)) = refused else { panic!("{refused:?}") };
    assert_eq!((error.kind(), start.elapsed().as_secs()), (StoreErrorKind::Timeout, 6));
}

#[tokio::test(start_paused = true)]
async fn a_settlement_that_fails_for_a_while_is_repeated_before_anyone_is_answered() {
    for trouble in TROUBLES {
        let world = World::new();
        world.store.next(Verb::Settle, trouble);
        world.store.next(Verb::Settle, trouble);
        assert_ran(&world.run(&world.at_most_once(), Duration::ZERO, done()).await);
        assert!(is_completed(&world).await, "{trouble:?}");
        assert_eq!(world.events.count("settlement-delayed"), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_store_that_is_away_for_less_than_five_seconds_settles_before_anyone_is_answered() {
    let world = World::new();
    for _ in 0..10_000 {
        world.store.next(Verb::Settle, Fault::ErrorBefore);
    }
    let engine = world.at_most_once();
    let run = world.run(&engine, Duration::ZERO, done());
    let heal = async {
        tokio::time::sleep(Duration::from_millis(4_900)).await;
        world.store.heal();
    };
    let (answer, ()) = tokio::join!(run, heal);
    assert_ran(&answer);
    assert!(is_completed(&world).await);
    assert_eq!(world.events.count("settlement-delayed"), 0);
}

#[tokio::test(start_paused = true)]
async fn a_settlement_that_keeps_failing_does_not_keep_the_answer_back_and_goes_on_behind_it() {
    let world = World::new();
    let engine = world.at_most_once();
    for _ in 0..10_000 {
        world.store.next(Verb::Settle, Fault::ErrorBefore);
    }
    let start = Instant::now();
    assert_ran(&world.run(&engine, Duration::ZERO, done()).await);
    assert_eq!(start.elapsed().as_secs(), 5);
    assert_eq!((world.events.count("settlement-delayed"), world.events.count("settlement-done")), (1, 0));
    // Beyond several leases the key is still held, because it is renewed; nothing runs.
    tokio::time::sleep(Duration::from_secs(100)).await;
    assert!(world.store.calls(Verb::Renew) >= 9);
    let repeat = world.run(&engine, Duration::ZERO, done()).await;
    assert!(matches!(repeat, Ok(Answer::InProgress { .. })), "{repeat:?}");
    world.store.heal();
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert!(is_completed(&world).await);
    assert_replays(&world.run(&engine, Duration::ZERO, done()).await, "paid");
    let told = ["settlement-done", "settlement-lost"].map(|event| world.events.count(event));
    assert_eq!((world.runs(), told), (1, [1, 0]));
}

#[tokio::test(start_paused = true)]
async fn a_settlement_is_given_up_when_the_lease_may_not_be_held_any_longer_or_a_shutdown_is_over() {
    let held = Duration::from_secs(60);
    for shut_down in [false, true] {
        let world = World::new();
        let settings = world.settings().renewal_limit(held);
        let engine = Idempotency::at_most_once(world.store.clone(), settings);
        for _ in 0..10_000 {
            world.store.next(Verb::Settle, Fault::ErrorBefore);
        }
        assert_ran(&world.run(&engine, Duration::ZERO, done()).await);
        if shut_down {
            let start = Instant::now();
            engine.shutdown(Duration::from_secs(3)).await.unwrap();
            let took = start.elapsed();
            assert!(took >= Duration::from_secs(3) && took < Duration::from_secs(4), "{took:?}");
        } else {
            // The last try comes when the time is over.
            tokio::time::sleep(held + Duration::from_millis(1)).await;
        }
        assert_eq!(world.events.count("settlement-lost"), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn a_settlement_goes_on_behind_its_answer_whatever_the_kind_of_error() {
    let kinds =
        [StoreErrorKind::Unavailable, StoreErrorKind::Timeout, StoreErrorKind::Capacity, StoreErrorKind::Misconfigured];
    for kind in kinds {
        let world = World::new();
        let engine = world.at_most_once();
        for _ in 0..10_000 {
            world.store.next(Verb::Settle, Fault::Refuse(kind));
        }
        assert_ran(&world.run(&engine, Duration::ZERO, done()).await);
        assert_eq!((engine.settling(), engine.running()), (1, 1), "{kind:?}");
        assert_eq!(
            (world.events.count("settlement-delayed"), world.events.count("settlement-lost")),
            (1, 0),
            "{kind:?}"
        );
        // Credentials are back, or the proxy has room again.
        world.store.heal();
        tokio::time::sleep(Duration::from_secs(3)).await;
        assert!(is_completed(&world).await, "{kind:?}");
        assert_eq!((engine.settling(), engine.running()), (0, 0), "{kind:?}");
        assert_replays(&world.run(&engine, Duration::ZERO, done()).await, "paid");
    }
}

#[tokio::test(start_paused = true)]
async fn a_run_whose_lease_is_over_is_not_answered_before_its_settlement() {
    let world = World::new();
    let settings = world.settings().lease(Duration::from_secs(4));
    let engine = Idempotency::at_least_once(world.store.clone(), settings);
    for verb in [Verb::Renew, Verb::Settle] {
        for _ in 0..10_000 {
            world.store.next(verb, Fault::ErrorBefore);
        }
    }
    let unclear = world.run(&engine, Duration::ZERO, done()).await;
    assert!(matches!(unclear, Err(ExecuteError::CommitUnclear(_))), "{unclear:?}");
    assert_eq!(engine.settling(), 1);
    // The settlement goes on, and a repeat gets the answer.
    world.store.heal();
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_replays(&world.run(&engine, Duration::ZERO, done()).await, "paid");
}

/// The renewals' runtime is busy for as long as the lease lasts.
#[test]
fn a_run_whose_lease_is_over_is_not_answered_although_its_renewals_are_late() {
    let renewals = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    runtime.block_on(async {
        let world = World::new();
        let settings = world.settings().lease(Duration::from_secs(4)).renewals_on(renewals.handle().clone());
        let engine = Idempotency::at_least_once(world.store.clone(), settings);
        for _ in 0..10_000 {
            world.store.next(Verb::Settle, Fault::ErrorBefore);
        }
        let unclear = world.run(&engine, Duration::ZERO, done()).await;
        assert!(matches!(unclear, Err(ExecuteError::CommitUnclear(_))), "{unclear:?}");
    });
}

#[tokio::test(start_paused = true)]
async fn a_lease_is_renewed_behind_the_answer_although_the_run_took_as_long_as_it_may() {
    let world = World::new();
    let lease = Duration::from_secs(30);
    let settings = world.settings().lease(lease).renewal_limit(2 * lease);
    let engine = Idempotency::at_least_once(world.store.clone(), settings);
    for _ in 0..10_000 {
        world.store.next(Verb::Settle, Fault::ErrorBefore);
    }
    assert_ran(&world.run(&engine, 2 * lease - Duration::from_secs(6), done()).await);
    let renewed = world.store.calls(Verb::Renew);
    tokio::time::sleep(lease).await;
    assert!(world.store.calls(Verb::Renew) >= renewed + 2, "the lease has ended");
}

#[tokio::test(start_paused = true)]
async fn what_an_operation_has_left_behind_is_told_of_its_end() {
    for is_repeatable in [false, true] {
        let world = World::new();
        let engine = if is_repeatable { world.at_least_once() } else { world.at_most_once() };
        let (send, left) = tokio::sync::oneshot::channel();
        let run = move |context: Context| async move {
            assert!(!context.is_lease_lost());
            let _ = send.send(context);
            Conclusion { value: (), disposition: done(), retention: None }
        };
        let ran = engine.execute(operation(), run, || panic!("it does not panic")).await;
        assert!(matches!(ran, Ok(Answer::Ran { .. })), "{ran:?}");
        let context = left.await.unwrap();
        assert!(context.is_lease_lost());
        context.lease_lost().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_key_is_given_back_whatever_the_kind_of_error_was_at_first() {
    let world = World::new();
    let engine = world.at_most_once();
    for _ in 0..4 {
        world.store.next(Verb::Settle, Fault::Refuse(StoreErrorKind::Misconfigured));
    }
    let release = || Disposition::Release { writes: Writes::Discard };
    assert_ran(&world.run(&engine, Duration::ZERO, release()).await);
    assert_eq!(world.record().await, None);
}

#[tokio::test(start_paused = true)]
async fn a_settlement_behind_its_answer_is_awaited_by_a_shutdown() {
    let world = World::new();
    let engine = world.at_most_once();
    for _ in 0..10_000 {
        world.store.next(Verb::Settle, Fault::ErrorBefore);
    }
    assert_ran(&world.run(&engine, Duration::ZERO, done()).await);
    let heal = async {
        tokio::time::sleep(Duration::from_secs(4)).await;
        world.store.heal();
    };
    let (ended, ()) = tokio::join!(engine.shutdown(Duration::from_secs(20)), heal);
    ended.unwrap();
    assert!(is_completed(&world).await);
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_says_how_many_operations_did_not_end_in_time() {
    let world = World::new();
    let engine = world.at_most_once();
    let slow = tokio::spawn({
        let (world, engine) = (world.clone(), engine.clone());
        async move { world.run(&engine, Duration::from_secs(100), done()).await }
    });
    tokio::time::sleep(Duration::from_secs(1)).await;
    let unfinished = engine.shutdown(Duration::from_secs(5)).await.unwrap_err();
    assert_eq!(unfinished.running, 1);
    let refused = world.run(&engine, Duration::ZERO, done()).await;
    assert!(matches!(refused, Err(ExecuteError::ShuttingDown)), "{refused:?}");
    // It is not cancelled.
    assert_ran(&slow.await.unwrap());
    engine.shutdown(Duration::from_secs(5)).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_store_that_panics_leaves_its_key_free_or_answered_after_a_lease() {
    for verb in [Verb::Acquire, Verb::Renew, Verb::Settle] {
        let world = World::new();
        let engine = world.at_least_once();
        world.store.next(verb, Fault::Panic);
        let first = world.run(&engine, Duration::from_secs(40), done()).await;
        match verb {
            // The run learns that its lease is no longer renewed, and goes on.
            Verb::Renew => {
                assert_ran(&first);
                assert_eq!(world.events.count("lease-lost"), 1);
            }
            _ => assert!(matches!(first, Err(ExecuteError::Interrupted)), "{verb:?}: {first:?}"),
        }
        assert_eq!((engine.running(), engine.settling()), (0, 0), "{verb:?}");
        world.clock.advance(Duration::from_secs(30));
        let again = world.run(&engine, Duration::ZERO, done()).await;
        assert!(matches!(again, Ok(Answer::Ran { .. } | Answer::Replay(_))), "{verb:?}: {again:?}");
        engine.shutdown(Duration::from_secs(60)).await.unwrap();
    }
}

/// Panics at one of its calls.
#[derive(Debug, Default)]
struct Panics {
    at: usize,
    calls: std::sync::atomic::AtomicUsize,
}

impl idem_core::engine::Observer for Panics {
    fn observe(&self, _: &idem_core::engine::Event<'_>) {
        let call = self.calls.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        assert_ne!(call, self.at, "as planned");
    }
}

#[tokio::test(start_paused = true)]
async fn a_panic_of_the_observer_changes_nothing_whichever_event_it_is_told() {
    let mut told = 0;
    for at in 0..20 {
        let world = World::new();
        let panics = Arc::new(Panics { at, ..Panics::default() });
        let engine = Idempotency::at_most_once(world.store.clone(), world.settings().observer(panics.clone()));
        // Renewals and the first settlements fail, so that the observer gets those events as well.
        world.store.next(Verb::Renew, Fault::ErrorBefore);
        for _ in 0..12 {
            world.store.next(Verb::Settle, Fault::ErrorBefore);
        }
        let run = move |context: Context| async move {
            let lost = tokio::time::timeout(Duration::from_secs(70), context.lease_lost()).await.is_ok();
            assert!(!lost, "event {at}: renewals ended");
            Conclusion { value: "ran", disposition: done(), retention: None }
        };
        assert_ran(&engine.execute(operation(), run, panicked).await);
        tokio::time::sleep(Duration::from_secs(30)).await;
        assert_replays(&world.run(&engine, Duration::ZERO, done()).await, "paid");
        let calls = panics.calls.load(std::sync::atomic::Ordering::SeqCst);
        assert_eq!(engine.observer_panics(), u64::from(at < calls), "event {at} of {calls}");
        told = told.max(calls);
    }
    assert!((5..20).contains(&told), "{told} events");
}

#[tokio::test(start_paused = true)]
async fn failing_open_runs_without_protection_and_says_so() {
    let world = World::new();
    let engine = Idempotency::at_least_once(world.store.clone(), world.settings().dangerous_fail_open());
    world.store.next(Verb::Acquire, Fault::ErrorBefore);
    world.store.next(Verb::Acquire, Fault::ErrorBefore);
    let run = |context: Context| async move {
        assert!(!context.is_protected());
        assert_eq!(context.attempt(), 1);
        context.checkpoint("nowhere", "to keep it").await.unwrap();
        Conclusion { value: "ran", disposition: done(), retention: None }
    };
    let answer = engine.execute(operation(), run, panicked).await;
    assert!(matches!(answer, Ok(Answer::Ran { value: "ran", protected: false, .. })), "{answer:?}");
    assert_eq!((world.events.count("failed-open"), world.record().await), (1, None));
}

#[tokio::test(start_paused = true)]
async fn every_fault_in_any_place_leaves_one_run_and_one_answer() {
    // One in three calls fails in some way, for many seeds: every caller that gets an answer gets the same one.
    let mut fired = 0;
    for seed in 0..200 {
        let world = World::new();
        let store = idem_testkit::FaultyStore::new(world.store.inner().clone()).random(seed, 3, TROUBLES);
        let store = std::sync::Arc::new(store);
        let engine = Idempotency::at_most_once(store.clone(), world.settings());
        let mut ran = 0;
        for _ in 0..30 {
            match world.run(&engine, Duration::from_secs(1), done()).await {
                Ok(Answer::Ran { value: "ran", .. }) => ran += 1,
                Ok(Answer::Replay(replay)) => {
                    assert_eq!(replay.response, idem_core::StoredResponse::new(201, "paid"), "seed {seed}");
                }
                // A caller that is turned away comes back later; meanwhile the engine releases what a lost acquire has
                // taken.
                Ok(Answer::InProgress { .. }) => tokio::time::sleep(Duration::from_millis(100)).await,
                Err(ExecuteError::NotAdmitted(_)) => {}
                other => panic!("seed {seed}: {other:?}"),
            }
        }
        fired += store.fired();
        assert!(world.runs() <= 1 && ran == world.runs(), "seed {seed}: {} runs", world.runs());
        store.heal();
        tokio::time::sleep(Duration::from_secs(10)).await;
        assert_replays(&world.run(&engine, Duration::ZERO, done()).await, "paid");
    }
    assert!(fired > 1000, "only {fired} faults fired");
}

#[tokio::test(start_paused = true)]
async fn a_delayed_settlement_that_somebody_else_made_impossible_is_told() {
    let world = World::new();
    let engine = world.at_least_once();
    for _ in 0..9 {
        world.store.next(Verb::Settle, Fault::ErrorBefore);
    }
    for _ in 0..100 {
        world.store.next(Verb::Renew, Fault::ErrorBefore);
    }
    assert_ran(&world.run(&engine, Duration::ZERO, done()).await);
    world.clock.advance(Duration::from_secs(30));
    assert_ran(&world.run(&world.at_least_once(), Duration::ZERO, done()).await);
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!((world.events.count("settlement-delayed"), world.events.count("settlement-lost")), (1, 1));
}

/// Its caller had success, and every repeat gets 504: the answer is lost, although the record keeps the run's token.
#[tokio::test(start_paused = true)]
async fn a_delayed_settlement_after_which_the_outcome_counts_as_unknown_is_told_as_lost() {
    let world = World::new();
    let engine = world.at_most_once();
    for _ in 0..9 {
        world.store.next(Verb::Settle, Fault::ErrorBefore);
    }
    for _ in 0..100 {
        world.store.next(Verb::Renew, Fault::ErrorBefore);
    }
    assert_ran(&world.run(&engine, Duration::ZERO, done()).await);
    world.clock.advance(Duration::from_secs(30));
    let repeat = world.run(&world.at_most_once(), Duration::ZERO, done()).await;
    assert!(matches!(&repeat, Ok(Answer::Replay(replay)) if replay.kind == ReplayKind::OutcomeUnknown), "{repeat:?}");
    tokio::time::sleep(Duration::from_secs(60)).await;
    let told = ["settlement-delayed", "settlement-done", "settlement-lost"].map(|event| world.events.count(event));
    assert_eq!((world.runs(), told), (1, [1, 0, 1]));
}

/// Its handler has settled the run in a transaction, and returned another answer, as after a lost answer to COMMIT.
#[tokio::test(start_paused = true)]
async fn a_delayed_settlement_of_a_run_that_its_handler_has_settled_is_no_loss() {
    let world = World::new();
    let engine = world.at_least_once();
    for _ in 0..10_000 {
        world.store.next(Verb::Settle, Fault::ErrorBefore);
    }
    let store = Arc::clone(world.store.inner());
    let run = move |context: Context| async move {
        let paid = Settlement::Completed(StoredResponse::new(201, "paid by SQL"));
        let settled = store.settle(context.lease().unwrap(), &paid, Duration::from_secs(3600)).await.unwrap();
        assert_eq!(settled, OwnerOutcome::Applied);
        Conclusion { value: "ran", disposition: done(), retention: None }
    };
    assert_ran(&engine.execute(operation(), run, panicked).await);
    world.store.heal();
    tokio::time::sleep(Duration::from_secs(3)).await;
    let events = ["settlement-delayed", "settlement-done", "settlement-lost"].map(|event| world.events.count(event));
    assert_eq!(events, [1, 1, 0]);
    assert_replays(&world.run(&engine, Duration::ZERO, done()).await, "paid by SQL");
}

/// A store in which, while an operation runs, a newer version writes a record that this version cannot read.
#[derive(Debug)]
struct NewerVersionTookOver(MemoryStore);

#[async_trait::async_trait]
impl IdempotencyStore for NewerVersionTookOver {
    async fn acquire(&self, request: &Acquire) -> Result<AcquireOutcome, StoreError> {
        self.0.acquire(request).await
    }

    async fn renew(&self, lease: &Lease, term: Term) -> Result<OwnerOutcome, StoreError> {
        self.0.renew(lease, term).await
    }

    async fn checkpoint(&self, lease: &Lease, checkpoint: &Checkpoint) -> Result<OwnerOutcome, StoreError> {
        self.0.checkpoint(lease, checkpoint).await
    }

    async fn settle(&self, _: &Lease, _: &Settlement, _: Duration) -> Result<OwnerOutcome, StoreError> {
        Err(StoreError::new(StoreErrorKind::Corrupt, "the record has format 2"))
    }

    async fn peek(&self, _: &RecordId) -> Result<Option<Record>, StoreError> {
        Err(StoreError::new(StoreErrorKind::Corrupt, "the record has format 2"))
    }

    fn on_settled(&self, _: Weak<dyn SettlementListener>) {}

    fn renewer(&self) -> Option<Arc<dyn LeaseRenewer>> {
        None
    }

    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }
}

#[tokio::test(start_paused = true)]
async fn a_run_whose_record_somebody_else_wrote_in_an_unknown_format_does_not_say_what_became_of_it() {
    let world = World::new();
    let store = Arc::new(NewerVersionTookOver(MemoryStore::new(NonZeroUsize::MAX)));
    let engine = Idempotency::at_least_once(store, world.settings());
    let start = Instant::now();
    // Other callers may get an unknown outcome: this one must not get a known one.
    let answer = world.run(&engine, Duration::ZERO, done()).await;
    let Err(ExecuteError::CommitUnclear(error)) = answer else { panic!("{answer:?}") };
    assert_eq!((error.kind(), start.elapsed().as_secs()), (StoreErrorKind::Corrupt, 0));
    assert_eq!((world.runs(), world.events.count("settlement-lost")), (1, 1));
}
