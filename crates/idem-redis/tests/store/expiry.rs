//! The server expires every key with its record.

use std::time::Duration;

use idem_core::{Acquire, AcquireOutcome, IdempotencyStore as _, Settlement, Takeover, Term};
use idem_testkit::fixture::{BACKOFF, KEPT, LEASE, RETENTION, checkpoint, completed, repeat_of, request, retryable};

use crate::world::{World, eventually};

fn left(world: &World, request: &Acquire) -> Duration {
    let left = world.ask(&["PTTL", &world.key(&request.id)]).integer().unwrap();
    Duration::from_millis(u64::try_from(left).expect("the key has an end"))
}

fn assert_ends_in(world: &World, request: &Acquire, expected: Duration) {
    let left = left(world, request);
    // Redis rounds to milliseconds, and a record is never forgotten before its time.
    let latest = expected + Duration::from_millis(2);
    assert!(left <= latest && latest - left < Duration::from_secs(10), "{left:?} is not about {expected:?}");
}

#[tokio::test]
async fn every_change_sets_the_end_of_the_key() {
    let world = World::shared().await;
    let request = request();
    let lease = world.lease(&request).await.unwrap();
    assert_ends_in(&world, &request, LEASE + RETENTION);
    world.store.acquire(&repeat_of(&request)).await.unwrap();
    world.store.checkpoint(&lease, &checkpoint("charged")).await.unwrap();
    assert_ends_in(&world, &request, LEASE + RETENTION);
    world.store.renew(&lease, Term { lease: LEASE * 2, retention: RETENTION }).await.unwrap();
    assert_ends_in(&world, &request, LEASE * 2 + RETENTION);
    world.settle(&lease, &retryable()).await.unwrap();
    assert_ends_in(&world, &request, BACKOFF + KEPT);
    let other = repeat_of(&request);
    world.store.acquire(&other).await.unwrap();
    assert_ends_in(&world, &request, BACKOFF + KEPT);
}

#[tokio::test]
async fn a_settled_key_ends_with_its_retention() {
    let world = World::shared().await;
    for settlement in [completed(), Settlement::OutcomeUnknown] {
        let request = request();
        let lease = world.lease(&request).await.unwrap();
        world.settle(&lease, &settlement).await.unwrap();
        assert_ends_in(&world, &request, KEPT);
    }
}

#[tokio::test]
async fn what_is_over_is_gone_from_the_server() {
    let world = World::shared().await;
    let soon = Duration::from_millis(200);
    let abandoned = Acquire { term: Term { lease: soon, retention: soon }, ..request() };
    world.lease(&abandoned).await.unwrap();
    let settled = request();
    let lease = world.lease(&settled).await.unwrap();
    world.store.settle(&lease, &completed(), soon).await.unwrap();
    for request in [&abandoned, &settled] {
        let key = world.key(&request.id);
        eventually("the key is gone", async || (world.ask(&["EXISTS", &key]).integer() == Some(0)).then_some(())).await;
        let again = world.store.acquire(&repeat_of(request)).await.unwrap();
        assert!(matches!(again, AcquireOutcome::Acquired(lease) if lease.attempt == 1));
    }
}

#[tokio::test]
async fn an_end_that_is_not_kept_is_told_all_the_same() {
    let world = World::shared().await;
    let mut told = 0;
    for _ in 0..300 {
        let moment = Duration::from_millis(1);
        let abandoned =
            Acquire { term: Term { lease: moment, retention: KEPT }, takeover: Takeover::Unknown, ..request() };
        world.lease(&abandoned).await.unwrap();
        tokio::time::sleep(moment * 2).await;
        // The unknown outcome has no retention, so it is over at once.
        let term = Term { lease: LEASE, retention: Duration::ZERO };
        match world.store.acquire(&Acquire { term, ..repeat_of(&abandoned) }).await.unwrap() {
            AcquireOutcome::Replay(replay) => told += i32::from(replay.response.status == 504),
            other => panic!("{other:?}"),
        }
        assert_eq!(world.store.peek(&abandoned.id).await.unwrap(), None);
    }
    assert_eq!(told, 300);
}
