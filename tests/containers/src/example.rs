//! The payments example in a container.

use std::fmt;
use std::net::SocketAddr;

use clap::ValueEnum;
use idem_http_suite::Contract;
use testcontainers::ImageExt;
use testcontainers::core::Mount;

use crate::Error;
use crate::container::{Container, Network};
use crate::images::Images;
use crate::servers::Servers;

const PORT: u16 = 8080;

pub(crate) const FRAMEWORKS: [&str; 2] = ["axum", "actix"];

/// The store of the records.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Store {
    Sqlite,
    Postgres,
    #[value(name = "pgbouncer")]
    PgBouncer,
    Redis,
    Sentinel,
    Cluster,
    Hybrid,
}

impl Store {
    /// The contracts that the store supports.
    pub(crate) fn contracts(self) -> &'static [Contract] {
        match self {
            Self::Sqlite | Self::Postgres | Self::PgBouncer | Self::Hybrid => &Contract::ALL,
            Self::Redis | Self::Sentinel | Self::Cluster => &Contract::LEASED,
        }
    }

    /// The arguments that select this store, with names that no other example has.
    fn arguments(self, servers: &Servers, unique: &str) -> Vec<String> {
        let (postgres, redis) = (servers.postgres.host(), format!("redis://{}", servers.redis.host()));
        match self {
            Self::Sqlite => Vec::new(),
            Self::Postgres => in_postgres(postgres, unique),
            Self::PgBouncer => [in_postgres(servers.pgbouncer.host(), unique), vec!["--pooler".into()]].concat(),
            Self::Redis => in_redis(&redis, unique),
            Self::Sentinel => in_redis(servers.sentinel.url(), unique),
            Self::Cluster => in_redis(servers.cluster.url(), unique),
            Self::Hybrid => {
                let cache = ["--cache", &redis, "--redis-key-prefix", &format!("{unique}:")].map(str::to_owned);
                [in_postgres(postgres, unique), cache.to_vec()].concat()
            }
        }
    }
}

impl fmt::Display for Store {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(match self {
            Self::Sqlite => "sqlite",
            Self::Postgres => "postgres",
            Self::PgBouncer => "pgbouncer",
            Self::Redis => "redis",
            Self::Sentinel => "sentinel",
            Self::Cluster => "cluster",
            Self::Hybrid => "hybrid",
        })
    }
}

fn in_postgres(host: &str, unique: &str) -> Vec<String> {
    let url = format!("postgres://postgres@{host}/postgres");
    let schemas = [format!("payments_{unique}"), format!("idem_{unique}")];
    ["--store", &url, "--schema", &schemas[0], "--idem-schema", &schemas[1]].map(str::to_owned).to_vec()
}

fn in_redis(url: &str, unique: &str) -> Vec<String> {
    let prefix = format!("{unique}:");
    ["--store", url, "--redis-key-prefix", &prefix, "--ledger", "sqlite://ledger.db"].map(str::to_owned).to_vec()
}

/// The configuration of an example.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Setup<'a> {
    pub(crate) store: Store,
    pub(crate) contract: Contract,
    pub(crate) framework: &'a str,
    /// Examples with the same name share their records.
    pub(crate) records: &'a str,
    pub(crate) more: &'a [&'a str],
}

/// The running example; removed when dropped.
#[derive(Debug)]
pub(crate) struct Example {
    _container: Container,
    pub(crate) address: SocketAddr,
}

impl Example {
    /// Starts it with simulations enabled, and waits until it listens.
    pub(crate) async fn start(
        network: &Network,
        images: &Images,
        servers: &Servers,
        setup: Setup<'_>,
    ) -> Result<Self, Error> {
        let Setup { store, contract, framework, records, more } = setup;
        let mut arguments = ["--framework", framework, "--contract", contract.name(), "--simulate"].to_vec();
        if contract == Contract::AtMostOnce && store.contracts() == Contract::LEASED {
            arguments.push("--dangerous-accept-store-loss");
        }
        let of_store = store.arguments(servers, records);
        let command = arguments.into_iter().chain(more.iter().copied()).map(str::to_owned).chain(of_store);
        let name = format!("payments-{records}-{framework}");
        // Its files need not outlive it, and are faster in memory.
        let data = Mount::tmpfs_mount("/data");
        let container =
            network.start(&name, &images.payments, |request| request.with_cmd(command).with_mount(data)).await?;
        let address = container.wait_until_it_listens(PORT).await?;
        Ok(Self { _container: container, address })
    }
}
