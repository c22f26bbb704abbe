//! Answers that are cut off after the script ran: no second owner, no lost settlement.

use std::time::{Duration, Instant};

use idem_core::{AcquireOutcome, IdempotencyStore as _, OwnerOutcome, Settlement, StoreErrorKind, Term};
use idem_servers::redis_url;
use idem_testkit::fixture::{KEPT, LEASE, RETENTION, checkpoint, completed, repeat_of, request};

use crate::support::ports;
use crate::world::World;
use idem_proxy::Proxy;
use idem_proxy::redis::{Lose, Losses};

/// How late a loaded machine may be.
const SLACK: Duration = Duration::from_secs(5);

/// Longer than the answer of any verb here, but for the body of a replay.
const CUTS: [usize; 12] = [0, 1, 2, 3, 4, 5, 8, 13, 21, 34, 55, 89];

async fn behind_proxy() -> (Proxy<Losses>, World) {
    let port = ports(&redis_url())[0];
    let proxy = Proxy::<Losses>::to_port(port).await.unwrap();
    let world = World::at(&format!("redis://127.0.0.1:{}", proxy.port()), port).await;
    // Loads all scripts, so that a planned loss meets the script's reply and not `NOSCRIPT`.
    world.is_whole().await;
    let lease = world.lease(&request()).await.unwrap();
    world.store.renew(&lease, Term { lease: LEASE, retention: RETENTION }).await.unwrap();
    world.store.checkpoint(&lease, &checkpoint("charged")).await.unwrap();
    (proxy, world)
}

#[tokio::test]
async fn a_verb_whose_answer_is_cut_off_is_sent_again_and_changes_nothing_twice() {
    let (proxy, world) = behind_proxy().await;
    for lose in CUTS.map(Lose::AnswerFrom).into_iter().chain([Lose::Command]) {
        let cut = || {
            assert!(proxy.has_lost(), "{lose:?} was not met");
            proxy.lose(lose, 1);
        };
        let request = request();
        cut();
        let lease = world.lease(&request).await.unwrap();
        assert_eq!(lease.attempt, 1);
        let other = world.store.acquire(&repeat_of(&request)).await.unwrap();
        assert!(matches!(other, AcquireOutcome::InProgress { .. }), "{lose:?}: a second owner");
        cut();
        let term = Term { lease: LEASE, retention: RETENTION };
        assert_eq!(world.store.renew(&lease, term).await.unwrap(), OwnerOutcome::Applied);
        cut();
        let reached = checkpoint("charged");
        assert_eq!(world.store.checkpoint(&lease, &reached).await.unwrap(), OwnerOutcome::Applied);
        cut();
        assert_eq!(world.complete(&lease).await.unwrap(), OwnerOutcome::Applied, "{lose:?}");
        cut();
        let replay = world.store.acquire(&repeat_of(&request)).await.unwrap();
        assert!(
            matches!(replay, AcquireOutcome::Replay(replay) if Settlement::Completed(replay.response.clone()) == completed())
        );
        cut();
        assert!(world.store.peek(&request.id).await.unwrap().is_some());
        assert!(proxy.has_lost());
    }
}

#[tokio::test]
async fn a_release_whose_answer_is_cut_off_leaves_the_next_owner_alone() {
    let (proxy, world) = behind_proxy().await;
    for cut in CUTS {
        let request = request();
        let lease = world.lease(&request).await.unwrap();
        proxy.lose(Lose::AnswerFrom(cut), 1);
        assert_eq!(world.settle(&lease, &Settlement::Released).await.unwrap(), OwnerOutcome::Applied);
        let next = world.lease(&repeat_of(&request)).await.unwrap();
        assert_eq!(world.settle(&lease, &Settlement::Released).await.unwrap(), OwnerOutcome::LeaseLost);
        assert_eq!(world.complete(&next).await.unwrap(), OwnerOutcome::Applied);
    }
}

#[tokio::test]
async fn answers_that_are_lost_again_and_again_are_an_error_that_says_so() {
    let (proxy, world) = behind_proxy().await;
    let request = request();
    proxy.lose(Lose::AnswerFrom(0), 3);
    let error = world.store.acquire(&request).await.unwrap_err();
    assert!(proxy.has_lost());
    assert_eq!(error.kind(), StoreErrorKind::Unavailable);
    assert!(error.is_indeterminate() && error.is_retryable());
    // The acquire has taken effect, and a repeat returns the same attempt to its owner.
    assert_eq!(world.lease(&request).await.unwrap().attempt, 1);
    let lease = world.lease(&request).await.unwrap();
    proxy.lose(Lose::AnswerFrom(0), 3);
    assert!(world.complete(&lease).await.unwrap_err().is_indeterminate());
    assert!(world.store.peek(&request.id).await.unwrap().unwrap().replay().is_some());
    assert_eq!(world.complete(&lease).await.unwrap(), OwnerOutcome::Applied);
}

#[tokio::test]
async fn a_connection_that_falls_silent_is_an_error_in_time_and_is_left() {
    let port = ports(&redis_url())[0];
    let proxy = Proxy::<Losses>::to_port(port).await.unwrap();
    let timeout = Duration::from_millis(300);
    let world =
        World::with(&format!("redis://127.0.0.1:{}", proxy.port()), port, |config| config.timeout(timeout)).await;
    world.is_whole().await;
    let request = request();
    for _ in 0..3 {
        proxy.lose(Lose::EverythingSilently, 1);
        let begun = Instant::now();
        let error = world.store.acquire(&request).await.unwrap_err();
        let waited = begun.elapsed();
        assert_eq!(error.kind(), StoreErrorKind::Timeout);
        assert!(error.is_indeterminate());
        assert!(waited >= timeout && waited < timeout + SLACK, "{waited:?}");
        // The next call does not take the silent connection.
        assert_eq!(world.lease(&request).await.unwrap().attempt, 1);
    }
    let lease = world.lease(&request).await.unwrap();
    assert_eq!(world.store.settle(&lease, &completed(), KEPT).await.unwrap(), OwnerOutcome::Applied);
}
