use std::num::NonZeroUsize;
use std::sync::Arc;

use axum::Router;
use axum::routing::post;
use idem_axum::IdempotencyLayer;
use idem_core::MemoryStore;

fn main() {
    let store = Arc::new(MemoryStore::new(NonZeroUsize::MIN));
    let layer = IdempotencyLayer::at_most_once(store);
    let _: Router = Router::new().route("/", post(|| async {})).layer(layer);
}
