//! Private keys of a server in the shared Redis.

use idem_servers::redis_command;
use uuid::Uuid;

/// The records of one server. They are not removed, because they expire.
pub(crate) struct Keys {
    pub(super) url: String,
    pub(super) prefix: String,
}

impl Keys {
    /// Keys at `url`, for any kind of Redis.
    pub(crate) fn new(url: String) -> Self {
        Self { url, prefix: format!("test-{}:", Uuid::new_v4().simple()) }
    }

    /// The arguments that put the records here, and the payments into the server's folder.
    pub(crate) fn arguments(&self) -> Vec<String> {
        let arguments = ["--store", &self.url, "--redis-key-prefix", &self.prefix, "--ledger", "sqlite://ledger.db"];
        arguments.map(str::to_owned).to_vec()
    }

    /// All keys. Only for a single server: in other setups, keys may be on another node.
    pub(crate) fn all(&self) -> Vec<String> {
        let keys = redis_command(self.port(), &["KEYS", &format!("{}*", self.prefix)]).unwrap();
        keys.items().iter().map(|key| key.text().unwrap().to_owned()).collect()
    }

    /// The port of the only server.
    pub(crate) fn port(&self) -> u16 {
        let port = self.url.strip_prefix("redis://127.0.0.1:").and_then(|port| port.parse().ok());
        port.unwrap_or_else(|| panic!("{} is not one server", self.url))
    }
}
