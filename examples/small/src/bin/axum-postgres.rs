//! Payments over HTTP on axum and Postgres: a repeated request moves money once.
//!
//! ```sh
//! DATABASE_URL=postgres://USER@HOST/DATABASE cargo run -p small --bin axum-postgres
//! curl -i http://127.0.0.1:8080/payments -H 'Authorization: Bearer token-of-acme' -H 'Idempotency-Key: "order-4711"' \
//!     -H 'Content-Type: application/json' -d '{"amount":1250}'
//! ```

use std::env;
use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use axum::http::{StatusCode, header, request::Parts};
use axum::routing::post;
use axum::{Json, Router};
use idem_axum::{IdempotencyLayer, IdempotentTransaction, Purger};
use idem_postgres::{PostgresConfig, PostgresStore, PostgresTransaction};
use serde::{Deserialize, Serialize};
use sqlx::postgres::PgPoolOptions;
use tokio::net::TcpListener;

const TABLE: &str = "CREATE TABLE IF NOT EXISTS payments (
    id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    amount BIGINT NOT NULL
)";

#[derive(Deserialize)]
struct NewPayment {
    amount: i64,
}

#[derive(Serialize)]
struct Payment {
    id: i64,
    amount: i64,
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    // The store takes transactions from this pool, and opens one more connection.
    let pool = PgPoolOptions::new().max_connections(17).connect(&env::var("DATABASE_URL")?).await?;
    sqlx::raw_sql(TABLE).execute(&pool).await?;
    let store = PostgresStore::open(PostgresConfig::from_pool(pool)).await?;
    eprintln!("{}", store.self_test().await?);
    let purger = Purger::start(Arc::new(store.clone()));

    let idempotency = IdempotencyLayer::transactional(Arc::new(store)).scope(account);
    let engine = idempotency.engine().clone();
    let app = Router::new().route("/payments", post(pay).route_layer(idempotency));

    let address = env::var("LISTEN").unwrap_or_else(|_| "127.0.0.1:8080".to_owned());
    let listener = TcpListener::bind(address).await?;
    println!("listening on http://{}", listener.local_addr()?);
    let interrupted = async { drop(tokio::signal::ctrl_c().await) };
    axum::serve(listener, app).with_graceful_shutdown(interrupted).await?;
    // Handlers outlive their clients: they are awaited here.
    engine.shutdown(Duration::from_secs(25)).await?;
    purger.stop().await;
    Ok(())
}

/// The account of a request: two accounts may send the same key. Your authentication takes this place.
fn account(request: &Parts) -> Option<&'static str> {
    let authorization = request.headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    (authorization == "Bearer token-of-acme").then_some("acme")
}

/// The payment commits together with the answer, or not at all.
async fn pay(
    mut transaction: IdempotentTransaction<PostgresTransaction>,
    Json(NewPayment { amount }): Json<NewPayment>,
) -> Result<(StatusCode, Json<Payment>), StatusCode> {
    let insert = sqlx::query_scalar("INSERT INTO payments (amount) VALUES ($1) RETURNING id").bind(amount);
    let inserted = insert.fetch_one(&mut **transaction).await;
    // A 500 rolls back, and a repeat runs again.
    let id = inserted.map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)?;
    Ok((StatusCode::CREATED, Json(Payment { id, amount })))
}
