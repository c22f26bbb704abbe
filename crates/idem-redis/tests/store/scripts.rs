//! Scripts that the server forgets.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use idem_core::{AcquireOutcome, IdempotencyStore as _, OwnerOutcome};
use idem_servers::{Redis, RedisCluster, redis_command};
use idem_testkit::fixture::{repeat_of, request};

use crate::world::World;

const LOAD: Duration = Duration::from_secs(3);
const FLUSH_EVERY: Duration = Duration::from_millis(10);
const CLIENTS: usize = 16;

/// Runs whole operations and their replays while the scripts are flushed every 10 ms.
async fn nobody_notices(world: World, ports: Vec<u16>) {
    let world = Arc::new(world);
    let (done, operations) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let flushing = {
        let (done, ports) = (Arc::clone(&done), ports.clone());
        std::thread::spawn(move || {
            let mut flushes = 0;
            while !done.load(Ordering::SeqCst) {
                for port in &ports {
                    redis_command(*port, &["SCRIPT", "FLUSH"]).unwrap();
                }
                flushes += 1;
                std::thread::sleep(FLUSH_EVERY);
            }
            flushes
        })
    };
    let end = Instant::now() + LOAD;
    let clients: Vec<_> = (0..CLIENTS)
        .map(|_| {
            let (world, operations) = (Arc::clone(&world), Arc::clone(&operations));
            tokio::spawn(async move {
                while Instant::now() < end {
                    let request = request();
                    let lease = world.lease(&request).await.unwrap();
                    assert_eq!(world.store.renew(&lease, request.term).await.unwrap(), OwnerOutcome::Applied);
                    assert_eq!(world.complete(&lease).await.unwrap(), OwnerOutcome::Applied);
                    let repeat = world.store.acquire(&repeat_of(&request)).await.unwrap();
                    assert!(matches!(repeat, AcquireOutcome::Replay(_)));
                    operations.fetch_add(1, Ordering::SeqCst);
                }
            })
        })
        .collect();
    for client in clients {
        client.await.unwrap();
    }
    done.store(true, Ordering::SeqCst);
    let flushes = flushing.join().unwrap();
    let unknown: i64 = ports.iter().map(|port| noscripts(*port)).sum();
    let operations = operations.load(Ordering::SeqCst);
    println!("{operations} operations during {flushes} flushes: {unknown} scripts were not known, no error");
    assert!(flushes > 50 && unknown > flushes, "{flushes} flushes, {unknown} unknown scripts");
}

/// How often the server did not know a script.
fn noscripts(port: u16) -> i64 {
    let stats = redis_command(port, &["INFO", "errorstats"]).unwrap();
    stats.field("errorstat_NOSCRIPT").and_then(|count| count.strip_prefix("count=")?.parse().ok()).unwrap_or(0)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_script_flush_every_10_ms_is_not_noticed() {
    let server = Redis::start().unwrap();
    nobody_notices(World::at(&server.url(), server.port()).await, vec![server.port()]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_script_flush_every_10_ms_is_not_noticed_where_replicas_are_awaited() {
    let group = idem_servers::RedisSentinel::start().unwrap();
    let primary = group.primary_port().unwrap();
    nobody_notices(World::with(&group.url(), primary, |config| config.min_replicas(1)).await, vec![primary]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_script_flush_every_10_ms_is_not_noticed_in_a_cluster() {
    let cluster = RedisCluster::start().unwrap();
    let ports: Vec<u16> = cluster.primaries().unwrap().iter().map(|primary| primary.port).collect();
    nobody_notices(World::at(&cluster.url(), ports[0]).await, ports).await;
}
