//! A message broker that writes to its log when it is ready.

use std::ffi::OsString;
use std::path::Path;

use tempfile::TempDir;

use crate::keeper::{self, Keeper};
use crate::{Error, port, processes};

/// One process of a broker, with a folder and a port of its own.
#[derive(Debug)]
pub(crate) struct Broker {
    // Dropped before the folder, which the keeper removes.
    keeper: Keeper,
    folder: TempDir,
    port: u16,
    /// The text in the log of a broker that is ready.
    ready: &'static str,
    /// The process id while it runs.
    server: Option<u32>,
}

impl Broker {
    /// Starts a broker, and waits until it is ready. `command` makes its words from the folder and the port; it may write files.
    pub(crate) fn start(
        ready: &'static str,
        command: impl Fn(&Path, u16) -> Result<Vec<OsString>, Error>,
    ) -> Result<Broker, Error> {
        /// Another process may take the port before the broker does.
        const ATTEMPTS: usize = 5;
        let mut attempt = 1;
        loop {
            let folder = TempDir::with_prefix("idem-broker-").map_err(Error::io("make a temporary folder"))?;
            let port = port::free()?;
            let keeper = Keeper::start(None, folder.path(), keeper::KILL, command(folder.path(), port)?)?;
            let mut broker = Broker { keeper, folder, port, ready, server: None };
            match broker.start_again() {
                Err(Error::Failed { log, .. }) if attempt < ATTEMPTS && is_port_taken(&log) => {
                    attempt += 1;
                }
                result => return result.map(|()| broker),
            }
        }
    }

    pub(crate) fn start_again(&mut self) -> Result<(), Error> {
        if self.server.is_some() {
            return Err(Error::failed("the broker is running already"));
        }
        // Look for the log line of this start, because another process may answer on the port.
        let path = self.folder.path().join("log");
        let times = || std::fs::read_to_string(&path).unwrap_or_default().matches(self.ready).count();
        let before = times();
        let server = self.keeper.start_server()?;
        self.server = Some(server);
        self.keeper.wait_until("was not ready", || {
            if !processes::is_running(server)? {
                return Err(self.keeper.error("the broker ended while it started"));
            }
            Ok(times() > before)
        })
    }

    pub(crate) fn kill(&mut self) -> Result<(), Error> {
        let Some(server) = self.server else { return Ok(()) };
        self.keeper.signal("KILL", &[server])?;
        self.keeper.reap(server)?;
        self.server = None;
        Ok(())
    }

    /// Sends it a signal.
    pub(crate) fn signal(&mut self, signal: &str) -> Result<(), Error> {
        let server = self.server.ok_or_else(|| Error::failed("the broker is not running"))?;
        self.keeper.signal(signal, &[server])
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn log(&self) -> Result<String, Error> {
        self.keeper.log()
    }
}

/// The last is RabbitMQ's error for the port by which its nodes reach each other.
fn is_port_taken(log: &str) -> bool {
    let log = log.to_ascii_lowercase();
    ["address already in use", "eaddrinuse", "dist_port_already_used"].iter().any(|error| log.contains(error))
}
