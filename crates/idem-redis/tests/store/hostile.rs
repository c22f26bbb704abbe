//! What is not a record, or not one of ours, is an error and never a reason to run.

use idem_core::{Acquire, IdempotencyStore as _, StoreError, StoreErrorKind, Term};
use idem_servers::Reply;
use idem_testkit::fixture::{KEPT, LEASE, RETENTION, checkpoint, completed, repeat_of, request, retryable};

use crate::world::World;

async fn everything_fails(world: &World, request: &Acquire) -> Vec<StoreError> {
    let lease = idem_core::Lease {
        id: request.id,
        owner: request.owner,
        attempt: 1,
        acquisition: idem_core::Acquisition::Fresh,
        checkpoint: None,
    };
    let store = &world.store;
    vec![
        store.acquire(request).await.unwrap_err(),
        store.acquire(&repeat_of(request)).await.unwrap_err(),
        store.renew(&lease, Term { lease: LEASE, retention: RETENTION }).await.unwrap_err(),
        store.checkpoint(&lease, &checkpoint("charged")).await.unwrap_err(),
        store.settle(&lease, &completed(), KEPT).await.unwrap_err(),
        store.peek(&request.id).await.unwrap_err(),
    ]
}

fn dump(world: &World, request: &Acquire) -> Reply {
    world.ask(&["DUMP", &world.key(&request.id)])
}

async fn is_refused_unchanged(world: &World, request: &Acquire, what: &str) {
    let before = dump(world, request);
    for error in everything_fails(world, request).await {
        assert_eq!(error.kind(), StoreErrorKind::Corrupt, "{what}: {error:?}");
        assert!(!error.is_retryable());
    }
    assert_eq!(dump(world, request), before, "{what}: it was changed");
}

#[tokio::test]
async fn other_peoples_keys_are_refused_and_left_alone() {
    let world = World::shared().await;
    for words in [
        &["SET", "", "a string"][..],
        &["RPUSH", "", "a", "list"],
        &["SADD", "", "a set"],
        &["ZADD", "", "1", "a sorted set"],
        &["XADD", "", "*", "a", "stream"],
        &["HSET", "", "another", "hash"],
        &["HSET", "", "format", "2"],
        &["HSET", "", "format", "1"],
        &["HSET", "", "format", "1\0"],
    ] {
        let request = request();
        let key = world.key(&request.id);
        let words: Vec<&str> = words.iter().map(|word| if word.is_empty() { &key } else { *word }).collect();
        world.ask(&words);
        is_refused_unchanged(&world, &request, &words.join(" ")).await;
    }
}

/// The fields without which a decision would be a guess, and what they must not be taken for.
const VITAL: [&str; 6] = ["format", "ends", "state", "owner", "attempt", "digest"];
const GARBAGE: [&str; 10] = ["", "nan", "inf", "-1", "0x10", "1e3", " 1", "1.5", "99", "\u{7f}\u{0}"];

#[tokio::test]
async fn a_record_that_lacks_a_vital_field_is_refused() {
    let world = World::shared().await;
    for field in VITAL.into_iter().chain(["algo", "lease", "crash", "how"]) {
        let request = request();
        world.lease(&request).await.unwrap();
        world.ask(&["HDEL", &world.key(&request.id), field]);
        is_refused_unchanged(&world, &request, field).await;
    }
    let request = request();
    let lease = world.lease(&request).await.unwrap();
    world.settle(&lease, &retryable()).await.unwrap();
    world.ask(&["HDEL", &world.key(&request.id), "after"]);
    is_refused_unchanged(&world, &request, "after").await;
}

#[tokio::test]
async fn a_record_with_garbage_in_it_is_refused() {
    let world = World::shared().await;
    for field in VITAL.into_iter().chain(["lease", "crash"]) {
        for garbage in GARBAGE {
            // These are numbers, if not sensible ones.
            if garbage == "99" && ["ends", "attempt", "lease", "crash"].contains(&field) {
                continue;
            }
            let request = request();
            world.lease(&request).await.unwrap();
            world.ask(&["HSET", &world.key(&request.id), field, garbage]);
            is_refused_unchanged(&world, &request, &format!("{field} is {garbage:?}")).await;
        }
    }
}

#[tokio::test]
async fn an_answer_that_cannot_be_read_is_not_replayed() {
    let world = World::shared().await;
    for (field, garbage) in [("status", "x"), ("status", "70000"), ("headers", "\0"), ("moved", ""), ("made", "x")] {
        let request = request();
        let lease = world.lease(&request).await.unwrap();
        world.complete(&lease).await.unwrap();
        world.ask(&["HSET", &world.key(&request.id), field, garbage]);
        for error in [
            world.store.acquire(&repeat_of(&request)).await.unwrap_err(),
            world.store.peek(&request.id).await.unwrap_err(),
        ] {
            assert_eq!(error.kind(), StoreErrorKind::Corrupt, "{field}: {error:?}");
        }
    }
}
