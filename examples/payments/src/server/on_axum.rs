//! The service on axum.

use std::error::Error;
use std::net::TcpListener;
use std::sync::Arc;

use axum::Router;
use axum::body::{self, Body, Bytes};
use axum::extract::{Path, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get, post};
use futures_util::stream;
use idem_axum::{IdempotencyContext, IdempotencyLayer};
use idem_core::engine::Idempotency;

use super::{CLOSE_CONNECTIONS_WITHIN, Signals};
use crate::answer::{self, Answer, chunks};
use crate::problem::Problem;
use crate::service::{Asked, DESCRIPTION, HEALTH, LEDGER, PAYMENT, PAYMENTS, QUOTES, RUNNING, Service};

type App = State<Arc<Service>>;

/// Connections end first: clients that stay are answered. Then the engine: handlers run in tasks of their own, and those
/// whose clients have gone are in no connection any more.
pub(super) async fn serve(
    listener: TcpListener,
    engine: Idempotency,
    service: Arc<Service>,
    signals: Signals,
) -> Result<(), Box<dyn Error + Send + Sync>> {
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let router = router(engine.clone(), service);
    let server = axum::serve(listener, router).with_graceful_shutdown(async { drop(stopped.await) });
    let mut server = tokio::spawn(server.into_future());
    tokio::select! {
        served = &mut server => return Ok(served??),
        () = signals.asked_to_stop() => {}
    }
    drop(stop);
    let served = tokio::time::timeout(CLOSE_CONNECTIONS_WITHIN, &mut server).await;
    if served.is_err() {
        tracing::warn!("some connections did not close in time");
    }
    engine.shutdown().await;
    match served {
        Ok(served) => Ok(served??),
        Err(_) => Ok(()),
    }
}

/// The pages. `engine` protects `POST /v1/payments`.
fn router(engine: Idempotency, service: Arc<Service>) -> Router {
    let tenants = service.clone();
    let tenant = move |request: &Parts| tenants.tenant(&asked(&request.headers));
    let idempotency = IdempotencyLayer::new(engine).scope(tenant);
    let quotes = post(make_quote).layer(idempotency.clone().policy(service.quotes_policy()));
    let idempotency = idempotency.policy(service.policy());
    let payments = post(create_payment).layer(idempotency).layer(from_fn_with_state(service.clone(), delay_answer));
    Router::new()
        .route(PAYMENTS.0, other_methods(payments.get(list_payments), PAYMENTS.1))
        .route(QUOTES.0, other_methods(quotes, QUOTES.1))
        .route(PAYMENT.0, other_methods(get(show_payment), PAYMENT.1))
        .route(LEDGER.0, other_methods(get(show_ledger), LEDGER.1))
        .route(RUNNING.0, other_methods(get(show_running).delete(release_run), RUNNING.1))
        .route(HEALTH.0, other_methods(get(show_health), HEALTH.1))
        .route(DESCRIPTION.0, other_methods(get(show_description), DESCRIPTION.1))
        .fallback(async || Answer::from(Problem::NotFound))
        .with_state(service)
}

fn other_methods(page: MethodRouter<Arc<Service>>, allowed: &'static str) -> MethodRouter<Arc<Service>> {
    page.fallback(async move || Answer::from(Problem::MethodNotAllowed(allowed)))
}

fn asked(headers: &HeaderMap) -> Asked<'_> {
    let field = |name| headers.get(name).map(HeaderValue::as_bytes);
    Asked { authorization: field("authorization"), simulate: field("x-simulate") }
}

async fn create_payment(
    State(service): App,
    IdempotencyContext(run): IdempotencyContext,
    headers: HeaderMap,
    request: Request,
) -> Result<Answer, Problem> {
    let body = body::to_bytes(request.into_body(), service.body_limit()).await;
    let body = body.map_err(|error| Problem::InvalidPayment(error.to_string()))?;
    service.create_payment(asked(&headers), &run, body).await
}

async fn make_quote(
    State(service): App,
    context: Option<IdempotencyContext>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Answer, Problem> {
    service.make_quote(&asked(&headers), context.is_some(), &body)
}

async fn list_payments(State(service): App, headers: HeaderMap) -> Result<Answer, Problem> {
    service.list_payments(asked(&headers)).await
}

async fn show_payment(State(service): App, headers: HeaderMap, Path(id): Path<String>) -> Result<Answer, Problem> {
    service.show_payment(asked(&headers), &id).await
}

async fn show_ledger(State(service): App, headers: HeaderMap) -> Result<Answer, Problem> {
    service.show_ledger(asked(&headers)).await
}

async fn show_running(State(service): App, headers: HeaderMap) -> Result<Answer, Problem> {
    service.show_running(&asked(&headers))
}

async fn release_run(State(service): App, headers: HeaderMap) -> Result<Answer, Problem> {
    service.release_run(&asked(&headers))
}

async fn show_health(State(service): App) -> Answer {
    service.show_health().await
}

async fn show_description(State(service): App) -> Answer {
    service.show_description()
}

async fn delay_answer(State(service): App, request: Request, next: Next) -> Response {
    let simulation = service.simulation(&asked(request.headers()));
    let response = next.run(request).await;
    simulation.delay_answer().await;
    response
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        Answer::from(self).into_response()
    }
}

impl IntoResponse for Answer {
    fn into_response(self) -> Response {
        let mut response = Response::new(match self.body {
            answer::Body::Whole(bytes) => Body::from(bytes),
            answer::Body::Stream(bytes) => {
                Body::from_stream(stream::iter(chunks(bytes).map(Ok::<_, std::convert::Infallible>)))
            }
        });
        *response.status_mut() = StatusCode::from_u16(self.status).unwrap_or_default();
        for (name, value) in self.headers {
            if let Ok(value) = HeaderValue::from_bytes(&value) {
                response.headers_mut().append(name, value);
            }
        }
        response
    }
}
