//! A receiver of webhooks of several senders on axum and SQLite, by the rules of Standard Webhooks: the header field `webhook-id` is the
//! key, and a sender's events share nothing with those of another one.
//!
//! ```sh
//! WEBHOOK_SECRETS=acme=whsec_…,globex=whsec_… cargo run -p small --bin signed-webhooks -- events.db
//! ```

use std::collections::HashMap;
use std::env;
use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{Path, Request, State};
use axum::http::header::CONTENT_TYPE;
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response;
use axum::routing::post;
use axum::{Json, Router};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use hmac::{Hmac, KeyInit as _, Mac as _};
use idem_axum::{HttpPolicy, IdempotencyLayer, IdempotentTransaction};
use idem_sqlite::{SqliteConfig, SqliteStore, SqliteTransaction};
use serde::Deserialize;
use sha2::Sha256;
use tokio::net::TcpListener;
use tokio::time::timeout;

/// The largest event, in bytes.
const LIMIT: usize = 256 * 1024;

/// How far the clock of a sender may differ from ours. An older event was recorded by a stranger.
const TOLERANCE: Duration = Duration::from_secs(5 * 60);

/// How long a body may take.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);

/// The shortest secret, in bytes.
const SHORTEST_SECRET: usize = 24;

/// The secret of each sender.
type Secrets = Arc<HashMap<String, Vec<u8>>>;

#[derive(Deserialize)]
struct Event {
    kind: String,
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let file = env::args().nth(1).ok_or("name the database, as in: signed-webhooks events.db")?;
    let secrets = env::var("WEBHOOK_SECRETS")?;
    let secrets: Secrets = Arc::new(secrets.split(',').map(read_secret).collect::<Result<_, _>>()?);
    let store = SqliteStore::open(SqliteConfig::new(format!("sqlite://{file}"))).await?;
    let table = "CREATE TABLE IF NOT EXISTS events (sender TEXT NOT NULL, kind TEXT NOT NULL)";
    sqlx::raw_sql(table).execute(store.pool()).await?;

    let policy = HttpPolicy::new().key_header("webhook-id").request_body_limit(LIMIT);
    // Senders repeat an event for days, so answers are kept for longer than a day.
    let settings = idem_axum::Settings::new().retention(Duration::from_secs(7 * 24 * 3600));
    let engine = idem_axum::Idempotency::transactional(Arc::new(store), settings);
    let idempotency = IdempotencyLayer::new(engine.clone()).policy(policy).scope(sender);
    let app = Router::new()
        .route("/webhooks/{sender}", post(receive).route_layer(idempotency))
        // Outside of the layer: a stranger must not use up the id of an event to come.
        .layer(from_fn_with_state(secrets, verify));

    let address = env::var("LISTEN").unwrap_or_else(|_| "127.0.0.1:8080".to_owned());
    let listener = TcpListener::bind(address).await?;
    println!("listening on http://{}", listener.local_addr()?);
    let interrupted = async { drop(tokio::signal::ctrl_c().await) };
    axum::serve(listener, app).with_graceful_shutdown(interrupted).await?;
    engine.shutdown(Duration::from_secs(25)).await?;
    Ok(())
}

/// Reads `sender=whsec_…`, whose second part is in Base64.
fn read_secret(pair: &str) -> Result<(String, Vec<u8>), Box<dyn Error>> {
    let (sender, secret) = pair.trim().split_once("=whsec_").ok_or("a secret has the form sender=whsec_…")?;
    let secret = BASE64_STANDARD.decode(secret)?;
    if secret.len() < SHORTEST_SECRET {
        return Err(format!("the secret of {sender} has less than {SHORTEST_SECRET} bytes").into());
    }
    Ok((sender.to_owned(), secret))
}

/// The sender is the scope of its keys.
fn sender(head: &Parts) -> Option<String> {
    head.uri.path().strip_prefix("/webhooks/").map(str::to_owned)
}

/// Checks that the sender has signed the id, the time and the body, and puts the body back.
async fn verify(State(secrets): State<Secrets>, request: Request, next: Next) -> Result<Response, StatusCode> {
    let (head, body) = request.into_parts();
    let secret = sender(&head).and_then(|sender| secrets.get(&sender)).ok_or(StatusCode::UNAUTHORIZED)?;
    // They count in the fingerprint, and are not signed.
    if head.uri.query().is_some() || head.headers.get(CONTENT_TYPE).is_none_or(|kind| kind != "application/json") {
        return Err(StatusCode::BAD_REQUEST);
    }
    let body = timeout(BODY_TIMEOUT, to_bytes(body, LIMIT)).await.map_err(|_| StatusCode::REQUEST_TIMEOUT)?;
    let body: Bytes = body.map_err(|_| StatusCode::PAYLOAD_TOO_LARGE)?;
    if !is_signed(&head.headers, &body, secret).unwrap_or(false) {
        return Err(StatusCode::UNAUTHORIZED);
    }
    Ok(next.run(Request::from_parts(head, Body::from(body))).await)
}

/// `None` if a field is missing or malformed.
fn is_signed(headers: &HeaderMap, body: &[u8], secret: &[u8]) -> Option<bool> {
    let field = |name: &str| headers.get(name)?.to_str().ok();
    let (id, time) = (field("webhook-id")?, field("webhook-timestamp")?);
    let sent = SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(time.parse().ok()?))?;
    let now = SystemTime::now();
    let differ = now.duration_since(sent).or_else(|_| sent.duration_since(now)).ok()?;
    let mut mac = Hmac::<Sha256>::new_from_slice(secret).ok()?;
    mac.update(format!("{id}.{time}.").as_bytes());
    mac.update(body);
    // While a secret is replaced there are several signatures.
    let signatures = field("webhook-signature")?.split(' ').filter_map(|one| one.strip_prefix("v1,"));
    let matches =
        |one: &str| BASE64_STANDARD.decode(one).is_ok_and(|signature| mac.clone().verify_slice(&signature).is_ok());
    Some(differ <= TOLERANCE && signatures.into_iter().any(matches))
}

/// What the event changes commits together with the answer, or not at all.
async fn receive(
    mut transaction: IdempotentTransaction<SqliteTransaction>,
    Path(sender): Path<String>,
    Json(Event { kind }): Json<Event>,
) -> Result<StatusCode, StatusCode> {
    let insert = sqlx::query("INSERT INTO events (sender, kind) VALUES (?, ?)").bind(sender).bind(kind);
    let inserted = insert.execute(&mut **transaction).await;
    inserted.map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)?;
    Ok(StatusCode::NO_CONTENT)
}
