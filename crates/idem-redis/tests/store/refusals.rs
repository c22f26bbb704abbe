//! Servers that refuse for a while: credentials that rotate, permissions that are revoked, a limit that is reached. Each is an
//! outage with its cause in the message, and the store recovers without being opened again.

use idem_core::{AcquireOutcome, IdempotencyStore as _, OwnerOutcome, StoreError, StoreErrorKind};
use idem_redis::{RedisConfig, RedisStore};
use idem_servers::{Redis, redis_command};
use idem_testkit::fixture::{repeat_of, request};

use crate::world::{World, eventually};

/// A store that logs in as `app` with the password `pw`.
async fn logged_in() -> (Redis, World) {
    let server = Redis::start().unwrap();
    redis_command(server.port(), &["ACL", "SETUSER", "app", "on", ">pw", "~*", "&*", "+@all"]).unwrap();
    let world = World::at(&format!("redis://app:pw@127.0.0.1:{}", server.port()), server.port()).await;
    (server, world)
}

fn acl(world: &World, rules: &str) {
    let words = ["ACL", "SETUSER", "app"].into_iter().chain(rules.split_ascii_whitespace());
    world.ask(&words.collect::<Vec<_>>());
}

fn end_all_connections(world: &World) {
    for kind in ["normal", "pubsub"] {
        world.ask(&["CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes"]);
    }
}

fn is_an_outage(error: &StoreError, word: &str) {
    assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error:?}");
    assert!(error.is_retryable() && error.to_string().contains(word), "{error:?}");
}

/// Inside a script, some versions of Redis report this without a separate code.
fn is_refused(error: &StoreError) {
    is_an_outage(error, "could not");
    let said = format!("{error:?}");
    assert!(said.contains("permission") || said.contains("can't run this command"), "{said}");
}

async fn is_misconfigured(url: &str, word: &str) {
    let error = RedisStore::open(RedisConfig::new(url)).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{error:?}");
    assert!(error.to_string().contains(word), "{error}");
}

#[tokio::test]
async fn a_password_that_is_rotated_is_an_outage_until_it_is_the_configured_one_again() {
    let (server, world) = logged_in().await;
    let running = request();
    let lease = world.lease(&running).await.unwrap();
    for _ in 0..2 {
        acl(&world, "resetpass >new");
        end_all_connections(&world);
        is_an_outage(&world.complete(&lease).await.unwrap_err(), "login");
        is_an_outage(&world.lease(&request()).await.unwrap_err(), "login");
        is_misconfigured(&format!("redis://app:pw@127.0.0.1:{}", server.port()), "login").await;
        acl(&world, "resetpass >pw");
        world.is_whole().await;
    }
    assert_eq!(world.complete(&lease).await.unwrap(), OwnerOutcome::Applied);
}

#[tokio::test]
async fn a_user_that_is_deleted_is_an_outage_until_it_is_back() {
    let (_server, world) = logged_in().await;
    let lease = world.lease(&request()).await.unwrap();
    world.ask(&["ACL", "DELUSER", "app"]);
    is_an_outage(&world.complete(&lease).await.unwrap_err(), "login");
    acl(&world, "on >pw ~* &* +@all");
    assert_eq!(world.complete(&lease).await.unwrap(), OwnerOutcome::Applied);
    world.is_whole().await;
}

/// A verb needs the permission for each of its commands, and may have written before one is missing.
#[tokio::test]
async fn a_permission_that_is_revoked_is_an_outage_in_which_a_verb_may_have_run() {
    for (command, settling) in [("set", "evalsha"), ("time", "get"), ("pexpiretime", "pexpiretime"), ("set", "set")] {
        let (server, world) = logged_in().await;
        world.is_whole().await;
        let request = request();
        acl(&world, &format!("-{command}"));
        let error = world.store.acquire(&request).await.unwrap_err();
        is_refused(&error);
        assert!(error.is_indeterminate(), "{command}: {error:?}");
        acl(&world, &format!("+{command}"));
        // By its token, the owner finds what was done.
        let lease = world.lease(&request).await.unwrap();
        assert!(matches!(world.store.acquire(&repeat_of(&request)).await, Ok(AcquireOutcome::InProgress { .. })));
        acl(&world, &format!("-{settling}"));
        is_refused(&world.complete(&lease).await.unwrap_err());
        acl(&world, &format!("+{settling}"));
        assert_eq!(world.complete(&lease).await.unwrap(), OwnerOutcome::Applied, "{settling}");
        world.is_whole().await;
        drop(server);
    }
}

#[tokio::test]
async fn a_permission_that_was_never_granted_is_a_misconfiguration() {
    let (server, world) = logged_in().await;
    acl(&world, "-info");
    is_misconfigured(&format!("redis://app:pw@127.0.0.1:{}", server.port()), "permission").await;
}

/// A server at its connection limit refuses a login like a wrong password: the driver drops the rest of the message.
#[tokio::test]
async fn a_server_that_takes_no_further_connection_is_an_outage() {
    let plain = Redis::start().unwrap();
    let without_login = World::at(&plain.url(), plain.port()).await;
    let (_server, with_login) = logged_in().await;
    for world in [without_login, with_login] {
        let lease = world.lease(&request()).await.unwrap();
        // The test holds the one connection that is allowed, until it raises the limit again.
        let mut control = Control::connect(world.port);
        control.ask("CONFIG SET maxclients 1");
        control.ask("CLIENT KILL TYPE pubsub");
        control.ask("CLIENT KILL TYPE normal SKIPME yes");
        let error = world.complete(&lease).await.unwrap_err();
        println!("{error:?}");
        assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error:?}");
        assert!(error.is_retryable());
        control.ask("CONFIG SET maxclients 10000");
        assert_eq!(world.complete(&lease).await.unwrap(), OwnerOutcome::Applied);
        world.is_whole().await;
    }
}

/// A connection to a server that takes no other one.
struct Control(std::net::TcpStream);

impl Control {
    fn connect(port: u16) -> Self {
        Self(std::net::TcpStream::connect(("127.0.0.1", port)).unwrap())
    }

    /// Sends a command whose reply is one line.
    fn ask(&mut self, command: &str) {
        use std::io::{Read as _, Write as _};
        self.0.write_all(format!("{command}\r\n").as_bytes()).unwrap();
        let mut byte = [0];
        let mut answer = Vec::new();
        while !answer.ends_with(b"\r\n") {
            self.0.read_exact(&mut byte).unwrap();
            answer.push(byte[0]);
        }
        assert!(answer.starts_with(b"+") || answer.starts_with(b":"), "{}", String::from_utf8_lossy(&answer));
    }
}

#[tokio::test]
async fn a_server_that_cannot_save_or_lacks_replicas_is_an_outage() {
    let server = Redis::start_with(&["--stop-writes-on-bgsave-error", "yes"]).unwrap();
    let world = World::at(&server.url(), server.port()).await;
    let settled = request();
    let lease = world.lease(&settled).await.unwrap();
    world.complete(&lease).await.unwrap();
    let lease = world.lease(&request()).await.unwrap();
    world.ask(&["CONFIG", "SET", "min-replicas-to-write", "1"]);
    for error in [world.complete(&lease).await.unwrap_err(), world.lease(&request()).await.unwrap_err()] {
        is_an_outage(&error, "too few replicas");
        assert!(!error.is_indeterminate(), "{error:?}");
    }
    // A replay writes nothing.
    assert!(matches!(world.store.acquire(&repeat_of(&settled)).await.unwrap(), AcquireOutcome::Replay(_)));
    world.ask(&["CONFIG", "SET", "min-replicas-to-write", "0"]);
    assert_eq!(world.complete(&lease).await.unwrap(), OwnerOutcome::Applied);
}

#[tokio::test]
async fn a_server_that_is_busy_with_another_script_is_an_outage() {
    let server = Redis::start_with(&["--busy-reply-threshold", "1"]).unwrap();
    let world = World::at(&server.url(), server.port()).await;
    let lease = world.lease(&request()).await.unwrap();
    let port = world.port;
    let busy = std::thread::spawn(move || {
        let _ = redis_command(port, &["EVAL", "while true do end", "0"]);
    });
    let error = eventually("it is busy", async || {
        let error = world.store.acquire(&request()).await.err()?;
        error.to_string().contains("another script").then_some(error)
    })
    .await;
    is_an_outage(&error, "another script");
    world.ask(&["SCRIPT", "KILL"]);
    busy.join().unwrap();
    assert_eq!(world.complete(&lease).await.unwrap(), OwnerOutcome::Applied);
}

#[tokio::test]
async fn a_database_that_is_not_there_is_a_misconfiguration() {
    let server = Redis::start().unwrap();
    is_misconfigured(&format!("{}/99", server.url()), "refused a command").await;
}
