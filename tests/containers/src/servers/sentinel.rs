//! A primary, its replicas, and Sentinels that would replace it.

use idem_servers::Reply;
use testcontainers::ImageExt;

use super::{ask, expect_field, redis};
use crate::Error;
use crate::container::{Container, Network};

/// The name under which the Sentinels know the group.
const SERVICE: &str = "idem";

const PORT: u16 = 26379;
const REPLICAS: usize = 2;
const SENTINELS: usize = 3;

/// How many Sentinels have to agree before anything is true.
const QUORUM: usize = 2;

/// A Sentinel writes into the file of its settings, so it gets one that it owns.
const COMMAND: [&str; 3] =
    ["sh", "-c", r#"printf "%s" "$SETTINGS" >/data/sentinel.conf && exec redis-sentinel /data/sentinel.conf"#];

/// The group; removed when dropped.
#[derive(Debug)]
pub(crate) struct Sentinel {
    _containers: Vec<Container>,
    url: String,
}

impl Sentinel {
    /// Starts the group, and waits until everybody knows everybody.
    pub(crate) async fn start(network: &Network, image: &str) -> Result<Self, Error> {
        let primary = redis::start(network, "redis-primary", image, &["--repl-diskless-sync-delay", "0"]).await?;
        let address = primary.address().await?.to_string();
        let mut servers = Vec::new();
        for index in 1..=REPLICAS {
            let following = ["--replicaof", &address, "6379"];
            servers.push(redis::start(network, &format!("redis-replica-{index}"), image, &following).await?);
        }
        let settings = format!(
            "port {PORT}\nprotected-mode no\ndir /data\nsentinel monitor {SERVICE} {address} 6379 {QUORUM}\n\
             sentinel down-after-milliseconds {SERVICE} 5000\nsentinel failover-timeout {SERVICE} 10000\n\
             sentinel parallel-syncs {SERVICE} 1\n"
        );
        let mut sentinels = Vec::new();
        for index in 1..=SENTINELS {
            let configure = |request: testcontainers::ContainerRequest<_>| {
                request.with_env_var("SETTINGS", &settings).with_cmd(COMMAND)
            };
            sentinels.push(network.start(&format!("redis-sentinel-{index}"), image, configure).await?);
        }
        let replicas = REPLICAS.to_string();
        let whole = async || {
            expect_field(&ask(&primary, redis::PORT, &["INFO", "replication"]).await?, "connected_slaves", &replicas)
        };
        primary.wait_until(whole).await?;
        for sentinel in &sentinels {
            sentinel
                .wait_until(async || expect_all_known(&ask(sentinel, PORT, &["SENTINEL", "MASTER", SERVICE]).await?))
                .await?;
        }
        let mut addresses = Vec::new();
        for sentinel in &sentinels {
            addresses.push(sentinel.socket(PORT).await?.to_string());
        }
        let containers = servers.into_iter().chain([primary]).chain(sentinels).collect();
        let url = format!("redis+sentinel://{}/{SERVICE}", addresses.join(","));
        Ok(Self { _containers: containers, url })
    }

    /// `redis+sentinel://ADDRESS:PORT,…/idem`
    pub(crate) fn url(&self) -> &str {
        &self.url
    }
}

/// A Sentinel tells names and values in turn.
fn expect_all_known(master: &Reply) -> Result<(), Error> {
    let value = |name: &str| {
        let mut pairs = master.items().chunks_exact(2);
        pairs.find(|pair| pair[0].text() == Some(name)).and_then(|pair| pair[1].integer())
    };
    let known = (value("num-slaves"), value("num-other-sentinels"));
    let all = (i64::try_from(REPLICAS).ok(), i64::try_from(SENTINELS - 1).ok());
    if known == all { Ok(()) } else { Err(format!("it knows {known:?} and not {all:?}").into()) }
}
