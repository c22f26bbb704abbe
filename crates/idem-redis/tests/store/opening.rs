//! Servers that cannot hold records are refused, with a message that says what to do.

use std::time::{Duration, Instant};

use idem_core::{
    AcquireOutcome, Durability, IdempotencyStore as _, OwnerOutcome, SelfTestError, StoreError, StoreErrorKind,
};
use idem_redis::{RedisConfig, RedisStore};
use idem_servers::{Redis, RedisCluster, redis_command};
use idem_testkit::fixture::{checkpoint, repeat_of, request};

use crate::world::World;

async fn refusal(config: RedisConfig) -> StoreError {
    match RedisStore::open(config).await {
        Ok(store) => panic!("{store:?} was not refused"),
        Err(error) => error,
    }
}

#[tokio::test]
async fn a_server_that_would_evict_records_is_refused() {
    for policy in ["volatile-lru", "volatile-ttl", "volatile-random", "volatile-lfu", "allkeys-lru", "allkeys-random"] {
        let server = Redis::start_with(&["--maxmemory-policy", policy]).unwrap();
        let error = refusal(RedisConfig::new(server.url())).await;
        assert_eq!(error.kind(), StoreErrorKind::Misconfigured);
        let message = error.to_string();
        assert!(message.contains(policy) && message.contains("set it to noeviction"), "{message}");
        println!("{message}");
        let allowed = RedisConfig::new(server.url()).dangerous_allow_eviction();
        let store = RedisStore::open(allowed).await.unwrap();
        assert_eq!(store.self_test().await.unwrap().primaries[0].eviction, policy);
    }
}

#[tokio::test]
async fn a_policy_that_changes_later_is_found_by_the_self_test() {
    let server = Redis::start().unwrap();
    let world = World::at(&server.url(), server.port()).await;
    world.store.self_test().await.unwrap();
    world.ask(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]);
    let SelfTestError::Store(error) = world.store.self_test().await.unwrap_err() else { panic!() };
    assert!(error.to_string().contains("allkeys-lru"), "{error}");
}

#[tokio::test]
async fn a_replica_is_refused() {
    let primary = Redis::start().unwrap();
    let port = primary.port().to_string();
    let replica = Redis::start_with(&["--replicaof", "127.0.0.1", &port]).unwrap();
    let error = refusal(RedisConfig::new(replica.url())).await;
    // It may be about to be promoted.
    assert_eq!(error.kind(), StoreErrorKind::Unavailable);
    assert!(!error.is_indeterminate() && error.to_string().contains("replica"), "{error:?}");
}

#[tokio::test]
async fn a_primary_that_becomes_a_replica_takes_no_verbs() {
    let (server, other) = (Redis::start().unwrap(), Redis::start().unwrap());
    let world = World::at(&server.url(), server.port()).await;
    world.ask(&["REPLICAOF", "127.0.0.1", &other.port().to_string()]);
    let error = world.store.acquire(&request()).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable);
    assert!(!error.is_indeterminate() && error.to_string().contains("replica"), "{error:?}");
    world.ask(&["REPLICAOF", "NO", "ONE"]);
    world.is_whole().await;
}

#[tokio::test]
async fn nobody_at_the_address_is_said_at_once() {
    let server = Redis::start().unwrap();
    let url = server.url();
    drop(server);
    let begun = Instant::now();
    let error = refusal(RedisConfig::new(url)).await;
    assert_eq!(error.kind(), StoreErrorKind::Unavailable);
    assert!(!error.is_indeterminate());
    assert!(begun.elapsed() < Duration::from_secs(5));
}

#[tokio::test]
async fn a_wrong_password_is_a_misconfiguration() {
    let server = Redis::start().unwrap();
    redis_command(server.port(), &["CONFIG", "SET", "requirepass", "hunter2"]).unwrap();
    for url in [format!("redis://:wrong-secret@127.0.0.1:{}", server.port()), server.url()] {
        let error = refusal(RedisConfig::new(url)).await;
        assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{error:?}");
        assert!(!format!("{error:?}").contains("wrong-secret"));
    }
    let url = format!("redis://:hunter2@127.0.0.1:{}", server.port());
    RedisStore::open(RedisConfig::new(url)).await.unwrap().self_test().await.unwrap();
}

#[tokio::test]
async fn a_full_server_has_no_room_and_keeps_what_it_has() {
    let server = Redis::start_with(&["--maxmemory", "3mb"]).unwrap();
    let world = World::at(&server.url(), server.port()).await;
    let (settled, running) = (request(), request());
    let lease = world.lease(&settled).await.unwrap();
    world.complete(&lease).await.unwrap();
    let lease = world.lease(&running).await.unwrap();
    world.ask(&["CONFIG", "SET", "maxmemory", "1"]);
    let error = world.store.acquire(&request()).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Capacity);
    assert!(!error.is_indeterminate() && error.is_retryable(), "{error:?}");
    assert!(world.store.peek(&settled.id).await.unwrap().is_some());
    let replay = world.store.acquire(&repeat_of(&settled)).await.unwrap();
    assert!(matches!(replay, AcquireOutcome::Replay(_)), "{replay:?}");
    // A running operation goes on: its lease is renewed, so that no repeat takes it over, and it is settled.
    assert_eq!(world.store.renew(&lease, running.term).await.unwrap(), OwnerOutcome::Applied);
    assert_eq!(world.store.checkpoint(&lease, &checkpoint("charged")).await.unwrap(), OwnerOutcome::Applied);
    let turned_away = world.store.acquire(&repeat_of(&running)).await.unwrap();
    assert!(matches!(turned_away, AcquireOutcome::InProgress { .. }));
    assert_eq!(world.complete(&lease).await.unwrap(), OwnerOutcome::Applied);
    world.ask(&["CONFIG", "SET", "maxmemory", "0"]);
    world.is_whole().await;
}

#[tokio::test]
async fn the_settings_say_what_a_record_survives() {
    for (settings, level, words) in [
        (&["--appendonly", "no"][..], Durability::Process, "appendonly=no"),
        (&["--appendonly", "yes"], Durability::Crash, "appendfsync=everysec"),
        (&["--appendonly", "yes", "--appendfsync", "always"], Durability::Power, "appendfsync=always"),
    ] {
        let server = Redis::start_with(settings).unwrap();
        let store = RedisStore::open(RedisConfig::new(server.url())).await.unwrap();
        let report = store.self_test().await.unwrap();
        assert_eq!((report.level(), store.capabilities().durability), (level, level));
        assert!(report.to_string().contains(words), "{report}");
        let health = store.health().await.unwrap();
        assert!(health.version.starts_with(|digit: char| digit.is_ascii_digit()), "{health:?}");
        assert_eq!(health.keys, 0, "the self-test left something behind");
    }
}

/// Hosted servers forbid `CONFIG`.
#[tokio::test]
async fn a_server_that_hides_its_settings_is_taken_as_it_shows_itself() {
    let server = Redis::start().unwrap();
    redis_command(server.port(), &["ACL", "SETUSER", "app", "on", ">pw", "~*", "&*", "+@all", "-config"]).unwrap();
    let url = format!("redis://app:pw@127.0.0.1:{}", server.port());
    let store = RedisStore::open(RedisConfig::new(url)).await.unwrap();
    let report = store.self_test().await.unwrap();
    assert_eq!(report.primaries[0].append_sync, None);
    assert_eq!(report.primaries[0].eviction, "noeviction");
}

/// The permissions that the documentation names are enough.
#[tokio::test]
async fn a_user_needs_only_what_the_documentation_says() {
    let server = Redis::start().unwrap();
    let rules = "ACL SETUSER app on >pw resetkeys ~idem:{* resetchannels &idem:{settled} -@all +info +role +ping +time \
        +evalsha +eval +wait +get +set +getrange +del +pexpiretime +pexpireat +publish +subscribe";
    redis_command(server.port(), &rules.split_ascii_whitespace().collect::<Vec<_>>()).unwrap();
    let url = format!("redis://app:pw@127.0.0.1:{}", server.port());
    RedisStore::open(RedisConfig::new(url)).await.unwrap().self_test().await.unwrap();
    let cluster = RedisCluster::start().unwrap();
    for port in cluster.ports() {
        let rules = format!("{rules} +cluster|slots +asking");
        redis_command(port, &rules.split_ascii_whitespace().collect::<Vec<_>>()).unwrap();
    }
    let url = cluster.url().replace("redis+cluster://", "redis+cluster://app:pw@");
    RedisStore::open(RedisConfig::new(url)).await.unwrap().self_test().await.unwrap();
}

/// The driver asks only the servers of a Cluster that it has reached. The configuration of the others is not known.
#[tokio::test]
async fn a_cluster_that_does_not_answer_as_a_whole_is_not_taken_for_examined() {
    let mut cluster = RedisCluster::start().unwrap();
    let primary = cluster.primaries().unwrap()[2].port;
    redis_command(primary, &["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]).unwrap();
    assert_eq!(refusal(RedisConfig::new(cluster.url())).await.kind(), StoreErrorKind::Misconfigured);
    cluster.pause(primary).unwrap();
    let error = refusal(RedisConfig::new(cluster.url())).await;
    assert!(matches!(error.kind(), StoreErrorKind::Unavailable | StoreErrorKind::Timeout), "{error:?}");
}

#[tokio::test]
async fn a_server_of_a_cluster_is_refused_as_one_server() {
    let port = crate::support::ports(&idem_servers::redis_cluster_url())[0];
    let primary = crate::support::primaries(&crate::support::ports(&idem_servers::redis_cluster_url()))[0];
    let error = refusal(RedisConfig::new(format!("redis://127.0.0.1:{primary}"))).await;
    assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{error:?}");
    assert!(error.to_string().contains("redis+cluster://"), "{error}");
    // One server of a Cluster is enough to find it.
    RedisStore::open(RedisConfig::new(format!("redis+cluster://127.0.0.1:{port}"))).await.unwrap();
}

#[tokio::test]
async fn settings_are_read_in_both_protocols() {
    let server = Redis::start_with(&["--appendonly", "yes", "--appendfsync", "always"]).unwrap();
    for query in ["", "/0?protocol=resp3"] {
        let store = RedisStore::open(RedisConfig::new(format!("{}{query}", server.url()))).await.unwrap();
        assert_eq!(store.self_test().await.unwrap().level(), Durability::Power, "{query}");
    }
}
