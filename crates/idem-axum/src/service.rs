//! The tower service: from axum's types to the policy and the engine, and back. It decides nothing itself.

use std::convert::{Infallible, identity};
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context as TaskContext, Poll};

use axum::body::Body;
use axum::extract::{MatchedPath, OriginalUri, Request};
use axum::response::Response;
use futures_util::{FutureExt, TryFutureExt};
use http::header::RETRY_AFTER;
use http::request::Parts;
use http::uri::Authority;
use idem_core::engine::{Conclusion, Context};
use idem_http::{
    Captured, Decision, HttpPolicy, Protection, ReceivedRequest, RequestHead, ResponseDirectives, ScopeSource,
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
        // The instance that was polled ready does the work; its clone waits for the next request.
        let clone = self.clone();
        let service = std::mem::replace(self, clone);
        let (head, body) = request.into_parts();
        // Boxed by itself, so that what receives the request is gone while the handler runs.
        Box::pin(Box::pin(service.receive(head, body)).try_flatten().unwrap_or_else(identity).map(Ok))
    }
}

impl<I, S> IdempotencyService<I, S>
where
    I: Service<Request, Response = Response, Error = Infallible> + Send + 'static,
    I::Future: Send + 'static,
    S: ScopeSource<Parts>,
{
    /// Receives the request, and returns what runs its handler; or the answer when there is one already.
    #[expect(clippy::manual_async_fn, reason = "the future of an `async fn` has room for each argument twice")]
    fn receive(
        mut self,
        mut head: Parts,
        mut body: Body,
    ) -> impl Future<Output = Result<impl Future<Output = Result<Response, Response>> + Send, Response>> + Send {
        async move {
            let incoming = match self.protection.decide(&head, &request_head(&head)) {
                Decision::Receive(incoming) => incoming,
                Decision::Refuse(reply) => return Err(respond(reply)),
                Decision::Pass => {
                    let Ok(response) = self.inner.call(Request::from_parts(head, body)).await;
                    return Err(response);
                }
            };
            let received = self.protection.receive(incoming, Data::of(&mut body)).await.map_err(respond)?;
            let ReceivedRequest { operation, chunks, reservation, .. } = received;
            let (mut inner, policy) = (self.inner, Arc::clone(self.protection.shared_policy()));
            let run = move |context: Context| {
                head.extensions.insert(context);
                // Without its trailers, which belong to no fingerprint: a handler that obeys one would do something else for
                // the same request. A recipient may discard them (RFC 9110 section 6.5.1).
                let request = Request::from_parts(head, sendable(chunks, None, None));
                inner.call(request).then(move |Ok(response)| {
                    // The handler has had the body.
                    drop(reservation);
                    // Boxed, or the handler would hold the room for it.
                    Box::pin(conclude(policy, response))
                })
            };
            Ok(self.protection.execute(operation, run).map_err(respond))
        }
    }
}

/// Path and query are those that the client sent: a nested router sees less of the path.
fn request_head(head: &Parts) -> RequestHead<'_, Fields<'_>> {
    let uri = head.extensions.get::<OriginalUri>().map_or(&head.uri, |original| &original.0);
    RequestHead {
        method: head.method.as_str(),
        authority: uri.authority().map(Authority::as_str),
        path: uri.path(),
        query: uri.query(),
        route: head.extensions.get::<MatchedPath>().map(MatchedPath::as_str),
        headers: Fields(&head.headers),
        is_protected: head.extensions.get::<Context>().is_some(),
    }
}

/// Reads the response until it can be settled, and puts together what the client gets.
async fn conclude(policy: Arc<HttpPolicy>, response: Response) -> Option<Conclusion<Response>> {
    let (mut head, mut body) = response.into_parts();
    let directives = head.extensions.get::<ResponseDirectives>();
    let capture = policy.capture(head.status.as_u16(), &Fields(&head.headers), directives);
    if let Some(seconds) = capture.retry_after_s() {
        head.headers.entry(RETRY_AFTER).or_insert_with(|| seconds.into());
    }
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
