//! Private Redis servers.

mod cluster;
mod command;
mod group;
mod node;
mod reply;
mod sentinel;

use node::{Node, Program};

use crate::{Error, port};

pub use cluster::{ClusterPrimary, RedisCluster};
pub use command::redis_command;
pub use reply::Reply;
pub use sentinel::RedisSentinel;

/// Nothing is written to the disk, and nothing is thrown away.
const CONFIGURATION: &str = "save \"\"\nappendonly no\nmaxmemory-policy noeviction\n";

/// A Redis server of this value's own, on 127.0.0.1 without password.
///
/// It runs from the `redis-server` on PATH, as the account of this process.
///
/// It keeps everything in memory and writes nothing (`save ""`, `appendonly no`), and evicts nothing
/// (`maxmemory-policy noeviction`); other settings are the defaults of its version.
///
/// When the value is dropped, or its process ends in whatever way, the server is stopped and its data are removed.
#[derive(Debug)]
pub struct Redis {
    node: Node,
    program: Program,
}

impl Redis {
    /// Starts a server and waits until it answers.
    ///
    /// # Errors
    ///
    /// [`Error::Missing`] if this machine has no `redis-server`; otherwise an error with the server's log if it does not
    /// answer within a minute.
    pub fn start() -> Result<Redis, Error> {
        Redis::start_with(&[])
    }

    /// [`start`](Self::start) with arguments of `redis-server`: `&["--appendonly", "yes", "--maxmemory", "10mb"]`.
    ///
    /// # Errors
    ///
    /// Those of [`start`](Self::start).
    pub fn start_with(settings: &[&str]) -> Result<Redis, Error> {
        let program = Program::find("redis-server")?;
        let node = Node::start(&program, port::free, CONFIGURATION, settings)?;
        Ok(Redis { node, program })
    }

    /// `redis://127.0.0.1:PORT`
    #[must_use]
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port())
    }

    /// The port on 127.0.0.1. It stays the same when the server starts again.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.node.port()
    }

    /// As in `Redis 7.0.15`.
    #[must_use]
    pub fn version(&self) -> &str {
        self.program.version()
    }

    /// The program.
    #[must_use]
    pub fn origin(&self) -> String {
        self.program.origin()
    }

    /// Stops it as an administrator would: what its settings say is written, clients see their connections end. A server
    /// that is not running stays so.
    ///
    /// # Errors
    ///
    /// If it does not end within a minute.
    pub fn stop(&mut self) -> Result<(), Error> {
        self.node.stop()
    }

    /// Crashes it: `kill -9`. What was not written yet is lost, and that is everything unless the server was started with
    /// `--appendonly yes`. A server that is not running stays so.
    ///
    /// # Errors
    ///
    /// If it does not end within a minute.
    pub fn kill(&mut self) -> Result<(), Error> {
        self.node.kill()
    }

    /// Starts it on the same port and folder after [`stop`](Self::stop) or [`kill`](Self::kill), and waits until it has
    /// read what it wrote.
    ///
    /// # Errors
    ///
    /// If it is running, or does not answer within a minute.
    pub fn start_again(&mut self) -> Result<(), Error> {
        self.node.start_again()
    }

    /// [`stop`](Self::stop), then [`start_again`](Self::start_again).
    ///
    /// # Errors
    ///
    /// Those of the two.
    pub fn restart(&mut self) -> Result<(), Error> {
        self.stop()?;
        self.start_again()
    }

    /// Holds it up: the operating system accepts connections and what is written to them, and nobody answers. It carries
    /// out what was written after [`resume`](Self::resume).
    ///
    /// # Errors
    ///
    /// If it is not running.
    pub fn pause(&mut self) -> Result<(), Error> {
        self.node.pause()
    }

    /// Ends a [`pause`](Self::pause).
    ///
    /// # Errors
    ///
    /// If it is not running.
    pub fn resume(&mut self) -> Result<(), Error> {
        self.node.resume()
    }
}
