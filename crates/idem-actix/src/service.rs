//! The service: from actix's types to the policy and the engine, and back. It decides nothing itself.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;

use actix_web::body::MessageBody;
use actix_web::dev::{Service, ServiceRequest, ServiceResponse, forward_ready};
use actix_web::{Error, HttpMessage, HttpRequest};
use idem_core::engine::Context;
use idem_http::{Decision, IncomingRequest, Protection, Reply, RequestHead, ScopeSource};

use crate::convert::{Fields, arriving, payload, respond};
use crate::handler;

/// The service that [`IdempotencyLayer`](crate::IdempotencyLayer) wraps around another one.
pub struct IdempotencyService<I, S> {
    inner: Rc<I>,
    protection: Rc<Protection<S>>,
}

impl<I, S> IdempotencyService<I, S> {
    pub(crate) fn new(inner: I, protection: Protection<S>) -> Self {
        Self { inner: Rc::new(inner), protection: Rc::new(protection) }
    }
}

type Answered = Pin<Box<dyn Future<Output = Result<ServiceResponse, Error>>>>;

impl<I, S, B> Service<ServiceRequest> for IdempotencyService<I, S>
where
    S: ScopeSource<HttpRequest>,
    I: Service<ServiceRequest, Response = ServiceResponse<B>, Error = Error> + 'static,
    B: MessageBody + 'static,
{
    type Response = ServiceResponse;
    type Error = Error;
    type Future = Answered;

    forward_ready!(inner);

    fn call(&self, request: ServiceRequest) -> Answered {
        let (inner, protection) = (Rc::clone(&self.inner), Rc::clone(&self.protection));
        // The scope is application code, and may panic. Over HTTP/2, actix calls services in the task of the connection,
        // where a panic would end all of its streams. It awaits their futures in one task per stream.
        Box::pin(async move {
            match decide(&protection, request.request()) {
                Decision::Pass => Ok(inner.call(request).await?.map_into_boxed_body()),
                Decision::Refuse(reply) => Ok(refuse(request, reply)),
                Decision::Receive(incoming) => Box::pin(protect(inner, protection, request, incoming)).await,
            }
        })
    }
}

/// The route by which actix handles the request, or will handle it.
///
/// Before the router has run, `match_pattern` looks up the path as the client sent it. That may give the pattern of another
/// route, or none: the router uses the path without percent-encoding, and both spellings are one operation. If there is no
/// pattern, as for a resource that has several, the path without percent-encoding stands for it.
fn route(request: &HttpRequest) -> String {
    let (routes, path) = (request.resource_map(), request.match_info().as_str());
    let pattern = request.match_pattern();
    // A pattern that differs from the look-up comes from the router, which also evaluates guards.
    let is_routed = pattern != routes.match_pattern(request.path());
    let pattern = if is_routed { pattern } else { routes.match_pattern(path) };
    pattern.unwrap_or_else(|| path.to_owned())
}

/// Decides by the request's head. Path and query are those of the request line, also in a scope of actix.
fn decide<S: ScopeSource<HttpRequest>>(protection: &Protection<S>, request: &HttpRequest) -> Decision {
    let route = route(request);
    let head = RequestHead {
        method: request.method().as_str(),
        authority: request.uri().authority().map(|authority| authority.as_str()),
        path: request.uri().path(),
        query: request.uri().query(),
        route: Some(&route),
        headers: Fields(request.headers()),
        is_protected: request.extensions().contains::<Context>(),
    };
    protection.decide(request, &head)
}

async fn protect<I, S, B>(
    inner: Rc<I>,
    protection: Rc<Protection<S>>,
    mut request: ServiceRequest,
    incoming: Box<IncomingRequest>,
) -> Result<ServiceResponse, Error>
where
    I: Service<ServiceRequest, Response = ServiceResponse<B>, Error = Error> + 'static,
    B: MessageBody + 'static,
{
    let received = match protection.receive(incoming, arriving(&mut request)).await {
        Ok(received) => received,
        Err(reply) => return Ok(refuse(request, reply)),
    };
    request.set_payload(payload(received.chunks));
    let (run, handled) = handler::prepare(
        inner,
        protection.shared_policy(),
        protection.stated_retention(),
        request,
        received.reservation,
    );
    let outcome = protection.execute(received.operation, run).await;
    handled.await.answer(outcome, protection.shared_policy())
}

fn refuse(request: ServiceRequest, reply: Reply) -> ServiceResponse {
    request.into_response(respond(reply))
}

impl<I, S> fmt::Debug for IdempotencyService<I, S> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("IdempotencyService").field("protection", &self.protection).finish_non_exhaustive()
    }
}
