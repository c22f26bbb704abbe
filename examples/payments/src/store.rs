//! The idempotency store, in either database.

use std::error::Error;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use idem_axum::{Idempotency, Settings};
use idem_core::{Purge, SelfTestError, StoreError, TransactionalStore};
use idem_postgres::{PostgresConfig, PostgresStore, Purger};
use idem_sqlite::{SqliteConfig, SqliteStore};
use tokio::task::JoinHandle;

use crate::config::{Config, ContractName, Database};

/// How often expired records are removed from SQLite, and how many at a time.
const PURGE_EVERY: Duration = Duration::from_secs(60);
const PURGE_BATCH: NonZeroU32 = NonZeroU32::new(500).unwrap();

#[derive(Debug, Clone)]
pub(crate) enum Store {
    Sqlite(SqliteStore),
    Postgres(PostgresStore),
}

/// What the store says about itself.
#[derive(Debug)]
pub(crate) struct Health {
    pub(crate) store: &'static str,
    pub(crate) version: String,
    /// How many records there are; an estimate in Postgres.
    pub(crate) records: u64,
}

/// The task that removes expired records.
#[derive(Debug)]
pub(crate) enum RunningPurge {
    Sqlite(JoinHandle<()>),
    Postgres(Purger),
}

impl Store {
    pub(crate) async fn open(config: &Config) -> Result<Self, Box<dyn Error + Send + Sync>> {
        Ok(match config.store()? {
            Database::Sqlite(url) => Self::Sqlite(SqliteStore::open(SqliteConfig::new(url)).await?),
            Database::Postgres(url) => {
                let postgres = PostgresConfig::new(url).schema(config.idem_schema.as_str());
                let postgres = if config.pooler { postgres.through_transaction_pooler() } else { postgres };
                Self::Postgres(PostgresStore::open(postgres).await?)
            }
        })
    }

    /// Whether the store keeps what the contracts need.
    pub(crate) async fn self_test(&self) -> Result<(), SelfTestError> {
        match self {
            Self::Sqlite(store) => store.self_test().await,
            Self::Postgres(store) => {
                let durability = store.self_test().await?;
                tracing::info!(%durability, "the store passed its self-test");
                Ok(())
            }
        }
    }

    /// The engine that runs payments under `contract`.
    pub(crate) fn engine(&self, contract: ContractName, settings: Settings) -> Idempotency {
        let store: Arc<dyn TransactionalStore> = match self {
            Self::Sqlite(store) => Arc::new(store.clone()),
            Self::Postgres(store) => Arc::new(store.clone()),
        };
        match contract {
            ContractName::Transactional => Idempotency::transactional(store, settings),
            ContractName::AtMostOnce => Idempotency::at_most_once(store, settings),
            ContractName::AtLeastOnce => Idempotency::at_least_once(store, settings),
        }
    }

    pub(crate) async fn health(&self) -> Result<Health, StoreError> {
        Ok(match self {
            Self::Sqlite(store) => {
                let health = store.health().await?;
                Health { store: "sqlite", version: health.version, records: health.records }
            }
            Self::Postgres(store) => {
                let health = store.health().await?;
                Health { store: "postgres", version: health.version, records: health.records }
            }
        })
    }

    /// Removes expired records from now on.
    pub(crate) fn start_purge(&self) -> RunningPurge {
        match self {
            Self::Sqlite(store) => RunningPurge::Sqlite(tokio::spawn(purge(store.clone()))),
            Self::Postgres(store) => RunningPurge::Postgres(Purger::start(store.clone())),
        }
    }
}

impl RunningPurge {
    pub(crate) async fn stop(self) {
        match self {
            Self::Sqlite(task) => task.abort(),
            Self::Postgres(purger) => purger.stop().await,
        }
    }
}

async fn purge(store: SqliteStore) {
    let mut due = tokio::time::interval(PURGE_EVERY);
    loop {
        due.tick().await;
        loop {
            match store.purge(PURGE_BATCH).await {
                Ok(purged) if purged == PURGE_BATCH.get() => {}
                Ok(_) => break,
                Err(error) => {
                    tracing::warn!(error = &error as &dyn Error, "expired records could not be removed");
                    break;
                }
            }
        }
    }
}
