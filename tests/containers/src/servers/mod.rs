//! The servers that the suites share.

mod cluster;
mod pgbouncer;
mod postgres;
mod redis;
mod sentinel;

use idem_servers::{Reply, redis_command};

use crate::Error;
use crate::container::{Container, Network};
use crate::images::Images;

use cluster::Cluster;
use sentinel::Sentinel;

pub(crate) use postgres::wait as wait_for_postgres;
pub(crate) use redis::wait as wait_for_redis;

/// So few that tests notice if they need a second connection, or leave a transaction open.
const FEW_CONNECTIONS: u16 = 2;

/// Enough for the example: a few handlers in their transactions, and the verbs.
const CONNECTIONS: u16 = 6;

/// All servers; removed when dropped.
#[derive(Debug)]
pub(crate) struct Servers {
    pub(crate) postgres: Container,
    pub(crate) narrow_pgbouncer: Container,
    pub(crate) pgbouncer: Container,
    pub(crate) redis: Container,
    pub(crate) sentinel: Sentinel,
    pub(crate) cluster: Cluster,
}

impl Servers {
    /// Starts them, and waits until each one answers and groups are complete.
    pub(crate) async fn start(network: &Network, images: &Images) -> Result<Self, Error> {
        let postgres = postgres::start(network, "postgres", &images.postgres).await?;
        let pooler = |name, size| pgbouncer::start(network, name, &images.pgbouncer, postgres.host(), size);
        let narrow_pgbouncer = pooler("pgbouncer-narrow", FEW_CONNECTIONS).await?;
        let pgbouncer = pooler("pgbouncer", CONNECTIONS).await?;
        let redis = redis::start(network, "redis", &images.redis, &[]).await?;
        let sentinel = Sentinel::start(network, &images.redis).await?;
        let cluster = Cluster::start(network, &images.redis).await?;
        Ok(Self { postgres, narrow_pgbouncer, pgbouncer, redis, sentinel, cluster })
    }
}

/// Sends a command to a Redis server of any kind.
async fn ask(server: &Container, port: u16, words: &[&str]) -> Result<Reply, Error> {
    let socket = server.socket(port).await?;
    Ok(tokio::task::block_in_place(|| redis_command(socket, words))?)
}
