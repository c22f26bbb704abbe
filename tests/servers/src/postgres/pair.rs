//! A primary and a standby that follows it.

use std::path::{Path, PathBuf};

use super::IMAGE;
use super::cluster::Cluster;
use crate::server::Server;
use crate::{Error, programs};

/// What both servers are called, and so also the standby by its primary.
const NAME: &str = "cluster_name=idem_standby";

/// What both servers are, beside the settings of the caller: a copy lacks nothing that its primary has written meanwhile, and
/// a standby that has lost its primary looks for it as soon as it can.
const OWN: [&str; 3] = [NAME, "wal_keep_size=512MB", "wal_retrieve_retry_interval=100ms"];

/// A Postgres primary with one streaming standby, each a server as [`Postgres`](crate::Postgres) starts it, from the binaries
/// of this machine.
///
/// Nobody watches over them: whoever holds this value is the one who fails over. That is
/// [`kill_primary`](Self::kill_primary), then [`promote`](Self::promote), then [`rebuild`](Self::rebuild), after which both
/// have changed places and ports.
///
/// When it is dropped, or its process ends in whatever way, both are stopped and their data are removed.
#[derive(Debug)]
pub struct PostgresPair {
    binaries: PathBuf,
    settings: Vec<String>,
    primary: Cluster,
    is_primary_dead: bool,
    standby: Option<Cluster>,
}

impl PostgresPair {
    /// The setting by which a primary of a pair awaits its standby before it acknowledges a commit.
    pub const SYNCHRONOUS: &str = "synchronous_standby_names=FIRST 1 (idem_standby)";

    /// Starts both with settings as in `postgresql.conf`, and waits until they accept connections.
    ///
    /// # Errors
    ///
    /// [`Error::Missing`] if this machine lacks the binaries, or `IDEM_POSTGRES_IMAGE` asks for containers; otherwise an error
    /// with the log of the server that does not accept connections within a minute.
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

    /// The primary's port on 127.0.0.1; another one after [`promote`](Self::promote).
    #[must_use]
    pub fn primary_port(&self) -> u16 {
        self.primary.port()
    }

    /// The standby's port; `None` from [`promote`](Self::promote) until [`rebuild`](Self::rebuild).
    #[must_use]
    pub fn standby_port(&self) -> Option<u16> {
        self.standby.as_ref().map(Server::port)
    }

    /// As in `PostgreSQL 15.18`.
    #[must_use]
    pub fn version(&self) -> &str {
        self.primary.version()
    }

    /// Where they come from, for people.
    #[must_use]
    pub fn origin(&self) -> &str {
        self.primary.origin()
    }

    /// Cuts the standby off: from now on nothing that the primary writes arrives there, until the primary is dead. What has
    /// been sent by then may arrive.
    ///
    /// # Errors
    ///
    /// If nothing is being replicated.
    pub fn cut_off_standby(&mut self) -> Result<(), Error> {
        let standby = self.standby.as_mut().ok_or_else(no_standby)?;
        // Alone, that would only let what is sent wait in the connection.
        standby.signal_child("walreceiver", "STOP")?.ok_or_else(|| Error::failed("the standby receives nothing"))?;
        let sender = self.primary.signal_child("walsender", "TERM")?;
        let sender = sender.ok_or_else(|| Error::failed("the primary sends nothing to its standby"))?;
        self.primary.wait_for_end_of(sender)
    }

    /// Ends what [`cut_off_standby`](Self::cut_off_standby) began: the standby catches up, if its primary is there.
    ///
    /// # Errors
    ///
    /// If there is no standby.
    pub fn reconnect_standby(&mut self) -> Result<(), Error> {
        let standby = self.standby.as_mut().ok_or_else(no_standby)?;
        standby.signal_child("walreceiver", "CONT").map(drop)
    }

    /// Holds the primary up, with everybody whom it serves.
    ///
    /// # Errors
    ///
    /// If it is not running.
    pub fn freeze_primary(&mut self) -> Result<(), Error> {
        self.primary.freeze()
    }

    /// Crashes the primary for good: `kill -9` of the server and of all its children.
    ///
    /// # Errors
    ///
    /// If it does not end within a minute.
    pub fn kill_primary(&mut self) -> Result<(), Error> {
        self.primary.kill()?;
        self.is_primary_dead = true;
        Ok(())
    }

    /// Crashes the primary, and starts it again on its own data.
    ///
    /// # Errors
    ///
    /// If it does not accept connections within a minute.
    pub fn crash_primary(&mut self) -> Result<(), Error> {
        self.primary.kill()?;
        self.primary.start_again()
    }

    /// Makes the standby the primary, and waits until it is one.
    ///
    /// # Errors
    ///
    /// If the old primary has not been [killed](Self::kill_primary): two primaries would take writes. If there is no standby, or it
    /// does not become one.
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

    /// Makes a new standby, a copy of the primary. The data of an old primary are gone by then: they may hold what its heir
    /// never got.
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
