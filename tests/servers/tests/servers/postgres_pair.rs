//! Tests of a primary, its standby, and a failover.

use std::net::{Ipv4Addr, TcpStream};
use std::time::{Duration, Instant};

use idem_servers::PostgresPair;

use crate::client::{Client, ask};

/// Longer than anything takes on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(20);

fn eventually(what: &str, mut reached: impl FnMut() -> bool) {
    let start = Instant::now();
    while !reached() {
        assert!(start.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_standby_takes_over_what_was_awaited_and_gets_a_standby_of_its_own() {
    let mut pair = PostgresPair::start_with(&[PostgresPair::SYNCHRONOUS]).unwrap();
    let (old, standby) = (pair.primary_port(), pair.standby_port().unwrap());
    assert_eq!(ask(standby, "SELECT pg_is_in_recovery()").unwrap(), "t");
    eventually("the standby is awaited", || {
        ask(old, "SELECT sync_state FROM pg_stat_replication").is_ok_and(|state| state == "sync")
    });
    ask(old, "CREATE TABLE kept (value int); INSERT INTO kept VALUES (7)").unwrap();
    assert!(pair.promote().is_err(), "the primary is alive");
    pair.freeze_primary().unwrap();
    pair.kill_primary().unwrap();
    pair.promote().unwrap();
    assert_eq!((pair.primary_port(), pair.standby_port()), (standby, None));
    assert!(TcpStream::connect((Ipv4Addr::LOCALHOST, old)).is_err(), "two primaries");
    assert_eq!(ask(standby, "SELECT pg_is_in_recovery(), (SELECT value FROM kept)").unwrap(), "f|7");
    pair.rebuild().unwrap();
    assert!(pair.rebuild().is_err(), "there is one");
    ask(standby, "INSERT INTO kept VALUES (8)").unwrap();
    let newest = pair.standby_port().unwrap();
    eventually("the new standby follows", || {
        ask(newest, "SELECT string_agg(value::TEXT, ',') FROM kept").is_ok_and(|values| values == "7,8")
    });
}

#[test]
fn what_is_written_after_the_standby_was_cut_off_is_lost_with_the_primary() {
    let mut pair = PostgresPair::start_with(&[]).unwrap();
    let old = pair.primary_port();
    ask(old, "CREATE TABLE kept (value int); INSERT INTO kept VALUES (7)").unwrap();
    let written = ask(old, "SELECT pg_current_wal_lsn()").unwrap();
    let standby = pair.standby_port().unwrap();
    let received = format!("SELECT pg_last_wal_receive_lsn() >= '{written}'");
    eventually("the standby has it", || ask(standby, &received).is_ok_and(|answer| answer == "t"));
    pair.cut_off_standby().unwrap();
    ask(old, "INSERT INTO kept VALUES (8)").unwrap();
    pair.kill_primary().unwrap();
    pair.promote().unwrap();
    assert_eq!(ask(pair.primary_port(), "SELECT value FROM kept").unwrap(), "7");
}

#[test]
fn a_commit_waits_for_a_standby_that_is_cut_off_and_ends_when_it_is_back() {
    let mut pair = PostgresPair::start_with(&[PostgresPair::SYNCHRONOUS]).unwrap();
    let primary = pair.primary_port();
    ask(primary, "CREATE TABLE kept (value int)").unwrap();
    pair.cut_off_standby().unwrap();
    let mut client = Client::connect(primary).unwrap();
    client.send("INSERT INTO kept VALUES (8)").unwrap();
    let waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'";
    eventually("the commit waits", || ask(primary, waiting).is_ok_and(|count| count == "1"));
    assert_eq!(ask(primary, "SELECT count(*) FROM kept").unwrap(), "0", "nobody sees it");
    pair.reconnect_standby().unwrap();
    client.answer().unwrap();
    pair.crash_primary().unwrap();
    assert_eq!(ask(primary, "SELECT value FROM kept").unwrap(), "8");
}
