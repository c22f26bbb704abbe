//! A primary, its replicas, and Sentinels that replace it.

use std::time::Duration;

use super::Reply;
use super::group::Group;
use super::node::{Node, Program};
use crate::server::Server;
use crate::setup::expect;
use crate::setup::redis::arguments;
use crate::setup::sentinel::{QUORUM, REPLICAS, SENTINELS, SERVICE, check_sentinel, check_server, watching};
use crate::{Error, port};

/// How long a primary may be silent before it counts as down.
const DOWN_AFTER: Duration = Duration::from_secs(1);

/// Shorter periods for the routines of Sentinels, in milliseconds. The last one is how long a Sentinel pauses after the machine
/// has stood still for a moment. Its default of half a minute would be most of a test.
const PERIODS: [(&str, &str); 5] = [
    ("INFO-PERIOD", "200"),
    ("PUBLISH-PERIOD", "200"),
    ("PING-PERIOD", "200"),
    ("ASK-PERIOD", "200"),
    ("TILT-PERIOD", "1000"),
];

/// A full resynchronization starts without waiting for further replicas.
const REPLICATION: &str = "repl-diskless-sync-delay 0\nrepl-ping-replica-period 1\n";

/// A private group of a primary, two replicas and three Sentinels, on 127.0.0.1 without passwords.
///
/// They run from the `redis-server` and the `redis-sentinel` on PATH. If a primary does not answer for one second, it is
/// replaced, mostly within another second. Sentinels that did not agree on a leader try again after six seconds.
///
/// Servers have the settings of a [`Redis`](crate::Redis), and keep what a Sentinel configures. A replaced primary that was
/// killed restarts as a primary, until the Sentinels notice and make it a replica.
///
/// Methods with a `port` accept the port of a server or of a Sentinel.
#[derive(Debug)]
pub struct RedisSentinel {
    servers: Group,
    sentinels: Group,
    program: Program,
}

impl RedisSentinel {
    /// Starts the group, and waits as [`wait_until_whole`](Self::wait_until_whole) does.
    ///
    /// # Errors
    ///
    /// - [`Error::Missing`] if this machine lacks one of the programs.
    /// - An error if the group is not complete within a minute.
    pub fn start() -> Result<RedisSentinel, Error> {
        RedisSentinel::start_with(&[])
    }

    /// [`start`](Self::start) with arguments of `redis-server` for all three servers: `&["--min-replicas-to-write", "1"]`.
    ///
    /// # Errors
    ///
    /// Those of [`start`](Self::start).
    pub fn start_with(settings: &[&str]) -> Result<RedisSentinel, Error> {
        let server = Program::find("redis-server")?;
        let program = Program::find("redis-sentinel")?;
        let settings = &arguments(settings);
        let primary = Node::start(&server, port::free, REPLICATION, settings)?;
        let (mut servers, mut sentinels) = (Group::default(), Group::default());
        let following = format!("{REPLICATION}replicaof 127.0.0.1 {}\n", primary.port());
        for _ in 0..REPLICAS {
            servers.push(Node::start(&server, port::free, &following, settings)?);
        }
        for _ in 0..SENTINELS {
            sentinels.push(Node::start(
                &program,
                port::free,
                &watching(("127.0.0.1", primary.port()), DOWN_AFTER),
                &[],
            )?);
        }
        servers.push(primary);
        let group = RedisSentinel { servers, sentinels, program };
        for sentinel in group.sentinels.nodes() {
            hurry(sentinel)?;
        }
        group.wait_until_whole()?;
        Ok(group)
    }

    /// The URL with the ports of the Sentinels: `redis+sentinel://127.0.0.1:PORT,127.0.0.1:PORT,127.0.0.1:PORT/idem`.
    #[must_use]
    pub fn url(&self) -> String {
        format!("redis+sentinel://{}/{SERVICE}", self.sentinels.addresses())
    }

    /// The version, as in `Redis 7.0.15`.
    #[must_use]
    pub fn version(&self) -> &str {
        self.program.version()
    }

    /// The program of the Sentinels.
    #[must_use]
    pub fn origin(&self) -> &str {
        self.program.origin()
    }

    /// The ports of the Sentinels. They stay the same.
    #[must_use]
    pub fn sentinel_ports(&self) -> Vec<u16> {
        self.sentinels.ports()
    }

    /// The port of the primary, as all running Sentinels name it. The primary itself may not answer.
    ///
    /// # Errors
    ///
    /// If they disagree at the moment, or fewer than two run.
    pub fn primary_port(&self) -> Result<u16, Error> {
        let named = self.sentinels.up().map(named_primary).collect::<Result<Vec<u16>, Error>>()?;
        match named[..] {
            [first, ..] if named.len() >= QUORUM && named.iter().all(|port| *port == first) => Ok(first),
            _ => Err(Error::failed(format!("the Sentinels name as their primary: {named:?}"))),
        }
    }

    /// The ports of the servers that are not the [primary](Self::primary_port).
    ///
    /// # Errors
    ///
    /// Those of [`primary_port`](Self::primary_port).
    pub fn replica_ports(&self) -> Result<Vec<u16>, Error> {
        let primary = self.primary_port()?;
        Ok(self.servers.ports().into_iter().filter(|port| *port != primary).collect())
    }

    /// [Pauses](Self::pause) the primary, and returns its port. After it resumes, it considers itself primary until the
    /// Sentinels reconfigure it.
    ///
    /// # Errors
    ///
    /// If the Sentinels disagree which it is, or it is not running.
    pub fn pause_primary(&mut self) -> Result<u16, Error> {
        let port = self.primary_port()?;
        self.pause(port)?;
        Ok(port)
    }

    /// Suspends a server or a Sentinel, as [`Redis::pause`](crate::Redis::pause) does.
    ///
    /// # Errors
    ///
    /// If it is not running.
    pub fn pause(&mut self, port: u16) -> Result<(), Error> {
        self.get_mut(port)?.pause()
    }

    /// Ends a [`pause`](Self::pause).
    ///
    /// # Errors
    ///
    /// If it is not running.
    pub fn resume(&mut self, port: u16) -> Result<(), Error> {
        self.get_mut(port)?.resume()
    }

    /// Crashes a server or a Sentinel: `kill -9`. Does nothing if it is not running.
    ///
    /// # Errors
    ///
    /// If it does not end within a minute.
    pub fn kill(&mut self, port: u16) -> Result<(), Error> {
        self.get_mut(port)?.kill()
    }

    /// Starts a server or a Sentinel again after [`kill`](Self::kill), on the same port and folder.
    ///
    /// # Errors
    ///
    /// If it is running, or does not answer within a minute.
    pub fn start_again(&mut self, port: u16) -> Result<(), Error> {
        self.get_mut(port)?.start_again()?;
        self.sentinels.get(port).map_or(Ok(()), hurry)
    }

    /// Waits until the Sentinels name another primary than this one and that server has this role; returns its port.
    ///
    /// # Errors
    ///
    /// If that does not happen within a minute.
    pub fn wait_for_other_primary_than(&self, port: u16) -> Result<u16, Error> {
        self.servers.wait_until_sound(|| {
            let primary = self.primary_port()?;
            if primary == port {
                return Err(Error::failed(format!("{port} is still the primary")));
            }
            // The first item is the role; offsets and replicas follow.
            let role = self.servers.get(primary)?.ask(&["ROLE"])?;
            let role = role.items().first().and_then(Reply::text).unwrap_or_default();
            expect("the role of the primary", role, "master")?;
            Ok(primary)
        })
    }

    /// Waits until the group is complete: the Sentinels agree on the primary and know its replicas and each other, the primary
    /// has both replicas online, and both follow it.
    ///
    /// # Errors
    ///
    /// - Immediately, if one of them is paused or does not run.
    /// - If it takes more than a minute.
    pub fn wait_until_whole(&self) -> Result<(), Error> {
        self.servers.expect_all_up()?;
        self.sentinels.expect_all_up()?;
        self.servers.wait_until_sound(|| {
            let primary = self.primary_port()?;
            for node in self.servers.nodes() {
                let port = node.port();
                check_server(&port.to_string(), port == primary, primary, |words| node.ask(words))?;
            }
            for sentinel in self.sentinels.nodes() {
                check_sentinel(&sentinel.port().to_string(), primary, |words| sentinel.ask(words))?;
            }
            Ok(())
        })
    }

    fn get_mut(&mut self, port: u16) -> Result<&mut Node, Error> {
        let is_sentinel = self.sentinels.get(port).is_ok();
        if is_sentinel { self.sentinels.get_mut(port) } else { self.servers.get_mut(port) }
    }
}

/// Sets the periods, which a configuration file cannot. Sentinels before Redis 7 lack this command and keep their defaults.
fn hurry(sentinel: &Node) -> Result<(), Error> {
    let words: Vec<&str> = PERIODS.iter().flat_map(|(name, period_ms)| [*name, *period_ms]).collect();
    match sentinel.ask(&[&["SENTINEL", "DEBUG"], &words[..]].concat()) {
        Ok(_) | Err(Error::Refused { .. }) => Ok(()),
        Err(error) => Err(error),
    }
}

fn named_primary(sentinel: &Node) -> Result<u16, Error> {
    let address = sentinel.ask(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE])?;
    let port = address.items().get(1).and_then(|port| port.text()?.parse().ok());
    port.ok_or_else(|| Error::failed(format!("the Sentinel on port {} names no primary", sentinel.port())))
}
