//! What is awaited on replicas, and what happens when they are away.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use idem_core::engine::{Idempotency, Operation, Settings};
use idem_core::{AcquireOutcome, IdempotencyStore as _, OwnerOutcome, Settlement, StoreErrorKind, Term};
use idem_core::{Fingerprint, Scope};
use idem_redis::{RedisConfig, RedisStore};
use idem_servers::{RedisCluster, RedisSentinel};
use idem_testkit::fixture::{KEPT, LEASE, RETENTION, checkpoint, repeat_of, request};

use crate::world::{World, eventually};

async fn world(group: &RedisSentinel, replicas: u32) -> World {
    let configure = |config: RedisConfig| config.min_replicas(replicas).timeout(Duration::from_secs(2));
    World::with(&group.url(), group.primary_port().unwrap(), configure).await
}

#[tokio::test]
async fn what_is_answered_is_on_the_replicas() {
    let group = RedisSentinel::start().unwrap();
    let world = world(&group, 2).await;
    for _ in 0..20 {
        let request = request();
        let lease = world.lease(&request).await.unwrap();
        let key = world.key(&request.id);
        for state in [1, 2] {
            if state == 2 {
                assert_eq!(world.complete(&lease).await.unwrap(), OwnerOutcome::Applied);
            }
            for port in group.replica_ports().unwrap() {
                assert_eq!(crate::world::stored_state(port, &key), state, "the replica at {port} lacks it");
            }
        }
    }
}

#[tokio::test]
async fn with_too_few_replicas_nothing_runs_and_nobody_is_told_of_a_success() {
    let mut group = RedisSentinel::start().unwrap();
    let world = world(&group, 2).await;
    let (settled, running) = (request(), request());
    let lease = world.lease(&settled).await.unwrap();
    world.complete(&lease).await.unwrap();
    let lease = world.lease(&running).await.unwrap();

    let away = group.replica_ports().unwrap()[0];
    group.pause(away).unwrap();
    let fresh = request();
    let store = &world.store;
    for error in [
        store.acquire(&fresh).await.unwrap_err(),
        store.acquire(&repeat_of(&settled)).await.unwrap_err(),
        // The repeat changes nothing, but the record is still not on two replicas.
        store.acquire(&running).await.unwrap_err(),
    ] {
        assert_eq!(error.kind(), StoreErrorKind::Unavailable);
        assert!(error.is_indeterminate() && error.is_retryable(), "{error:?}");
        assert!(error.to_string().contains("1 of 2 replicas"), "{error}");
    }
    // A caller that acquired in vain releases the key, or tries again with the same token.
    group.resume(away).unwrap();
    let again = eventually("the replica is back", async || world.lease(&fresh).await.ok()).await;
    assert_eq!(again.attempt, 1);
    assert_eq!(store.settle(&again, &Settlement::Released, KEPT).await.unwrap(), OwnerOutcome::Applied);
    assert!(store.peek(&fresh.id).await.unwrap().is_none());

    group.pause(away).unwrap();
    let term = Term { lease: LEASE, retention: RETENTION };
    assert!(store.renew(&lease, term).await.unwrap_err().is_indeterminate());
    assert!(store.checkpoint(&lease, &checkpoint("charged")).await.unwrap_err().is_indeterminate());
    assert!(world.complete(&lease).await.unwrap_err().is_indeterminate());
    // The record is settled by now. The repeat changes nothing, but the record is still not on two replicas.
    assert!(world.complete(&lease).await.unwrap_err().is_indeterminate());
    group.resume(away).unwrap();
    eventually("the replica is back", async || world.complete(&lease).await.ok()).await;
    assert!(matches!(store.acquire(&repeat_of(&running)).await.unwrap(), AcquireOutcome::Replay(_)));
}

#[tokio::test]
async fn whoever_is_turned_away_does_not_wait_for_replicas() {
    let mut group = RedisSentinel::start().unwrap();
    let world = world(&group, 1).await;
    let request = request();
    world.lease(&request).await.unwrap();
    for port in group.replica_ports().unwrap() {
        group.pause(port).unwrap();
    }
    let turned_away = world.store.acquire(&repeat_of(&request)).await.unwrap();
    assert!(matches!(turned_away, AcquireOutcome::InProgress { .. }));
    let mismatch = idem_testkit::fixture::mismatch_of(&request);
    assert!(matches!(world.store.acquire(&mismatch).await.unwrap(), AcquireOutcome::Mismatch { .. }));
}

/// A primary with fewer replicas than its `min-replicas-to-write` takes no writes at all.
#[tokio::test]
async fn a_server_that_lacks_replicas_itself_says_what_has_a_record() {
    let group = RedisSentinel::start().unwrap();
    let world = world(&group, 1).await;
    let (settled, running) = (request(), request());
    let lease = world.lease(&settled).await.unwrap();
    world.complete(&lease).await.unwrap();
    world.lease(&running).await.unwrap();
    world.ask(&["CONFIG", "SET", "min-replicas-to-write", "3"]);
    let error = world.store.acquire(&repeat_of(&settled)).await.unwrap_err();
    assert!(error.has_existing_record() && error.is_retryable(), "{error:?}");
    let turned_away = world.store.acquire(&repeat_of(&running)).await.unwrap();
    assert!(matches!(turned_away, AcquireOutcome::InProgress { .. }));
    let error = world.store.acquire(&request()).await.unwrap_err();
    assert!(!error.has_existing_record() && !error.is_indeterminate(), "{error:?}");
    world.ask(&["CONFIG", "SET", "min-replicas-to-write", "0"]);
    world.is_whole().await;
}

/// How many changes the server has made since its last save.
fn written(port: u16) -> i64 {
    let persistence = idem_servers::redis_command(port, &["INFO", "persistence"]).unwrap();
    persistence.field("rdb_changes_since_last_save").unwrap().parse().unwrap()
}

/// `WAIT` is documented to await only the writes of the connection that sends it. A repeat may use another connection, so it
/// has to write as well. Where no replicas are awaited, it writes nothing.
#[tokio::test]
async fn a_repeat_writes_where_replicas_are_awaited_and_nowhere_else() {
    let group = RedisSentinel::start().unwrap();
    for (replicas, writes) in [(0, false), (1, true)] {
        let world = world(&group, replicas).await;
        let (running, settled) = (request(), request());
        world.lease(&running).await.unwrap();
        let lease = world.lease(&settled).await.unwrap();
        world.complete(&lease).await.unwrap();
        let has_written = || {
            let (port, before) = (world.port, written(world.port));
            move || written(port) > before
        };
        let since = has_written();
        world.lease(&running).await.unwrap();
        assert_eq!(since(), writes, "the repeat of an acquire");
        let since = has_written();
        world.complete(&lease).await.unwrap();
        assert_eq!(since(), writes, "the repeat of a settlement");
        let since = has_written();
        world.store.acquire(&repeat_of(&settled)).await.unwrap();
        assert_eq!(since(), writes, "a replay");
        let since = has_written();
        world.store.peek(&settled.id).await.unwrap();
        assert_eq!(since(), writes, "a peek");
    }
}

#[tokio::test]
async fn too_few_replicas_are_counted_in_a_cluster_too() {
    let mut cluster = RedisCluster::start().unwrap();
    let world = World::with(&cluster.url(), 0, |config| config.min_replicas(1).timeout(Duration::from_secs(4))).await;
    // Every connection is made, and every primary knows the scripts, before the replicas are away.
    for _ in 0..20 {
        world.is_whole().await;
    }
    let replicas: Vec<u16> =
        cluster.primaries().unwrap().iter().map(|primary| cluster.replica_of(primary.port).unwrap()).collect();
    for replica in &replicas {
        cluster.pause(*replica).unwrap();
    }
    for _ in 0..3 {
        let error = world.store.acquire(&request()).await.unwrap_err();
        assert!(error.to_string().contains("0 of 1 replicas"), "{error:?}");
    }
}

/// With `dangerous_fail_open`, the engine must not run an operation again that the store has a record of.
#[tokio::test]
async fn what_has_a_record_does_not_run_without_protection() {
    let mut group = RedisSentinel::start().unwrap();
    let world = world(&group, 2).await;
    let store: RedisStore = world.store.clone();
    let idempotency = Idempotency::at_least_once(Arc::new(store), Settings::new().dangerous_fail_open());
    let operation =
        || Operation::new(Scope::new("acme", "pay"), "k".parse().unwrap(), Fingerprint::of_bytes("pay", b"1"));
    let runs = Arc::new(AtomicUsize::new(0));
    let run = || {
        let runs = Arc::clone(&runs);
        move |_: idem_core::engine::Context| async move { Ok::<_, String>(runs.fetch_add(1, Ordering::SeqCst)) }
    };
    idempotency.run(operation(), run()).await.unwrap();
    group.pause(group.replica_ports().unwrap()[0]).unwrap();
    idempotency.run(operation(), run()).await.unwrap_err();
    assert_eq!(runs.load(Ordering::SeqCst), 1);
}
