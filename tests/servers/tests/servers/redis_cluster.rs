//! Tests of a cluster that loses nodes and moves slots.

use std::sync::atomic::{AtomicBool, Ordering};

use std::time::{Duration, Instant};

use idem_servers::{Error, RedisCluster, Reply, redis_command};

/// A key with a common tag: all of them share a slot.
fn key(number: usize) -> String {
    format!("{{tag}}:{number}")
}

fn slot(port: u16) -> u16 {
    redis_command(port, &["CLUSTER", "KEYSLOT", "{tag}"]).unwrap().integer().unwrap().try_into().unwrap()
}

/// Another primary than this one.
fn other(cluster: &RedisCluster, owner: u16) -> u16 {
    cluster.primaries().unwrap().into_iter().map(|primary| primary.port).find(|port| *port != owner).unwrap()
}

fn refusal(result: Result<Reply, Error>) -> Option<String> {
    match result {
        Ok(_) => None,
        Err(Error::Refused { reply, .. }) => Some(reply.split(' ').next().unwrap().to_owned()),
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn a_cluster_serves_every_slot_from_three_primaries() {
    let cluster = RedisCluster::start().unwrap();
    let addresses: Vec<String> = cluster.ports().iter().map(|port| format!("127.0.0.1:{port}")).collect();
    assert_eq!(addresses.len(), 6);
    assert_eq!(cluster.url(), format!("redis+cluster://{}", addresses.join(",")));
    let primaries = cluster.primaries().unwrap();
    assert_eq!(primaries.len(), 3);
    assert_eq!(primaries.iter().flat_map(|primary| &primary.slots).flat_map(Clone::clone).count(), 16_384);
    for port in cluster.ports() {
        let info = redis_command(port, &["CLUSTER", "INFO"]).unwrap();
        assert_eq!((info.field("cluster_state"), info.field("cluster_known_nodes")), (Some("ok"), Some("6")));
    }
    for primary in &primaries {
        assert_eq!(cluster.owner_of_slot(*primary.slots[0].start()).unwrap(), primary.port);
        let replica = cluster.replica_of(primary.port).unwrap();
        assert!(primaries.iter().all(|primary| primary.port != replica));
    }
}

#[test]
fn coverage_is_the_callers_choice() {
    let cluster = RedisCluster::start_with(&["--cluster-require-full-coverage", "yes"]).unwrap();
    for port in cluster.ports() {
        let reply = redis_command(port, &["CONFIG", "GET", "cluster-require-full-coverage"]).unwrap();
        assert_eq!(reply.items()[1].text(), Some("yes"));
    }
}

/// A replication offset of a server.
fn offset(port: u16, name: &str) -> u64 {
    let info = redis_command(port, &["INFO", "replication"]).unwrap();
    let line = info.text().unwrap().lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).unwrap();
    line.trim().parse().unwrap()
}

#[test]
fn a_killed_primary_is_replaced_and_starts_again_as_a_replica() {
    let mut cluster = RedisCluster::start().unwrap();
    let slot = slot(cluster.ports()[0]);
    let old = cluster.owner_of_slot(slot).unwrap();
    let heir = cluster.replica_of(old).unwrap();
    redis_command(old, &["SET", &key(0), "7"]).unwrap();
    // `WAIT` would await only the writes on its connection.
    let (sent, give_up_at) = (offset(old, "master_repl_offset"), Instant::now() + Duration::from_secs(30));
    while offset(heir, "slave_repl_offset") < sent {
        assert!(Instant::now() < give_up_at, "the replica never got the key");
        std::thread::sleep(Duration::from_millis(10));
    }
    cluster.kill(old).unwrap();
    assert!(cluster.wait_until_ok().is_err(), "one does not run");
    cluster.wait_until_served().unwrap();
    assert_eq!(cluster.owner_of_slot(slot).unwrap(), heir);
    assert_eq!(redis_command(heir, &["GET", &key(0)]).unwrap().integer(), Some(7));
    cluster.start_again(old).unwrap();
    cluster.wait_until_ok().unwrap();
    assert_eq!(cluster.replica_of(heir).unwrap(), old);
}

#[test]
fn a_paused_primary_is_replaced_and_comes_back_as_a_replica() {
    let mut cluster = RedisCluster::start().unwrap();
    let old = cluster.owner_of_slot(0).unwrap();
    cluster.pause(old).unwrap();
    cluster.wait_until_served().unwrap();
    let heir = cluster.owner_of_slot(0).unwrap();
    assert_ne!(heir, old);
    cluster.resume(old).unwrap();
    cluster.wait_until_ok().unwrap();
    assert_eq!((cluster.owner_of_slot(0).unwrap(), cluster.replica_of(heir).unwrap()), (heir, old));
}

#[test]
fn a_slot_moves_with_its_keys() {
    let cluster = RedisCluster::start().unwrap();
    let slot = slot(cluster.ports()[0]);
    let from = cluster.owner_of_slot(slot).unwrap();
    let to = other(&cluster, from);
    for number in 0..25 {
        redis_command(from, &["SET", &key(number), &number.to_string()]).unwrap();
    }
    cluster.migrate_slot(slot, from, to).unwrap();
    assert_eq!(cluster.owner_of_slot(slot).unwrap(), to);
    for number in 0..25_i64 {
        let key = key(number.try_into().unwrap());
        assert_eq!(redis_command(to, &["GET", &key]).unwrap().integer(), Some(number));
        assert_eq!(refusal(redis_command(from, &["GET", &key])).unwrap(), "MOVED");
    }
    cluster.wait_until_ok().unwrap();
    let error = cluster.migrate_slot(slot, from, to).unwrap_err();
    assert!(matches!(error, Error::Refused { .. }), "it has moved already: {error}");
}

#[test]
fn clients_see_both_sides_of_a_slot_that_moves() {
    const KEYS: usize = 3000;
    let cluster = RedisCluster::start().unwrap();
    let slot = slot(cluster.ports()[0]);
    let from = cluster.owner_of_slot(slot).unwrap();
    let to = other(&cluster, from);
    let pairs = (0..KEYS).flat_map(|number| [key(number), "7".into()]);
    redis_command(from, &["MSET".to_owned()].into_iter().chain(pairs).collect::<Vec<_>>()).unwrap();
    let has_moved = AtomicBool::new(false);
    let seen = std::thread::scope(|scope| {
        let client = scope.spawn(|| {
            let mut seen = std::collections::BTreeSet::new();
            while !has_moved.load(Ordering::Relaxed) {
                // Two keys that move at different times, then one that was never there.
                seen.extend(refusal(redis_command(from, &["MGET", &key(0), &key(KEYS - 1)])));
                seen.extend(refusal(redis_command(from, &["MGET", &key(0), &key(KEYS)])));
                seen.extend(refusal(redis_command(from, &["GET", &key(KEYS)])));
            }
            seen
        });
        let result = cluster.migrate_slot(slot, from, to);
        has_moved.store(true, Ordering::Relaxed);
        result.unwrap();
        client.join().unwrap()
    });
    assert!(seen.contains("ASK") && seen.contains("TRYAGAIN"), "{seen:?}");
    let count = redis_command(to, &["CLUSTER", "COUNTKEYSINSLOT", &slot.to_string()]).unwrap();
    assert_eq!(count.integer(), Some(KEYS.try_into().unwrap()));
}
