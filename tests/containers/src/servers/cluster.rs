//! A Redis Cluster: three primaries with one replica each.

use idem_servers::setup::expect;
use idem_servers::setup::redis::NODES;

use super::{ask, redis};
use crate::Error;
use crate::container::{Container, Network};

const SETTINGS: [&str; 8] = [
    "--cluster-enabled",
    "yes",
    "--cluster-node-timeout",
    "5000",
    "--cluster-require-full-coverage",
    "no",
    "--repl-diskless-sync-delay",
    "0",
];

/// The nodes; removed when dropped.
#[derive(Debug)]
pub(crate) struct Cluster {
    _nodes: Vec<Container>,
    url: String,
}

impl Cluster {
    /// Starts the nodes, and waits until every slot is served and every replica follows.
    pub(crate) async fn start(network: &Network, image: &str) -> Result<Self, Error> {
        let (mut nodes, mut addresses) = (Vec::new(), Vec::new());
        for index in 1..=NODES {
            let node = redis::start(network, &format!("redis-node-{index}"), image, &SETTINGS).await?;
            addresses.push(node.socket(redis::PORT).await?.to_string());
            nodes.push(node);
        }
        let create = ["redis-cli", "--cluster", "create", "--cluster-replicas", "1", "--cluster-yes"];
        let words: Vec<&str> = create.into_iter().chain(addresses.iter().map(String::as_str)).collect();
        if let Some(node) = nodes.first() {
            node.execute(&words).await?;
        }
        for node in &nodes {
            node.wait_until(async || expect_sound(node).await).await?;
        }
        Ok(Self { _nodes: nodes, url: format!("redis+cluster://{}", addresses.join(",")) })
    }

    /// The URL with all nodes: `redis+cluster://ADDRESS:PORT,…`.
    pub(crate) fn url(&self) -> &str {
        &self.url
    }
}

/// Fails unless the node sees all slots, and its replication link is up.
async fn expect_sound(node: &Container) -> Result<(), Error> {
    let info = ask(node, redis::PORT, &["CLUSTER", "INFO"]).await?;
    expect("the cluster's state", info.field("cluster_state").unwrap_or("missing"), "ok")?;
    let replication = ask(node, redis::PORT, &["INFO", "replication"]).await?;
    let (field, expected) = match replication.field("role") {
        Some("master") => ("connected_slaves", "1"),
        _ => ("master_link_status", "up"),
    };
    Ok(expect(field, replication.field(field).unwrap_or("missing"), expected)?)
}
