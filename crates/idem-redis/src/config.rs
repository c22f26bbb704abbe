//! How Redis is reached and used, each default with its reason.

use std::fmt;
use std::num::NonZeroUsize;
use std::time::Duration;

use idem_core::{StoreError, StoreErrorKind, TimeOffset};

use crate::address::{Address, Servers};

/// The default timeout of a verb; [`RedisConfig::timeout`] gives the reason.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(1);

/// The upper limit of the timeout: longer than any caller waits for a verb.
const LONGEST_TIMEOUT: Duration = Duration::from_secs(30);

/// The configuration of a Redis store.
#[derive(Clone)]
pub struct RedisConfig {
    target: Target,
    pub(crate) key_prefix: String,
    pub(crate) timeout: Option<Duration>,
    pub(crate) min_replicas: u32,
    pub(crate) replica_connections: NonZeroUsize,
    pub(crate) allow_eviction: bool,
    pub(crate) offset: TimeOffset,
}

#[derive(Clone)]
enum Target {
    Address(Box<Result<Address, String>>),
    #[cfg(feature = "deadpool")]
    Pool(deadpool_redis::Pool),
}

impl RedisConfig {
    /// Uses the servers at `url`. An invalid URL is an error when the store is opened.
    ///
    /// - `redis://user:password@host:6379/0`: one server.
    /// - `redis+sentinel://user:password@host:26379,host:26379/service/0`: the primary that Sentinels name; the login is
    ///   that of the Redis servers.
    /// - `redis+cluster://user:password@host:6379,host:6379`: a Cluster, found through some of its servers.
    ///
    /// `rediss` in place of `redis` enables TLS. It needs a TLS feature of the crate `redis`, such as `tokio-rustls-comp`, in
    /// your application.
    #[must_use]
    pub fn new(url: impl AsRef<str>) -> Self {
        Self::at(Target::Address(Box::new(Address::parse(url.as_ref()).map_err(|error| error.to_string()))))
    }

    /// Uses the application's connection pool. Each verb takes a connection for a moment, and fails if the application uses all of
    /// them for longer than [`timeout`](Self::timeout). The store has no subscription then, so waiters learn of settlements by
    /// polling.
    ///
    /// The store uses the database that the pool's URL names, and selects it before each use: the application may have left a
    /// connection in another one. The connection then stays in the database of the URL. A pool whose hook selects another
    /// database is refused at opening, unless the login may not send `CLIENT INFO`.
    ///
    /// Let the pool's URL log in, not a hook: the connection that renews leases while a runtime is busy is made without hooks.
    #[cfg(feature = "deadpool")]
    #[must_use]
    pub fn from_pool(pool: deadpool_redis::Pool) -> Self {
        Self::at(Target::Pool(pool))
    }

    fn at(target: Target) -> Self {
        Self {
            target,
            key_prefix: "idem:".to_owned(),
            timeout: None,
            min_replicas: 0,
            replica_connections: NonZeroUsize::new(4).unwrap_or(NonZeroUsize::MIN),
            allow_eviction: false,
            offset: TimeOffset::default(),
        }
    }

    /// Sets the prefix of all keys. Default `idem:`, to keep them apart from the application's keys. The prefix must not
    /// contain `{`, which begins the hash tag in a Cluster.
    #[must_use]
    pub fn key_prefix(mut self, prefix: impl Into<String>) -> Self {
        self.key_prefix = prefix.into();
        self
    }

    /// Sets the timeout of a verb, connecting included, at most 30 s. Default 1 s: far above the latency of a healthy server,
    /// and short enough for the engine, which by default waits 2 s for a store.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout.clamp(Duration::from_millis(1), LONGEST_TIMEOUT));
        self
    }

    /// Sets how many replicas must acknowledge a change before the store reports it (`WAIT`). Default 0: the primary alone
    /// answers, and a failover loses what it had not yet replicated.
    ///
    /// With too few replicas in reach, every change but a release is an indeterminate error, and nothing runs. Each verb takes
    /// a round trip to a replica longer. A failover then loses a change only if it promotes a replica that had not
    /// acknowledged it; Redis prefers the most recent one.
    #[must_use]
    pub fn min_replicas(mut self, replicas: u32) -> Self {
        self.min_replicas = replicas;
        self
    }

    /// Sets how many connections carry verbs that await replicas, in turn. Default 4. A connection is blocked while it waits,
    /// so the verbs on it run one after another.
    #[must_use]
    pub fn replica_connections(mut self, connections: NonZeroUsize) -> Self {
        self.replica_connections = connections;
        self
    }

    /// Accepts a server that may evict records when its memory is full.
    ///
    /// Default off: such a server is refused. After an eviction, a repeat runs the operation again. Every policy but
    /// `noeviction` evicts live records. The `volatile-` policies evict them first, since all records have a TTL.
    #[must_use]
    pub fn dangerous_allow_eviction(mut self) -> Self {
        self.allow_eviction = true;
        self
    }

    /// Moves the store's time, for tests. Default none.
    ///
    /// All times of a record follow from the expiry of its key, which this does not move. A test that moves the time also has
    /// to move the expiry of its keys, by the same amount to an earlier time.
    #[must_use]
    pub fn time_offset(mut self, offset: TimeOffset) -> Self {
        self.offset = offset;
        self
    }

    pub(crate) fn servers(&self, timeout: Duration) -> Result<Servers, StoreError> {
        let misconfigured = |message: &str| StoreError::new(StoreErrorKind::Misconfigured, message);
        if self.key_prefix.contains('{') {
            return Err(misconfigured("the prefix of the keys has a { in it; leave it out"));
        }
        match &self.target {
            Target::Address(address) => {
                let message = "the URL of Redis cannot be used; write redis://user:password@host:port/0, and for rediss enable \
                     a TLS feature of the crate redis";
                let address = address.clone().map_err(|error| misconfigured(message).with_source(error))?;
                address.servers(timeout).map_err(|error| misconfigured(message).with_source(error))
            }
            #[cfg(feature = "deadpool")]
            Target::Pool(pool) => Ok(Servers::Pool(pool.clone())),
        }
    }

    pub(crate) fn is_from_pool(&self) -> bool {
        match self.target {
            Target::Address(_) => false,
            #[cfg(feature = "deadpool")]
            Target::Pool(_) => true,
        }
    }
}

/// Omits the URL, which may contain a password.
impl fmt::Debug for RedisConfig {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("RedisConfig")
            .field("key_prefix", &self.key_prefix)
            .field("timeout", &self.timeout)
            .field("min_replicas", &self.min_replicas)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use redis::IntoConnectionInfo as _;

    use super::*;

    #[test]
    fn an_address_that_is_none_is_refused_without_showing_it() {
        for url in
            ["mysql://root:hunter2@host/0", "redis//hunter2", "redis://host:hunter2/0", "redis+sentinel://hunter2"]
        {
            let error = RedisConfig::new(url).servers(TIMEOUT).map(|_| ()).unwrap_err();
            assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{url}");
            assert!(!format!("{error} {error:?}").contains("hunter2"), "{error:?}");
        }
    }

    #[test]
    fn tls_without_its_feature_is_said_to_be_missing() {
        for url in ["rediss://host", "rediss+cluster://host"] {
            // In a build of the whole workspace, the command line enables the feature.
            match RedisConfig::new(url).servers(TIMEOUT).map(|_| ()) {
                Ok(()) => assert!("rediss://host".into_connection_info().is_ok(), "{url}"),
                Err(error) => assert!(error.to_string().contains("enable a TLS feature"), "{url}: {error}"),
            }
        }
    }

    #[test]
    fn a_prefix_that_would_part_what_belongs_together_is_refused() {
        let error = RedisConfig::new("redis://host").key_prefix("{a}").servers(TIMEOUT).map(|_| ()).unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Misconfigured);
    }

    #[test]
    fn the_password_is_not_shown() {
        let config = RedisConfig::new("redis://root:hunter2@host/0");
        config.servers(TIMEOUT).map(|_| ()).unwrap();
        assert!(!format!("{config:?}").contains("hunter2"));
    }
}
