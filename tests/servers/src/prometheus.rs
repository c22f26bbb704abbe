//! Private Prometheus servers.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use crate::broker::Broker;
use crate::{Error, programs};

/// A Prometheus on a free port of 127.0.0.1. It is gone when the value is dropped, or when its process ends in whatever way.
#[derive(Debug)]
pub struct Prometheus {
    broker: Broker,
}

impl Prometheus {
    /// Starts a server with this configuration, and waits until it is ready. Paths in the configuration must be absolute.
    ///
    /// # Errors
    ///
    /// - [`Error::Missing`] if this machine has no `prometheus`.
    /// - An error with its log if it is not ready within a minute, such as for a wrong configuration.
    pub fn start(config: &str) -> Result<Prometheus, Error> {
        let program = find("prometheus")?;
        let broker = Broker::start("Server is ready to receive web requests", |folder, port| {
            let (file, data) = (folder.join("prometheus.yml"), folder.join("data"));
            std::fs::write(&file, config).map_err(Error::io("write the configuration of Prometheus"))?;
            let flags = [
                format!("--config.file={}", file.display()),
                format!("--storage.tsdb.path={}", data.display()),
                format!("--web.listen-address=127.0.0.1:{port}"),
            ];
            Ok([program.clone().into()].into_iter().chain(flags.map(Into::into)).collect())
        })?;
        Ok(Prometheus { broker })
    }

    /// The address of its HTTP API.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.broker.port()).into()
    }
}

/// Finds `promtool`, which checks rules.
///
/// # Errors
///
/// [`Error::Missing`] if this machine has none.
pub fn promtool() -> Result<PathBuf, Error> {
    find("promtool")
}

fn find(program: &str) -> Result<PathBuf, Error> {
    programs::find(program).ok_or_else(|| Error::Missing {
        what: format!("`{program}` is not on PATH"),
        advice: "install it (Debian's package is prometheus)".into(),
    })
}
