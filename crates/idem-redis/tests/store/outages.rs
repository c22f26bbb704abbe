//! Servers that are paused, killed and started again.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use idem_core::{AcquireOutcome, IdempotencyStore as _, OwnerOutcome, RecordId, StoreErrorKind};
use idem_redis::{RedisConfig, RedisStore};
use idem_servers::{Redis, RedisCluster, RedisSentinel, redis_command};
use idem_testkit::fixture::{repeat_of, request};

use crate::world::World;
use idem_proxy::{Proxy, Sluggish};

const TIMEOUT: Duration = Duration::from_millis(300);

/// How late a loaded machine may be.
const SLACK: Duration = Duration::from_secs(5);

fn in_time(config: RedisConfig) -> RedisConfig {
    config.timeout(TIMEOUT)
}

#[tokio::test]
async fn a_server_that_hangs_is_an_error_in_time_however_many_ask() {
    let mut server = Redis::start().unwrap();
    let world = Arc::new(World::with(&server.url(), server.port(), in_time).await);
    world.is_whole().await;
    server.pause().unwrap();
    let ask = |world: Arc<World>| async move {
        let begun = Instant::now();
        let error = world.store.acquire(&request()).await.unwrap_err();
        (error, begun.elapsed())
    };
    for _ in 0..2 {
        let asking: Vec<_> = (0..64).map(|_| tokio::spawn(ask(Arc::clone(&world)))).collect();
        for asked in asking {
            let (error, waited) = asked.await.unwrap();
            assert!(matches!(error.kind(), StoreErrorKind::Timeout | StoreErrorKind::Unavailable), "{error:?}");
            assert!(waited < TIMEOUT + SLACK, "{waited:?}");
        }
    }
    server.resume().unwrap();
    crate::world::eventually("it answers again", async || world.lease(&request()).await.ok()).await;
    world.is_whole().await;
}

#[tokio::test]
async fn a_server_that_is_away_is_an_error_at_once_and_is_found_again() {
    let mut server = Redis::start_with(&["--appendonly", "yes", "--appendfsync", "always"]).unwrap();
    let world = World::with(&server.url(), server.port(), in_time).await;
    let settled = request();
    let lease = world.lease(&settled).await.unwrap();
    world.complete(&lease).await.unwrap();
    for _ in 0..3 {
        let running = request();
        let lease = world.lease(&running).await.unwrap();
        server.kill().unwrap();
        let error = world.complete(&lease).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Unavailable);
        assert!(error.is_retryable());
        let error = world.store.acquire(&request()).await.unwrap_err();
        assert!(!error.is_indeterminate(), "nothing could have been sent: {error:?}");
        server.start_again().unwrap();
        // The restarted server has lost its scripts, but has every record that it acknowledged.
        assert_eq!(world.complete(&lease).await.unwrap(), OwnerOutcome::Applied);
        assert!(world.store.peek(&settled.id).await.unwrap().is_some());
        world.is_whole().await;
    }
}

#[tokio::test]
async fn connections_that_the_server_ends_are_not_noticed() {
    let server = Redis::start().unwrap();
    let world = World::at(&server.url(), server.port()).await;
    for _ in 0..20 {
        assert!(world.ask(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]).integer().unwrap() > 0);
        world.is_whole().await;
    }
}

/// A caller that waits for a connection does not keep it from later callers.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_recovers_serves_soon_however_many_ask() {
    let server = Redis::start().unwrap();
    let proxy = Proxy::start("127.0.0.1", server.port(), Sluggish::new(Duration::from_millis(80))).await.unwrap();
    let config = |config: RedisConfig| config.timeout(Duration::from_secs(1));
    let world = Arc::new(World::with(&format!("redis://127.0.0.1:{}", proxy.port()), server.port(), config).await);
    let asking = {
        let world = Arc::clone(&world);
        tokio::spawn(async move {
            let mut tick = tokio::time::interval(Duration::from_millis(5));
            loop {
                tick.tick().await;
                let world = Arc::clone(&world);
                tokio::spawn(async move { world.store.acquire(&request()).await.is_ok() });
            }
        })
    };
    proxy.hang();
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    proxy.recover();
    let recovered = Instant::now();
    crate::world::eventually("it serves again", async || world.lease(&request()).await.ok()).await;
    let waited = recovered.elapsed();
    asking.abort();
    // The connection that was begun during the outage has to be given up first.
    assert!(waited < Duration::from_secs(5), "{waited:?}");
}

#[tokio::test]
async fn a_sentinel_that_hangs_does_not_keep_back_what_the_others_know() {
    let mut group = RedisSentinel::start().unwrap();
    let config = |config: RedisConfig| config.timeout(Duration::from_secs(1));
    let world = World::with(&group.url(), 0, config).await;
    // The first Sentinel is the one that would be asked first.
    group.pause(group.sentinel_ports()[0]).unwrap();
    let paused = group.pause_primary().unwrap();
    let found = crate::world::eventually("the new primary serves", async || world.lease(&request()).await.ok()).await;
    assert_eq!(found.attempt, 1);
    RedisStore::open(RedisConfig::new(group.url())).await.unwrap();
    group.resume(paused).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_primary_that_hangs_does_not_keep_the_other_shards_from_serving() {
    let mut cluster = RedisCluster::start().unwrap();
    let configure = |config: RedisConfig| config.timeout(Duration::from_secs(3));
    let world = Arc::new(World::with(&cluster.url(), 0, configure).await);
    let hanging = cluster.primaries().unwrap().swap_remove(0);
    world.is_whole().await;
    cluster.pause(hanging.port).unwrap();
    let (hanging, end) = (Arc::new(hanging), Instant::now() + Duration::from_secs(6));
    let clients: Vec<_> = (0..16)
        .map(|_| {
            let (world, hanging) = (Arc::clone(&world), Arc::clone(&hanging));
            tokio::spawn(async move {
                let mut served = 0;
                while Instant::now() < end {
                    let request = request();
                    let hangs = hanging.has(slot_of(&request.id));
                    let answer = world.store.acquire(&request).await;
                    if !hangs {
                        answer.unwrap();
                        served += 1;
                    }
                }
                served
            })
        })
        .collect();
    let mut served = 0;
    for client in clients {
        served += client.await.unwrap();
    }
    assert!(served > 16, "{served}");
}

/// While a slot moves, callers on one connection are redirected to the server that has their keys.
#[tokio::test(flavor = "multi_thread")]
async fn a_slot_that_moves_is_not_noticed() {
    let cluster = RedisCluster::start().unwrap();
    let owners = cluster.primaries().unwrap();
    let slot = *owners[0].slots[0].start();
    let in_slot = || std::iter::repeat_with(request).find(|request| slot_of(&request.id) == slot).unwrap();
    let requests: Vec<_> = (0..24).map(|_| in_slot()).collect();
    for replicas in [0, 1] {
        let world = Arc::new(World::with(&cluster.url(), 0, |config| config.min_replicas(replicas)).await);
        let done = Arc::new(AtomicBool::new(false));
        let clients: Vec<_> = requests
            .iter()
            .cloned()
            .map(|request| {
                let (world, done) = (Arc::clone(&world), Arc::clone(&done));
                tokio::spawn(async move {
                    let lease = world.lease(&request).await.unwrap();
                    let mut renewed = 0;
                    while !done.load(Ordering::SeqCst) {
                        assert_eq!(world.store.renew(&lease, request.term).await.unwrap(), OwnerOutcome::Applied);
                        renewed += 1;
                    }
                    assert_eq!(world.complete(&lease).await.unwrap(), OwnerOutcome::Applied);
                    renewed
                })
            })
            .collect();
        for (from, to) in [(0, 1), (1, 0), (0, 2), (2, 0), (0, 1), (1, 0)] {
            cluster.migrate_slot(slot, owners[from].port, owners[to].port).unwrap();
            // The next primary has to know of this move before it takes the slot.
            cluster.wait_until_ok().unwrap();
        }
        done.store(true, Ordering::SeqCst);
        for client in clients {
            assert!(client.await.unwrap() > 0);
        }
    }
    let asked: i64 = owners.iter().map(|owner| asks(owner.port)).sum();
    assert!(asked > 0, "nobody was asked to look elsewhere");
}

/// A slot with many keys can take hours to move.
#[tokio::test(flavor = "multi_thread")]
async fn keys_on_both_sides_of_a_move_are_acquired_and_replayed() {
    let cluster = RedisCluster::start().unwrap();
    let owners = cluster.primaries().unwrap();
    let (from, to, slot) = (owners[0].port, owners[1].port, *owners[0].slots[0].start());
    let in_slot = || std::iter::repeat_with(request).find(|request| slot_of(&request.id) == slot).unwrap();
    for replicas in [0, 1] {
        let world = World::with(&cluster.url(), from, |config| config.min_replicas(replicas)).await;
        let (settled, running, moved) = (in_slot(), in_slot(), in_slot());
        for request in [&settled, &moved] {
            let lease = world.lease(request).await.unwrap();
            world.complete(&lease).await.unwrap();
        }
        let lease = world.lease(&running).await.unwrap();

        let ask = |port: u16, words: &[&str]| redis_command(port, words).unwrap();
        let id = |port: u16| ask(port, &["CLUSTER", "MYID"]).text().unwrap().to_owned();
        let number = slot.to_string();
        ask(to, &["CLUSTER", "SETSLOT", &number, "IMPORTING", &id(from)]);
        ask(from, &["CLUSTER", "SETSLOT", &number, "MIGRATING", &id(to)]);
        ask(from, &["MIGRATE", "127.0.0.1", &to.to_string(), &world.key(&moved.id), "0", "5000"]);

        for request in [&settled, &moved] {
            let replay = world.store.acquire(&repeat_of(request)).await.unwrap();
            assert!(matches!(replay, AcquireOutcome::Replay(_)), "{replay:?}");
        }
        let turned_away = world.store.acquire(&repeat_of(&running)).await.unwrap();
        assert!(matches!(turned_away, AcquireOutcome::InProgress { .. }), "{turned_away:?}");
        assert_eq!(world.complete(&lease).await.unwrap(), OwnerOutcome::Applied);
        // A new key is created on the target only.
        let fresh = in_slot();
        let lease = world.lease(&fresh).await.unwrap();
        assert_eq!(world.store.renew(&lease, fresh.term).await.unwrap(), OwnerOutcome::Applied);
        assert_eq!(world.complete(&lease).await.unwrap(), OwnerOutcome::Applied);

        cluster.migrate_slot(slot, from, to).unwrap();
        cluster.wait_until_ok().unwrap();
        cluster.migrate_slot(slot, to, from).unwrap();
        cluster.wait_until_ok().unwrap();
    }
}

/// How often a server has answered with an `ASK` redirect.
fn asks(port: u16) -> i64 {
    let stats = idem_servers::redis_command(port, &["INFO", "errorstats"]).unwrap();
    stats.field("errorstat_ASK").and_then(|count| count.strip_prefix("count=")?.parse().ok()).unwrap_or(0)
}

/// The Cluster slot of a record: CRC16 of the hash tag in braces, which is the id.
fn slot_of(id: &RecordId) -> u16 {
    let mut crc = 0_u16;
    for byte in id.to_string().bytes() {
        crc ^= u16::from(byte) << 8;
        for _ in 0..8 {
            crc = if crc & 0x8000 == 0 { crc << 1 } else { (crc << 1) ^ 0x1021 };
        }
    }
    crc % 16_384
}
