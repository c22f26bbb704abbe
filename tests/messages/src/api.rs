//! The API: an order and its message commit together.

use std::error::Error;
use std::sync::Arc;

use axum::extract::State;
use axum::http::{StatusCode, request::Parts};
use axum::routing::post;
use axum::{Json, Router};
use idem_axum::{HttpPolicy, IdempotencyContext, IdempotencyLayer};
use idem_core::engine::Idempotency;
use idem_outbox::{MessageToSend, PostgresOutbox};
use idem_postgres::{PostgresStore, PostgresTransaction};
use serde::Deserialize;
use sqlx::postgres::PgPool;
use sqlx::{PgConnection, Row as _};
use tokio::net::TcpListener;

use crate::{Config, Order, SCHEMA, brokers, settings, stopped};

#[derive(Debug, Clone, Deserialize)]
struct NewOrder {
    id: String,
    account: String,
    #[serde(default)]
    is_poison: bool,
    /// Fail after the message was published, so that it must never be sent.
    #[serde(default)]
    fails: bool,
}

type Failure = (StatusCode, String);

pub(crate) async fn serve(
    config: &Config,
    pool: PgPool,
    store: Arc<PostgresStore>,
) -> Result<(), Box<dyn Error + Send + Sync>> {
    let outbox = PostgresOutbox::open(pool, SCHEMA).await?;
    let engine = Idempotency::transactional(store, settings(config));
    let layer =
        IdempotencyLayer::new(engine.clone()).policy(HttpPolicy::new()).scope(|_: &Parts| Some("acme".to_owned()));
    let app = Router::new().route("/orders", post(order).route_layer(layer)).with_state(outbox);
    let listener = TcpListener::bind(&config.listen).await?;
    println!("listening on http://{}", listener.local_addr()?);
    axum::serve(listener, app).with_graceful_shutdown(stopped()).await?;
    Ok(())
}

async fn order(
    State(outbox): State<PostgresOutbox>,
    IdempotencyContext(context): IdempotencyContext,
    Json(new): Json<NewOrder>,
) -> Result<StatusCode, Failure> {
    let mut transaction = context.transaction::<PostgresTransaction>().map_err(failed)?;
    // The lock of the account's row comes first, so that its numbers are in the order of the commits.
    let number = next_number(&mut transaction, &new).await.map_err(failed)?;
    let order = Order { id: new.id.clone(), account: new.account.clone(), number, is_poison: new.is_poison };
    let payload = serde_json::to_vec(&order).map_err(failed)?;
    let message = MessageToSend::of_run(&context, "ordered", brokers::TOPIC, payload).ordered_by(&new.account);
    outbox.publish(&mut transaction, &message).await.map_err(failed)?;
    if new.fails { Err((StatusCode::INTERNAL_SERVER_ERROR, "on purpose".to_owned())) } else { Ok(StatusCode::CREATED) }
}

async fn next_number(connection: &mut PgConnection, new: &NewOrder) -> Result<i64, sqlx::Error> {
    let next = "INSERT INTO messages.accounts AS account (name, last) VALUES ($1, 1)
        ON CONFLICT (name) DO UPDATE SET last = account.last + 1 RETURNING last";
    let number: i64 = sqlx::query(next).bind(&new.account).fetch_one(&mut *connection).await?.try_get(0)?;
    let insert = sqlx::query("INSERT INTO messages.orders (id, account, number) VALUES ($1, $2, $3)");
    insert.bind(&new.id).bind(&new.account).bind(number).execute(connection).await?;
    Ok(number)
}

fn failed(error: impl Error + 'static) -> Failure {
    tracing::warn!(error = &error as &dyn Error, "an order failed");
    (StatusCode::INTERNAL_SERVER_ERROR, error.to_string())
}
