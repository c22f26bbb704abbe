//! The service on axum.

use std::error::Error;
use std::net::TcpListener;
use std::sync::Arc;

use axum::Router;
use axum::body::{self, Body, Bytes};
use axum::extract::{Path, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, any, get, post};
use http_body_util::LengthLimitError;
use idem_axum::{IdempotencyContext, IdempotencyLayer};
use idem_core::JsonPointerError;
use idem_core::engine::Idempotency;
use tower_http::compression::CompressionLayer;
use tower_http::cors::CorsLayer;

use super::{Signals, connections};
use crate::answer::{self, Answer, chunks};
use crate::problem::Problem;
use crate::service::{
    Asked, DESCRIPTION, HEALTH, HOME, LEDGER, METRICS, MIRROR, MIRROR_REPLAY_HEADER, NOTICES, PAYMENT, PAYMENTS,
    QUOTES, RECORD, RUNNING, STORE_HEALTH, Service,
};

type App = State<Arc<Service>>;

pub(super) async fn serve(
    listener: TcpListener,
    engine: Idempotency,
    service: Arc<Service>,
    signals: Signals,
) -> Result<(), Box<dyn Error + Send + Sync>> {
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let client_timeout = service.client_timeout();
    let router = router(engine.clone(), service)?;
    let open = connections::serve(listener, router, client_timeout, signals.asked_to_stop()).await;
    super::end(open, engine).await;
    Ok(())
}

/// The pages. `engine` protects `POST /v1/payments`.
fn router(engine: Idempotency, service: Arc<Service>) -> Result<Router, JsonPointerError> {
    let tenants = service.clone();
    let tenant = move |request: &Parts| tenants.tenant(&asked(&request.headers));
    let idempotency = IdempotencyLayer::new(engine).scope(tenant);
    let quotes = post(make_quote).layer(idempotency.clone().policy(service.quotes_policy()));
    let mirror: MethodRouter<_> = any(mirror).layer(idempotency.clone().policy(service.mirror_policy()));
    let mirror: MethodRouter<_> = mirror.layer(CompressionLayer::new());
    let mirror: MethodRouter<_> = mirror.layer(cors());
    let notices = post(take_notice).layer(idempotency.clone().policy(service.notices_policy()?));
    let pages = Router::new();
    let pages = if service.is_simulating() { pages.route(MIRROR, mirror).route(NOTICES, notices) } else { pages };
    let idempotency = idempotency.policy(service.policy());
    let payments = post(create_payment).layer(idempotency).layer(from_fn_with_state(service.clone(), simulate_outside));
    let pages = pages
        .route(HOME.0, other_methods(get(async || Service::show_home()), HOME.1))
        .route(RECORD.0, other_methods(get(show_record), RECORD.1))
        .route(PAYMENTS.0, other_methods(payments.get(list_payments), PAYMENTS.1))
        .route(QUOTES.0, other_methods(quotes, QUOTES.1))
        .route(PAYMENT.0, other_methods(get(show_payment), PAYMENT.1))
        .route(LEDGER.0, other_methods(get(show_ledger), LEDGER.1))
        .route(RUNNING.0, other_methods(get(show_running).delete(release_run).post(time_out_run), RUNNING.1))
        .route(HEALTH.0, other_methods(get(show_health), HEALTH.1))
        .route(METRICS.0, other_methods(get(show_metrics), METRICS.1))
        .route(STORE_HEALTH.0, other_methods(get(show_store_health), STORE_HEALTH.1))
        .route(DESCRIPTION.0, other_methods(get(show_description), DESCRIPTION.1))
        .fallback(async || Answer::from(Problem::NotFound))
        .with_state(service);
    Ok(pages)
}

/// The CORS fields of the mirror.
fn cors() -> CorsLayer {
    CorsLayer::very_permissive().expose_headers([HeaderName::from_static(MIRROR_REPLAY_HEADER)])
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
    let body = whole(&service, request.into_body()).await?;
    service.create_payment(asked(&headers), &run, body).await
}

async fn make_quote(
    State(service): App,
    context: Option<IdempotencyContext>,
    headers: HeaderMap,
    request: Request,
) -> Result<Answer, Problem> {
    let body = whole(&service, request.into_body()).await?;
    service.make_quote(&asked(&headers), context.is_some(), &body)
}

/// A request body under the limit of the service.
async fn whole(service: &Service, body: Body) -> Result<Bytes, Problem> {
    body::to_bytes(body, service.body_limit()).await.map_err(|error| {
        let is_too_large = error.into_inner().downcast::<LengthLimitError>().is_ok();
        if is_too_large { Problem::BodyTooLarge } else { Problem::BodyIncomplete }
    })
}

async fn mirror(
    State(service): App,
    context: Option<IdempotencyContext>,
    method: Method,
    headers: HeaderMap,
    request: Request,
) -> Result<Answer, Problem> {
    let body = whole(&service, request.into_body()).await?;
    Ok(service.mirror(&asked(&headers), method.as_str(), context.is_some(), &body))
}

async fn take_notice(State(service): App, request: Request) -> Result<Answer, Problem> {
    let body = whole(&service, request.into_body()).await?;
    Ok(service.take_notice(&body))
}

async fn list_payments(State(service): App, headers: HeaderMap) -> Result<Answer, Problem> {
    service.list_payments(asked(&headers)).await
}

async fn show_payment(State(service): App, headers: HeaderMap, Path(id): Path<String>) -> Result<Answer, Problem> {
    service.show_payment(asked(&headers), &id).await
}

async fn show_record(State(service): App, headers: HeaderMap, Path(key): Path<String>) -> Result<Answer, Problem> {
    service.show_record(asked(&headers), &key).await
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

async fn time_out_run(State(service): App, headers: HeaderMap) -> Result<Answer, Problem> {
    service.time_out_run(&asked(&headers))
}

async fn show_health(State(service): App) -> Answer {
    service.show_health()
}

async fn show_store_health(State(service): App, headers: HeaderMap) -> Result<Answer, Problem> {
    service.show_store_health(asked(&headers)).await
}

async fn show_metrics(State(service): App, headers: HeaderMap) -> Result<Answer, Problem> {
    service.show_metrics(&asked(&headers))
}

async fn show_description(State(service): App) -> Answer {
    service.show_description()
}

async fn simulate_outside(State(service): App, request: Request, next: Next) -> Result<Response, Problem> {
    let outside = service.outside(&asked(request.headers()));
    outside.around(next.run(request)).await
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
            answer::Body::Stream(bytes, end) => Body::from_stream(chunks(bytes, end)),
        });
        *response.status_mut() = StatusCode::from_u16(self.status).unwrap_or_default();
        for (name, value) in self.headers {
            if let Ok(value) = HeaderValue::from_bytes(&value) {
                response.headers_mut().append(name, value);
            }
        }
        if let Some(directives) = self.directives {
            response.extensions_mut().insert(directives);
        }
        response
    }
}
