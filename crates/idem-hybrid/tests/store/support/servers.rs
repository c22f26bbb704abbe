//! Hybrids of the servers that the tests are given.

use std::sync::Arc;
use std::time::Duration;

use idem_core::{OwnerToken, TimeOffset};
use idem_hybrid::{HybridConfig, HybridStore};
use idem_postgres::{PostgresConfig, PostgresStore};
use idem_redis::{RedisConfig, RedisFastStore};
use idem_schemas::Schema;
use idem_testkit::{Subject, TimeControl};

use super::PATIENCE;

/// The time of both servers.
#[derive(Debug, Clone, Default)]
pub struct Time(pub TimeOffset);

impl TimeControl for Time {
    fn advance(&self, by: Duration) {
        self.0.advance(by);
    }
}

/// A Postgres store in this schema of the shared server.
pub fn durable(schema: &Schema) -> PostgresConfig {
    PostgresConfig::new(idem_servers::postgres_url()).schema(&schema.name).verb_connections(2.try_into().unwrap())
}

/// Keys that no other test has.
pub fn fresh_prefix() -> String {
    let token: String = OwnerToken::random().as_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    format!("test-{token}:")
}

/// Postgres, with the Redis at `url` in front.
pub async fn servers_at(url: &str, config: HybridConfig) -> Subject {
    let (schema, time) = (Schema::of_kind("hybrid"), Time::default());
    let postgres = PostgresStore::open(durable(&schema).time_offset(time.0.clone())).await.unwrap();
    let redis = RedisConfig::new(url).key_prefix(fresh_prefix()).timeout(PATIENCE).time_offset(time.0.clone());
    let fast = Arc::new(RedisFastStore::new(redis).unwrap());
    let postgres = Arc::new(postgres);
    let store = Arc::new(HybridStore::new(Arc::clone(&postgres), fast, config));
    Subject::new(store.clone(), postgres, Arc::new(time))
        .operated_by(store.clone())
        .inspected_by(store)
        .with_precision(PATIENCE)
        .keeping(schema)
}

/// Postgres with one Redis server in front.
pub async fn servers(config: HybridConfig) -> Subject {
    servers_at(&idem_servers::redis_url(), config).await
}
