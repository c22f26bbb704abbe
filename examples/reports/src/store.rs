//! Store and queue, by the URL.

use std::error::Error;
use std::io;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use idem_core::Purge;
use idem_core::engine::{Idempotency, Settings};
use idem_jobs::{JobQueue, PostgresQueue, RedisQueue, SqliteQueue};
use idem_postgres::{PostgresConfig, PostgresStore};
use idem_redis::{RedisConfig, RedisStore};
use idem_sqlite::{SqliteConfig, SqliteStore};
use sqlx::postgres::PgPoolOptions;
use sqlx::sqlite::{SqliteConnectOptions, SqlitePoolOptions};
use tokio::time::sleep;

use crate::Config;
use crate::reports::{Reports, TABLE};

/// Two engines on one store: one for requests, and one for their jobs.
pub(crate) struct Opened {
    pub(crate) requests: Idempotency,
    pub(crate) jobs: Idempotency,
    pub(crate) queue: Arc<dyn JobQueue>,
    pub(crate) reports: Reports,
    /// What removes old records, unless the store does that itself.
    pub(crate) purge: Option<Arc<dyn Purge>>,
}

pub(crate) async fn open(config: &Config, settings: Settings) -> Result<Opened, Box<dyn Error + Send + Sync>> {
    let (url, schema) = (&config.store, &config.schema);
    if url.starts_with("sqlite:") {
        let store = SqliteStore::open(SqliteConfig::new(url)).await?;
        sqlx::raw_sql(sqlx::AssertSqlSafe(TABLE.replace("{schema}", ""))).execute(store.pool()).await?;
        // The store's own pool has no connection left while many handlers run.
        let options: SqliteConnectOptions = url.parse()?;
        let pool = SqlitePoolOptions::new().max_connections(4).connect_with(options).await?;
        let queue = Arc::new(SqliteQueue::open(pool).await?);
        let store = Arc::new(store);
        let requests = Idempotency::transactional(store.clone(), settings.clone());
        let jobs = Idempotency::transactional(store.clone(), settings).attached_to(&requests);
        return Ok(Opened { requests, jobs, queue, reports: Reports::Sqlite, purge: Some(store) });
    }
    if url.starts_with("postgres") {
        let pool = PgPoolOptions::new().max_connections(4).connect(url).await?;
        let store = PostgresStore::open(PostgresConfig::new(url).schema(schema.as_str())).await?;
        let table = TABLE.replace("{schema}", &format!("\"{schema}\"."));
        // Two processes that start at once could make the table together. A service with migrations makes it there.
        let table = format!("BEGIN; SELECT pg_advisory_xact_lock(7); {table}; COMMIT");
        sqlx::raw_sql(sqlx::AssertSqlSafe(table)).execute(&pool).await?;
        let queue = Arc::new(PostgresQueue::open(pool, schema).await?);
        let store = Arc::new(store);
        let requests = Idempotency::transactional(store.clone(), settings.clone());
        let jobs = Idempotency::transactional(store.clone(), settings).attached_to(&requests);
        return Ok(Opened { requests, jobs, queue, reports: Reports::Postgres(schema.clone()), purge: Some(store) });
    }
    let prefix = format!("{schema}:");
    let store = Arc::new(RedisStore::open(RedisConfig::new(url).key_prefix(&prefix)).await?);
    let connection = redis::Client::open(url.as_str())?.get_connection_manager().await?;
    let requests = Idempotency::at_least_once(store.clone(), settings.clone());
    let jobs = Idempotency::at_least_once(store, settings).attached_to(&requests);
    let queue = Arc::new(RedisQueue::new(connection, &prefix));
    Ok(Opened { requests, jobs, queue, reports: Reports::Nowhere, purge: None })
}

/// Removes old records until `stop` completes.
pub(crate) async fn purge(store: Arc<dyn Purge>, stop: impl Future<Output = ()>) -> io::Result<()> {
    const EVERY: Duration = Duration::from_secs(60);
    const BATCH: NonZeroU32 = NonZeroU32::new(500).unwrap();
    let purging = async {
        loop {
            match store.purge(BATCH).await {
                Ok(purged) if purged == BATCH.get() => {}
                Ok(_) => sleep(EVERY).await,
                Err(error) => {
                    tracing::warn!(error = &error as &dyn Error, "old records could not be removed");
                    sleep(EVERY).await;
                }
            }
        }
    };
    tokio::select! {
        () = purging => {}
        () = stop => {}
    }
    Ok(())
}
