//! A settlement is reported to the waiters of another process.

use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use idem_core::{Acquire, AcquireOutcome, IdempotencyStore as _, RecordId, Settlement, SettlementListener};
use idem_redis::{RedisConfig, RedisStore};
use idem_servers::{Redis, RedisSentinel, redis_cluster_url, redis_sentinel_url, redis_url};
use idem_testkit::fixture::{completed, repeat_of, request, retryable};

use crate::support::fresh_prefix;
use crate::world::{World, eventually};

#[derive(Default)]
struct Told(Mutex<Vec<RecordId>>);

impl SettlementListener for Told {
    fn settled(&self, id: &RecordId) {
        self.0.lock().unwrap().push(*id);
    }
}

impl Told {
    fn of(&self, id: &RecordId) -> usize {
        self.0.lock().unwrap().iter().filter(|told| *told == id).count()
    }
}

/// Two stores on the same keys, as two processes have them, and a listener at the second.
async fn pair(url: &str) -> (World, RedisStore, Arc<Told>) {
    let prefix = fresh_prefix();
    let open = || RedisStore::open(RedisConfig::new(url).key_prefix(&prefix));
    let (one, other) = (open().await.unwrap(), open().await.unwrap());
    let told = Arc::new(Told::default());
    let listener: Weak<Told> = Arc::downgrade(&told);
    other.on_settled(listener);
    (World { store: one, prefix, port: 0 }, other, told)
}

/// Settles operations until the other store reports one, and returns how long after the settlement that was.
async fn is_told(world: &World, other: &RedisStore, told: &Told, settlement: &Settlement) -> Duration {
    // The subscription is made in the background, so it may miss the first settlements.
    eventually("a settlement is told", async || {
        let request = asked_for(world, other).await;
        let lease = world.lease(&request).await.ok()?;
        world.settle(&lease, settlement).await.ok()?;
        let settled_at = Instant::now();
        while settled_at.elapsed() < Duration::from_millis(200) {
            if told.of(&request.id) > 0 {
                return Some(settled_at.elapsed());
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        None
    })
    .await
}

/// A request that runs, and that the other store has tried to acquire.
async fn asked_for(world: &World, other: &RedisStore) -> Acquire {
    let request = request();
    if world.lease(&request).await.is_ok() {
        // During an outage this may fail.
        let _ = other.acquire(&repeat_of(&request)).await;
    }
    request
}

#[tokio::test]
async fn settlements_are_told_on_one_server_through_sentinel_and_in_a_cluster() {
    for url in [redis_url(), redis_sentinel_url(), redis_cluster_url()] {
        let (world, other, told) = pair(&url).await;
        for settlement in [completed(), retryable(), Settlement::OutcomeUnknown, Settlement::Released] {
            is_told(&world, &other, &told, &settlement).await;
        }
    }
}

#[tokio::test]
async fn what_nobody_asked_for_is_not_told() {
    let (world, other, told) = pair(&redis_url()).await;
    is_told(&world, &other, &told, &completed()).await;
    let quiet = request();
    let lease = world.lease(&quiet).await.unwrap();
    world.complete(&lease).await.unwrap();
    // Messages arrive in the order of the settlements.
    is_told(&world, &other, &told, &completed()).await;
    assert_eq!(told.of(&quiet.id), 0);
}

#[tokio::test]
async fn a_subscription_is_made_anew_after_the_server_was_away() {
    let mut server = Redis::start().unwrap();
    let (world, other, told) = pair(&server.url()).await;
    is_told(&world, &other, &told, &completed()).await;
    server.restart().unwrap();
    is_told(&world, &other, &told, &completed()).await;
}

#[tokio::test]
async fn a_subscription_follows_the_primary() {
    let mut group = RedisSentinel::start().unwrap();
    let (world, other, told) = pair(&group.url()).await;
    is_told(&world, &other, &told, &completed()).await;
    let paused = group.pause_primary().unwrap();
    group.wait_for_other_primary_than(paused).unwrap();
    is_told(&world, &other, &told, &completed()).await;
}

struct Panics;

impl SettlementListener for Panics {
    fn settled(&self, _: &RecordId) {
        panic!("a listener panics");
    }
}

#[tokio::test]
async fn a_listener_that_panics_keeps_nobody_from_being_told() {
    let (world, other, told) = pair(&redis_url()).await;
    let panics = Arc::new(Panics);
    let listener: Weak<Panics> = Arc::downgrade(&panics);
    other.on_settled(listener);
    let last = Arc::new(Told::default());
    let listener: Weak<Told> = Arc::downgrade(&last);
    other.on_settled(listener);
    for told in [&told, &last, &told] {
        is_told(&world, &other, told, &completed()).await;
    }
}

/// By default, new users of Redis 7 may use no channel.
#[tokio::test]
async fn whoever_may_not_publish_settles_all_the_same() {
    let server = Redis::start().unwrap();
    let rules = ["ACL", "SETUSER", "app", "on", ">pw", "~*", "resetchannels", "+@all"];
    idem_servers::redis_command(server.port(), &rules).unwrap();
    let (world, other, told) = pair(&format!("redis://app:pw@127.0.0.1:{}", server.port())).await;
    let request = asked_for(&world, &other).await;
    let lease = world.lease(&request).await.unwrap();
    assert_eq!(world.complete(&lease).await.unwrap(), idem_core::OwnerOutcome::Applied);
    world.store.self_test().await.unwrap();
    assert_eq!(told.of(&request.id), 0);
}

#[tokio::test]
async fn a_listener_that_is_gone_is_forgotten_and_the_others_are_told() {
    let (world, other, told) = pair(&redis_url()).await;
    let gone = Arc::new(Told::default());
    let listener: Weak<Told> = Arc::downgrade(&gone);
    other.on_settled(listener);
    drop(gone);
    is_told(&world, &other, &told, &completed()).await;
    let AcquireOutcome::Acquired(_) = other.acquire(&request()).await.unwrap() else { panic!() };
}

/// The subscription belongs to the runtime that made it; the store outlives that.
#[tokio::test(flavor = "multi_thread")]
async fn a_subscription_whose_runtime_has_ended_is_made_anew_for_callers_that_may_wait() {
    let prefix = fresh_prefix();
    let config = RedisConfig::new(redis_url()).key_prefix(&prefix);
    let told = Arc::new(Told::default());
    let listener: Weak<Told> = Arc::downgrade(&told);
    let opening = config.clone();
    let opened = std::thread::spawn(move || {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let other = runtime.block_on(RedisStore::open(opening)).unwrap();
        runtime.block_on(async { other.on_settled(listener) });
        drop(runtime);
        other
    });
    let other = opened.join().unwrap();
    let world = World { store: RedisStore::open(config).await.unwrap(), prefix, port: 0 };
    is_told(&world, &other, &told, &completed()).await;
}
