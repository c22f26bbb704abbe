//! Hybrids of the servers that the tests are given.

use std::sync::Arc;
use std::time::Duration;

use idem_core::{OwnerToken, TimeOffset};
use idem_hybrid::{HybridConfig, HybridStore};
use idem_postgres::{PostgresConfig, PostgresStore};
use idem_redis::{RedisConfig, RedisFastStore};
use idem_testkit::{Subject, TimeControl};
use sqlx::postgres::PgConnectOptions;
use sqlx::{AssertSqlSafe, ConnectOptions};

use super::PATIENCE;

/// The time of both servers.
#[derive(Debug, Clone, Default)]
pub struct Time(pub TimeOffset);

impl TimeControl for Time {
    fn advance(&self, by: Duration) {
        self.0.advance(by);
    }
}

/// A schema that is dropped with the test, unless the test fails.
#[derive(Debug)]
pub struct Schema {
    pub name: String,
}

impl Schema {
    pub fn new() -> Self {
        Self { name: format!("test_{}", uuid::Uuid::new_v4().simple()) }
    }

    pub fn config(&self) -> PostgresConfig {
        PostgresConfig::new(idem_servers::postgres_url()).schema(&self.name).verb_connections(2.try_into().unwrap())
    }
}

impl Drop for Schema {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        let drop_schema = format!("SET lock_timeout='2s';DROP SCHEMA IF EXISTS \"{}\" CASCADE", self.name);
        let work = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let options: PgConnectOptions = idem_servers::postgres_url().parse().unwrap();
                let mut connection = options.disable_statement_logging().connect().await.unwrap();
                // What is in the way of it does not make the test wrong; the server goes away with its tests.
                let _ = sqlx::raw_sql(AssertSqlSafe(drop_schema)).execute(&mut connection).await;
            });
        });
        work.join().unwrap();
    }
}

/// Keys that no other test has.
pub fn fresh_prefix() -> String {
    let token: String = OwnerToken::random().as_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    format!("test-{token}:")
}

/// Postgres, with the Redis at `url` in front.
pub async fn servers_at(url: &str, config: HybridConfig) -> Subject {
    let (schema, time) = (Schema::new(), Time::default());
    let postgres = PostgresStore::open(schema.config().time_offset(time.0.clone())).await.unwrap();
    let redis = RedisConfig::new(url).key_prefix(fresh_prefix()).timeout(PATIENCE).time_offset(time.0.clone());
    let fast = Arc::new(RedisFastStore::new(redis).unwrap());
    let durable = Arc::new(postgres);
    let store = Arc::new(HybridStore::new(Arc::clone(&durable), fast, config));
    Subject::new(store, durable, Arc::new(time)).with_precision(PATIENCE).keeping(schema)
}

/// Postgres with one Redis server in front.
pub async fn servers(config: HybridConfig) -> Subject {
    servers_at(&idem_servers::redis_url(), config).await
}
