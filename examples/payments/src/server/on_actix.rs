//! The service on actix-web.

use std::error;
use std::future::ready;
use std::net::TcpListener;
use std::sync::Arc;

use actix_cors::Cors;
use actix_web::body::{BodyStream, BoxBody};
use actix_web::dev::{ServiceRequest, ServiceResponse};
use actix_web::error::PayloadError;
use actix_web::http::StatusCode;
use actix_web::http::header::{HeaderMap, HeaderName, HeaderValue};
use actix_web::middleware::{Compress, Next, from_fn};
use actix_web::web::{self, Bytes, Data, Path, PayloadConfig};
use actix_web::{App, Error, HttpRequest, HttpResponse, HttpServer, Resource, Responder, ResponseError, Route, guard};
use idem_actix::{IdempotencyContext, IdempotencyLayer};
use idem_core::engine::Idempotency;

use super::{CLOSE_CONNECTIONS_WITHIN, END_OPERATIONS_WITHIN, Signals};
use crate::answer::{Answer, Body, chunks};
use crate::problem::Problem;
use crate::service::{
    Asked, DESCRIPTION, HEALTH, HOME, LEDGER, METRICS, MIRROR, MIRROR_REPLAY_HEADER, NOTICES, PAYMENT, PAYMENTS,
    QUOTES, RECORD, RUNNING, STORE_HEALTH, Service,
};

/// Shuts the engine down before the workers, because tasks on a worker end with it. Handlers run in separate tasks. Those
/// whose clients have gone belong to no connection that a worker would wait for.
pub(super) async fn serve(
    listener: TcpListener,
    engine: Idempotency,
    service: Arc<Service>,
    signals: Signals,
) -> Result<(), Box<dyn error::Error + Send + Sync>> {
    let tenants = service.clone();
    let tenant = move |request: &HttpRequest| tenants.tenant(&asked(request.headers()));
    let idempotency = IdempotencyLayer::new(engine.clone()).scope(tenant);
    let for_quotes = idempotency.clone().policy(service.quotes_policy());
    let for_mirror = service.is_simulating().then(|| idempotency.clone().policy(service.mirror_policy()));
    let for_notices = idempotency.clone().policy(service.notices_policy()?);
    let idempotency = idempotency.policy(service.policy());
    let limit = PayloadConfig::new(service.body_limit());
    let client_timeout = service.client_timeout();
    let service = Data::from(service);
    let app = move || {
        let pay = web::post().to(create_payment).wrap(idempotency.clone()).wrap(from_fn(simulate_outside));
        let (mirror, notices) = (for_mirror.clone(), for_notices.clone());
        App::new()
            .configure(move |pages| {
                if let Some(idempotency) = mirror {
                    let mirror =
                        web::route().to(mirror_request).wrap(idempotency).wrap(Compress::default()).wrap(cors());
                    pages.service(web::resource(MIRROR).route(mirror));
                    pages.service(web::resource(NOTICES).route(web::post().to(take_notice).wrap(notices)));
                }
            })
            .app_data(service.clone())
            .app_data(limit.clone())
            .service(page(PAYMENTS, read().to(list_payments)).route(pay))
            .service(page(QUOTES, web::post().to(make_quote).wrap(for_quotes.clone())))
            .service(page(HOME, read().to(async || Service::show_home())))
            .service(page(RECORD, read().to(show_record)))
            .service(page(PAYMENT, read().to(show_payment)))
            .service(page(LEDGER, read().to(show_ledger)))
            .service(
                page(RUNNING, read().to(show_running))
                    .route(web::delete().to(release_run))
                    .route(web::post().to(time_out_run)),
            )
            .service(page(HEALTH, read().to(show_health)))
            .service(page(METRICS, read().to(show_metrics)))
            .service(page(STORE_HEALTH, read().to(show_store_health)))
            .service(page(DESCRIPTION, read().to(show_description)))
            .default_service(web::to(async || Answer::from(Problem::NotFound)))
    };
    let server = HttpServer::new(app).client_request_timeout(client_timeout).keep_alive(client_timeout);
    let server = server.disable_signals().shutdown_timeout(CLOSE_CONNECTIONS_WITHIN.as_secs());
    let server = server.listen_auto_h2c(listener)?.run();
    let handle = server.handle();
    let mut server = tokio::spawn(server);
    tokio::select! {
        served = &mut server => return Ok(served??),
        () = signals.asked_to_stop() => {}
    }
    handle.pause().await;
    if let Err(unfinished) = engine.shutdown(END_OPERATIONS_WITHIN).await {
        tracing::warn!("{unfinished}");
    }
    handle.stop(true).await;
    Ok(server.await??)
}

/// The CORS fields of the mirror.
fn cors() -> Cors {
    Cors::permissive().expose_headers([MIRROR_REPLAY_HEADER])
}

fn page((path, allowed): (&'static str, &'static str), route: Route) -> Resource {
    let other_methods = web::to(move || ready(Answer::from(Problem::MethodNotAllowed(allowed))));
    web::resource(path).route(route).default_service(other_methods)
}

/// A route for GET and HEAD: actix does not answer HEAD on a route for GET.
fn read() -> Route {
    web::route().guard(guard::Any(guard::Get()).or(guard::Head()))
}

fn asked(headers: &HeaderMap) -> Asked<'_> {
    let field = |name| headers.get(name).map(HeaderValue::as_bytes);
    Asked { authorization: field("authorization"), simulate: field("x-simulate") }
}

async fn create_payment(
    service: Data<Service>,
    IdempotencyContext(run): IdempotencyContext,
    request: HttpRequest,
    body: Result<Bytes, Error>,
) -> Result<Answer, Problem> {
    service.create_payment(asked(request.headers()), &run, whole(body)?).await
}

async fn make_quote(
    service: Data<Service>,
    context: Option<IdempotencyContext>,
    request: HttpRequest,
    body: Result<Bytes, Error>,
) -> Result<Answer, Problem> {
    service.make_quote(&asked(request.headers()), context.is_some(), &whole(body)?)
}

/// A request body under the limit of the service.
fn whole(body: Result<Bytes, Error>) -> Result<Bytes, Problem> {
    body.map_err(|error| match error.as_error() {
        Some(PayloadError::Overflow) => Problem::BodyTooLarge,
        _ => Problem::BodyIncomplete,
    })
}

async fn mirror_request(
    service: Data<Service>,
    context: Option<IdempotencyContext>,
    request: HttpRequest,
    body: Result<Bytes, Error>,
) -> Result<Answer, Problem> {
    let asked = asked(request.headers());
    Ok(service.mirror(&asked, request.method().as_str(), context.is_some(), &whole(body)?))
}

async fn take_notice(service: Data<Service>, body: Result<Bytes, Error>) -> Result<Answer, Problem> {
    Ok(service.take_notice(&whole(body)?))
}

async fn list_payments(service: Data<Service>, request: HttpRequest) -> Result<Answer, Problem> {
    service.list_payments(asked(request.headers())).await
}

async fn show_payment(service: Data<Service>, request: HttpRequest, id: Path<String>) -> Result<Answer, Problem> {
    service.show_payment(asked(request.headers()), &id).await
}

async fn show_record(service: Data<Service>, request: HttpRequest, key: Path<String>) -> Result<Answer, Problem> {
    service.show_record(asked(request.headers()), &key).await
}

async fn show_ledger(service: Data<Service>, request: HttpRequest) -> Result<Answer, Problem> {
    service.show_ledger(asked(request.headers())).await
}

async fn show_running(service: Data<Service>, request: HttpRequest) -> Result<Answer, Problem> {
    service.show_running(&asked(request.headers()))
}

async fn release_run(service: Data<Service>, request: HttpRequest) -> Result<Answer, Problem> {
    service.release_run(&asked(request.headers()))
}

async fn time_out_run(service: Data<Service>, request: HttpRequest) -> Result<Answer, Problem> {
    service.time_out_run(&asked(request.headers()))
}

async fn show_health(service: Data<Service>) -> Answer {
    service.show_health()
}

async fn show_metrics(service: Data<Service>, request: HttpRequest) -> Result<Answer, Problem> {
    service.show_metrics(&asked(request.headers()))
}

async fn show_store_health(service: Data<Service>, request: HttpRequest) -> Result<Answer, Problem> {
    service.show_store_health(asked(request.headers())).await
}

async fn show_description(service: Data<Service>) -> Answer {
    service.show_description()
}

async fn simulate_outside(
    service: Data<Service>,
    request: ServiceRequest,
    next: Next<BoxBody>,
) -> Result<ServiceResponse<BoxBody>, Error> {
    let outside = service.outside(&asked(request.headers()));
    outside.around(next.call(request)).await?
}

impl ResponseError for Problem {
    fn error_response(&self) -> HttpResponse {
        Answer::from(self).into()
    }
}

impl Responder for Answer {
    type Body = BoxBody;

    fn respond_to(self, _: &HttpRequest) -> HttpResponse {
        self.into()
    }
}

impl From<Answer> for HttpResponse {
    fn from(answer: Answer) -> Self {
        let body = match answer.body {
            Body::Whole(bytes) => BoxBody::new(bytes),
            Body::Stream(bytes, end) => BoxBody::new(BodyStream::new(chunks(bytes, end))),
        };
        let mut response = Self::with_body(StatusCode::from_u16(answer.status).unwrap_or_default(), body);
        for (name, value) in answer.headers {
            if let Ok(value) = HeaderValue::from_bytes(&value) {
                response.headers_mut().append(HeaderName::from_static(name), value);
            }
        }
        if let Some(directives) = answer.directives {
            response.extensions_mut().insert(directives);
        }
        response
    }
}
