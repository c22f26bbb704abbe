//! A client of Redis that writes what it likes: every answer is the durable store's, or "in progress" for no longer than a lease.

use std::sync::Arc;
use std::time::Duration;

use crate::support::{PATIENCE, eventually, fresh_prefix};
use idem_core::{
    Acquire, AcquireOutcome, DurableStore as _, IdempotencyStore as _, Lease, RecordId, Settlement, StoredResponse,
    Term,
};
use idem_hybrid::{HybridConfig, HybridStore};
use idem_redis::{RedisConfig, RedisFastStore};
use idem_servers::{Redis, Reply, redis_command};
use idem_sqlite::{SqliteConfig, SqliteStore};
use idem_testkit::fixture::{KEPT, mismatch_of, repeat_of, request};
use tempfile::TempDir;

const SECOND: Duration = Duration::from_secs(1);

/// SQLite behind a Redis server whose keys another client writes as well.
struct World {
    store: HybridStore<SqliteStore>,
    redis: Redis,
    prefix: String,
    _folder: TempDir,
}

impl World {
    async fn new() -> Self {
        let (folder, redis, prefix) = (TempDir::new().unwrap(), Redis::start().unwrap(), fresh_prefix());
        let url = format!("sqlite://{}", folder.path().join("records.db").display());
        let durable = SqliteStore::open(SqliteConfig::new(url).dangerous_synchronous_normal()).await.unwrap();
        let config = RedisConfig::new(redis.url()).key_prefix(&prefix).timeout(PATIENCE);
        let fast = Arc::new(RedisFastStore::new(config).unwrap());
        let store = HybridStore::new(Arc::new(durable), fast, HybridConfig::new().patience(SECOND));
        Self { store, redis, prefix, _folder: folder }
    }

    fn ask<W: AsRef<[u8]>>(&self, words: &[W]) -> Reply {
        redis_command(self.redis.port(), words).unwrap()
    }

    /// The key of a record's entry, which any client of the server can list.
    fn key(&self, id: &RecordId) -> Vec<u8> {
        let keys = self.ask(&["KEYS", &format!("{}*{id}*", self.prefix)]);
        match keys.items() {
            [Reply::Bytes(key)] => key.clone(),
            other => panic!("{other:?}"),
        }
    }

    fn entry(&self, id: &RecordId) -> Option<Vec<u8>> {
        match self.ask(&["KEYS", &format!("{}*{id}*", self.prefix)]).items() {
            [Reply::Bytes(key)] => match self.ask(&[b"GET", key.as_slice()]) {
                Reply::Bytes(entry) => Some(entry),
                _ => None,
            },
            _ => None,
        }
    }

    fn write(&self, key: &[u8], entry: &[u8]) {
        self.ask(&[b"SET", key, entry]);
    }

    async fn run(&self, request: &Acquire) -> Lease {
        match self.store.acquire(request).await.unwrap() {
            AcquireOutcome::Acquired(lease) => lease,
            other => panic!("{other:?}"),
        }
    }

    /// An operation that is settled with this body, and whose copy is in Redis.
    async fn settled(&self, body: &'static str) -> Acquire {
        let request = request();
        let lease = self.run(&request).await;
        let done = Settlement::Completed(StoredResponse::new(201, body));
        self.store.settle(&lease, &done, KEPT).await.unwrap();
        let is_copied = async || self.entry(&request.id).filter(|entry| entry.starts_with(b"4611686018427387904:"));
        eventually("the copy", is_copied).await;
        request
    }

    /// Checks that a repeat gets the response of its record, and another request a mismatch.
    async fn is_replayed(&self, request: &Acquire, body: &'static str, what: &str) {
        match self.store.acquire(&repeat_of(request)).await.unwrap() {
            AcquireOutcome::Replay(replay) => assert_eq!(replay.response, StoredResponse::new(201, body), "{what}"),
            other => panic!("{what}: {other:?}"),
        }
        let other = self.store.acquire(&mismatch_of(request)).await.unwrap();
        assert!(matches!(other, AcquireOutcome::Mismatch { .. }), "{what}: {other:?}");
    }
}

/// Entries that a hostile client makes out of one that it has seen.
fn forgeries(seen: &[u8]) -> Vec<(&'static str, Vec<u8>)> {
    let colon = seen.iter().position(|byte| *byte == b':').unwrap();
    let (rank, bytes) = (&seen[..=colon], &seen[colon + 1..]);
    let with = |bytes: &[u8]| [rank, bytes].concat();
    let flipped = |at: usize| {
        let mut bytes = bytes.to_vec();
        bytes[at] ^= 1;
        with(&bytes)
    };
    vec![
        ("nothing", Vec::new()),
        ("garbage", b"garbage".to_vec()),
        ("garbage of the highest rank", b"18446744073709551615:garbage".to_vec()),
        ("no bytes", rank.to_vec()),
        ("half of it", with(&bytes[..bytes.len() / 2])),
        ("all but the last byte", with(&bytes[..bytes.len() - 1])),
        ("one byte more", with(&[bytes, b"x"].concat())),
        ("another form", flipped(4)),
        ("another tag", flipped(5)),
        ("no tag", with(&[&bytes[..5], &[0; 32], &bytes[37..]].concat())),
        ("another time", flipped(38)),
        ("another body", flipped(bytes.len() - 12)),
        ("another end", flipped(bytes.len() - 1)),
        ("a rank beyond all", [b"99999999999999999999999999:", &bytes[1..]].concat()),
    ]
}

#[tokio::test]
async fn a_forged_copy_is_never_replayed() {
    let world = World::new().await;
    let settled = world.settled("mine").await;
    let (key, seen) = (world.key(&settled.id), world.entry(&settled.id).unwrap());
    for number in 0..forgeries(&seen).len() {
        // Of a new record: a copy that a replay makes behind its answer would replace the next forgery.
        let settled = world.settled("mine").await;
        let (what, forged) = forgeries(&world.entry(&settled.id).unwrap()).swap_remove(number);
        world.write(&world.key(&settled.id), &forged);
        let before = world.store.metrics().durable_replays;
        world.is_replayed(&settled, "mine", what).await;
        assert!(world.store.metrics().durable_replays > before, "{what}: it was believed");
    }
    // The original entry is accepted again.
    world.write(&key, &seen);
    let before = world.store.metrics().fast_replays;
    world.is_replayed(&settled, "mine", "whole").await;
    assert_eq!(world.store.metrics().fast_replays, before + 2);
}

#[tokio::test]
async fn entries_that_are_swapped_answer_nobody() {
    let world = World::new().await;
    let (mine, yours) = (world.settled("mine").await, world.settled("yours").await);
    let (my_key, your_key) = (world.key(&mine.id), world.key(&yours.id));
    let (my_entry, your_entry) = (world.entry(&mine.id).unwrap(), world.entry(&yours.id).unwrap());
    world.write(&my_key, &your_entry);
    world.write(&your_key, &my_entry);
    world.is_replayed(&mine, "mine", "swapped").await;
    world.is_replayed(&yours, "yours", "swapped").await;
    assert_eq!(world.store.metrics().fast_replays, 0);
    // An entry of another record does not keep a new key from running either.
    let fresh = request();
    world.write(&your_key.clone(), b"");
    let key = String::from_utf8(my_key).unwrap().replace(&mine.id.to_string(), &fresh.id.to_string());
    world.write(key.as_bytes(), &my_entry);
    assert_eq!(world.run(&fresh).await.attempt, 1);
}

#[tokio::test]
async fn the_lock_of_an_ended_run_that_is_put_back_turns_away_for_its_lease_and_lets_nobody_run() {
    let world = World::new().await;
    let lasts = Duration::from_secs(2);
    let running = Acquire { term: Term { lease: lasts, ..request().term }, ..request() };
    let lease = world.run(&running).await;
    let (key, lock) = (world.key(&running.id), world.entry(&running.id).unwrap());
    world.store.settle(&lease, &Settlement::Released, KEPT).await.unwrap();
    world.write(&key, &lock);
    let turned_away = world.store.acquire(&repeat_of(&running)).await.unwrap();
    assert!(
        matches!(turned_away, AcquireOutcome::InProgress { lease_left, .. } if lease_left <= lasts),
        "{turned_away:?}"
    );
    assert_eq!(world.store.durable().live_record(&running.id).await.unwrap(), None);
    // The durable store answers repeats again once the lock is over.
    let next =
        eventually("the lock is over", async || match world.store.acquire(&repeat_of(&running)).await.unwrap() {
            AcquireOutcome::Acquired(lease) => Some(lease),
            AcquireOutcome::InProgress { .. } => None,
            other => panic!("{other:?}"),
        });
    assert_eq!(next.await.attempt, 1);
}

#[tokio::test]
async fn keys_of_other_types_and_without_an_end_cost_nothing_but_the_cache() {
    let world = World::new().await;
    let settled = world.settled("mine").await;
    let key = world.key(&settled.id);
    for words in [&[b"RPUSH".as_slice(), &key, b"a"][..], &[b"SADD", &key, b"a"], &[b"HSET", &key, b"a", b"b"]] {
        world.ask(&[b"DEL", key.as_slice()]);
        world.ask(words);
        world.is_replayed(&settled, "mine", "another type").await;
    }
    // An entry of the highest rank, without a TTL: no lock and no copy takes its place, and every verb still works.
    let fresh = request();
    let key = String::from_utf8(key).unwrap().replace(&settled.id.to_string(), &fresh.id.to_string());
    world.write(key.as_bytes(), b"18446744073709551615:");
    let lease = world.run(&fresh).await;
    let turned_away = world.store.acquire(&repeat_of(&fresh)).await.unwrap();
    assert!(matches!(turned_away, AcquireOutcome::InProgress { .. }), "{turned_away:?}");
    world.store.renew(&lease, fresh.term).await.unwrap();
    let done = Settlement::Completed(StoredResponse::new(201, "done"));
    world.store.settle(&lease, &done, KEPT).await.unwrap();
    world.is_replayed(&fresh, "done", "behind an entry that stays").await;
}
