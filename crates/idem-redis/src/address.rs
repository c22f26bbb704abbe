//! The addresses of the servers, parsed from a URL.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use redis::cluster::ClusterClient;
use redis::sentinel::{SentinelClient, SentinelClientBuilder, SentinelServerType};
use redis::{
    Client, ConnectionAddr, ConnectionInfo, ErrorKind, IntoConnectionInfo, RedisConnectionInfo, RedisError, TlsMode,
};

/// The servers, and how they are found.
#[derive(Clone)]
pub(crate) enum Servers {
    /// One server.
    One(Box<Client>),
    /// The primary that the Sentinels name. Each Sentinel is asked by a separate client, so that one that hangs does not
    /// delay the others.
    Sentinel(Arc<[Sentinel]>),
    /// The servers that share the slots of a Cluster, and a client for each server that the URL names.
    Cluster(Arc<ClusterClient>, Arc<[Client]>),
    /// One server, through the application's connection pool.
    #[cfg(feature = "deadpool")]
    Pool(deadpool_redis::Pool),
    /// The same server, through connections that the pool's manager makes outside the pool.
    #[cfg(feature = "deadpool")]
    BesidePool(deadpool_redis::Pool),
}

impl Servers {
    /// The same servers, without the connections of the application's pool.
    pub(crate) fn beside_pool(&self) -> Self {
        match self {
            #[cfg(feature = "deadpool")]
            Self::Pool(pool) => Self::BesidePool(pool.clone()),
            servers => servers.clone(),
        }
    }
}

/// A Sentinel, and what it is asked for.
pub(crate) struct Sentinel {
    address: ConnectionAddr,
    service: String,
    login: RedisConnectionInfo,
    db: i64,
    tls: bool,
}

impl Sentinel {
    /// A client for one query. A shared client would stay locked while it waits: forever, if its runtime is not driven.
    fn client(&self) -> Result<SentinelClient, RedisError> {
        let server = SentinelServerType::Master;
        let builder = SentinelClientBuilder::new([self.address.clone()], &self.service, server)?;
        let mut builder = builder.set_client_to_redis_db(self.db);
        if self.tls {
            builder = builder.set_client_to_redis_tls_mode(TlsMode::Secure);
            builder = builder.set_client_to_sentinel_tls_mode(TlsMode::Secure);
        }
        if let Some(username) = self.login.username() {
            builder = builder.set_client_to_redis_username(username);
        }
        if let Some(password) = self.login.password() {
            builder = builder.set_client_to_redis_password(password);
        }
        builder.build()
    }
}

/// A parsed URL, before any client is made.
#[derive(Clone)]
pub(crate) enum Address {
    One(ConnectionInfo),
    Sentinel { nodes: Vec<ConnectionInfo>, service: String, db: i64, tls: bool },
    Cluster(Vec<ConnectionInfo>),
}

impl Address {
    pub(crate) fn parse(url: &str) -> Result<Self, RedisError> {
        let (scheme, rest) = url.split_once("://").ok_or_else(|| refused("it does not begin with redis://"))?;
        let (scheme, tls) = match scheme.strip_prefix("rediss") {
            Some(rest) => (rest, true),
            None => (scheme.strip_prefix("redis").ok_or_else(|| refused("it does not begin with redis://"))?, false),
        };
        match scheme {
            "" => Ok(Self::One(url.into_connection_info()?)),
            "+cluster" => {
                let (authority, tail) = rest.split_once('/').unwrap_or((rest, ""));
                if !tail.is_empty() {
                    return Err(refused("a Cluster has one database only, so nothing follows the servers"));
                }
                Ok(Self::Cluster(nodes(authority, tls)?))
            }
            "+sentinel" => {
                let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
                let (service, db) = path.split_once('/').unwrap_or((path, "0"));
                if service.is_empty() {
                    return Err(refused("the name of the service is missing after the Sentinels"));
                }
                let db = db.parse().map_err(|_| refused("the database after the service is not a number"))?;
                Ok(Self::Sentinel { nodes: nodes(authority, tls)?, service: service.to_owned(), db, tls })
            }
            _ => Err(refused("its scheme is not redis, redis+sentinel or redis+cluster")),
        }
    }

    /// Makes the clients of these servers, without connecting.
    pub(crate) fn servers(self, timeout: Duration) -> Result<Servers, RedisError> {
        Ok(match self {
            Self::One(info) => Servers::One(Box::new(Client::open(info)?)),
            Self::Cluster(nodes) => {
                // A server that hangs must not use up the timeout of a verb: another server may answer instead. The driver
                // has no overall timeout, since it would then drop what it has learnt.
                let builder = ClusterClient::builder(nodes.clone()).connection_timeout(timeout / 4);
                let builder = builder.response_timeout(timeout * 2 / 3).overall_response_timeout(None);
                // If the driver gives up, the transport tries again until the verb's deadline, and handles a moving slot better.
                let client = builder.retries(3).build()?;
                let seeds = nodes.into_iter().map(Client::open).collect::<Result<_, _>>()?;
                Servers::Cluster(Arc::new(client), seeds)
            }
            Self::Sentinel { nodes, service, db, tls } => {
                let login = nodes.first().map(|node| node.redis_settings().clone()).unwrap_or_default();
                let sentinels: Arc<[Sentinel]> = nodes
                    .iter()
                    .map(|node| Sentinel {
                        address: node.addr().clone(),
                        service: service.clone(),
                        login: login.clone(),
                        db,
                        tls,
                    })
                    .collect();
                // Reports now if no client can be built.
                sentinels.iter().try_for_each(|sentinel| sentinel.client().map(drop))?;
                Servers::Sentinel(sentinels)
            }
        })
    }
}

/// The primary that the first Sentinel to answer names, after that server has confirmed its role.
pub(crate) async fn primary(sentinels: &[Sentinel]) -> Result<Client, RedisError> {
    let asking = sentinels.iter().map(|sentinel| async { sentinel.client()?.async_get_client().await }.boxed());
    futures_util::future::select_ok(asking).await.map(|(client, _)| client)
}

/// The servers of `user:password@host:port,host:port`; the login applies to all of them.
fn nodes(authority: &str, tls: bool) -> Result<Vec<ConnectionInfo>, RedisError> {
    let (login, hosts) = match authority.rsplit_once('@') {
        Some((login, hosts)) => (format!("{login}@"), hosts),
        None => (String::new(), authority),
    };
    let scheme = if tls { "rediss" } else { "redis" };
    let node = |host: &str| match host {
        "" => Err(refused("the name of a server is missing")),
        host => format!("{scheme}://{login}{host}").into_connection_info(),
    };
    hosts.split(',').map(node).collect()
}

fn refused(why: &'static str) -> RedisError {
    RedisError::from((ErrorKind::InvalidClientConfig, why))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(info: &ConnectionInfo) -> String {
        info.addr().to_string()
    }

    #[test]
    fn one_server_is_read_as_everywhere() {
        let Ok(Address::One(info)) = Address::parse("redis://app:s%40crt@db.internal:6380/3") else { panic!() };
        assert_eq!(at(&info), "db.internal:6380");
        assert_eq!((info.redis_settings().username(), info.redis_settings().password()), (Some("app"), Some("s@crt")));
        assert_eq!(info.redis_settings().db(), 3);
    }

    #[test]
    fn sentinels_share_a_login_and_name_a_service() {
        let url = "redis+sentinel://:secret@a:26379,b:26380,[::1]:26381/payments/2";
        let Ok(Address::Sentinel { nodes, service, db, tls }) = Address::parse(url) else { panic!() };
        assert_eq!(nodes.iter().map(at).collect::<Vec<_>>(), ["a:26379", "b:26380", "::1:26381"]);
        assert_eq!((service.as_str(), db, tls), ("payments", 2, false));
        assert!(nodes.iter().all(|node| node.redis_settings().password() == Some("secret")));
    }

    #[test]
    fn a_cluster_is_some_of_its_servers() {
        let Ok(Address::Cluster(nodes)) = Address::parse("redis+cluster://app:pw@a:7000,b/") else { panic!() };
        assert_eq!(nodes.iter().map(at).collect::<Vec<_>>(), ["a:7000", "b:6379"]);
        assert!(nodes.iter().all(|node| node.redis_settings().username() == Some("app")));
    }

    #[test]
    fn what_is_no_address_is_refused() {
        for url in [
            "",
            "redis",
            "postgres://host",
            "redis+sentinel://host",
            "redis+sentinel://host/",
            "redis+sentinel://host/service/x",
            "redis+cluster://a,,b",
            "redis+cluster://",
            "redis+cluster://a/1",
            "redis+ring://a",
        ] {
            assert!(Address::parse(url).is_err(), "{url}");
        }
    }
}
