//! The service on actix. It answers a repeated request with the result of its job, once there is one; axum repeats the first 202.

use std::sync::Arc;

use actix_web::http::StatusCode;
use actix_web::http::header::{AUTHORIZATION, HeaderMap};
use actix_web::web::{self, Data, Json, Path};
use actix_web::{App, HttpRequest, HttpResponse, HttpServer};
use http_body_util::BodyExt as _;
use idem_actix::{HttpPolicy, IdempotencyContext, IdempotencyLayer, ResponseDirectives};

use crate::service::{Answer, NewPayment, Service, tenant};
use crate::{AnyError, Config};

pub(crate) async fn serve(config: &Config, service: Service) -> Result<(), AnyError> {
    let policy = HttpPolicy::new().continued_by(Arc::new(service.jobs.clone()));
    let layer = IdempotencyLayer::new(service.requests.clone()).policy(policy);
    let layer = layer.scope(|request: &HttpRequest| tenant_of(request.headers()));
    let service = Data::new(service);
    let app = move || {
        App::new()
            .app_data(service.clone())
            .service(web::resource("/payments").wrap(layer.clone()).route(web::post().to(pay)))
            .service(web::resource("/later").wrap(layer.clone()).route(web::post().to(pay_later)))
            .route("/jobs/{id}", web::get().to(show))
    };
    let server = HttpServer::new(app).workers(2).disable_signals().bind(&config.listen)?;
    for address in server.addrs() {
        println!("listening on http://{address}");
    }
    Ok(server.run().await?)
}

fn tenant_of(headers: &HeaderMap) -> Option<String> {
    tenant(headers.get(AUTHORIZATION).map(|value| value.as_bytes()))
}

async fn pay(
    service: Data<Service>,
    IdempotencyContext(context): IdempotencyContext,
    new: Json<NewPayment>,
) -> HttpResponse {
    match service.pay(&context, new.into_inner()).await {
        Ok(paid) => HttpResponse::Created().json(paid),
        Err(error) => failed(&error),
    }
}

async fn pay_later(
    service: Data<Service>,
    IdempotencyContext(context): IdempotencyContext,
    new: Json<NewPayment>,
) -> HttpResponse {
    match service.enqueue(&context, &new).await {
        Ok(accepted) => translated(accepted).await,
        Err(error) => failed(&error),
    }
}

async fn show(service: Data<Service>, id: Path<String>, request: HttpRequest) -> HttpResponse {
    match tenant_of(request.headers()) {
        Some(tenant) => translated(service.jobs.status(Some(&tenant), &id).await).await,
        None => HttpResponse::Unauthorized().finish(),
    }
}

/// Actix has response types of its own.
async fn translated(answer: Answer) -> HttpResponse {
    let (head, body) = answer.into_parts();
    let status = StatusCode::from_u16(head.status.as_u16()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = HttpResponse::build(status);
    for (name, value) in &head.headers {
        response.append_header((name.as_str(), value.as_bytes()));
    }
    let Ok(body) = body.collect().await;
    let mut response = response.body(body.to_bytes());
    if let Some(directives) = head.extensions.get::<ResponseDirectives>() {
        response.extensions_mut().insert(directives.clone());
    }
    response
}

fn failed(error: &AnyError) -> HttpResponse {
    tracing::warn!(error = &**error as &dyn std::error::Error, "a payment failed");
    HttpResponse::InternalServerError().finish()
}
