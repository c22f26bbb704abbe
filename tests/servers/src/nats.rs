//! Private NATS servers with JetStream.

use std::process::Command;

use crate::broker::Broker;
use crate::{Error, programs};

/// A NATS server with JetStream on a free port of 127.0.0.1, without a password.
///
/// Its streams are in files, which survive [`kill`](Self::kill). It is gone when the value is dropped, or when its process ends in
/// whatever way.
#[derive(Debug)]
pub struct Nats {
    broker: Broker,
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
        let output =
            Command::new(&program).arg("--version").output().map_err(Error::io("run nats-server --version"))?;
        let printed = String::from_utf8_lossy(&output.stdout);
        let version = printed.rsplit_once('v').map_or("of unknown version", |(_, version)| version.trim());
        let broker = Broker::start("Server is ready", |folder, port| {
            let streams = folder.join("streams");
            let words = [program.clone().into(), "--addr".into(), "127.0.0.1".into(), "--port".into()].into_iter();
            Ok(words
                .chain([port.to_string().into(), "--jetstream".into(), "--store_dir".into(), streams.into()])
                .collect())
        })?;
        Ok(Nats { broker, version: format!("NATS {version}"), origin: program.display().to_string() })
    }

    /// Starts it on the same port and folder after [`kill`](Self::kill), and waits until it is ready.
    ///
    /// # Errors
    ///
    /// If it is running, or is not ready within a minute.
    pub fn start_again(&mut self) -> Result<(), Error> {
        self.broker.start_again()
    }

    /// Crashes it: `kill -9`. Clients see their connections end. Does nothing if it is not running.
    ///
    /// # Errors
    ///
    /// If it does not end within a minute.
    pub fn kill(&mut self) -> Result<(), Error> {
        self.broker.kill()
    }

    /// The URL: `nats://127.0.0.1:PORT`. It stays the same across restarts.
    #[must_use]
    pub fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.broker.port())
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
