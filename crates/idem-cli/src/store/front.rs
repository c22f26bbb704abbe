//! The Redis in front of a durable store.

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use idem_core::DurableStore;
use idem_hybrid::{HybridConfig, HybridStore};
use idem_redis::{RedisConfig, RedisFastStore};

/// How long an operator waits for Redis. In an application it is a cache, and much less.
const PATIENCE: Duration = Duration::from_secs(5);

/// Puts the Redis of this URL in front of a store.
pub(super) fn in_front_of<D: DurableStore>(
    durable: D,
    url: &str,
    key_prefix: &str,
) -> Result<HybridStore<D>, Box<dyn Error>> {
    let config = RedisConfig::new(url).key_prefix(key_prefix).timeout(PATIENCE);
    let fast = Arc::new(RedisFastStore::new(config)?);
    Ok(HybridStore::new(Arc::new(durable), fast, HybridConfig::new().patience(PATIENCE)))
}
