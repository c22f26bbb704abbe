//! The routes, and the idempotency layer around the one that moves money.

use std::sync::Arc;

use axum::extract::{FromRequestParts, Path, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, StatusCode, header};
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router, body};
use idem_axum::{HttpPolicy, Idempotency, IdempotencyContext, IdempotencyLayer};
use idem_hybrid::HybridMetrics;

use crate::config::Config;
use crate::ledger::{Ledger, NewPayment, Payment, Totals};
use crate::problem::Problem;
use crate::simulate::{Simulation, delay_answer};
use crate::store::{Health, Store};

struct App {
    store: Store,
    /// Where the payments are: the store's own database under the transactional contract.
    ledger: Ledger,
    simulate: bool,
    body_limit: usize,
}

/// The service. `engine` protects `POST /v1/payments`.
pub(crate) fn router(config: &Config, engine: Idempotency, store: Store, ledger: Ledger) -> Router {
    let policy = HttpPolicy::new().request_body_limit(config.body_limit).stored_response_limit(config.stored_limit);
    let idempotency = IdempotencyLayer::new(engine).policy(policy).scope(bearer_token);
    let app = App { store, ledger, simulate: config.simulate, body_limit: config.body_limit };
    let payments = post(create_payment).layer(idempotency).layer(from_fn_with_state(config.simulate, delay_answer));
    Router::new()
        .route("/v1/payments", payments.get(list_payments))
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
    let payment = app.ledger.pay(&context, &tenant, payment).await?;
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
    let payments = app.ledger.payments(&tenant).await?;
    Ok(Json(serde_json::json!({ "payments": payments })))
}

async fn show_payment(
    State(app): State<Arc<App>>,
    Tenant(tenant): Tenant,
    Path(id): Path<String>,
) -> Result<Json<Payment>, Problem> {
    app.ledger.payment(&tenant, &id).await?.map(Json).ok_or(Problem::NotFound)
}

async fn show_ledger(State(app): State<Arc<App>>, Tenant(tenant): Tenant) -> Result<Json<Totals>, Problem> {
    Ok(Json(app.ledger.totals(&tenant).await?))
}

async fn health(State(app): State<Arc<App>>) -> Response {
    match app.store.health().await {
        Ok(health) => {
            let Health { store, version, counted, count, cache } = health;
            let mut document =
                serde_json::json!({ "status": "ok", "store": store, "version": version, (counted): count });
            if let Some(metrics) = cache {
                document["cache"] = cache_metrics(&metrics);
            }
            Json(document).into_response()
        }
        Err(error) => {
            tracing::error!(error = &error as &dyn std::error::Error, "the store is not healthy");
            (StatusCode::SERVICE_UNAVAILABLE, Json(serde_json::json!({ "status": "unavailable" }))).into_response()
        }
    }
}

fn cache_metrics(metrics: &HybridMetrics) -> serde_json::Value {
    serde_json::json!({
        "is_open": metrics.is_open,
        "opened": metrics.opened,
        "failures": metrics.fast_failures,
        "skipped": metrics.fast_skipped,
        "unreadable": metrics.unreadable,
        "replays": { "cache": metrics.fast_replays, "store": metrics.durable_replays },
        "in_progress": { "cache": metrics.fast_in_progress, "store": metrics.durable_in_progress },
    })
}
