//! Accepting that records may be lost does not make a transaction.

use std::sync::Arc;

use idem_core::engine::{Idempotency, Settings};
use idem_redis::RedisStore;

fn engine(store: RedisStore) -> Idempotency {
    Idempotency::transactional(Arc::new(store.dangerous_accept_store_loss()), Settings::new())
}

fn main() {}
