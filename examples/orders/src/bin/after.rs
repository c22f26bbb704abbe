//! The same orders API, safe to repeat.

use std::env;
use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Extension, Json, Router};
use idem_axum::{IdempotencyLayer, IdempotentTransaction, Purger};
use idem_postgres::{PostgresConfig, PostgresStore, PostgresTransaction};
use serde::{Deserialize, Serialize};
use sqlx::postgres::PgPoolOptions;
use sqlx::{PgConnection, PgPool};
use tokio::net::TcpListener;
use tokio::signal::ctrl_c;
use tokio::signal::unix::{SignalKind, signal};
use tower_http::compression::CompressionLayer;
use tower_http::cors::CorsLayer;
use tower_http::timeout::TimeoutLayer;
use tower_http::trace::TraceLayer;

#[derive(Clone)]
struct Account(String);

#[derive(Deserialize)]
struct NewOrder {
    item: String,
    quantity: i32,
}

#[derive(Serialize, sqlx::FromRow)]
struct Order {
    id: i64,
    item: String,
    quantity: i32,
}

#[derive(Debug, thiserror::Error)]
enum ApiError {
    #[error("who are you?")]
    Unauthenticated,
    #[error("order at least one")]
    InvalidQuantity,
    #[error("something went wrong")]
    Database(#[from] sqlx::Error),
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let status = match &self {
            Self::Unauthenticated => StatusCode::UNAUTHORIZED,
            Self::InvalidQuantity => StatusCode::UNPROCESSABLE_ENTITY,
            Self::Database(error) => {
                tracing::error!(%error, "the database failed");
                StatusCode::INTERNAL_SERVER_ERROR
            }
        };
        (status, self.to_string()).into_response()
    }
}

async fn create_order(
    Extension(account): Extension<Account>,
    mut transaction: IdempotentTransaction<PostgresTransaction>,
    Json(new): Json<NewOrder>,
) -> Result<(StatusCode, Json<Order>), ApiError> {
    let order = insert(&mut transaction, &account, new).await?;
    Ok((StatusCode::CREATED, Json(order)))
}

async fn list_orders(
    State(pool): State<PgPool>,
    Extension(account): Extension<Account>,
) -> Result<Json<Vec<Order>>, ApiError> {
    let orders = sqlx::query_as("SELECT id, item, quantity FROM orders.orders WHERE account = $1 ORDER BY id");
    Ok(Json(orders.bind(account.0).fetch_all(&pool).await?))
}

async fn insert(connection: &mut PgConnection, account: &Account, new: NewOrder) -> Result<Order, ApiError> {
    if new.quantity < 1 {
        return Err(ApiError::InvalidQuantity);
    }
    let insert = "INSERT INTO orders.orders (account, item, quantity) VALUES ($1, $2, $3) RETURNING id, item, quantity";
    let insert = sqlx::query_as(insert).bind(&account.0).bind(new.item).bind(new.quantity);
    Ok(insert.fetch_one(connection).await?)
}

async fn authenticate(mut request: Request, next: Next) -> Result<Response, ApiError> {
    let account = match request.headers().get(header::AUTHORIZATION).map(HeaderValue::as_bytes) {
        Some(b"Bearer token-of-acme") => "acme",
        Some(b"Bearer token-of-globex") => "globex",
        _ => return Err(ApiError::Unauthenticated),
    };
    request.extensions_mut().insert(Account(account.to_owned()));
    Ok(next.run(request).await)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let pool = PgPoolOptions::new().max_connections(5).connect(&env::var("DATABASE_URL")?).await?;
    sqlx::migrate!().run(&pool).await?;
    let store = PostgresStore::open(PostgresConfig::from_pool(pool.clone()).schema("orders")).await?;
    tracing::info!("{}", store.self_test().await?);
    let purger = Purger::start(Arc::new(store.clone()));
    let idempotency = IdempotencyLayer::transactional(Arc::new(store))
        .scope(|request| Some(request.extensions.get::<Account>()?.0.clone()));
    let engine = idempotency.engine().clone();
    let app = Router::new()
        .route("/orders", post(create_order).route_layer(idempotency).get(list_orders))
        .layer(from_fn(authenticate))
        .layer(TimeoutLayer::with_status_code(StatusCode::SERVICE_UNAVAILABLE, Duration::from_secs(10)))
        .layer(CompressionLayer::new())
        .layer(CorsLayer::permissive())
        .layer(TraceLayer::new_for_http())
        .with_state(pool);
    let listener = TcpListener::bind(env::var("LISTEN")?).await?;
    println!("{}", listener.local_addr()?);
    axum::serve(listener, app).with_graceful_shutdown(asked_to_stop()).await?;
    purger.stop().await;
    engine.shutdown(Duration::from_secs(25)).await?;
    Ok(())
}

/// SIGINT, or the SIGTERM that a container is stopped by.
async fn asked_to_stop() {
    let Ok(mut terminated) = signal(SignalKind::terminate()) else { return };
    tokio::select! {
        _ = ctrl_c() => {}
        _ = terminated.recv() => {}
    }
}
