//! The Redis in front of a durable store.

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use idem_core::DurableStore;
use idem_hybrid::{HybridConfig, HybridStore};
use idem_redis::{RedisConfig, RedisFastStore};

use super::{Store, StoreOptions};

/// How long an operator waits for Redis. In an application it is a cache, and much less.
const PATIENCE: Duration = Duration::from_secs(5);

pub(super) fn in_front_of<D: Store + DurableStore>(
    durable: D,
    url: &str,
    options: &StoreOptions,
) -> Result<Box<dyn Store>, Box<dyn Error>> {
    let config = RedisConfig::new(url).key_prefix(&options.key_prefix).timeout(PATIENCE);
    let fast = Arc::new(RedisFastStore::new(config)?);
    Ok(Box::new(HybridStore::new(Arc::new(durable), fast, HybridConfig::new().patience(PATIENCE))))
}
