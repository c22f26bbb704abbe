//! The routes, and the idempotency layer around the one that moves money.

use std::sync::Arc;

use axum::extract::{FromRequestParts, Path, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router, body};
use idem_axum::{HttpPolicy, Idempotency, IdempotencyContext, IdempotencyLayer, IdempotentTransaction};
use idem_sqlite::{SqliteStore, SqliteTransaction};
use sqlx::SqlitePool;

use crate::config::Config;
use crate::ledger::{self, NewPayment, Payment, Totals};
use crate::problem::Problem;
use crate::simulate::Simulation;

#[derive(Clone)]
struct App {
    store: SqliteStore,
    /// Where the payments are: the store's own database under the transactional contract.
    ledger: SqlitePool,
    simulate: bool,
    body_limit: usize,
}

/// The service. `engine` protects `POST /v1/payments`.
pub(crate) fn router(config: &Config, engine: Idempotency, store: SqliteStore, ledger: SqlitePool) -> Router {
    let policy = HttpPolicy::new().request_body_limit(config.body_limit).stored_response_limit(config.stored_limit);
    let idempotency = IdempotencyLayer::new(engine).policy(policy).scope(bearer_token);
    let app = App { store, ledger, simulate: config.simulate, body_limit: config.body_limit };
    Router::new()
        .route("/v1/payments", post(create_payment).layer(idempotency).get(list_payments))
        .route("/v1/payments/{id}", get(show_payment))
        .route("/v1/ledger", get(show_ledger))
        .route("/healthz", get(health))
        .with_state(Arc::new(app))
}

/// The tenant: in this example, whatever bearer token the client sends. A real service looks up whose token it is, and
/// names the account: principals are stored readable, and a token is a secret.
fn bearer_token(request: &Parts) -> Option<String> {
    let value = request.headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, token) = value.split_once(' ')?;
    let token = token.trim();
    (scheme.eq_ignore_ascii_case("bearer") && !token.is_empty()).then(|| token.to_owned())
}

struct Tenant(String);

impl<S: Sync> FromRequestParts<S> for Tenant {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        bearer_token(parts).map(Self).ok_or(Problem::Unauthenticated)
    }
}

async fn create_payment(
    State(app): State<Arc<App>>,
    Tenant(tenant): Tenant,
    IdempotencyContext(context): IdempotencyContext,
    transaction: Option<IdempotentTransaction<SqliteTransaction>>,
    headers: HeaderMap,
    request: Request,
) -> Result<Response, Problem> {
    let simulation = Simulation::from_headers(app.simulate, &headers)?;
    let body = body::to_bytes(request.into_body(), app.body_limit).await;
    let body = body.map_err(|error| Problem::InvalidPayment(error.to_string()))?;
    let payment = NewPayment::from_json(&body)?;
    if let Some(response) = simulation.before().await {
        return Ok(response);
    }
    let payment = match transaction {
        // The payment, its ledger row and the stored answer commit together, or not at all.
        Some(mut transaction) => ledger::pay(&mut transaction, &tenant, payment).await?,
        None => {
            let mut transaction = app.ledger.begin().await?;
            let payment = ledger::pay(&mut transaction, &tenant, payment).await?;
            transaction.commit().await?;
            payment
        }
    };
    if let Some(response) = simulation.after().await {
        return Ok(response);
    }
    tracing::info!(payment = payment.id, attempt = context.attempt(), "money moved");
    let location = (header::LOCATION, format!("/v1/payments/{}", payment.id));
    let attempt = (HeaderName::from_static("x-attempt"), context.attempt().to_string());
    let mut document = serde_json::json!(payment);
    if simulation.padding > 0 {
        document["padding"] = "p".repeat(simulation.padding).into();
    }
    Ok(simulation.dress((StatusCode::CREATED, [location, attempt], Json(document)).into_response()))
}

async fn list_payments(
    State(app): State<Arc<App>>,
    Tenant(tenant): Tenant,
) -> Result<Json<serde_json::Value>, Problem> {
    let payments = ledger::payments(&app.ledger, &tenant).await?;
    Ok(Json(serde_json::json!({ "payments": payments })))
}

async fn show_payment(
    State(app): State<Arc<App>>,
    Tenant(tenant): Tenant,
    Path(id): Path<String>,
) -> Result<Json<Payment>, Problem> {
    ledger::payment(&app.ledger, &tenant, &id).await?.map(Json).ok_or(Problem::NotFound)
}

async fn show_ledger(State(app): State<Arc<App>>, Tenant(tenant): Tenant) -> Result<Json<Totals>, Problem> {
    Ok(Json(ledger::totals(&app.ledger, &tenant).await?))
}

async fn health(State(app): State<Arc<App>>) -> Response {
    match app.store.health().await {
        Ok(health) => {
            let document = serde_json::json!({ "status": "ok", "sqlite": health.version, "records": health.records });
            Json(document).into_response()
        }
        Err(error) => {
            tracing::error!(error = &error as &dyn std::error::Error, "the store is not healthy");
            (StatusCode::SERVICE_UNAVAILABLE, Json(serde_json::json!({ "status": "unavailable" }))).into_response()
        }
    }
}
