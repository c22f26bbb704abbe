//! Servers that are paused, killed and started again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use idem_core::{IdempotencyStore as _, OwnerOutcome, StoreErrorKind};
use idem_redis::RedisConfig;
use idem_servers::Redis;
use idem_testkit::fixture::request;

use crate::world::World;

const TIMEOUT: Duration = Duration::from_millis(300);

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
            assert!(waited < TIMEOUT * 5, "{waited:?}");
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
        // It knows no script any more, and every record that it acknowledged.
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
