//! Acquires whose answer comes late, or never.

use std::time::Duration;

use idem_core::engine::{Answer, Disposition, ExecuteError, Idempotency};
use idem_core::{
    Acquire, Fingerprint, IdempotencyStore as _, OnMismatch, Origin, OwnerToken, Scope, Takeover, Term, Writes,
};
use idem_testkit::{Fault, Verb};

use crate::support::{World, assert_ran, assert_replays, done, operation};

/// An acquire that a stalled store executes after the engine has answered that nothing ran.
#[tokio::test(start_paused = true)]
async fn an_acquire_that_a_stalled_store_delivers_late_leaves_no_lease_behind() {
    for stall in [5, 10, 15, 60] {
        let world = World::new();
        let engine = world.at_most_once();
        let late = Fault::Late(Duration::from_secs(stall));
        for verb in [Verb::Acquire, Verb::Settle] {
            // As long as it stalls, nothing is answered.
            for _ in 0..2 * stall {
                world.store.next(verb, late);
            }
        }
        let refused = world.run(&engine, Duration::ZERO, done()).await;
        assert!(matches!(refused, Err(ExecuteError::NotAdmitted(_))), "{refused:?}");
        tokio::time::sleep(Duration::from_secs(stall)).await;
        world.store.heal();
        // At most a third of a lease later the key is free, and no caller gets an unknown outcome.
        tokio::time::sleep(Duration::from_secs(15)).await;
        assert_ran(&world.run(&engine, Duration::ZERO, done()).await);
        world.clock.advance(Duration::from_secs(60));
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_replays(&world.run(&engine, Duration::ZERO, done()).await, "paid");
        assert_eq!(world.runs(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn a_late_acquire_leaves_no_lease_behind_when_its_repetition_was_answered() {
    let world = World::new();
    let engine = world.at_most_once();
    let release = || Disposition::Release { writes: Writes::Discard };
    // The repetition runs and releases its key; then the first try arrives.
    world.store.next(Verb::Acquire, Fault::Late(Duration::from_secs(10)));
    assert_ran(&world.run(&engine, Duration::ZERO, release()).await);
    tokio::time::sleep(Duration::from_secs(25)).await;
    assert_eq!(world.record().await, None, "a lease without an owner");

    // The repetition is turned away by another run, which then releases its key; then the first try arrives.
    let other = tokio::spawn({
        let (world, engine) = (world.clone(), engine.clone());
        let release = release();
        async move { world.run(&engine, Duration::from_secs(5), release).await }
    });
    tokio::time::sleep(Duration::from_secs(1)).await;
    world.store.next(Verb::Acquire, Fault::Late(Duration::from_secs(10)));
    let refused = world.run(&engine, Duration::ZERO, done()).await;
    assert!(matches!(refused, Ok(Answer::InProgress { .. })), "{refused:?}");
    assert_ran(&other.await.unwrap());
    tokio::time::sleep(Duration::from_secs(25)).await;
    assert_eq!(world.record().await, None, "a lease without an owner");
}

#[tokio::test(start_paused = true)]
async fn a_late_acquire_does_not_disturb_the_run_of_its_repetition() {
    let world = World::new();
    let engine = world.at_most_once();
    world.store.next(Verb::Acquire, Fault::Late(Duration::from_secs(10)));
    assert_ran(&world.run(&engine, Duration::from_secs(40), done()).await);
    assert_eq!((world.events.count("lease-lost"), world.runs()), (0, 1));
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_replays(&world.run(&engine, Duration::ZERO, done()).await, "paid");
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_an_earlier_look_may_have_taken_is_confirmed_before_the_operation_runs() {
    let world = World::new();
    let lease = Duration::from_millis(1500);
    let settings = world.settings().lease(lease).store_timeout(Duration::from_millis(200));
    let engine = Idempotency::at_least_once(world.store.clone(), settings);
    // The owner dies.
    let crashed = Acquire {
        id: world.record_id(),
        origin: Origin { namespace: "idem".into(), scope: Scope::new("acme", "pay") },
        trace: None,
        fingerprint: Fingerprint::of_bytes("pay", b"12.50 EUR"),
        owner: OwnerToken::random(),
        term: Term { lease, retention: Duration::from_secs(60) },
        takeover: Takeover::Rerun,
        max_attempts: std::num::NonZeroU32::MIN,
        on_mismatch: OnMismatch::Refuse,
    };
    world.store.inner().acquire(&crashed).await.unwrap();
    // A duplicate waits. Its first acquire stalls, and takes the lease over long after its repetition was turned away.
    world.store.next(Verb::Acquire, Fault::Late(Duration::from_secs(5)));
    let waits = tokio::spawn({
        let (world, engine) = (world.clone(), engine.clone());
        async move { world.run_as(&engine, operation().wait(Duration::from_secs(30)), Duration::ZERO, done()).await }
    });
    tokio::time::sleep(Duration::from_millis(4_999)).await;
    world.clock.advance(lease);
    assert_ran(&waits.await.unwrap());
    assert!(world.store.calls(Verb::Renew) > 0, "nothing has confirmed the lease");
}

#[tokio::test(start_paused = true)]
async fn no_success_is_told_after_a_renewal_was_refused() {
    let world = World::new();
    let engine = world.at_least_once();
    for _ in 0..10_000 {
        world.store.next(Verb::Settle, Fault::ErrorBefore);
    }
    // While the settlement is tried, the renewal that is due then finds another owner.
    let slow = tokio::spawn({
        let (world, engine) = (world.clone(), engine.clone());
        async move { world.run(&engine, Duration::from_secs(8), done()).await }
    });
    tokio::time::sleep(Duration::from_secs(9)).await;
    world.clock.advance(Duration::from_secs(30));
    let successor = tokio::spawn({
        let (world, engine) = (world.clone(), world.at_least_once());
        async move { world.run(&engine, Duration::from_secs(10), done()).await }
    });
    let unclear = slow.await.unwrap();
    assert!(matches!(unclear, Err(ExecuteError::CommitUnclear(_))), "{unclear:?}");
    world.store.heal();
    assert_ran(&successor.await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn late_acquires_do_not_drive_the_waiters_of_their_key() {
    let world = World::new();
    let engine = world.at_least_once();
    let run = |operation, takes| {
        let (world, engine) = (world.clone(), engine.clone());
        tokio::spawn(async move { world.run_as(&engine, operation, takes, done()).await })
    };
    let first = run(operation(), Duration::from_secs(29));
    tokio::time::sleep(Duration::from_secs(1)).await;
    // Some duplicates whose first acquire has no answer, and others that wait.
    for _ in 0..20 {
        world.store.next(Verb::Acquire, Fault::Late(Duration::from_secs(3)));
    }
    let mut unclear = Vec::new();
    for _ in 0..20 {
        unclear.push(run(operation(), Duration::ZERO));
        // Releases at one moment would wake the waiters only once.
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let waiting: Vec<_> = (0..20).map(|_| run(operation().wait(Duration::from_secs(30)), Duration::ZERO)).collect();
    assert_ran(&first.await.unwrap());
    for waits in waiting {
        assert_replays(&waits.await.unwrap(), "paid");
    }
    for refused in unclear {
        assert!(matches!(refused.await.unwrap(), Ok(Answer::InProgress { .. })));
    }
    // Each request asks once, and those without an answer once more. Each late acquire wakes the waiters once. While they wait, one of
    // them asks for all, at most twice a second.
    let (requests, without_answer, seconds) = (41, 20, 28);
    let looks = world.store.calls(Verb::Acquire);
    assert!(looks <= requests + without_answer + 20 + 2 * seconds, "{looks} acquires");
}
