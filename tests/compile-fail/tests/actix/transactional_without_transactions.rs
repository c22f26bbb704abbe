use std::num::NonZeroUsize;
use std::sync::Arc;

use idem_actix::IdempotencyLayer;
use idem_core::MemoryStore;

fn main() {
    let store = Arc::new(MemoryStore::new(NonZeroUsize::MIN));
    let _ = IdempotencyLayer::transactional(store).single_tenant();
}
