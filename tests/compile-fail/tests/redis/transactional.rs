//! Redis has no transaction that holds the business writes.

use std::sync::Arc;

use idem_core::engine::{Idempotency, Settings};
use idem_redis::RedisStore;

fn engine(store: RedisStore) -> Idempotency {
    Idempotency::transactional(Arc::new(store), Settings::new())
}

fn main() {}
