//! A primary, its replicas, and Sentinels that watch it.

use std::time::Duration;

use idem_servers::redis_command;
use idem_servers::setup::sentinel::{REPLICAS, SENTINELS, SERVICE, check_sentinel, check_server, watching};
use testcontainers::ImageExt;
use tokio::task::block_in_place;

use super::redis;
use crate::Error;
use crate::container::{Container, Network};

const PORT: u16 = 26379;

/// How long a primary may be silent before it counts as down, on a machine with many containers.
const DOWN_AFTER: Duration = Duration::from_secs(5);

/// A Sentinel rewrites its configuration file, so it gets a file that it owns.
const COMMAND: [&str; 3] =
    ["sh", "-c", r#"printf "%s" "$SETTINGS" >/data/sentinel.conf && exec redis-sentinel /data/sentinel.conf"#];

/// The group; removed when dropped.
#[derive(Debug)]
pub(crate) struct Sentinel {
    _containers: Vec<Container>,
    url: String,
}

impl Sentinel {
    /// Starts the group, and waits until all its members know each other.
    pub(crate) async fn start(network: &Network, image: &str) -> Result<Self, Error> {
        let primary = redis::start(network, "redis-primary", image, &["--repl-diskless-sync-delay", "0"]).await?;
        let address = primary.address().await?.to_string();
        let mut servers = Vec::new();
        for index in 1..=REPLICAS {
            let following = ["--replicaof", &address, "6379"];
            servers.push(redis::start(network, &format!("redis-replica-{index}"), image, &following).await?);
        }
        let watching = watching((&address, redis::PORT), DOWN_AFTER);
        let settings = format!("port {PORT}\nprotected-mode no\ndir /data\n{watching}");
        let mut sentinels = Vec::new();
        for index in 1..=SENTINELS {
            let configure = |request: testcontainers::ContainerRequest<_>| {
                request.with_env_var("SETTINGS", &settings).with_cmd(COMMAND)
            };
            sentinels.push(network.start(&format!("redis-sentinel-{index}"), image, configure).await?);
        }
        for (server, is_primary) in servers.iter().map(|replica| (replica, false)).chain([(&primary, true)]) {
            let socket = server.socket(redis::PORT).await?;
            let ask = |words: &[&str]| redis_command(socket, words);
            let check = || check_server(server.host(), is_primary, redis::PORT, ask);
            server.wait_until(async || Ok(block_in_place(check)?)).await?;
        }
        for sentinel in &sentinels {
            let socket = sentinel.socket(PORT).await?;
            let ask = |words: &[&str]| redis_command(socket, words);
            let check = || check_sentinel(sentinel.host(), redis::PORT, ask);
            sentinel.wait_until(async || Ok(block_in_place(check)?)).await?;
        }
        let mut addresses = Vec::new();
        for sentinel in &sentinels {
            addresses.push(sentinel.socket(PORT).await?.to_string());
        }
        let containers = servers.into_iter().chain([primary]).chain(sentinels).collect();
        let url = format!("redis+sentinel://{}/{SERVICE}", addresses.join(","));
        Ok(Self { _containers: containers, url })
    }

    /// The URL with all Sentinels: `redis+sentinel://ADDRESS:PORT,…/idem`.
    pub(crate) fn url(&self) -> &str {
        &self.url
    }
}
