//! Private RabbitMQ servers.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use crate::broker::Broker;
use crate::{Error, programs};

/// Debian's program of this name on PATH changes the account, and keeps the data in one place.
const DEBIAN: &str = "/usr/lib/rabbitmq/bin/rabbitmq-server";

/// A RabbitMQ server without plugins on a free port of 127.0.0.1. The user is `guest`, with the password `guest`.
///
/// Durable queues survive [`kill`](Self::kill). It is gone when the value is dropped, or when its process ends in whatever way. The
/// port mapper of Erlang may stay; it holds no data.
#[derive(Debug)]
pub struct RabbitMq {
    broker: Broker,
    version: String,
    origin: String,
}

impl RabbitMq {
    /// Starts a server, and waits until it is ready.
    ///
    /// # Errors
    ///
    /// - [`Error::Missing`] if this machine has no `rabbitmq-server`.
    /// - An error with its log if it is not ready within a minute.
    pub fn start() -> Result<RabbitMq, Error> {
        let debian = Some(PathBuf::from(DEBIAN)).filter(|program| program.is_file());
        let program = debian.or_else(|| programs::find("rabbitmq-server")).ok_or_else(|| Error::Missing {
            what: "`rabbitmq-server` is not on PATH".into(),
            advice: "install it (Debian's package is rabbitmq-server)".into(),
        })?;
        let broker = Broker::start("Server startup complete", |folder, port| command(&program, folder, port))?;
        let log = broker.log()?;
        let version = log.split_once("Starting RabbitMQ ").and_then(|(_, rest)| rest.split_ascii_whitespace().next());
        let version = format!("RabbitMQ {}", version.unwrap_or("of unknown version"));
        Ok(RabbitMq { broker, version, origin: program.display().to_string() })
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

    /// The URL: `amqp://guest:guest@127.0.0.1:PORT/%2f`. It stays the same across restarts.
    #[must_use]
    pub fn url(&self) -> String {
        format!("amqp://guest:guest@127.0.0.1:{}/%2f", self.broker.port())
    }

    /// The version, as in `RabbitMQ 3.10.8`.
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

/// The script starts Erlang in its own process if it believes to run under systemd. Nodes reach each other through a port that follows
/// from the port for clients, so that no port mapper is asked.
fn command(program: &Path, folder: &Path, port: u16) -> Result<Vec<OsString>, Error> {
    let (configuration, plugins) = (folder.join("rabbitmq.conf"), folder.join("plugins"));
    std::fs::write(&configuration, "loopback_users = none\n").map_err(Error::io("write a file"))?;
    std::fs::write(&plugins, "[].\n").map_err(Error::io("write a file"))?;
    let distribution = port.wrapping_add(1);
    let in_folder = |name: &str| folder.join(name).into_os_string();
    let variables: [(&str, OsString); 13] = [
        ("HOME", folder.into()),
        ("RUNNING_UNDER_SYSTEMD", "1".into()),
        ("RABBITMQ_NODENAME", format!("idem{port}@localhost").into()),
        ("RABBITMQ_NODE_IP_ADDRESS", "127.0.0.1".into()),
        ("RABBITMQ_NODE_PORT", port.to_string().into()),
        ("RABBITMQ_DIST_PORT", distribution.to_string().into()),
        ("RABBITMQ_MNESIA_BASE", in_folder("data")),
        ("RABBITMQ_LOG_BASE", in_folder("logs")),
        ("RABBITMQ_LOGS", "-".into()),
        ("RABBITMQ_PID_FILE", in_folder("pid")),
        ("RABBITMQ_CONFIG_FILE", configuration.into()),
        ("RABBITMQ_ENABLED_PLUGINS_FILE", plugins.into()),
        (
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS",
            format!("-start_epmd false -erl_epmd_port {distribution} +S 2:2").into(),
        ),
    ];
    let variables = variables.into_iter().map(|(name, value)| {
        let mut variable = OsString::from(name);
        variable.push("=");
        variable.push(value);
        variable
    });
    Ok([OsString::from("env")].into_iter().chain(variables).chain([program.into()]).collect())
}
