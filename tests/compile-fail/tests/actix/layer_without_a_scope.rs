use std::num::NonZeroUsize;
use std::sync::Arc;

use actix_web::{App, HttpResponse, web};
use idem_actix::IdempotencyLayer;
use idem_core::MemoryStore;

fn main() {
    let store = Arc::new(MemoryStore::new(NonZeroUsize::MIN));
    let layer = IdempotencyLayer::at_most_once(store);
    let _ = App::new().wrap(layer).route("/", web::post().to(HttpResponse::Ok));
}
