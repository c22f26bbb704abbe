//! The service on axum.

use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode, header, request::Parts};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use idem_axum::{HttpPolicy, IdempotencyContext, IdempotencyLayer};
use tokio::net::TcpListener;

use crate::service::{NewPayment, Service, tenant};
use crate::{AnyError, Config};

pub(crate) async fn serve(config: &Config, service: Service) -> Result<(), AnyError> {
    let layer = IdempotencyLayer::new(service.requests.clone()).policy(HttpPolicy::new());
    let layer = layer.scope(|head: &Parts| tenant_of(&head.headers));
    let app = Router::new()
        .route("/payments", post(pay))
        .route("/later", post(pay_later))
        .route_layer(layer)
        .route("/jobs/{id}", get(show))
        .with_state(service);
    let listener = TcpListener::bind(&config.listen).await?;
    println!("listening on http://{}", listener.local_addr()?);
    Ok(axum::serve(listener, app).await?)
}

fn tenant_of(headers: &HeaderMap) -> Option<String> {
    tenant(headers.get(header::AUTHORIZATION).map(|value| value.as_bytes()))
}

async fn pay(
    State(service): State<Service>,
    IdempotencyContext(context): IdempotencyContext,
    Json(new): Json<NewPayment>,
) -> Response {
    match service.pay(&context, new).await {
        Ok(paid) => (StatusCode::CREATED, Json(paid)).into_response(),
        Err(error) => failed(&error),
    }
}

async fn pay_later(
    State(service): State<Service>,
    IdempotencyContext(context): IdempotencyContext,
    Json(new): Json<NewPayment>,
) -> Response {
    match service.enqueue(&context, &new).await {
        Ok(accepted) => accepted.into_response(),
        Err(error) => failed(&error),
    }
}

async fn show(State(service): State<Service>, Path(id): Path<String>, headers: HeaderMap) -> Response {
    match tenant_of(&headers) {
        Some(tenant) => service.jobs.status(Some(&tenant), &id).await.into_response(),
        None => StatusCode::UNAUTHORIZED.into_response(),
    }
}

fn failed(error: &AnyError) -> Response {
    tracing::warn!(error = &**error as &dyn std::error::Error, "a payment failed");
    StatusCode::INTERNAL_SERVER_ERROR.into_response()
}
