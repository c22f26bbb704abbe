//! Private Redis servers.

mod cluster;
mod command;
mod expiry;
mod group;
mod node;
mod reply;
mod sentinel;

use node::{Node, Program, version_in};

use crate::container::{Container, Image};
use crate::server::Server;
use crate::setup::redis::arguments;
use crate::{Error, port, setup};

pub use cluster::{ClusterPrimary, RedisCluster};
pub use command::{RedisAddress, redis_command};
pub use expiry::redis_expire_sooner;
pub use reply::Reply;
pub use sentinel::RedisSentinel;

/// `is_ready` needs `grep`: `redis-cli` exits with success even if the server answers with an error, as it does while it loads
/// data.
static IMAGE: Image = Image {
    variable: setup::redis::IMAGE_VARIABLE,
    default: setup::redis::IMAGE,
    absent: "`redis-server` is not on PATH",
    package: "redis-server",
    prefix: "idem-redis-",
    port: 6379,
    environment: &[],
    is_ready: &["sh", "-c", "redis-cli ping | grep PONG"],
    version: &["redis-server", "--version"],
    version_in,
};

/// A private Redis server on 127.0.0.1 without password.
///
/// It runs from the `redis-server` on PATH, as the account of this process. If there is none, or if `IDEM_REDIS_IMAGE` names an
/// image, it runs in a Docker container.
///
/// It keeps everything in memory and writes nothing (`save ""`, `appendonly no`), and evicts nothing
/// (`maxmemory-policy noeviction`); other settings are the defaults of its version.
///
/// When the value is dropped, or its process ends in whatever way, the server is stopped and its data are removed.
#[derive(Debug)]
pub struct Redis {
    server: Box<dyn Server>,
}

impl Redis {
    /// Starts a server and waits until it answers.
    ///
    /// # Errors
    ///
    /// - [`Error::Missing`] if this machine has neither a `redis-server` nor an image.
    /// - An error with the server's log if it does not answer within a minute.
    pub fn start() -> Result<Redis, Error> {
        Redis::start_with(&[])
    }

    /// [`start`](Self::start) with arguments of `redis-server`: `&["--appendonly", "yes", "--maxmemory", "10mb"]`.
    ///
    /// # Errors
    ///
    /// Those of [`start`](Self::start).
    pub fn start_with(settings: &[&str]) -> Result<Redis, Error> {
        let server: Box<dyn Server> = match Program::find("redis-server") {
            Ok(program) if !IMAGE.is_named() => Box::new(Node::start(&program, port::free, "", &arguments(settings))?),
            Ok(_) | Err(Error::Missing { .. }) => Box::new(Container::start(&IMAGE, &setup::redis::command(settings))?),
            Err(error) => return Err(error),
        };
        Ok(Redis { server })
    }

    /// The URL: `redis://127.0.0.1:PORT`.
    #[must_use]
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port())
    }

    /// The port on 127.0.0.1. It stays the same across restarts.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.server.port()
    }

    /// The version, as in `Redis 7.0.15`.
    #[must_use]
    pub fn version(&self) -> &str {
        self.server.version()
    }

    /// The origin of the server, for people: the program, or `container of redis:7`.
    #[must_use]
    pub fn origin(&self) -> &str {
        self.server.origin()
    }

    /// Stops it as an operator would: it saves what its settings demand, and clients see their connections end. Does nothing if
    /// the server is not running.
    ///
    /// # Errors
    ///
    /// If it does not end within a minute.
    pub fn stop(&mut self) -> Result<(), Error> {
        self.server.stop()
    }

    /// Crashes it: `kill -9`. Unsaved data are lost, which is everything unless the server was started with `--appendonly yes`.
    /// Does nothing if the server is not running.
    ///
    /// # Errors
    ///
    /// If it does not end within a minute.
    pub fn kill(&mut self) -> Result<(), Error> {
        self.server.kill()
    }

    /// Starts it on the same port and folder after [`stop`](Self::stop) or [`kill`](Self::kill), and waits until it has loaded
    /// its data.
    ///
    /// # Errors
    ///
    /// If it is running, or does not answer within a minute.
    pub fn start_again(&mut self) -> Result<(), Error> {
        self.server.start_again()
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

    /// Suspends it: the operating system accepts connections and data, and the server does not answer. After
    /// [`resume`](Self::resume) it executes what it was sent.
    ///
    /// # Errors
    ///
    /// If it is not running.
    pub fn pause(&mut self) -> Result<(), Error> {
        self.server.pause()
    }

    /// Ends a [`pause`](Self::pause).
    ///
    /// # Errors
    ///
    /// If it is not running.
    pub fn resume(&mut self) -> Result<(), Error> {
        self.server.resume()
    }
}
