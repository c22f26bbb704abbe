//! The idempotency store: SQLite, Postgres, MariaDB, Redis, or the memory of this process; in front of the first three, Redis as well.

use std::error::Error;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use idem_core::engine::{Idempotency, Purger, Settings};
use idem_core::{
    IdempotencyStore as _, Inspect, MemoryStore, Purge, Record, RecordId, SelfTestError, StoreError,
    TransactionalStore, self_test,
};
use idem_hybrid::{HybridConfig, HybridMetrics, HybridStore};
use idem_mysql::{MySqlConfig, MySqlStore};
use idem_postgres::{PostgresConfig, PostgresStore};
use idem_redis::{RedisConfig, RedisFastStore, RedisStore};
use idem_sqlite::{SqliteConfig, SqliteStore};
use sqlx::postgres::PgPoolOptions;

use crate::config::{Config, ContractName, Database, Place, UnknownPlace};
use crate::joined::JoinedStore;

/// The least time to wait for other writers of SQLite.
const SQLITE_PATIENCE: Duration = Duration::from_secs(5);

/// The connections of the application's own pool.
const POOL_CONNECTIONS: u32 = 17;

/// How many records are kept in memory at most.
const MEMORY_RECORDS: NonZeroUsize = NonZeroUsize::new(100_000).unwrap();

#[derive(Debug, Clone)]
pub(crate) enum Store {
    Sqlite(SqliteStore),
    Postgres(PostgresStore),
    /// Postgres, with transactions that this service opens.
    Joined(JoinedStore),
    MySql(MySqlStore),
    Redis(RedisStore),
    Memory(Arc<MemoryStore>),
    /// With Redis in front.
    Cached(Box<Self>, HybridStore<dyn TransactionalStore>),
}

/// What the store says about itself.
#[derive(Debug)]
pub(crate) struct Health {
    pub(crate) store: &'static str,
    pub(crate) version: String,
    /// What is counted: records, or in Redis all keys, the records of this service among them.
    pub(crate) counted: &'static str,
    /// How many there are; an estimate in Postgres and MariaDB.
    pub(crate) count: u64,
    /// The counters of the cache, if there is one.
    pub(crate) cache: Option<HybridMetrics>,
}

/// A contract that the store cannot keep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ContractRefused {
    /// A transaction of Redis cannot hold the payments.
    TransactionalOnRedis,
    /// Memory has no transaction for the payments.
    TransactionalInMemory,
    /// Only runs under leases of a store in Postgres can be settled by their handlers.
    SettledInHandler,
    /// Redis can lose records, and the operator has not accepted that.
    AtMostOnceOnRedis,
}

impl Store {
    pub(crate) async fn open(config: &Config) -> Result<Self, Box<dyn Error + Send + Sync>> {
        let store = Self::open_alone(config).await?;
        let Some(url) = &config.cache else { return Ok(store) };
        let durable: Arc<dyn TransactionalStore> = match &store {
            Self::Sqlite(store) => Arc::new(store.clone()),
            Self::Postgres(store) => Arc::new(store.clone()),
            Self::MySql(store) => Arc::new(store.clone()),
            Self::Joined(_) | Self::Redis(_) | Self::Memory(_) | Self::Cached(..) => {
                return Err(UnknownPlace::NothingToSpare.into());
            }
        };
        let timeout = Duration::from_millis(config.cache_timeout_ms);
        let redis = RedisConfig::new(url).key_prefix(&config.redis_key_prefix).timeout(timeout);
        let patient = HybridConfig::new().patience(timeout * 2);
        let hybrid = HybridStore::new(durable, Arc::new(RedisFastStore::new(redis)?), patient);
        Ok(Self::Cached(Box::new(store), hybrid))
    }

    async fn open_alone(config: &Config) -> Result<Self, Box<dyn Error + Send + Sync>> {
        // A request that waits for longer would be ended by the engine, without the reason.
        let transaction_wait = Duration::from_millis(config.store_timeout_ms / 2);
        Ok(match config.store()? {
            Place::Database(Database::Sqlite(url)) => {
                let patience = Duration::from_millis(config.store_timeout_ms).max(SQLITE_PATIENCE);
                let sqlite = SqliteConfig::new(url).busy_timeout(patience).transaction_wait(transaction_wait);
                Self::Sqlite(SqliteStore::open(sqlite).await?)
            }
            Place::Database(Database::Postgres(url)) => {
                let pool = PgPoolOptions::new().max_connections(POOL_CONNECTIONS).connect_lazy(url)?;
                let postgres = if config.own_pool || config.join {
                    PostgresConfig::from_pool(pool.clone())
                } else {
                    PostgresConfig::new(url)
                };
                let postgres = postgres.schema(config.idem_schema.as_str());
                let postgres = if config.pooler { postgres.through_transaction_pooler() } else { postgres };
                let store = PostgresStore::open(postgres).await?;
                let idle = Duration::from_millis(config.lease_ms);
                if config.join { Self::Joined(JoinedStore { store, pool, idle }) } else { Self::Postgres(store) }
            }
            Place::Database(Database::MySql(url)) => {
                Self::MySql(MySqlStore::open(MySqlConfig::new(url).transaction_wait(transaction_wait)).await?)
            }
            Place::Memory => Self::Memory(Arc::new(MemoryStore::new(MEMORY_RECORDS))),
            Place::Redis(url) => {
                let redis = RedisConfig::new(url).key_prefix(&config.redis_key_prefix);
                let redis = redis.min_replicas(config.min_replicas);
                let redis = if config.dangerous_allow_eviction { redis.dangerous_allow_eviction() } else { redis };
                Self::Redis(RedisStore::open(redis).await?)
            }
        })
    }

    /// Whether the store keeps what the contracts need.
    pub(crate) async fn self_test(&self) -> Result<(), SelfTestError> {
        let durability = match self {
            Self::Sqlite(store) => return store.self_test().await,
            Self::Memory(store) => return self_test(store.as_ref()).await,
            Self::Postgres(store) | Self::Joined(JoinedStore { store, .. }) => store.self_test().await?.to_string(),
            Self::MySql(store) => store.self_test().await?.to_string(),
            Self::Redis(store) => store.self_test().await?.to_string(),
            Self::Cached(durable, store) => {
                Box::pin(durable.self_test()).await?;
                if let Err(error) = store.self_test().await?.fast {
                    tracing::warn!(error = &error as &dyn Error, "Redis does not answer, so there is no cache for now");
                }
                return Ok(());
            }
        };
        tracing::info!(durability, "the store passed its self-test");
        Ok(())
    }

    /// The engine that runs payments under the contract, if this store can keep it.
    pub(crate) fn engine(&self, config: &Config, settings: Settings) -> Result<Idempotency, ContractRefused> {
        let store = match self {
            Self::Redis(store) => return on_redis(store.clone(), config, settings),
            Self::Memory(store) => return in_memory(store.clone(), config, settings),
            Self::Sqlite(store) => Arc::new(store.clone()) as Arc<dyn TransactionalStore>,
            Self::Postgres(store) => Arc::new(store.clone()),
            Self::MySql(store) => Arc::new(store.clone()),
            Self::Joined(store) => Arc::new(store.clone()),
            Self::Cached(_, store) => Arc::new(store.clone()),
        };
        Ok(match config.contract {
            ContractName::Transactional => Idempotency::transactional(store, settings),
            ContractName::AtMostOnce => Idempotency::at_most_once(store, settings),
            ContractName::AtLeastOnce => Idempotency::at_least_once(store, settings),
        })
    }

    /// The statement by which handlers settle their payments, if the command line asks for that.
    pub(crate) fn settle_run_sql(&self, config: &Config) -> Result<Option<String>, ContractRefused> {
        match self {
            _ if !config.settle_in_handler => Ok(None),
            Self::Cached(durable, _) => durable.settle_run_sql(config),
            Self::Postgres(store) if config.contract == ContractName::AtLeastOnce => Ok(Some(store.settle_run_sql())),
            _ => Err(ContractRefused::SettledInHandler),
        }
    }

    pub(crate) async fn peek(&self, id: &RecordId) -> Result<Option<Record>, StoreError> {
        match self {
            Self::Sqlite(store) => store.peek(id).await,
            Self::Postgres(store) | Self::Joined(JoinedStore { store, .. }) => store.peek(id).await,
            Self::MySql(store) => store.peek(id).await,
            Self::Redis(store) => store.peek(id).await,
            Self::Memory(store) => store.peek(id).await,
            Self::Cached(_, store) => store.peek(id).await,
        }
    }

    pub(crate) async fn health(&self) -> Result<Health, StoreError> {
        let (store, version, counted, count) = match self {
            Self::Sqlite(store) => {
                let health = store.health().await?;
                ("sqlite", health.version, "records", health.records)
            }
            Self::Postgres(store) | Self::Joined(JoinedStore { store, .. }) => {
                let health = store.health().await?;
                ("postgres", health.version, "records", health.records)
            }
            Self::MySql(store) => {
                let health = store.health().await?;
                ("mariadb", health.version, "records", health.records)
            }
            Self::Redis(store) => {
                let health = store.health().await?;
                ("redis", health.version, "keys", health.keys)
            }
            Self::Memory(store) => {
                let version = env!("CARGO_PKG_VERSION").to_owned();
                ("memory", version, "records", store.record_count() as u64)
            }
            Self::Cached(durable, store) => {
                let durable = Box::pin(durable.health()).await?;
                return Ok(Health { cache: Some(store.metrics()), ..durable });
            }
        };
        Ok(Health { store, version, counted, count, cache: None })
    }

    /// Its records, to be counted; `None` for a Redis Cluster, whose records cannot be listed.
    pub(crate) fn records(&self, config: &Config) -> Option<Arc<dyn Inspect>> {
        match self {
            Self::Sqlite(store) => Some(Arc::new(store.clone())),
            Self::Postgres(store) | Self::Joined(JoinedStore { store, .. }) => Some(Arc::new(store.clone())),
            Self::MySql(store) => Some(Arc::new(store.clone())),
            Self::Redis(_) if config.is_on_cluster() => None,
            Self::Redis(store) => Some(Arc::new(store.clone())),
            Self::Memory(store) => Some(store.clone()),
            Self::Cached(durable, _) => durable.records(config),
        }
    }

    /// Removes expired records from now on. Redis does that itself.
    pub(crate) fn start_purge(&self) -> Option<Purger> {
        let store: Arc<dyn Purge> = match self {
            Self::Sqlite(store) => Arc::new(store.clone()),
            Self::Postgres(store) | Self::Joined(JoinedStore { store, .. }) => Arc::new(store.clone()),
            Self::MySql(store) => Arc::new(store.clone()),
            Self::Memory(store) => store.clone(),
            Self::Redis(_) => return None,
            Self::Cached(durable, _) => return durable.start_purge(),
        };
        Some(Purger::start(store))
    }
}

impl std::fmt::Display for ContractRefused {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(match self {
            Self::TransactionalOnRedis => {
                "--contract transactional commits payment and record in one transaction, and Redis has no transaction \
                 that could hold a payment: choose --contract at-least-once, or a --store in SQLite, Postgres or MariaDB"
            }
            Self::TransactionalInMemory => {
                "--contract transactional commits payment and record in one transaction, and memory has none: choose \
                 another --contract, or a --store in SQLite, Postgres or MariaDB"
            }
            Self::SettledInHandler => {
                "--settle-in-handler takes a --store in Postgres and --contract at-least-once: a handler settles there in \
                 the transaction of its payment"
            }
            Self::AtMostOnceOnRedis => {
                "--contract at-most-once promises that no payment is made twice, and Redis can lose records that it has \
                 acknowledged, by a failover or by a restart without persistence; their payments are made again when \
                 they are repeated. Choose a --store in SQLite, Postgres or MariaDB, or --contract at-least-once, or accept the \
                 loss by --dangerous-accept-store-loss"
            }
        })
    }
}

impl Error for ContractRefused {}

fn on_redis(store: RedisStore, config: &Config, settings: Settings) -> Result<Idempotency, ContractRefused> {
    match config.contract {
        ContractName::Transactional => Err(ContractRefused::TransactionalOnRedis),
        ContractName::AtMostOnce if config.dangerous_accept_store_loss => {
            Ok(Idempotency::at_most_once(Arc::new(store.dangerous_accept_store_loss()), settings))
        }
        ContractName::AtMostOnce => Err(ContractRefused::AtMostOnceOnRedis),
        ContractName::AtLeastOnce => Ok(Idempotency::at_least_once(Arc::new(store), settings)),
    }
}

fn in_memory(store: Arc<MemoryStore>, config: &Config, settings: Settings) -> Result<Idempotency, ContractRefused> {
    match config.contract {
        ContractName::Transactional => Err(ContractRefused::TransactionalInMemory),
        ContractName::AtMostOnce => Ok(Idempotency::at_most_once(store, settings)),
        ContractName::AtLeastOnce => Ok(Idempotency::at_least_once(store, settings)),
    }
}
