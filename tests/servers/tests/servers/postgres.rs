//! Tests of the life of a Postgres server.

use std::io::ErrorKind;
use std::net::{Ipv4Addr, TcpStream};
use std::time::{Duration, Instant};

use idem_servers::{Error, Postgres};

use crate::client::{Client, ask};

#[test]
fn a_server_answers_and_is_what_it_says() {
    let postgres = Postgres::start().unwrap();
    assert_eq!(postgres.url(), format!("postgres://postgres@127.0.0.1:{}/postgres", postgres.port()));
    let answer = ask(postgres.port(), "SELECT current_user, current_setting('server_version')").unwrap();
    let (user, version) = answer.split_once('|').unwrap();
    assert_eq!(user, "postgres");
    assert_eq!(postgres.version(), format!("PostgreSQL {}", version.split(' ').next().unwrap()));
    let settings =
        "SELECT current_setting('fsync'), current_setting('max_connections'), current_setting('server_encoding')";
    assert_eq!(ask(postgres.port(), settings).unwrap(), "on|200|UTF8");
}

#[test]
fn settings_of_the_caller_win() {
    let postgres = Postgres::start_with(&["fsync=off", "max_connections=20"]).unwrap();
    let settings = "SELECT current_setting('fsync'), current_setting('max_connections')";
    assert_eq!(ask(postgres.port(), settings).unwrap(), "off|20");
}

#[test]
fn a_server_that_cannot_start_shows_its_log() {
    let error = Postgres::start_with(&["no_such_setting=1"]).unwrap_err();
    assert!(matches!(error, Error::Failed { .. }), "{error}");
    assert!(error.to_string().contains("no_such_setting"), "{error}");
}

#[test]
fn a_restart_keeps_port_and_data() {
    let mut postgres = Postgres::start().unwrap();
    let port = postgres.port();
    ask(port, "CREATE TABLE kept (value int); INSERT INTO kept VALUES (7)").unwrap();
    postgres.restart().unwrap();
    assert_eq!(postgres.port(), port);
    assert_eq!(ask(port, "SELECT value FROM kept").unwrap(), "7");
}

#[test]
fn what_is_stopped_refuses_connections_until_it_starts_again() {
    let mut postgres = Postgres::start().unwrap();
    assert!(postgres.start_again().is_err(), "it is running already");
    postgres.stop().unwrap();
    postgres.stop().unwrap();
    assert!(TcpStream::connect((Ipv4Addr::LOCALHOST, postgres.port())).is_err());
    assert!(postgres.pause().is_err(), "it is not running");
    postgres.start_again().unwrap();
    assert_eq!(ask(postgres.port(), "SELECT 1").unwrap(), "1");
}

#[test]
fn a_killed_server_drops_its_clients_and_recovers_what_was_committed() {
    let mut postgres = Postgres::start().unwrap();
    let mut client = Client::connect(postgres.port()).unwrap();
    client.ask("CREATE TABLE kept (value int); INSERT INTO kept VALUES (7)").unwrap();
    client.ask("BEGIN").unwrap();
    client.ask("INSERT INTO kept VALUES (8)").unwrap();
    postgres.kill().unwrap();
    assert!(client.ask("COMMIT").is_err());
    assert!(TcpStream::connect((Ipv4Addr::LOCALHOST, postgres.port())).is_err());
    postgres.start_again().unwrap();
    assert_eq!(ask(postgres.port(), "SELECT value FROM kept").unwrap(), "7");
}

#[test]
fn a_server_is_killed_also_while_its_clients_are_busy() {
    let mut postgres = Postgres::start().unwrap();
    let port = postgres.port();
    let mut busy: Vec<Client> = (0..3).map(|_| Client::connect(port).unwrap()).collect();
    for client in &mut busy {
        client.send("DO $$ BEGIN LOOP END LOOP; END $$").unwrap();
    }
    let active = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'DO %' AND state = 'active'";
    let start = Instant::now();
    while ask(port, active).unwrap() != "3" {
        assert!(start.elapsed() < Duration::from_secs(20), "not all became busy: {}", ask(port, active).unwrap());
    }
    postgres.kill().unwrap();
    assert!(busy.iter_mut().all(|client| client.answer().is_err_and(|error| error.kind() != ErrorKind::WouldBlock)));
    // It starts only if none of the old processes holds the shared memory.
    postgres.start_again().unwrap();
    assert_eq!(ask(port, "SELECT 1").unwrap(), "1");
}

#[test]
fn a_paused_server_answers_nobody_new_until_it_goes_on() {
    let mut postgres = Postgres::start().unwrap();
    postgres.pause().unwrap();
    let error = Client::connect(postgres.port()).err().unwrap();
    assert!(matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut), "{error}");
    postgres.resume().unwrap();
    assert_eq!(ask(postgres.port(), "SELECT 1").unwrap(), "1");
}

#[test]
fn a_paused_server_can_be_stopped_killed_and_dropped() {
    let mut postgres = Postgres::start().unwrap();
    postgres.pause().unwrap();
    postgres.stop().unwrap();
    postgres.start_again().unwrap();
    postgres.pause().unwrap();
    postgres.kill().unwrap();
    postgres.start_again().unwrap();
    postgres.pause().unwrap();
    let port = postgres.port();
    drop(postgres);
    assert!(TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_err());
}

#[test]
fn a_frozen_server_carries_out_afterwards_what_it_was_sent() {
    let mut postgres = Postgres::start().unwrap();
    let port = postgres.port();
    ask(port, "CREATE TABLE kept (value int)").unwrap();
    let mut client = Client::connect(port).unwrap();
    postgres.freeze().unwrap();
    assert!(client.ask("INSERT INTO kept VALUES (7)").is_err(), "its session stands still as well");
    drop(client);
    postgres.thaw().unwrap();
    let give_up_at = Instant::now() + Duration::from_secs(20);
    while ask(port, "SELECT value FROM kept").unwrap() != "7" {
        assert!(Instant::now() < give_up_at, "it was sent, and is not carried out");
    }
}

#[test]
fn a_full_disk_fails_what_writes_and_loses_nothing_that_was_written() {
    let mut postgres = Postgres::start().unwrap();
    let port = postgres.port();
    ask(port, "CREATE TABLE kept (value int); INSERT INTO kept VALUES (7)").unwrap();
    postgres.fill_disk().unwrap();
    assert!(ask(port, "INSERT INTO kept VALUES (8)").is_err(), "it cannot be written");
    postgres.make_room().unwrap();
    assert_eq!(ask(port, "SELECT value FROM kept").unwrap(), "7");
    ask(port, "INSERT INTO kept VALUES (9)").unwrap();
}
