//! A primary and a standby that follows it.

use std::path::{Path, PathBuf};

use super::IMAGE;
use super::cluster::Cluster;
use crate::server::Server;
use crate::{Error, programs};

/// The name of both servers, by which a primary also knows its standby.
const NAME: &str = "cluster_name=idem_standby";

/// Settings of both servers besides those of the caller. A copy lacks nothing that its primary writes meanwhile, and a standby
/// that has lost its primary looks for it as soon as it can.
const OWN: [&str; 3] = [NAME, "wal_keep_size=512MB", "wal_retrieve_retry_interval=100ms"];

/// A Postgres primary with one streaming standby, both from the binaries of this machine. Each is a server as
/// [`Postgres`](crate::Postgres) starts it.
///
/// There is no automatic failover; the owner of this value fails over. For that it calls [`kill_primary`](Self::kill_primary),
/// then [`promote`](Self::promote), then [`rebuild`](Self::rebuild). Afterwards both have changed places and ports.
///
/// When it is dropped, or its process ends in whatever way, both servers are stopped and their data are removed.
#[derive(Debug)]
pub struct PostgresPair {
    binaries: PathBuf,
    settings: Vec<String>,
    primary: Cluster,
    is_primary_dead: bool,
    standby: Option<Cluster>,
}

impl PostgresPair {
    /// The setting by which a primary of a pair waits for its standby before it acknowledges a commit.
    pub const SYNCHRONOUS: &str = "synchronous_standby_names=FIRST 1 (idem_standby)";

    /// Starts both with settings as in `postgresql.conf`, and waits until they accept connections.
    ///
    /// # Errors
    ///
    /// - [`Error::Missing`] if this machine lacks the binaries, or `IDEM_POSTGRES_IMAGE` asks for containers.
    /// - An error with the log of the server that does not accept connections within a minute.
    pub fn start_with(settings: &[&str]) -> Result<PostgresPair, Error> {
        let binaries = programs::postgres_folder().filter(|_| !IMAGE.is_named()).ok_or_else(|| Error::Missing {
            what: "a standby is made by programs of Postgres on this machine, of which there are none to be used"
                .into(),
            advice: "install the package postgresql, and leave IDEM_POSTGRES_IMAGE alone".into(),
        })?;
        let settings: Vec<String> = OWN.iter().chain(settings).map(|setting| (*setting).to_owned()).collect();
        let primary = Cluster::start(&binaries, &borrowed(&settings))?;
        let standby = standby_of(&binaries, &primary, &settings)?;
        Ok(PostgresPair { binaries, settings, primary, is_primary_dead: false, standby: Some(standby) })
    }

    /// The primary's port on 127.0.0.1; it changes with [`promote`](Self::promote).
    #[must_use]
    pub fn primary_port(&self) -> u16 {
        self.primary.port()
    }

    /// The standby's port; `None` from [`promote`](Self::promote) until [`rebuild`](Self::rebuild).
    #[must_use]
    pub fn standby_port(&self) -> Option<u16> {
        self.standby.as_ref().map(Server::port)
    }

    /// The version, as in `PostgreSQL 15.18`.
    #[must_use]
    pub fn version(&self) -> &str {
        self.primary.version()
    }

    /// The origin of the servers, for people.
    #[must_use]
    pub fn origin(&self) -> &str {
        self.primary.origin()
    }

    /// Cuts the standby off: nothing that the primary writes from now on arrives there, until the primary is dead. What was
    /// sent before may still arrive.
    ///
    /// # Errors
    ///
    /// If the standby receives nothing, or the primary sends nothing.
    pub fn cut_off_standby(&mut self) -> Result<(), Error> {
        let standby = self.standby.as_mut().ok_or_else(no_standby)?;
        // This alone would only keep what is sent in the connection's buffers.
        standby.signal_child("walreceiver", "STOP")?.ok_or_else(|| Error::failed("the standby receives nothing"))?;
        let sender = self.primary.signal_child("walsender", "TERM")?;
        let sender = sender.ok_or_else(|| Error::failed("the primary sends nothing to its standby"))?;
        self.primary.wait_for_end_of(sender)
    }

    /// Undoes [`cut_off_standby`](Self::cut_off_standby): the standby catches up, if its primary is there.
    ///
    /// # Errors
    ///
    /// If there is no standby.
    pub fn reconnect_standby(&mut self) -> Result<(), Error> {
        let standby = self.standby.as_mut().ok_or_else(no_standby)?;
        standby.signal_child("walreceiver", "CONT").map(drop)
    }

    /// Suspends the primary with all its connections.
    ///
    /// # Errors
    ///
    /// If it is not running.
    pub fn freeze_primary(&mut self) -> Result<(), Error> {
        self.primary.freeze()
    }

    /// Crashes the primary permanently: `kill -9` of the server and of all its children.
    ///
    /// # Errors
    ///
    /// If it does not end within a minute.
    pub fn kill_primary(&mut self) -> Result<(), Error> {
        self.primary.kill()?;
        self.is_primary_dead = true;
        Ok(())
    }

    /// Crashes the primary, and restarts it on the same data.
    ///
    /// # Errors
    ///
    /// If it does not accept connections within a minute.
    pub fn crash_primary(&mut self) -> Result<(), Error> {
        self.primary.kill()?;
        self.primary.start_again()
    }

    /// Promotes the standby, and waits until it is the primary.
    ///
    /// # Errors
    ///
    /// - If the old primary has not been [killed](Self::kill_primary): two primaries would accept writes.
    /// - If there is no standby, or its promotion fails.
    pub fn promote(&mut self) -> Result<(), Error> {
        if !self.is_primary_dead {
            return Err(Error::failed("the primary is alive, and might be written to after its standby was promoted"));
        }
        self.reconnect_standby()?;
        let mut standby = self.standby.take().ok_or_else(no_standby)?;
        standby.promote()?;
        (self.primary, self.is_primary_dead) = (standby, false);
        Ok(())
    }

    /// Makes a new standby as a copy of the primary. The data of the old primary are gone by then: they may hold what the new
    /// primary never got.
    ///
    /// # Errors
    ///
    /// If there is a standby, or the new one does not accept connections within a minute.
    pub fn rebuild(&mut self) -> Result<(), Error> {
        if self.standby.is_some() {
            return Err(Error::failed("there is a standby already"));
        }
        self.standby = Some(standby_of(&self.binaries, &self.primary, &self.settings)?);
        Ok(())
    }
}

fn standby_of(binaries: &Path, primary: &Cluster, settings: &[String]) -> Result<Cluster, Error> {
    Cluster::start_standby(binaries, primary.port(), &borrowed(settings))
}

fn borrowed(settings: &[String]) -> Vec<&str> {
    settings.iter().map(String::as_str).collect()
}

fn no_standby() -> Error {
    Error::failed("there is no standby")
}
