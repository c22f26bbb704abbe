//! A private Postgres.

mod cluster;
mod pair;
mod template;

pub use pair::PostgresPair;
pub use template::PostgresTemplate;

use crate::container::{Container, Image};
use crate::server::Server;
use crate::setup::postgres as setup;
use crate::{Error, programs};

static IMAGE: Image = Image {
    variable: setup::IMAGE_VARIABLE,
    default: setup::IMAGE,
    absent: "`initdb` and `postgres` are neither on PATH nor under /usr/lib/postgresql",
    package: "postgresql",
    prefix: "idem-postgres-",
    port: 5432,
    environment: &[setup::ENVIRONMENT],
    is_ready: &setup::IS_READY,
    version: &["postgres", "--version"],
    version_in,
};

/// A private Postgres server on 127.0.0.1, with the superuser and the database `postgres`, without password.
///
/// It runs from the binaries of this machine: those on PATH, or the newest under `/usr/lib/postgresql`. If there are none, or
/// if `IDEM_POSTGRES_IMAGE` names an image, it runs in a Docker container. If this process runs as root, the server runs as
/// `postgres`, or `nobody`.
///
/// Settings are those of a new cluster (UTF-8, locale C, `fsync` on), with 200 connections.
///
/// When the value is dropped, or its process ends in whatever way, the server is stopped and its data are removed.
#[derive(Debug)]
pub struct Postgres {
    server: Box<dyn Server>,
}

/// Enough connections for many concurrent tests, and whole statements in `pg_stat_activity`.
const SETTINGS: [&str; 2] = ["max_connections=200", "track_activity_query_size=16kB"];

impl Postgres {
    /// Starts a server and waits until it accepts connections.
    ///
    /// # Errors
    ///
    /// - [`Error::Missing`] if this machine has neither the binaries nor an image.
    /// - An error with the server's log if it does not accept connections within a minute.
    pub fn start() -> Result<Postgres, Error> {
        Postgres::start_with(&[])
    }

    /// [`start`](Self::start) with settings as in `postgresql.conf`: `&["fsync=off", "max_connections=20"]`.
    ///
    /// # Errors
    ///
    /// Those of [`start`](Self::start).
    pub fn start_with(settings: &[&str]) -> Result<Postgres, Error> {
        let server: Box<dyn Server> = match programs::postgres_folder() {
            Some(folder) if !IMAGE.is_named() => Box::new(cluster::Cluster::start(&folder, settings)?),
            _ => {
                let settings = SETTINGS.iter().chain(settings).flat_map(|setting| ["-c", setting]);
                Box::new(Container::start(&IMAGE, &["postgres"].into_iter().chain(settings).collect::<Vec<_>>())?)
            }
        };
        Ok(Postgres { server })
    }

    /// [`start`](Self::start) with a clock that [`shift_clock`](Self::shift_clock) shifts. A container ignores this and has the
    /// clock of the machine.
    ///
    /// # Errors
    ///
    /// Those of [`start`](Self::start), and [`Error::Missing`] if this machine has no C compiler.
    pub fn start_with_own_clock() -> Result<Postgres, Error> {
        let mut postgres = Postgres::start()?;
        postgres.server.give_clock()?;
        Ok(postgres)
    }

    /// The URL: `postgres://postgres@127.0.0.1:PORT/postgres`.
    #[must_use]
    pub fn url(&self) -> String {
        format!("postgres://postgres@127.0.0.1:{}/postgres", self.port())
    }

    /// The port on 127.0.0.1. It stays the same across restarts.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.server.port()
    }

    /// The version, as in `PostgreSQL 15.18`.
    #[must_use]
    pub fn version(&self) -> &str {
        self.server.version()
    }

    /// The origin of the server, for people: `private server from /usr/lib/postgresql/15/bin`, or `container of postgres:17`.
    #[must_use]
    pub fn origin(&self) -> &str {
        self.server.origin()
    }

    /// Its log, including earlier runs.
    ///
    /// # Errors
    ///
    /// If the log cannot be read.
    pub fn log(&self) -> Result<String, Error> {
        self.server.log()
    }

    /// Stops it as an operator would, in the fast mode: transactions are rolled back, clients are notified, data are written.
    /// Does nothing if the server is not running.
    ///
    /// # Errors
    ///
    /// If it does not end within a minute.
    pub fn stop(&mut self) -> Result<(), Error> {
        self.server.stop()
    }

    /// Crashes it: `kill -9` of the server and of all its children. Nothing more is written, and clients see their connections
    /// end. Does nothing if the server is not running.
    ///
    /// # Errors
    ///
    /// If it does not end within a minute.
    pub fn kill(&mut self) -> Result<(), Error> {
        self.server.kill()
    }

    /// Starts it on the same port and data after [`stop`](Self::stop) or [`kill`](Self::kill), and waits until it
    /// accepts connections, which includes the recovery after a crash.
    ///
    /// # Errors
    ///
    /// If it is running, or does not accept connections within a minute.
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

    /// Suspends it: the operating system accepts new connections, and the server does not answer them.
    ///
    /// If the server is a process, only the postmaster is stopped, and open connections go on. If it is a container, open
    /// connections stand still too.
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

    /// Suspends it with all its children: the operating system accepts what clients send, and the server does not answer.
    ///
    /// After [`thaw`](Self::thaw) the server executes what it was sent, even for clients that have gone.
    ///
    /// # Errors
    ///
    /// If it is not running.
    pub fn freeze(&mut self) -> Result<(), Error> {
        self.server.freeze()
    }

    /// Ends a [`freeze`](Self::freeze).
    ///
    /// # Errors
    ///
    /// If it is not running.
    pub fn thaw(&mut self) -> Result<(), Error> {
        self.server.thaw()
    }

    /// Leaves no room for another byte in any file. The first transaction that writes makes the server crash, as it does if
    /// there is no room for its WAL, and a restart fails too.
    ///
    /// # Errors
    ///
    /// If it is not running, or is a container.
    pub fn fill_disk(&mut self) -> Result<(), Error> {
        self.server.set_room(false)
    }

    /// Ends a [`fill_disk`](Self::fill_disk), and starts the server again.
    ///
    /// # Errors
    ///
    /// If it does not accept connections within a minute.
    pub fn make_room(&mut self) -> Result<(), Error> {
        self.server.set_room(true)?;
        // It may have ended, or be about to end, because a write failed.
        self.server.stop()?;
        self.server.start_again()
    }

    /// Sets its clock this many seconds ahead of the clock of this machine, or behind it if negative.
    ///
    /// # Errors
    ///
    /// If it was not started with [a private clock](Self::start_with_own_clock), or is a container.
    pub fn shift_clock(&mut self, seconds: i64) -> Result<(), Error> {
        self.server.shift_clock(seconds)
    }
}

/// Extracts `PostgreSQL 15.18` from the output of `postgres --version`: `postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)`.
fn version_in(printed: &str) -> String {
    let number = printed.split_once("(PostgreSQL) ").and_then(|(_, rest)| rest.split_ascii_whitespace().next());
    format!("PostgreSQL {}", number.unwrap_or("of unknown version"))
}

#[cfg(test)]
mod tests {
    use super::version_in;

    #[test]
    fn a_version_is_told_without_its_package() {
        assert_eq!(version_in("postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)\n"), "PostgreSQL 15.18");
        assert_eq!(version_in("postgres (PostgreSQL) 18beta1\n"), "PostgreSQL 18beta1");
    }
}
