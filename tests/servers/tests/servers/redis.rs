//! Tests of the life of a Redis server.

use std::io::ErrorKind;
use std::net::{Ipv4Addr, TcpStream};

use idem_servers::{Error, Redis, Reply, redis_command};

/// The value of a setting.
fn setting(port: u16, name: &str) -> String {
    redis_command(port, &["CONFIG", "GET", name]).unwrap().items()[1].text().unwrap().to_owned()
}

fn value(port: u16) -> Reply {
    redis_command(port, &["GET", "kept"]).unwrap()
}

#[test]
fn a_server_answers_and_is_what_it_says() {
    let redis = Redis::start().unwrap();
    assert_eq!(redis.url(), format!("redis://127.0.0.1:{}", redis.port()));
    let info = redis_command(redis.port(), &["INFO", "server"]).unwrap();
    assert_eq!(redis.version(), format!("Redis {}", info.field("redis_version").unwrap()));
    for (name, value) in [("appendonly", "no"), ("save", ""), ("maxmemory-policy", "noeviction")] {
        assert_eq!(setting(redis.port(), name), value, "{name}");
    }
}

#[test]
fn settings_of_the_caller_win() {
    let redis = Redis::start_with(&["--maxmemory-policy", "volatile-lru", "--maxmemory", "10mb"]).unwrap();
    assert_eq!(setting(redis.port(), "maxmemory-policy"), "volatile-lru");
    assert_eq!(setting(redis.port(), "maxmemory"), (10 << 20).to_string());
}

#[test]
fn a_server_that_cannot_start_shows_its_log() {
    let error = Redis::start_with(&["--no-such-setting", "1"]).unwrap_err();
    assert!(matches!(error, Error::Failed { .. }), "{error}");
    assert!(error.to_string().contains("no-such-setting"), "{error}");
}

#[test]
fn bytes_come_back_as_they_were_and_errors_are_told_apart() {
    let redis = Redis::start().unwrap();
    let bytes = b"\0\r\n\xff".as_slice();
    redis_command(redis.port(), &[b"SET", b"kept".as_slice(), bytes]).unwrap();
    assert_eq!(value(redis.port()), Reply::Bytes(bytes.into()));
    let error = redis_command(redis.port(), &["INCR", "kept"]).unwrap_err();
    assert!(matches!(&error, Error::Refused { reply, .. } if reply.starts_with("ERR ")), "{error}");
}

#[test]
fn a_restart_keeps_the_port_and_forgets_the_data() {
    let mut redis = Redis::start().unwrap();
    let port = redis.port();
    redis_command(port, &["SET", "kept", "7"]).unwrap();
    redis.restart().unwrap();
    assert_eq!(redis.port(), port);
    assert_eq!(value(port), Reply::Nil);
}

#[test]
fn a_killed_server_recovers_what_it_appended_to_its_file() {
    let mut redis = Redis::start_with(&["--appendonly", "yes", "--appendfsync", "always"]).unwrap();
    redis_command(redis.port(), &["SET", "kept", "7"]).unwrap();
    redis.kill().unwrap();
    redis.start_again().unwrap();
    assert_eq!(value(redis.port()).integer(), Some(7));
}

#[test]
fn what_is_stopped_refuses_connections_until_it_starts_again() {
    let mut redis = Redis::start().unwrap();
    assert!(redis.start_again().is_err(), "it is running already");
    for end in [Redis::stop, Redis::kill] {
        end(&mut redis).unwrap();
        end(&mut redis).unwrap();
        assert!(TcpStream::connect((Ipv4Addr::LOCALHOST, redis.port())).is_err());
        assert!(redis.pause().is_err(), "it is not running");
        redis.start_again().unwrap();
        assert_eq!(value(redis.port()), Reply::Nil);
    }
}

#[test]
fn a_paused_server_answers_nobody_until_it_goes_on() {
    let mut redis = Redis::start().unwrap();
    redis.pause().unwrap();
    let error = redis_command(redis.port(), &["SET", "kept", "7"]).unwrap_err();
    let Error::Io { source, .. } = &error else { panic!("{error}") };
    assert!(matches!(source.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut), "{error}");
    redis.resume().unwrap();
    // The command was written before the client gave up.
    assert_eq!(value(redis.port()).integer(), Some(7));
}

#[test]
fn a_paused_server_can_be_stopped_killed_and_dropped() {
    let mut redis = Redis::start().unwrap();
    for end in [Redis::stop, Redis::kill] {
        redis.pause().unwrap();
        end(&mut redis).unwrap();
        redis.start_again().unwrap();
    }
    redis.pause().unwrap();
    let port = redis.port();
    drop(redis);
    assert!(TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_err());
}
