//! Notifications over HTTP on actix-web and Redis: a repeated request sends nothing again.
//!
//! After a crash in between, the next repeat sends again, because Redis cannot commit together with a mail server. Pass on the
//! key (`downstream_key`), and the mail server can drop the duplicate.
//!
//! ```sh
//! REDIS_URL=redis://HOST cargo run -p small --bin actix-redis
//! curl -i http://127.0.0.1:8080/notifications -H 'Idempotency-Key: "order-4711"' -d 'Your order has been shipped.'
//! ```

use std::env;
use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use actix_web::{App, HttpResponse, HttpServer, web};
use idem_actix::{IdempotencyContext, IdempotencyLayer};
use idem_redis::{RedisConfig, RedisStore};

#[actix_web::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let store = RedisStore::open(RedisConfig::new(env::var("REDIS_URL")?)).await?;
    eprintln!("{}", store.self_test().await?);

    // One tenant: all clients share their keys. Several tenants take `scope`.
    let idempotency = IdempotencyLayer::at_least_once(Arc::new(store)).single_tenant();
    let engine = idempotency.engine().clone();
    let app = move || {
        App::new().service(web::resource("/notifications").wrap(idempotency.clone()).route(web::post().to(notify)))
    };

    let address = env::var("LISTEN").unwrap_or_else(|_| "127.0.0.1:8080".to_owned());
    let server = HttpServer::new(app).workers(2).bind(address)?;
    for address in server.addrs() {
        println!("listening on http://{address}");
    }
    let server = server.disable_signals().run();
    let handle = server.handle();
    let server = actix_web::rt::spawn(server);
    tokio::signal::ctrl_c().await?;
    // No new connections; then all that was begun is settled; only then the workers stop.
    handle.pause().await;
    engine.shutdown(Duration::from_secs(25)).await?;
    handle.stop(true).await;
    server.await??;
    Ok(())
}

async fn notify(IdempotencyContext(context): IdempotencyContext, text: String) -> HttpResponse {
    let key = context.downstream_key("mail");
    // The mail server takes this place.
    println!("attempt {}: {text:?} with the key {key}", context.attempt());
    HttpResponse::Accepted().body("sent")
}
