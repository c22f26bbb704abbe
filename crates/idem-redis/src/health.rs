//! How the servers are while they serve.

use idem_core::{SelfTestError, StoreError};

use crate::durability::DurabilityReport;
use crate::error::Phase;
use crate::info::Info;
use crate::servers::{primaries, refuse_eviction, report};
use crate::store::RedisStore;

/// How the servers are.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RedisHealth {
    /// The version of the oldest primary, as in `7.0.15`.
    pub version: String,
    /// About how many keys there are in all databases, the application's included: Redis does not count by name.
    pub keys: u64,
    /// What an acknowledged record survives.
    pub durability: DurabilityReport,
}

impl RedisStore {
    /// Proves that the store keeps its promises, on a record of its own (see [`idem_core::self_test`]), that the servers
    /// are still such as can hold records, and says what an acknowledged record survives. Run it at start-up, and log
    /// the report.
    ///
    /// # Errors
    /// [`SelfTestError`] says which promise does not hold.
    pub async fn self_test(&self) -> Result<DurabilityReport, SelfTestError> {
        let durability = self.health().await?.durability;
        refuse_eviction(&durability, self.shared.allow_eviction)?;
        idem_core::self_test(self).await?;
        Ok(durability)
    }

    /// How the servers are.
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
