//! A receiver of webhooks on axum and SQLite: an event that is delivered again is not handled again.
//!
//! The sender names the event in the JSON body, and signs the body.
//!
//! ```sh
//! WEBHOOK_SECRET=secret cargo run -p small --bin webhook-receiver -- events.db
//! ```

use std::env;
use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response;
use axum::routing::post;
use axum::{Json, Router};
use hmac::{Hmac, KeyInit as _, Mac as _};
use idem_axum::{HttpPolicy, IdempotencyLayer, IdempotentTransaction};
use idem_sqlite::{SqliteConfig, SqliteStore, SqliteTransaction};
use serde::Deserialize;
use sha2::Sha256;
use tokio::net::TcpListener;

/// The largest event, in bytes.
const LIMIT: usize = 256 * 1024;

#[derive(Deserialize)]
struct Event {
    kind: String,
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let file = env::args().nth(1).ok_or("name the database, as in: webhook-receiver events.db")?;
    let secret: Arc<str> = env::var("WEBHOOK_SECRET")?.into();
    let store = SqliteStore::open(SqliteConfig::new(format!("sqlite://{file}"))).await?;
    sqlx::raw_sql("CREATE TABLE IF NOT EXISTS events (kind TEXT NOT NULL)").execute(store.pool()).await?;

    // Senders repeat an event for days, so answers are kept for longer than a day.
    let policy = HttpPolicy::new().key_member("/id".parse()?).request_body_limit(LIMIT);
    let settings = idem_axum::Settings::new().retention(Duration::from_secs(7 * 24 * 3600));
    let engine = idem_axum::Idempotency::transactional(Arc::new(store), settings);
    let idempotency = IdempotencyLayer::new(engine.clone()).policy(policy).single_tenant();
    let app = Router::new()
        .route("/events", post(receive).route_layer(idempotency))
        // Outside of the layer: a stranger must not use up the id of an event to come.
        .layer(from_fn_with_state(secret, verify));

    let address = env::var("LISTEN").unwrap_or_else(|_| "127.0.0.1:8080".to_owned());
    let listener = TcpListener::bind(address).await?;
    println!("listening on http://{}", listener.local_addr()?);
    let interrupted = async { drop(tokio::signal::ctrl_c().await) };
    axum::serve(listener, app).with_graceful_shutdown(interrupted).await?;
    engine.shutdown(Duration::from_secs(25)).await?;
    Ok(())
}

/// Checks the signature, and puts the body back.
async fn verify(State(secret): State<Arc<str>>, request: Request, next: Next) -> Result<Response, StatusCode> {
    let (head, body) = request.into_parts();
    let body: Bytes = to_bytes(body, LIMIT).await.map_err(|_| StatusCode::PAYLOAD_TOO_LARGE)?;
    let signature = head.headers.get("x-signature").and_then(|value| hex::decode(value.as_bytes()).ok());
    let mut mac = Hmac::<Sha256>::new_from_slice(secret.as_bytes()).map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)?;
    mac.update(&body);
    mac.verify_slice(&signature.unwrap_or_default()).map_err(|_| StatusCode::UNAUTHORIZED)?;
    Ok(next.run(Request::from_parts(head, Body::from(body))).await)
}

/// What the event changes commits together with the answer, or not at all.
async fn receive(
    mut transaction: IdempotentTransaction<SqliteTransaction>,
    Json(Event { kind }): Json<Event>,
) -> Result<StatusCode, StatusCode> {
    let insert = sqlx::query("INSERT INTO events (kind) VALUES (?)").bind(kind);
    let inserted = insert.execute(&mut **transaction).await;
    inserted.map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)?;
    Ok(StatusCode::NO_CONTENT)
}
