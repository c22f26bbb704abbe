//! The fast store: what it keeps, for how long, and what else may be under its keys.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use idem_core::{FastEntry, FastStore as _, RecordId, SettlementListener, StoreErrorKind, TimeOffset, Timestamp};
use idem_redis::{RedisConfig, RedisFastStore};
use idem_servers::{Redis, RedisCluster, Reply, redis_command};
use idem_testkit::fixture::fresh_id;

use crate::support::{fresh_prefix, ports};
use crate::world::eventually;

struct World {
    fast: RedisFastStore,
    prefix: String,
    port: u16,
    offset: TimeOffset,
}

impl World {
    fn at(url: &str) -> Self {
        let (prefix, offset) = (fresh_prefix(), TimeOffset::default());
        let config = RedisConfig::new(url).key_prefix(&prefix).timeout(Duration::from_secs(10));
        let fast = RedisFastStore::new(config.time_offset(offset.clone())).unwrap();
        Self { fast, prefix, port: ports(url)[0], offset }
    }

    fn shared() -> Self {
        Self::at(&idem_servers::redis_url())
    }

    fn key(&self, id: &RecordId) -> String {
        format!("{}{{{id}}}:fast", self.prefix)
    }

    fn ask<W: AsRef<[u8]>>(&self, words: &[W]) -> Reply {
        redis_command(self.port, words).unwrap()
    }

    async fn now(&self) -> Timestamp {
        self.fast.get(&fresh_id(), None).await.unwrap().now
    }

    async fn entry(&self, id: &RecordId) -> Option<Bytes> {
        self.fast.get(id, None).await.unwrap().bytes
    }

    async fn put(&self, id: &RecordId, rank: u64, bytes: &[u8], life: Duration) {
        let until = self.now().await.saturating_add(life);
        let entry = FastEntry { rank, bytes: Bytes::copy_from_slice(bytes), until };
        self.fast.put(id, &entry).await.unwrap();
    }
}

const MINUTE: Duration = Duration::from_secs(60);

#[tokio::test]
async fn an_entry_is_kept_byte_for_byte() {
    let world = World::shared();
    let every_byte: Vec<u8> = (0..=u8::MAX).collect();
    for bytes in [b"".as_slice(), b":", b"7:x", &every_byte, &vec![0xa5; 1 << 20]] {
        let id = fresh_id();
        world.put(&id, 3, bytes, MINUTE).await;
        assert_eq!(world.entry(&id).await.as_deref(), Some(bytes));
    }
    assert_eq!(world.entry(&fresh_id()).await, None);
}

#[tokio::test]
async fn a_higher_rank_stays_and_every_other_is_replaced() {
    let world = World::shared();
    let id = fresh_id();
    for (rank, bytes, stands) in [
        (5, "five", "five"),
        (4, "four", "five"),
        (5, "five again", "five again"),
        (u64::from(u32::MAX), "the last lock", "the last lock"),
        (u64::from(u32::MAX) - 1, "the last lock but one", "the last lock"),
        (u64::MAX, "settled", "settled"),
        (u64::from(u32::MAX), "the last lock", "settled"),
    ] {
        world.put(&id, rank, bytes.as_bytes(), MINUTE).await;
        assert_eq!(world.entry(&id).await.as_deref(), Some(stands.as_bytes()), "after {rank}");
    }
}

#[tokio::test]
async fn a_claim_is_put_where_there_is_nothing_and_everything_replaces_it() {
    let world = World::shared();
    let (id, life) = (fresh_id(), Some(Duration::from_secs(7)));
    let looked = async || world.fast.get(&id, life).await.unwrap().bytes;
    assert_eq!(looked().await, None);
    assert_eq!(looked().await.as_deref(), Some(b"".as_slice()), "somebody else's");
    let left = world.ask(&["PTTL", &world.key(&id)]).integer().unwrap();
    assert!((1..=7_000).contains(&left), "{left} ms");
    world.put(&id, 1, b"lock", MINUTE).await;
    assert_eq!(looked().await.as_deref(), Some(b"lock".as_slice()));
    world.fast.remove(&id, 0, None).await.unwrap();
    assert_eq!(looked().await.as_deref(), Some(b"lock".as_slice()), "a claim is taken back, and nothing else");
    // A string that is no entry counts as nothing.
    world.ask(&["SET", &world.key(&id), "garbage"]);
    assert_eq!(looked().await, None);
    assert_eq!(looked().await.as_deref(), Some(b"".as_slice()));
    world.fast.remove(&id, 0, None).await.unwrap();
    assert_eq!(world.entry(&id).await, None);
}

#[tokio::test]
async fn only_the_rank_that_is_named_is_removed() {
    let world = World::shared();
    let id = fresh_id();
    world.put(&id, u64::from(u32::MAX), b"lock", MINUTE).await;
    for rank in [0, 1, u64::from(u32::MAX) - 1, u64::MAX] {
        world.fast.remove(&id, rank, None).await.unwrap();
        assert!(world.entry(&id).await.is_some(), "{rank}");
    }
    let before = world.now().await;
    let removed_at = world.fast.remove(&id, u64::from(u32::MAX), None).await.unwrap();
    assert_eq!(world.entry(&id).await, None);
    assert!(before <= removed_at && removed_at <= world.now().await);
}

#[tokio::test]
async fn the_server_forgets_an_entry_at_its_end_and_not_before() {
    let world = World::shared();
    let id = fresh_id();
    let until = world.now().await.saturating_add(MINUTE);
    world.fast.put(&id, &FastEntry { rank: 1, bytes: Bytes::new(), until }).await.unwrap();
    let expires_ms = world.ask(&["PEXPIRETIME", &world.key(&id)]).integer().unwrap();
    let until_ms = (until.unix_micros() + 999) / 1_000;
    assert_eq!(expires_ms, until_ms);
    let over = fresh_id();
    let now = world.now().await;
    world.fast.put(&over, &FastEntry { rank: 1, bytes: Bytes::new(), until: now }).await.unwrap();
    assert_eq!(world.entry(&over).await, None, "it was over when it came");
}

#[tokio::test]
async fn the_time_that_a_test_moves_is_the_time() {
    let world = World::shared();
    let (id, before) = (fresh_id(), world.now().await);
    world.offset.advance(MINUTE * 60);
    let after = world.now().await;
    assert!(after.saturating_duration_since(before) >= MINUTE * 60);
    world.put(&id, 1, b"", MINUTE).await;
    let left = world.ask(&["PTTL", &world.key(&id)]).integer().unwrap();
    assert!((50_000..=60_001).contains(&left), "{left} ms");
}

#[tokio::test]
async fn whatever_else_is_under_a_key_is_no_entry_and_is_replaced() {
    let world = World::shared();
    let (list, text, digits, high) = (fresh_id(), fresh_id(), fresh_id(), fresh_id());
    world.ask(&["RPUSH", &world.key(&list), "1:a"]);
    world.ask(&["SET", &world.key(&text), "no entry"]);
    world.ask(&["SET", &world.key(&digits), "99999999999999999999999"]);
    // No rank is that high.
    world.ask(&["SET", &world.key(&high), "99999999999999999999"]);
    for id in [list, text, digits, high] {
        assert_eq!(world.entry(&id).await, None);
        world.fast.remove(&id, 1, None).await.unwrap();
        world.put(&id, 1, b"mine", MINUTE).await;
        assert_eq!(world.entry(&id).await.as_deref(), Some(b"mine".as_slice()));
    }
}

#[tokio::test]
async fn in_a_cluster_entries_are_where_their_slots_are() {
    let cluster = RedisCluster::start().unwrap();
    let world = World::at(&cluster.url());
    for _ in 0..50 {
        let id = fresh_id();
        world.put(&id, 2, b"here", MINUTE).await;
        assert_eq!(world.entry(&id).await.as_deref(), Some(b"here".as_slice()));
        world.fast.remove(&id, 2, None).await.unwrap();
        assert_eq!(world.entry(&id).await, None);
    }
}

#[tokio::test]
async fn a_server_that_is_away_is_an_error_soon_and_found_when_it_comes() {
    let mut server = Redis::start().unwrap();
    let url = server.url();
    server.kill().unwrap();
    let fast = RedisFastStore::new(RedisConfig::new(&url)).unwrap();
    let began = Instant::now();
    let error = fast.get(&fresh_id(), None).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error}");
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    server.start_again().unwrap();
    eventually("an answer", async || fast.get(&fresh_id(), None).await.ok()).await;
}

#[tokio::test]
async fn a_server_that_evicts_is_taken() {
    let server = Redis::start().unwrap();
    redis_command(server.port(), &["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]).unwrap();
    let world = World::at(&server.url());
    let id = fresh_id();
    world.put(&id, 1, b"", MINUTE).await;
    assert!(world.entry(&id).await.is_some());
}

#[derive(Debug, Default)]
struct Heard(Mutex<Vec<RecordId>>);

impl Heard {
    fn of(&self, id: &RecordId) -> bool {
        self.0.lock().unwrap().contains(id)
    }
}

impl SettlementListener for Heard {
    fn settled(&self, id: &RecordId) {
        self.0.lock().unwrap().push(*id);
    }
}

#[tokio::test]
async fn ends_are_told_to_other_processes_whether_there_was_a_lock_or_not() {
    let world = World::shared();
    let config = RedisConfig::new(idem_servers::redis_url()).key_prefix(&world.prefix);
    let elsewhere = RedisFastStore::new(config).unwrap();
    let heard = Arc::new(Heard::default());
    let listener: Arc<dyn SettlementListener> = heard.clone();
    elsewhere.on_settled(Arc::downgrade(&listener));
    let nothing_there = fresh_id();
    eventually("a removal is heard of", async || {
        world.fast.remove(&nothing_there, 1, None).await.unwrap();
        heard.of(&nothing_there).then_some(())
    })
    .await;
    let (claimed, id) = (fresh_id(), fresh_id());
    world.fast.get(&claimed, Some(MINUTE)).await.unwrap();
    world.fast.remove(&claimed, 0, None).await.unwrap();
    world.put(&id, 1, b"a lock", MINUTE).await;
    world.fast.remove(&id, 1, Some(MINUTE)).await.unwrap();
    eventually("another is heard of", async || heard.of(&id).then_some(())).await;
    // Messages come in their order.
    assert!(!heard.of(&claimed), "waiters would ask again in vain");
    assert_eq!(world.entry(&id).await.as_deref(), Some(b"".as_slice()), "a claim is in its place");
}

#[test]
fn outside_of_a_runtime_it_is_refused() {
    let error = RedisFastStore::new(RedisConfig::new("redis://127.0.0.1")).unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Misconfigured);
}

/// As the README says.
#[tokio::test]
async fn a_user_with_the_permissions_of_the_documentation_is_enough() {
    let server = Redis::start().unwrap();
    let rules = "ACL SETUSER app on >pw resetkeys ~idem:{* resetchannels &idem:{settled} -@all +role +ping +time +evalsha \
                 +eval +del +publish +subscribe +get +getrange +set +strlen";
    redis_command(server.port(), &rules.split_whitespace().collect::<Vec<_>>()).unwrap();
    let fast = RedisFastStore::new(RedisConfig::new(format!("redis://app:pw@127.0.0.1:{}", server.port()))).unwrap();
    let heard = Arc::new(Heard::default());
    let listener: Arc<dyn SettlementListener> = heard.clone();
    fast.on_settled(Arc::downgrade(&listener));
    eventually("a removal is heard of", async || {
        let id = fresh_id();
        let until = fast.get(&id, None).await.unwrap().now.saturating_add(MINUTE);
        fast.put(&id, &FastEntry { rank: 1, bytes: Bytes::from_static(b"x"), until }).await.unwrap();
        assert_eq!(fast.get(&id, None).await.unwrap().bytes.as_deref(), Some(b"x".as_slice()));
        fast.remove(&id, 1, None).await.unwrap();
        assert_eq!(fast.get(&id, None).await.unwrap().bytes, None);
        (!heard.0.lock().unwrap().is_empty()).then_some(())
    })
    .await;
}
