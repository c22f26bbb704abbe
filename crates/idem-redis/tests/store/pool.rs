//! The application's own pool of connections.

use std::sync::Arc;

use deadpool::managed::{Hook, HookError};
use idem_core::{AcquireOutcome, IdempotencyStore as _, OwnerOutcome, StoreErrorKind};
use idem_redis::{RedisConfig, RedisStore, TimeOffset};
use idem_servers::{Redis, redis_url};
use idem_testkit::Subject;
use idem_testkit::fixture::request;
use redis::RedisResult;
use redis::aio::MultiplexedConnection;

use crate::support::{Time, fresh_prefix, ports};
use crate::world::World;

fn pool(url: &str, size: usize) -> deadpool_redis::Pool {
    let manager = deadpool_redis::Manager::new(url).unwrap();
    let builder = deadpool_redis::Pool::builder(manager).max_size(size).runtime(deadpool_redis::Runtime::Tokio1);
    builder.build().unwrap()
}

async fn pooled() -> Subject {
    let (offset, prefix) = (TimeOffset::default(), fresh_prefix());
    let precision = std::time::Duration::from_secs(10);
    let config = RedisConfig::from_pool(pool(&redis_url(), 4)).key_prefix(&prefix).time_offset(offset.clone());
    let store = Arc::new(RedisStore::open(config.timeout(precision)).await.unwrap());
    let time = Arc::new(Time { offset, servers: vec![ports(&redis_url())[0].into()], prefix });
    Subject::purging_itself(store, time.clone(), time).with_precision(precision)
}

idem_testkit::conformance!(by_a_pool, pooled);

#[tokio::test]
async fn connections_of_a_pool_that_are_of_no_use_leave_it() {
    let mut server = Redis::start().unwrap();
    let timeout = std::time::Duration::from_millis(300);
    let prefix = fresh_prefix();
    let config = RedisConfig::from_pool(pool(&server.url(), 2)).key_prefix(&prefix).timeout(timeout);
    let world = World { store: RedisStore::open(config).await.unwrap(), prefix, port: server.port() };
    world.is_whole().await;
    server.pause().unwrap();
    for _ in 0..4 {
        let error = world.store.acquire(&request()).await.unwrap_err();
        assert!(matches!(error.kind(), StoreErrorKind::Timeout | StoreErrorKind::Unavailable), "{error:?}");
    }
    server.resume().unwrap();
    crate::world::eventually("the pool serves again", async || world.lease(&request()).await.ok()).await;
    server.restart().unwrap();
    world.is_whole().await;
}

#[tokio::test]
async fn a_pool_may_await_replicas() {
    let (primary, prefix) = (Redis::start().unwrap(), fresh_prefix());
    let port = primary.port().to_string();
    let replica = Redis::start_with(&["--replicaof", "127.0.0.1", &port]).unwrap();
    let config = RedisConfig::from_pool(pool(&primary.url(), 2)).key_prefix(&prefix).min_replicas(1);
    let world = World { store: RedisStore::open(config).await.unwrap(), prefix, port: primary.port() };
    let lease = crate::world::eventually("the replica has joined", async || world.lease(&request()).await.ok()).await;
    // On a busy machine the replica may be late; settling again changes nothing.
    let settled = crate::world::eventually("the replica has it", async || world.complete(&lease).await.ok()).await;
    assert_eq!(settled, OwnerOutcome::Applied);
    assert_eq!(crate::world::stored_state(replica.port(), &world.key(&lease.id)), 2);
}

/// The application selects another database on a connection. Records stay where they are.
#[tokio::test]
async fn a_connection_left_in_another_database_finds_the_records() {
    let pool = pool(&redis_url(), 1);
    let config = RedisConfig::from_pool(pool.clone()).key_prefix(fresh_prefix());
    let store = RedisStore::open(config).await.unwrap();
    let request = request();
    let AcquireOutcome::Acquired(lease) = store.acquire(&request).await.unwrap() else { panic!("it is new") };
    select(&mut pool.get().await.unwrap(), 2).await.unwrap();
    assert!(store.peek(&lease.id).await.unwrap().is_some());
    select(&mut pool.get().await.unwrap(), 3).await.unwrap();
    assert_eq!(store.renew(&lease, request.term).await.unwrap(), OwnerOutcome::Applied);
    assert_eq!(store.renewer().unwrap().renew(&lease, request.term).await.unwrap(), OwnerOutcome::Applied);
}

/// The store would move the connections to another database than the application's.
#[tokio::test]
async fn a_pool_whose_hook_selects_a_database_is_refused() {
    let manager = deadpool_redis::Manager::new(redis_url()).unwrap();
    let hook = Hook::async_fn(|connection: &mut MultiplexedConnection, _| {
        Box::pin(async move { select(connection, 1).await.map_err(HookError::Backend) })
    });
    let builder = deadpool_redis::Pool::builder(manager).max_size(1).post_create(hook);
    let pool = builder.runtime(deadpool_redis::Runtime::Tokio1).build().unwrap();
    let error = RedisStore::open(RedisConfig::from_pool(pool.clone())).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Misconfigured);
    assert!(error.to_string().contains("is in database 1, and the pool's URL names 0"), "{error}");
    let about: String = redis::cmd("CLIENT").arg("INFO").query_async(&mut pool.get().await.unwrap()).await.unwrap();
    assert!(about.contains(" db=1 "), "{about}");
}

/// By default a connection of the pool waits for 500 ms, and `WAIT` for 800.
#[tokio::test]
async fn a_connection_of_a_pool_waits_for_as_long_as_the_store() {
    let server = Redis::start().unwrap();
    let timeout = std::time::Duration::from_secs(2);
    let config = RedisConfig::from_pool(pool(&server.url(), 1)).min_replicas(1).timeout(timeout);
    let error = RedisStore::open(config).await.unwrap().acquire(&request()).await.unwrap_err();
    assert!(error.to_string().contains("0 of 1 replicas"), "{error}");
}

#[tokio::test]
async fn a_pool_without_a_free_connection_is_told() {
    let pool = pool(&redis_url(), 1);
    let timeout = std::time::Duration::from_millis(100);
    let config = RedisConfig::from_pool(pool.clone()).key_prefix(fresh_prefix()).timeout(timeout);
    let store = RedisStore::open(config).await.unwrap();
    let busy = pool.get().await.unwrap();
    let error = store.acquire(&request()).await.unwrap_err();
    assert!(
        error
            .to_string()
            .ends_with("pool gave no connection: its connections are all in use, or Redis does not answer on them"),
        "{error}"
    );
    drop(busy);
    pool.close();
    let error = store.acquire(&request()).await.unwrap_err();
    assert!(error.to_string().ends_with("pool gave no connection: the application has closed it"), "{error}");
}

async fn select(connection: &mut MultiplexedConnection, database: i64) -> RedisResult<()> {
    redis::cmd("SELECT").arg(database).query_async(connection).await
}

/// A login that may not send `SELECT` has never left the database.
#[tokio::test]
async fn a_pool_needs_no_permission_for_select() {
    let server = Redis::start().unwrap();
    let mut admin = redis::Client::open(server.url()).unwrap().get_multiplexed_async_connection().await.unwrap();
    let rules = ["on", ">secret", "~*", "&*", "+@all", "-select"];
    let () = redis::cmd("ACL").arg("SETUSER").arg("app").arg(&rules).query_async(&mut admin).await.unwrap();
    let url = server.url().replace("redis://", "redis://app:secret@");
    let prefix = fresh_prefix();
    let store = RedisStore::open(RedisConfig::from_pool(pool(&url, 2)).key_prefix(&prefix)).await.unwrap();
    World { store, prefix, port: server.port() }.is_whole().await;
}

#[tokio::test]
async fn a_pool_needs_no_select_at_all() {
    let server = Redis::start_with(&["--rename-command", "SELECT", ""]).unwrap();
    let prefix = fresh_prefix();
    let config = RedisConfig::from_pool(pool(&server.url(), 2)).key_prefix(&prefix);
    let store = RedisStore::open(config).await.unwrap();
    World { store, prefix, port: server.port() }.is_whole().await;
}

#[test]
fn an_operation_that_keeps_its_runtime_busy_keeps_its_lease() {
    let (by_a_pool, by_an_address) = (fresh_prefix(), fresh_prefix());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            idem_testkit::renewals::a_busy_runtime_keeps_its_leases(async || {
                let config = RedisConfig::from_pool(pool(&redis_url(), 4)).key_prefix(&by_a_pool);
                Arc::new(RedisStore::open(config).await.unwrap())
            });
        });
        idem_testkit::renewals::a_busy_runtime_keeps_its_leases(async || {
            Arc::new(RedisStore::open(RedisConfig::new(redis_url()).key_prefix(&by_an_address)).await.unwrap())
        });
    });
}
