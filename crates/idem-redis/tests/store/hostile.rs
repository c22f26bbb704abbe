//! What is not a record, or not one of ours, is an error and never a reason to run.

use idem_core::{Acquire, IdempotencyStore as _, StoreError, StoreErrorKind, Term};
use idem_servers::Reply;
use idem_testkit::fixture::{KEPT, LEASE, RETENTION, checkpoint, completed, repeat_of, request};

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
        &["HSET", "", "asked", "1"],
        &["HSET", "", "head", ""],
        &["HSET", "", "head", "\0"],
        &["HSET", "", "head", "\0\u{1}"],
        &["HSET", "", "head", "\0\u{2}"],
    ] {
        let request = request();
        let key = world.key(&request.id);
        let words: Vec<&str> = words.iter().map(|word| if word.is_empty() { &key } else { *word }).collect();
        world.ask(&words);
        is_refused_unchanged(&world, &request, &words.join(" ")).await;
    }
}

#[tokio::test]
async fn what_is_cut_off_or_goes_on_is_refused() {
    let world = World::shared().await;
    for (field, length) in [("head", HEAD), ("who", WHO)] {
        let request = request();
        world.lease(&request).await.unwrap();
        let key = world.key(&request.id);
        let Reply::Bytes(whole) = world.ask(&["HGET", &key, field]) else { panic!("no {field}") };
        let longer = [whole, vec![0]].concat();
        for wrong in (0..=length + 1).filter(|&wrong| wrong != length) {
            world.ask(&[&b"HSET"[..], key.as_bytes(), field.as_bytes(), &longer[..wrong]]);
            is_refused_unchanged(&world, &request, &format!("{wrong} bytes of {field}")).await;
        }
        world.ask(&["HDEL", &key, field]);
        is_refused_unchanged(&world, &request, &format!("no {field}")).await;
    }
}

const HEAD: usize = 45;
const WHO: usize = 48;

/// Numbers that say nothing, by their place in the head of a record in progress.
const SENSELESS: [(&str, usize, &[u8]); 12] = [
    ("format", 0, &[0, 0]),
    ("format", 0, &[0, 2]),
    ("format", 0, &[1, 1]),
    ("attempt", 4, &[0; 4]),
    ("state", 8, &[0]),
    ("state", 8, &[6]),
    ("state", 8, b"1"),
    ("how", 9, &[0]),
    ("how", 9, &[5]),
    ("crash", 10, &[0]),
    ("crash", 10, &[4]),
    ("crash", 10, &[255]),
];

#[tokio::test]
async fn a_record_with_garbage_in_it_is_refused() {
    let world = World::shared().await;
    for (field, place, garbage) in SENSELESS {
        let request = request();
        world.lease(&request).await.unwrap();
        world.write_head(&request.id, place, garbage);
        is_refused_unchanged(&world, &request, &format!("{field} is {garbage:?}")).await;
    }
}

#[tokio::test]
async fn an_answer_that_cannot_be_read_is_not_replayed() {
    let world = World::shared().await;
    for words in [&["HSET", "", "headers", "\0"][..], &["HDEL", "", "headers"], &["HSET", "", "point", "half of it"]] {
        let request = request();
        let lease = world.lease(&request).await.unwrap();
        world.complete(&lease).await.unwrap();
        let key = world.key(&request.id);
        world.ask(&words.iter().map(|word| if word.is_empty() { &key } else { *word }).collect::<Vec<_>>());
        for error in [
            world.store.acquire(&repeat_of(&request)).await.unwrap_err(),
            world.store.peek(&request.id).await.unwrap_err(),
        ] {
            assert_eq!(error.kind(), StoreErrorKind::Corrupt, "{words:?}: {error:?}");
        }
    }
}
