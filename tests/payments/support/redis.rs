//! Keys of a server's own in the Redis that all tests share.

use idem_servers::redis_command;
use uuid::Uuid;

/// The records of one server. They are left to the server that has them, which forgets them by itself.
pub(crate) struct Keys {
    url: String,
    pub(super) prefix: String,
}

impl Keys {
    /// Keys at `url`, of whatever kind it is.
    pub(crate) fn new(url: String) -> Self {
        Self { url, prefix: format!("test-{}:", Uuid::new_v4().simple()) }
    }

    /// The command line that puts the records here, and the payments into the server's folder.
    pub(crate) fn arguments(&self) -> Vec<String> {
        let arguments = ["--store", &self.url, "--redis-key-prefix", &self.prefix, "--ledger", "sqlite://ledger.db"];
        arguments.map(str::to_owned).to_vec()
    }

    /// The keys that there are. Only of a server that stands alone: another one may have the keys elsewhere.
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
