//! Health checks and the self-test.

use idem_core::{SelfTestError, StoreError};

use crate::durability::DurabilityReport;
use crate::error::Phase;
use crate::info::Info;
use crate::servers::{primaries, refuse_eviction, report};
use crate::store::RedisStore;

/// The state of the servers.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RedisHealth {
    /// The version of the oldest primary, as in `7.0.15`.
    pub version: String,
    /// The approximate number of keys in all databases, the application's included: Redis does not count by prefix.
    pub keys: u64,
    /// What an acknowledged record survives.
    pub durability: DurabilityReport,
}

impl RedisStore {
    /// Tests that the store keeps its promises, and reports what an acknowledged record survives.
    ///
    /// It uses a separate record (see [`idem_core::self_test`]). It also fails if a server may by now evict records, unless
    /// the configuration allows that. Run it at start-up, and log the report.
    ///
    /// # Errors
    /// [`SelfTestError`] says which promise does not hold.
    pub async fn self_test(&self) -> Result<DurabilityReport, SelfTestError> {
        let durability = self.health().await?.durability;
        refuse_eviction(&durability, self.shared.allow_eviction)?;
        idem_core::self_test(self).await?;
        Ok(durability)
    }

    /// Asks every primary for its version, number of keys and durability settings.
    ///
    /// # Errors
    /// [`StoreError`] when they do not answer.
    pub async fn health(&self) -> Result<RedisHealth, StoreError> {
        let primaries = primaries(&self.transport, Phase::Serving).await?;
        let oldest = primaries.iter().min_by_key(|primary| primary.version_number());
        Ok(RedisHealth {
            version: oldest.map(|primary| primary.text("redis_version").to_owned()).unwrap_or_default(),
            keys: primaries.iter().map(Info::keys).sum(),
            durability: report(&self.transport, &primaries, self.shared.durability.min_replicas).await,
        })
    }
}
