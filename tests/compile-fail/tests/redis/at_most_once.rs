//! A failover may lose a record, and its operation would run again.

use std::sync::Arc;

use idem_core::engine::{Idempotency, Settings};
use idem_redis::RedisStore;

fn engine(store: RedisStore) -> Idempotency {
    Idempotency::at_most_once(Arc::new(store), Settings::new())
}

fn main() {}
