//! If a task that connects is cancelled, ends with its runtime, or is never driven again, other callers connect anew.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use idem_core::{FastStore as _, IdempotencyStore as _, StoreError};
use idem_redis::{RedisConfig, RedisFastStore, RedisStore};
use idem_servers::{Redis, RedisSentinel, redis_cluster_url, redis_command, redis_sentinel_url};
use idem_testkit::fixture::request;
use tokio::runtime::{Builder, Handle, Runtime};

use crate::support::fresh_prefix;
use crate::world::{World, eventually};
use idem_proxy::{Proxy, Sluggish};

/// How long a verb may take.
const TIMEOUT: Duration = Duration::from_secs(1);

/// How long a caller waits before it gives up.
const GIVEN_UP: Duration = Duration::from_millis(300);

/// A store of either kind, through one of its verbs.
#[async_trait]
trait Asked: Send + Sync + 'static {
    async fn ask(&self) -> Result<(), StoreError>;
}

#[async_trait]
impl Asked for RedisStore {
    async fn ask(&self) -> Result<(), StoreError> {
        self.acquire(&request()).await.map(drop)
    }
}

#[async_trait]
impl Asked for RedisFastStore {
    async fn ask(&self) -> Result<(), StoreError> {
        self.get(&request().id, None).await.map(drop)
    }
}

/// A server behind a proxy that hangs, and stores that have connected through the proxy.
async fn hanging() -> (Redis, Proxy<Sluggish>, Vec<Arc<dyn Asked>>) {
    let server = Redis::start().unwrap();
    let proxy = Proxy::start("127.0.0.1", server.port(), Sluggish::new(Duration::ZERO)).await.unwrap();
    let config =
        || RedisConfig::new(format!("redis://127.0.0.1:{}", proxy.port())).key_prefix(fresh_prefix()).timeout(TIMEOUT);
    let stores: Vec<Arc<dyn Asked>> =
        vec![Arc::new(RedisStore::open(config()).await.unwrap()), Arc::new(RedisFastStore::new(config()).unwrap())];
    for store in &stores {
        store.ask().await.unwrap();
    }
    proxy.hang();
    (server, proxy, stores)
}

/// Asks on `runtime`, whose task then connects, and gives up before there is an answer.
fn begin_to_connect_on(runtime: Runtime, stores: &[Arc<dyn Asked>]) -> Runtime {
    let stores = stores.to_vec();
    let asking = std::thread::spawn(move || {
        for store in stores {
            let asked = runtime.block_on(async { tokio::time::timeout(GIVEN_UP, store.ask()).await });
            assert!(asked.is_err(), "it did not hang");
        }
        runtime
    });
    asking.join().unwrap()
}

async fn all_serve(stores: &[Arc<dyn Asked>]) {
    for store in stores {
        eventually("another runtime connects", async || store.ask().await.ok()).await;
        for _ in 0..10 {
            store.ask().await.unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_runtime_that_ends_while_it_connects_does_not_keep_others_from_connecting() {
    let (_server, proxy, stores) = hanging().await;
    begin_to_connect_on(Runtime::new().unwrap(), &stores).shutdown_background();
    proxy.recover();
    all_serve(&stores).await;
}

/// For example the runtime of a thread that blocks elsewhere: neither its tasks nor its timers go on.
#[tokio::test(flavor = "multi_thread")]
async fn a_runtime_that_nothing_drives_while_it_connects_does_not_keep_others_from_connecting() {
    let (_server, proxy, stores) = hanging().await;
    let runtime = begin_to_connect_on(Builder::new_current_thread().enable_all().build().unwrap(), &stores);
    proxy.recover();
    all_serve(&stores).await;
    runtime.shutdown_background();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_runtime_that_nothing_drives_while_it_asks_sentinels_does_not_keep_others_from_asking() {
    let mut group = RedisSentinel::start().unwrap();
    let config = RedisConfig::new(group.url()).key_prefix(fresh_prefix()).timeout(TIMEOUT);
    let store: Arc<dyn Asked> = Arc::new(RedisStore::open(config).await.unwrap());
    let (stores, primary) = ([store], group.primary_port().unwrap());
    for port in group.sentinel_ports() {
        group.pause(port).unwrap();
    }
    redis_command(primary, &["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]).unwrap();
    let runtime = begin_to_connect_on(Builder::new_current_thread().enable_all().build().unwrap(), &stores);
    for port in group.sentinel_ports() {
        group.resume(port).unwrap();
    }
    all_serve(&stores).await;
    runtime.shutdown_background();
}

/// If the runtime that makes a connection ends, the callers that wait for the connection do not fail.
#[tokio::test(flavor = "multi_thread")]
async fn a_caller_on_another_runtime_goes_on_to_connect_when_the_first_runtime_ends() {
    let (_server, proxy, stores) = hanging().await;
    let runtime = begin_to_connect_on(Runtime::new().unwrap(), &stores);
    let waiting: Vec<_> = stores.iter().cloned().map(|store| tokio::spawn(async move { store.ask().await })).collect();
    // They wait for the attempt of the other runtime, as there is only one at a time.
    tokio::time::sleep(Duration::from_millis(50)).await;
    proxy.recover();
    runtime.shutdown_background();
    for waiting in waiting {
        waiting.await.unwrap().unwrap();
    }
}

// On one thread, all of them wait after a few turns.
#[tokio::test]
async fn callers_that_are_aborted_while_they_connect_leave_no_task_behind() {
    for number in 0..2 {
        let (_server, proxy, mut stores) = hanging().await;
        let store = stores.swap_remove(number);
        drop(stores);
        let before = alive_tasks();
        let asking: Vec<_> = (0..256)
            .map(|_| {
                let store = Arc::clone(&store);
                tokio::spawn(async move { store.ask().await })
            })
            .collect();
        for _ in 0..16 {
            tokio::task::yield_now().await;
        }
        for asked in asking {
            asked.abort();
            assert!(asked.await.unwrap_err().is_cancelled());
        }
        // The one attempt that all of them share, and the connection on its side and on the proxy's.
        assert!(alive_tasks() <= before + 8, "{before} tasks before, {} after", alive_tasks());
        proxy.recover();
        all_serve(&[store]).await;
    }
}

fn alive_tasks() -> usize {
    Handle::current().metrics().num_alive_tasks()
}

/// A connection is driven by the runtime that made it.
#[tokio::test(flavor = "multi_thread")]
async fn connections_whose_runtime_has_ended_are_not_noticed() {
    let server = Redis::start().unwrap();
    for (url, replicas) in [(server.url(), 0), (redis_sentinel_url(), 1), (redis_cluster_url(), 0)] {
        let opening = std::thread::spawn(move || {
            let runtime = Runtime::new().unwrap();
            let world = runtime.block_on(World::with(&url, 0, |config| config.min_replicas(replicas)));
            for _ in 0..8 {
                runtime.block_on(world.is_whole());
            }
            drop(runtime);
            world
        });
        let world = opening.join().unwrap();
        for _ in 0..8 {
            world.is_whole().await;
        }
    }
}
