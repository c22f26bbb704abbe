//! Tests of Sentinels that replace a primary.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use idem_servers::{RedisSentinel, redis_command};

fn role(port: u16) -> String {
    redis_command(port, &["ROLE"]).unwrap().items()[0].text().unwrap().to_owned()
}

/// Waits until the replica has the key. `WAIT` would await only the writes on its connection.
fn await_key(replica: u16) {
    let give_up_at = Instant::now() + Duration::from_secs(30);
    while redis_command(replica, &["GET", "kept"]).unwrap().integer() != Some(7) {
        assert!(Instant::now() < give_up_at, "the replica {replica} never got the key");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_group_has_a_primary_two_replicas_and_three_sentinels() {
    let group = RedisSentinel::start().unwrap();
    let sentinels = group.sentinel_ports();
    let addresses: Vec<String> = sentinels.iter().map(|port| format!("127.0.0.1:{port}")).collect();
    assert_eq!(group.url(), format!("redis+sentinel://{}/idem", addresses.join(",")));
    assert_eq!(sentinels.iter().map(|port| role(*port)).collect::<Vec<_>>(), ["sentinel"; 3]);
    let primary = group.primary_port().unwrap();
    assert_eq!(role(primary), "master");
    assert_eq!(group.replica_ports().unwrap().iter().map(|port| role(*port)).collect::<Vec<_>>(), ["slave"; 2]);
    redis_command(primary, &["SET", "kept", "7"]).unwrap();
    for replica in group.replica_ports().unwrap() {
        await_key(replica);
    }
}

#[test]
fn a_paused_primary_is_replaced_and_comes_back_as_a_replica() {
    let mut group = RedisSentinel::start().unwrap();
    let servers: BTreeSet<u16> =
        group.replica_ports().unwrap().into_iter().chain([group.primary_port().unwrap()]).collect();
    // The second round shows that the group recovered completely from the first.
    for _ in 0..2 {
        let old = group.pause_primary().unwrap();
        assert!(group.wait_until_whole().is_err(), "one is paused");
        let new = group.wait_for_other_primary_than(old).unwrap();
        assert!(new != old && servers.contains(&new));
        redis_command(new, &["SET", "kept", "7"]).unwrap();
        group.resume(old).unwrap();
        group.wait_until_whole().unwrap();
        assert_eq!(role(old), "slave");
        assert_eq!(group.primary_port().unwrap(), new);
    }
}

#[test]
fn a_killed_primary_is_replaced_and_starts_again_as_a_replica() {
    let mut group = RedisSentinel::start().unwrap();
    let old = group.primary_port().unwrap();
    group.kill(old).unwrap();
    let new = group.wait_for_other_primary_than(old).unwrap();
    group.start_again(old).unwrap();
    group.wait_until_whole().unwrap();
    assert_eq!((role(old).as_str(), role(new).as_str()), ("slave", "master"));
}

#[test]
fn two_sentinels_are_enough() {
    let mut group = RedisSentinel::start_with(&["--maxmemory", "10mb"]).unwrap();
    let sentinel = group.sentinel_ports()[0];
    group.kill(sentinel).unwrap();
    let old = group.pause_primary().unwrap();
    let new = group.wait_for_other_primary_than(old).unwrap();
    let limit = redis_command(new, &["CONFIG", "GET", "maxmemory"]).unwrap();
    assert_eq!(limit.items()[1].integer(), Some(10 << 20));
    group.resume(old).unwrap();
    group.start_again(sentinel).unwrap();
    group.wait_until_whole().unwrap();
    assert!(group.kill(1).is_err(), "nobody has this port");
}
