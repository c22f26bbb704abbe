//! Private NATS servers with JetStream.

use std::path::Path;
use std::process::Command;

use tempfile::TempDir;

use crate::keeper::{self, Keeper};
use crate::{Error, port, processes, programs};

/// A NATS server with JetStream on a free port of 127.0.0.1, without a password.
///
/// Its streams are in files, which survive [`kill`](Self::kill). It is gone when the value is dropped, or when its process ends in
/// whatever way.
#[derive(Debug)]
pub struct Nats {
    // Dropped before the folder, which the keeper removes.
    keeper: Keeper,
    folder: TempDir,
    port: u16,
    /// The process id while it runs.
    server: Option<u32>,
    version: String,
    origin: String,
}

impl Nats {
    /// Starts a server, and waits until it is ready.
    ///
    /// # Errors
    ///
    /// - [`Error::Missing`] if this machine has no `nats-server`.
    /// - An error with its log if it is not ready within a minute.
    pub fn start() -> Result<Nats, Error> {
        let program = programs::find("nats-server").ok_or_else(|| Error::Missing {
            what: "`nats-server` is not on PATH".into(),
            advice: "install it (Debian's package is nats-server)".into(),
        })?;
        /// Another process may take the port before the server does.
        const ATTEMPTS: usize = 5;
        let mut attempt = 1;
        loop {
            match Nats::start_once(&program) {
                Err(Error::Failed { log, .. }) if attempt < ATTEMPTS && log.contains("address already in use") => attempt += 1,
                result => return result,
            }
        }
    }

    fn start_once(program: &Path) -> Result<Nats, Error> {
        let folder = TempDir::with_prefix("idem-nats-").map_err(Error::io("make a temporary folder"))?;
        let port = port::free()?;
        let streams = folder.path().join("streams");
        let words = [program.into(), "--addr".into(), "127.0.0.1".into(), "--port".into(), port.to_string().into()];
        let words = words.into_iter().chain(["--jetstream".into(), "--store_dir".into(), streams.into()]);
        let keeper = Keeper::start(None, folder.path(), keeper::KILL, words)?;
        let output = Command::new(program).arg("--version").output().map_err(Error::io("run nats-server --version"))?;
        let printed = String::from_utf8_lossy(&output.stdout);
        let version = printed.rsplit_once('v').map_or("of unknown version", |(_, version)| version.trim());
        let (version, origin) = (format!("NATS {version}"), program.display().to_string());
        let mut nats = Nats { keeper, folder, port, server: None, version, origin };
        nats.start_again()?;
        Ok(nats)
    }

    /// Starts it on the same port and folder after [`kill`](Self::kill), and waits until it is ready.
    ///
    /// # Errors
    ///
    /// If it is running, or is not ready within a minute.
    pub fn start_again(&mut self) -> Result<(), Error> {
        if self.server.is_some() {
            return Err(Error::failed("the NATS server is running already"));
        }
        // Look for the log line of this start, because another process may answer on the port.
        let path = self.folder.path().join("log");
        let times = || std::fs::read_to_string(&path).unwrap_or_default().matches("Server is ready").count();
        let before = times();
        let server = self.keeper.start_server()?;
        self.server = Some(server);
        self.keeper.wait_until("was not ready", || {
            if !processes::is_running(server)? {
                return Err(self.keeper.error("the NATS server ended while it started"));
            }
            Ok(times() > before)
        })
    }

    /// Crashes it: `kill -9`. Clients see their connections end. Does nothing if it is not running.
    ///
    /// # Errors
    ///
    /// If it does not end within a minute.
    pub fn kill(&mut self) -> Result<(), Error> {
        let Some(server) = self.server else { return Ok(()) };
        self.keeper.signal("KILL", &[server])?;
        self.keeper.reap(server)?;
        self.server = None;
        Ok(())
    }

    /// The URL: `nats://127.0.0.1:PORT`. It stays the same across restarts.
    #[must_use]
    pub fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }

    /// The version, as in `NATS 2.9.10`.
    #[must_use]
    pub fn version(&self) -> &str {
        &self.version
    }

    /// The program.
    #[must_use]
    pub fn origin(&self) -> &str {
        &self.origin
    }
}
