//! Locks that arrive late, stay behind, or are found by the owner of the record.

use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::support::{FAILS, FINE, HANGS, PUTS_LATE, PUTS_SLOWLY, SLOWLY, World};
use idem_core::{Acquire, AcquireOutcome, IdempotencyStore as _, Lease, Settlement, Takeover};
use idem_hybrid::HybridConfig;
use idem_testkit::fixture::{BACKOFF, KEPT, repeat_of, request, retryable};
use idem_testkit::{Fault, Verb};

const SECOND: Duration = Duration::from_secs(1);

/// A lock was left behind, its key is free, and a second request has acquired it without an answer.
async fn acquired_beside_an_old_lock(takeover: Takeover) -> (World, Acquire) {
    let world = World::new(HybridConfig::new());
    let first = Acquire { takeover, ..request() };
    let lease = world.run(&first).await;
    world.fast.is(FAILS);
    world.store.settle(&lease, &Settlement::Released, KEPT).await.unwrap();
    let second = repeat_of(&first);
    world.durable.next(Verb::Acquire, Fault::ErrorAfter);
    assert!(world.store.acquire(&second).await.is_err());
    world.fast.is(FINE);
    assert!(world.fast.inner.entry(&first.id).is_some());
    (world, second)
}

#[tokio::test(start_paused = true)]
async fn whoever_owns_the_record_is_not_turned_away_by_another_runs_lock() {
    let (world, request) = acquired_beside_an_old_lock(Takeover::Rerun).await;
    world.run(&request).await;
}

#[tokio::test(start_paused = true)]
async fn what_nobody_ran_does_not_become_unknown() {
    let (world, request) = acquired_beside_an_old_lock(Takeover::Unknown).await;
    let lease = world.run(&request).await;
    world.store.settle(&lease, &Settlement::Released, KEPT).await.unwrap();
    world.run(&repeat_of(&request)).await;
}

#[tokio::test(start_paused = true)]
async fn a_lock_that_is_renewed_beside_the_end_of_its_run_goes() {
    for settlement in [Settlement::Released, idem_testkit::fixture::retryable()] {
        let world = World::new(HybridConfig::new());
        let request = request();
        let lease = world.run(&request).await;
        world.fast.is(PUTS_SLOWLY);
        let (store, owner, term) = (world.store.clone(), lease.clone(), request.term);
        let renewal = tokio::spawn(async move { store.renew(&owner, term).await });
        // The renewal has happened, and its lock is on the way.
        while world.durable.calls(Verb::Renew) == 0 {
            tokio::task::yield_now().await;
        }
        tokio::task::yield_now().await;
        world.store.settle(&lease, &settlement, KEPT).await.unwrap();
        renewal.await.unwrap().unwrap();
        assert_eq!(world.fast.inner.entry(&request.id), None, "{settlement:?}");
    }
}

/// A heartbeat that ends with its run drops the renewal, but a lock that it has sent still arrives.
#[tokio::test(start_paused = true)]
async fn a_lock_that_comes_after_the_end_of_its_run_goes() {
    for is_renewal in [true, false] {
        for settlement in [Settlement::Released, idem_testkit::fixture::retryable()] {
            let world = World::new(HybridConfig::new());
            let request = request();
            let lease = if is_renewal {
                let lease = world.run(&request).await;
                world.fast.is(PUTS_LATE);
                let renewal = world.store.renew(&lease, request.term);
                assert!(tokio::time::timeout(SLOWLY / 5, renewal).await.is_err(), "it has been answered");
                lease
            } else {
                world.fast.is(PUTS_LATE);
                let acquire = world.store.acquire(&request);
                assert!(tokio::time::timeout(SLOWLY / 5, acquire).await.is_err(), "it has been answered");
                Lease {
                    id: request.id,
                    fingerprint: request.fingerprint,
                    owner: request.owner,
                    attempt: 1,
                    acquisition: idem_core::Acquisition::Fresh,
                    checkpoint: None,
                }
            };
            // A claim is no lock.
            let lock = || world.fast.inner.entry(&request.id).filter(|entry| entry.rank > 0);
            world.store.settle(&lease, &settlement, KEPT).await.unwrap();
            assert_eq!(lock(), None, "it has not come yet");
            tokio::time::sleep(SLOWLY).await;
            assert!(lock().is_some(), "it came late");
            tokio::time::sleep(SECOND * 2).await;
            assert_eq!(lock(), None, "{settlement:?}, renewal {is_renewal}");
        }
    }
}

/// The engine does so when its acquire had no answer.
#[tokio::test]
async fn a_release_by_somebody_who_knows_no_attempt_removes_the_lock() {
    let world = World::new(HybridConfig::new());
    let request = request();
    let lease = world.run(&request).await;
    world.store.settle(&Lease { attempt: 0, ..lease }, &Settlement::Released, KEPT).await.unwrap();
    assert_eq!(world.fast.inner.entry(&request.id), None);
    world.run(&repeat_of(&request)).await;
}

/// The answer to the first acquire is lost, and so is the second acquire.
#[tokio::test]
async fn a_run_is_known_although_its_owner_asks_again_and_is_refused() {
    let world = World::new(HybridConfig::new());
    let first = request();
    let lease = world.run(&first).await;
    world.store.settle(&lease, &retryable(), KEPT).await.unwrap();
    world.clock.advance(BACKOFF);
    let request = repeat_of(&first);
    let lease = world.run(&request).await;
    assert_eq!(lease.attempt, 2);
    world.durable.next(Verb::Acquire, Fault::ErrorBefore);
    assert!(!world.store.acquire(&request).await.unwrap_err().is_indeterminate());
    world.store.settle(&Lease { attempt: 0, ..lease }, &Settlement::Released, KEPT).await.unwrap();
    world.run(&repeat_of(&request)).await;
}

/// The first settlement is dropped while it removes the lock.
#[tokio::test(start_paused = true)]
async fn a_lock_goes_although_a_repeated_settlement_could_not_remove_it() {
    let world = World::new(HybridConfig::new());
    let request = request();
    let lease = world.run(&request).await;
    world.fast.is(HANGS);
    let settlement = world.store.settle(&lease, &Settlement::Released, KEPT);
    assert!(tokio::time::timeout(SLOWLY, settlement).await.is_err(), "it has been answered");
    world.store.settle(&lease, &Settlement::Released, KEPT).await.unwrap();
    world.fast.is(FINE);
    tokio::time::sleep(SECOND * 2).await;
    assert_eq!(world.fast.inner.entry(&request.id), None);
}

/// Its acquire had no answer, and this process has forgotten its run.
#[tokio::test]
async fn a_release_without_an_attempt_wakes_the_waiters_of_other_processes() {
    let world = World::new(HybridConfig::new());
    let heard = world.listener();
    let request = request();
    let AcquireOutcome::Acquired(lease) = world.durable.acquire(&request).await.unwrap() else { panic!("a run") };
    world.store.settle(&Lease { attempt: 0, ..lease }, &Settlement::Released, KEPT).await.unwrap();
    assert_eq!(heard.0.load(Ordering::SeqCst), 1);
}

#[tokio::test(start_paused = true)]
async fn somebody_else_is_turned_away_by_an_old_lock_until_it_can_be_removed() {
    let (world, request) = acquired_beside_an_old_lock(Takeover::Rerun).await;
    let lease = world.run(&request).await;
    let answer = world.store.acquire(&repeat_of(&request)).await.unwrap();
    assert!(matches!(answer, AcquireOutcome::InProgress { .. }), "{answer:?}");
    world.store.settle(&lease, &Settlement::Released, KEPT).await.unwrap();
    tokio::time::sleep(SECOND * 2).await;
    world.run(&repeat_of(&request)).await;
}

#[tokio::test]
async fn a_run_that_took_longer_than_its_record_is_kept_leaves_no_lock() {
    let world = World::new(HybridConfig::new());
    let request = request();
    let lease = world.run(&request).await;
    world.clock.advance(SECOND * 5);
    world.store.settle(&lease, &idem_testkit::fixture::completed(), SECOND).await.unwrap();
    let answer = world.store.acquire(&repeat_of(&request)).await.unwrap();
    assert!(matches!(answer, AcquireOutcome::Replay(_)), "{answer:?}");
}
