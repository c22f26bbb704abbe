//! The service on hyper, without a framework: a match instead of a router, and the layer of `idem-tower`.

use std::convert::Infallible;
use std::error::Error;
use std::net::TcpListener;
use std::sync::Arc;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full, LengthLimitError, Limited, StreamBody};
use hyper::body::{Body as _, Frame, Incoming};
use hyper::http::header::CONTENT_LENGTH;
use hyper::http::request::Parts;
use hyper::http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use hyper::{Method, Request, Response};
use idem_core::JsonPointerError;
use idem_core::engine::Idempotency;
use idem_tower::{Framework as _, IdempotencyLayer, NotProtected, Plain, context_of};
use tower::util::BoxCloneSyncService;
use tower::{Layer as _, Service as _, ServiceBuilder, service_fn};
use tower_http::compression::CompressionLayer;
use tower_http::cors::CorsLayer;

use super::{Signals, connections};
use crate::answer::{self, Answer, chunks};
use crate::problem::Problem;
use crate::service::{
    Asked, DESCRIPTION, HEALTH, HOME, LEDGER, METRICS, MIRROR, MIRROR_REPLAY_HEADER, NOTICES, PAYMENT, PAYMENTS,
    QUOTES, RECORD, RUNNING, STORE_HEALTH, Service,
};

type Body = <Plain as idem_tower::Framework>::Body;

/// A page that the layer protects.
type Protected = BoxCloneSyncService<Request<Incoming>, Response<Body>, Infallible>;

/// What the connections share.
#[derive(Clone)]
struct Pages {
    service: Arc<Service>,
    payments: Protected,
    quotes: Protected,
    /// The mirror and the notices, only under `--simulate`.
    simulated: Option<(Protected, Protected)>,
}

pub(super) async fn serve(
    listener: TcpListener,
    engine: Idempotency,
    service: Arc<Service>,
    signals: Signals,
) -> Result<(), Box<dyn Error + Send + Sync>> {
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let client_timeout = service.client_timeout();
    let pages = Pages::new(engine.clone(), service)?;
    let answer = service_fn(move |request: Request<Incoming>| {
        let (pages, is_head) = (pages.clone(), request.method() == Method::HEAD);
        async move { pages.answer(request).await.map(|response| if is_head { without_body(response) } else { response }) }
    });
    let open = connections::serve(listener, answer, client_timeout, signals.asked_to_stop()).await;
    super::end(open, engine).await;
    Ok(())
}

impl Pages {
    fn new(engine: Idempotency, service: Arc<Service>) -> Result<Self, JsonPointerError> {
        let tenants = Arc::clone(&service);
        let tenant = move |request: &Parts| tenants.tenant(&asked(&request.headers));
        let idempotency = IdempotencyLayer::new(engine).scope(tenant);
        let of = |page: Page| {
            let service = Arc::clone(&service);
            service_fn(move |request| page.answer(Arc::clone(&service), request))
        };
        let (payments, quotes, mirror) = (service.policy(), service.quotes_policy(), service.mirror_policy());
        let mirror = idempotency.clone().policy(mirror).layer(of(Page::Mirror));
        let browsers = CorsLayer::very_permissive().expose_headers([HeaderName::from_static(MIRROR_REPLAY_HEADER)]);
        let mirror = ServiceBuilder::new().layer(browsers).layer(CompressionLayer::new()).service(mirror);
        let mirror = tower::ServiceExt::<Request<Incoming>>::map_response(mirror, |response: Response<_>| {
            response.map(Plain::body)
        });
        let notices = idempotency.clone().policy(service.notices_policy()?).layer(of(Page::Notices));
        Ok(Self {
            payments: BoxCloneSyncService::new(idempotency.clone().policy(payments).layer(of(Page::Payments))),
            quotes: BoxCloneSyncService::new(idempotency.policy(quotes).layer(of(Page::Quotes))),
            simulated: service
                .is_simulating()
                .then(|| (BoxCloneSyncService::new(mirror), BoxCloneSyncService::new(notices))),
            service,
        })
    }

    /// Answers a request by its path and method.
    async fn answer(self, request: Request<Incoming>) -> Result<Response<Body>, Infallible> {
        let Self { service, mut payments, mut quotes, simulated } = self;
        let (method, path) = (request.method().clone(), request.uri().path().to_owned());
        let (is_read, is_post) = (method == Method::GET || method == Method::HEAD, method == Method::POST);
        let headers = request.headers().clone();
        let asked = || asked(&headers);
        let allows = |allowed| Err(Problem::MethodNotAllowed(allowed));
        match (simulated, path.as_str()) {
            (Some((mut mirror, _)), MIRROR) => return mirror.call(request).await,
            (Some((_, mut notices)), NOTICES) if is_post => return notices.call(request).await,
            (Some(_), NOTICES) => return Ok(respond(allows("POST"))),
            _ => {}
        }
        let answer = match path.as_str() {
            path if path == PAYMENTS.0 && is_post => {
                let outside = service.outside(&asked());
                match outside.around(payments.call(request)).await {
                    Ok(answered) => return answered,
                    Err(problem) => Err(problem),
                }
            }
            path if path == PAYMENTS.0 && is_read => service.list_payments(asked()).await,
            path if path == PAYMENTS.0 => allows(PAYMENTS.1),
            path if path == QUOTES.0 && is_post => return quotes.call(request).await,
            path if path == QUOTES.0 => allows(QUOTES.1),
            path if path == LEDGER.0 && is_read => service.show_ledger(asked()).await,
            path if path == LEDGER.0 => allows(LEDGER.1),
            path if path == RUNNING.0 && is_read => service.show_running(&asked()),
            path if path == RUNNING.0 && is_post => service.time_out_run(&asked()),
            path if path == RUNNING.0 && method == Method::DELETE => service.release_run(&asked()),
            path if path == RUNNING.0 => allows(RUNNING.1),
            path if path == HEALTH.0 && is_read => Ok(service.show_health()),
            path if path == HEALTH.0 => allows(HEALTH.1),
            path if path == STORE_HEALTH.0 && is_read => service.show_store_health(asked()).await,
            path if path == STORE_HEALTH.0 => allows(STORE_HEALTH.1),
            path if path == METRICS.0 && is_read => service.show_metrics(&asked()),
            path if path == METRICS.0 => allows(METRICS.1),
            path if path == DESCRIPTION.0 && is_read => Ok(service.show_description()),
            path if path == DESCRIPTION.0 => allows(DESCRIPTION.1),
            path if path == HOME.0 && is_read => Ok(Service::show_home()),
            path if path == HOME.0 => allows(HOME.1),
            path => match (item_of(PAYMENT.0, path), item_of(RECORD.0, path)) {
                (Some(id), _) if is_read => service.show_payment(asked(), id).await,
                (Some(_), _) => allows(PAYMENT.1),
                (_, Some(key)) if is_read => service.show_record(asked(), key).await,
                (_, Some(_)) => allows(RECORD.1),
                (None, None) => Err(Problem::NotFound),
            },
        };
        Ok(respond(answer))
    }
}

/// The answer to HEAD, as a router makes it: with the length of the body that GET would have, and without the body. Over
/// HTTP/2, hyper leaves that to the application.
fn without_body(response: Response<Body>) -> Response<Body> {
    let (mut head, body) = response.into_parts();
    if let Some(length) = body.size_hint().exact() {
        head.headers.entry(CONTENT_LENGTH).or_insert(length.into());
    }
    Response::from_parts(head, Plain::body(Full::default()))
}

/// The last segment of a path, if the path is of this page.
fn item_of<'a>(page: &str, path: &'a str) -> Option<&'a str> {
    let (before, _) = page.split_once('{')?;
    let item = path.strip_prefix(before)?;
    (!item.is_empty() && !item.contains('/')).then_some(item)
}

/// The pages that are protected.
#[derive(Debug, Clone, Copy)]
enum Page {
    Payments,
    Quotes,
    Mirror,
    Notices,
}

impl Page {
    async fn answer(self, service: Arc<Service>, request: Request<Body>) -> Result<Response<Body>, Infallible> {
        let (head, body) = request.into_parts();
        let body = match whole(&service, body).await {
            Ok(body) => body,
            Err(problem) => return Ok(respond(Err(problem))),
        };
        let (asked, context) = (asked(&head.headers), context_of(head.extensions.get()));
        let answer = match (self, context) {
            (Self::Payments, Ok(context)) => service.create_payment(asked, context, body).await,
            (Self::Payments, Err(error)) => return Ok(without_layer(error)),
            (Self::Quotes, context) => service.make_quote(&asked, context.is_ok(), &body),
            (Self::Notices, _) => Ok(service.take_notice(&body)),
            (Self::Mirror, context) => Ok(service.mirror(&asked, head.method.as_str(), context.is_ok(), &body)),
        };
        Ok(respond(answer))
    }
}

/// The answer without the layer: a page that moves money does not run without it.
fn without_layer(error: NotProtected) -> Response<Body> {
    let mut response = Response::new(Plain::body(Full::from(error.report())));
    *response.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
    response
}

/// A request body under the limit of the service.
async fn whole(service: &Service, body: Body) -> Result<Bytes, Problem> {
    let collected = Limited::new(body, service.body_limit()).collect().await;
    collected.map(http_body_util::Collected::to_bytes).map_err(|error| {
        let is_too_large = error.downcast::<LengthLimitError>().is_ok();
        if is_too_large { Problem::BodyTooLarge } else { Problem::BodyIncomplete }
    })
}

fn asked(headers: &HeaderMap) -> Asked<'_> {
    let field = |name| headers.get(name).map(HeaderValue::as_bytes);
    Asked { authorization: field("authorization"), simulate: field("x-simulate") }
}

fn respond(answer: Result<Answer, Problem>) -> Response<Body> {
    let answer = answer.unwrap_or_else(Answer::from);
    let mut response = Response::new(match answer.body {
        answer::Body::Whole(bytes) => Plain::body(Full::new(bytes)),
        answer::Body::Stream(bytes, end) => {
            use futures_util::TryStreamExt as _;
            Plain::body(StreamBody::new(chunks(bytes, end).map_ok(Frame::data)))
        }
    });
    *response.status_mut() = StatusCode::from_u16(answer.status).unwrap_or_default();
    for (name, value) in answer.headers {
        if let Ok(value) = HeaderValue::from_bytes(&value) {
            response.headers_mut().append(name, value);
        }
    }
    if let Some(directives) = answer.directives {
        response.extensions_mut().insert(directives);
    }
    response
}
