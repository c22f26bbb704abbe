//! The tower service: from axum's types to the policy and the engine, and back. It decides nothing itself.

use std::convert::Infallible;
use std::fmt;
use std::future::{self, Future};
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context as TaskContext, Poll};

use axum::body::Body;
use axum::extract::{MatchedPath, OriginalUri, Request};
use axum::response::Response;
use futures_util::{FutureExt, TryFutureExt};
use http::request::Parts;
use idem_core::engine::{Conclusion, Context};
use idem_http::{
    Arrival, Arrived, Captured, Decision, HttpPolicy, Protection, Reply, RequestHead, ResponseDirectives, ScopeSource,
};
use tower_service::Service;

use crate::convert::{Data, Fields, respond, sendable};

/// What [`IdempotencyLayer`](crate::IdempotencyLayer) makes of a service.
#[derive(Clone)]
pub struct IdempotencyService<I, S> {
    inner: I,
    protection: Protection<S>,
}

impl<I, S> IdempotencyService<I, S> {
    pub(crate) fn new(inner: I, protection: Protection<S>) -> Self {
        Self { inner, protection }
    }
}

impl<I, S> Service<Request> for IdempotencyService<I, S>
where
    I: Service<Request, Response = Response, Error = Infallible> + Clone + Send + 'static,
    I::Future: Send + 'static,
    S: ScopeSource<Parts>,
{
    type Response = Response;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, context: &mut TaskContext<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request) -> Self::Future {
        let (head, body) = request.into_parts();
        match self.protection.decide(&head, &request_head(&head)) {
            Decision::Pass => Box::pin(self.inner.call(Request::from_parts(head, body))),
            Decision::Refuse(reply) => Box::pin(future::ready(Ok(respond(reply)))),
            Decision::Receive(arrival) => {
                // The instance that was polled ready does the work; its clone waits for the next request.
                let clone = self.inner.clone();
                let inner = mem::replace(&mut self.inner, clone);
                // Boxed by itself, so that what receives is gone while the handler runs.
                let protected = Box::pin(protect(inner, self.protection.clone(), arrival, head, body));
                Box::pin(protected.try_flatten().unwrap_or_else(respond).map(Ok))
            }
        }
    }
}

/// Receives the request, and returns what answers it.
async fn protect<I, S>(
    mut inner: I,
    protection: Protection<S>,
    arrival: Box<Arrival>,
    mut head: Parts,
    mut body: Body,
) -> Result<impl Future<Output = Result<Response, Reply>> + Send, Reply>
where
    I: Service<Request, Response = Response, Error = Infallible> + Send + 'static,
    I::Future: Send + 'static,
    S: ScopeSource<Parts>,
{
    let mut data = Data::of(&mut body);
    let Arrived { operation, chunks, reservation, .. } = arrival.receive(&mut data).await?;
    let trailers = data.trailers;
    let policy = Arc::clone(protection.shared_policy());
    let run = move |context: Context| {
        head.extensions.insert(context);
        let request = Request::from_parts(head, sendable(chunks, trailers, None));
        inner.call(request).then(move |Ok(response)| {
            // The handler has had the body.
            drop(reservation);
            conclude(policy, response)
        })
    };
    Ok(protection.execute(operation, run))
}

/// Path and query are those that the client sent: a nested router sees less of the path.
fn request_head(head: &Parts) -> RequestHead<'_, Fields<'_>> {
    let uri = head.extensions.get::<OriginalUri>().map_or(&head.uri, |original| &original.0);
    RequestHead {
        method: head.method.as_str(),
        path: uri.path(),
        query: uri.query(),
        route: head.extensions.get::<MatchedPath>().map(MatchedPath::as_str),
        headers: Fields(&head.headers),
        is_protected: head.extensions.get::<Context>().is_some(),
    }
}

/// Reads the response until it can be settled, and puts together what the client gets.
async fn conclude(policy: Arc<HttpPolicy>, response: Response) -> Option<Conclusion<Response>> {
    let (head, mut body) = response.into_parts();
    let directives = head.extensions.get::<ResponseDirectives>();
    let capture = policy.capture(head.status.as_u16(), &Fields(&head.headers), directives);
    let mut data = Data::of(&mut body);
    let (Conclusion { value: chunks, disposition, retention }, captured) = capture.read(&mut data).await?;
    let trailers = data.trailers;
    let rest = (captured == Captured::Enough).then_some(body);
    let value = Response::from_parts(head, sendable(chunks, trailers, rest));
    Some(Conclusion { value, disposition, retention })
}

impl<I, S> fmt::Debug for IdempotencyService<I, S> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("IdempotencyService").field("protection", &self.protection).finish_non_exhaustive()
    }
}
