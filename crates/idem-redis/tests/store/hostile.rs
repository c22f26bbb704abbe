//! What is not a record, or not one of ours, is an error and never a reason to run.

use idem_core::{Acquire, IdempotencyStore as _, StoreError, StoreErrorKind, Term};
use idem_servers::Reply;
use idem_testkit::fixture::{KEPT, LEASE, RETENTION, checkpoint, completed, repeat_of, request};

use crate::world::World;

async fn everything_fails(world: &World, request: &Acquire) -> Vec<StoreError> {
    let lease = idem_core::Lease {
        id: request.id,
        fingerprint: request.fingerprint,
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
        &["SET", "", "a string", "PX", "600000"],
        &["SET", "", "", "PX", "600000"],
        &["SET", "", "\0", "PX", "600000"],
        &["SET", "", "\0\u{1}", "PX", "600000"],
        &["SET", "", "\0\u{2}", "PX", "600000"],
        &["RPUSH", "", "a", "list"],
        &["SADD", "", "a set"],
        &["ZADD", "", "1", "a sorted set"],
        &["XADD", "", "*", "a", "stream"],
        &["HSET", "", "another", "hash"],
    ] {
        let request = request();
        let key = world.key(&request.id);
        let is_empty = |at: usize, word: &str| at == 1 && word.is_empty();
        let words: Vec<&str> =
            words.iter().enumerate().map(|(at, word)| if is_empty(at, word) { &key } else { *word }).collect();
        world.ask(&words);
        is_refused_unchanged(&world, &request, &words.join(" ")).await;
    }
}

/// Tries every verb on truncated and extended records, in progress and settled.
#[tokio::test]
async fn what_is_cut_off_or_goes_on_is_refused() {
    let world = World::shared().await;
    for is_settled in [false, true] {
        let request = request();
        let lease = world.lease(&request).await.unwrap();
        if is_settled {
            world.complete(&lease).await.unwrap();
        } else {
            world.store.checkpoint(&lease, &checkpoint("charged")).await.unwrap();
        }
        let whole = world.stored(&request.id);
        let longer = [whole.clone(), vec![0]].concat();
        // Without its parts, a record in progress is one without a checkpoint; without its body, a settled one is a tombstone.
        let also_whole = if is_settled { whole.len() - 5 - 256 } else { 92 };
        let wrong = |length: &usize| ![whole.len(), also_whole].contains(length);
        for length in (0..=longer.len()).filter(wrong) {
            world.store(&request.id, &longer[..length]);
            // If the head is whole, its run may still settle the record without reading the parts.
            if is_settled || length < 92 {
                is_refused_unchanged(&world, &request, &format!("{length} bytes")).await;
            } else {
                is_not_read(&world, &request, &format!("{length} bytes")).await;
            }
        }
    }
}

async fn is_not_read(world: &World, request: &Acquire, what: &str) {
    for error in
        [world.store.acquire(&repeat_of(request)).await.unwrap_err(), world.store.peek(&request.id).await.unwrap_err()]
    {
        assert_eq!(error.kind(), StoreErrorKind::Corrupt, "{what}: {error:?}");
    }
}

/// Invalid values, with their offset in a record in progress.
const SENSELESS: [(&str, usize, &[u8]); 8] = [
    ("format", 0, &[0, 0]),
    ("format", 0, &[0, 2]),
    ("format", 0, &[1, 1]),
    ("state", 2, &[0]),
    ("state", 2, &[6]),
    ("state", 2, b"1"),
    ("attempt", 19, &[0; 4]),
    // The owner differs too, so that the run cannot settle the record without reading the takeover.
    ("the owner and the takeover", 3, &[7; 83]),
];

#[tokio::test]
async fn a_record_with_garbage_in_it_is_refused() {
    let world = World::shared().await;
    for (field, place, garbage) in SENSELESS {
        let request = request();
        world.lease(&request).await.unwrap();
        let mut bytes = world.stored(&request.id);
        bytes[place..place + garbage.len()].copy_from_slice(garbage);
        world.store(&request.id, &bytes);
        is_refused_unchanged(&world, &request, &format!("{field} is {garbage:?}")).await;
    }
}

/// Garbage that only the next owner would read does not keep a run from settling.
#[tokio::test]
async fn garbage_about_a_crash_is_refused_by_whoever_would_take_over() {
    let world = World::shared().await;
    for (place, garbage) in [(84, 0), (84, 5), (85, 0), (85, 4), (85, 255)] {
        let request = request();
        let lease = world.lease(&request).await.unwrap();
        let mut bytes = world.stored(&request.id);
        bytes[place] = garbage;
        world.store(&request.id, &bytes);
        is_not_read(&world, &request, &format!("{garbage} at {place}")).await;
        world.complete(&lease).await.unwrap();
        assert!(world.store.peek(&request.id).await.unwrap().unwrap().replay().is_some());
    }
}

#[tokio::test]
async fn an_answer_that_cannot_be_read_is_not_replayed() {
    let world = World::shared().await;
    let parts: [&[u8]; 6] = [
        b"",
        b"\x03\0\0\0\x01\0",
        b"\x04\0\0\0\x01x",
        b"\x04\0\0\0\x01x\x03\0\0\0\0",
        b"\x03\0\0\0\0\x03\0\0\0\0",
        b"\x01\0\0\0\x01a\x03\0\0\0\0",
    ];
    for parts in parts {
        let request = request();
        let lease = world.lease(&request).await.unwrap();
        world.complete(&lease).await.unwrap();
        let head = &world.stored(&request.id)[..92];
        world.store(&request.id, &[head, parts].concat());
        is_not_read(&world, &request, &format!("{parts:?}")).await;
    }
}

/// Later versions may add parts: this version skips optional ones, and refuses the others.
#[tokio::test]
async fn a_part_of_a_later_version_is_passed_over_if_it_may_be() {
    let world = World::shared().await;
    let request = request();
    let lease = world.lease(&request).await.unwrap();
    world.complete(&lease).await.unwrap();
    let bytes = world.stored(&request.id);
    let with = |number: u8| [&bytes[..], &[number, 0, 0, 0, 1, 7]].concat();
    world.store(&request.id, &with(128));
    assert!(world.store.peek(&request.id).await.unwrap().unwrap().replay().is_some());
    world.store(&request.id, &with(5));
    is_not_read(&world, &request, "a part of which nothing is known").await;
}

/// All times of a record follow from the expiry of its key.
#[tokio::test]
async fn a_record_that_does_not_expire_is_refused() {
    let world = World::shared().await;
    let request = request();
    world.lease(&request).await.unwrap();
    world.ask(&["PERSIST", &world.key(&request.id)]);
    is_refused_unchanged(&world, &request, "no expiry").await;
}
