//! The tower service: from the types of `http` to the policy and the engine, and back. It decides nothing itself.

use std::convert::{Infallible, identity};
use std::fmt;
use std::future::Future;
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context as TaskContext, Poll};

use bytes::Bytes;
use futures_util::{FutureExt, TryFutureExt, TryStreamExt};
use http::header::RETRY_AFTER;
use http::request::Parts;
use http::uri::Authority;
use http::{Request, Response};
use http_body::Body;
use idem_core::engine::{Conclusion, Context};
use idem_http::{
    BrokenResponse, Captured, Decision, HttpPolicy, Protection, RETENTION_HEADER, ReceivedRequest, RequestHead,
    ResponseDirectives, ScopeSource, StatedRetention,
};
use tower_service::Service;

use crate::convert::{Data, Fields, reason, respond, sendable};
use crate::framework::{BoxError, Framework};

/// The service that a [`FrameworkLayer`](crate::FrameworkLayer) wraps around another one.
pub struct IdempotencyService<I, S, F> {
    inner: I,
    protection: Protection<S>,
    framework: PhantomData<fn() -> F>,
}

impl<I, S, F> IdempotencyService<I, S, F> {
    pub(crate) fn new(inner: I, protection: Protection<S>) -> Self {
        Self { inner, protection, framework: PhantomData }
    }
}

impl<I: Clone, S: Clone, F> Clone for IdempotencyService<I, S, F> {
    fn clone(&self) -> Self {
        Self::new(self.inner.clone(), self.protection.clone())
    }
}

impl<I, S, F, B, R> Service<Request<B>> for IdempotencyService<I, S, F>
where
    F: Framework,
    B: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
    R: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
    I: Service<Request<F::Body>, Response = Response<R>, Error = Infallible> + Clone + Send + 'static,
    I::Future: Send + 'static,
    S: ScopeSource<Parts>,
{
    type Response = Response<F::Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<F::Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, context: &mut TaskContext<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        // The instance that was polled ready handles this request; its clone waits for the next one.
        let clone = self.clone();
        let service = std::mem::replace(self, clone);
        let (head, body) = request.into_parts();
        // Boxed separately, so that the future that receives the request is freed before the handler runs.
        Box::pin(Box::pin(service.receive(head, F::body(body))).try_flatten().unwrap_or_else(identity).map(Ok))
    }
}

impl<I, S, F> IdempotencyService<I, S, F>
where
    F: Framework,
    S: ScopeSource<Parts>,
{
    /// Receives the request. Returns the future that runs its handler, or the answer if there is one already.
    #[expect(clippy::manual_async_fn, reason = "the future of an `async fn` has room for each argument twice")]
    fn receive<R>(mut self, mut head: Parts, mut body: F::Body) -> impl Future<Output = Received<impl Run<F>, F>> + Send
    where
        R: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
        I: Service<Request<F::Body>, Response = Response<R>, Error = Infallible> + Send + 'static,
        I::Future: Send + 'static,
    {
        async move {
            let incoming = match self.protection.decide(&head, &request_head::<F>(&head)) {
                Decision::Receive(incoming) => incoming,
                Decision::Refuse(reply) => return Err(respond::<F>(reply)),
                Decision::Pass => {
                    let Ok(response) = self.inner.call(Request::from_parts(head, body)).await;
                    return Err(response.map(F::body));
                }
            };
            let chunks = Data::of(&mut body).map_err(reason);
            let received = self.protection.receive(incoming, chunks).await.map_err(respond::<F>)?;
            let ReceivedRequest { operation, chunks, reservation, .. } = received;
            let (mut inner, policy) = (self.inner, Arc::clone(self.protection.shared_policy()));
            let stated = self.protection.stated_retention();
            let run = move |context: Context| {
                let is_protected = context.is_protected();
                head.extensions.insert(context);
                // Without its trailers, which belong to no fingerprint: a handler that obeys one would do something else for
                // the same request. A recipient may discard them (RFC 9110 section 6.5.1).
                let request = Request::from_parts(head, sendable::<F>(chunks, None, None));
                inner.call(request).then(move |Ok(response)| {
                    // The handler has read the body.
                    drop(reservation);
                    // Boxed, because the handler's future would hold space for it from the start.
                    Box::pin(conclude::<F>(policy, stated, is_protected, response.map(F::body)))
                })
            };
            Ok(self.protection.execute(operation, run).map_err(respond::<F>))
        }
    }
}

/// The future that runs the handler, or the answer if there is one already.
type Received<T, F> = Result<T, Response<<F as Framework>::Body>>;

/// Runs the handler; an error is an answer that takes the place of the handler's.
trait Run<F: Framework>: Future<Output = Result<Response<F::Body>, Response<F::Body>>> + Send {}

impl<F: Framework, T> Run<F> for T where T: Future<Output = Result<Response<F::Body>, Response<F::Body>>> + Send {}

/// The head with the client's path and query; a nested router sees only a part of the path.
fn request_head<F: Framework>(head: &Parts) -> RequestHead<'_, Fields<'_>> {
    let uri = F::target(head);
    RequestHead {
        method: head.method.as_str(),
        authority: uri.authority().map(Authority::as_str),
        path: uri.path(),
        query: uri.query(),
        route: F::route(head),
        headers: Fields(&head.headers),
        is_protected: head.extensions.get::<Context>().is_some(),
    }
}

/// Reads the response until it can be settled, and puts together what the client gets.
async fn conclude<F: Framework>(
    policy: Arc<HttpPolicy>,
    stated: StatedRetention,
    is_protected: bool,
    response: Response<F::Body>,
) -> Result<Conclusion<Response<F::Body>>, BrokenResponse> {
    let (mut head, mut body) = response.into_parts();
    let directives = head.extensions.get::<ResponseDirectives>();
    let capture = policy.capture(head.status.as_u16(), &Fields(&head.headers), directives);
    if let Some(seconds) = capture.retry_after_s() {
        head.headers.entry(RETRY_AFTER).or_insert_with(|| seconds.into());
    }
    let mut data = Data::of(&mut body);
    let (Conclusion { value: chunks, disposition, retention }, captured) = capture.read(&mut data).await?;
    head.headers.remove(policy.replay_header_name());
    head.headers.remove(RETENTION_HEADER);
    if let Some(seconds) = stated.seconds(is_protected, &disposition, retention) {
        head.headers.insert(RETENTION_HEADER, seconds.into());
    }
    let trailers = data.trailers;
    let rest = (captured == Captured::Enough).then_some(body);
    let value = Response::from_parts(head, sendable::<F>(chunks, trailers, rest));
    Ok(Conclusion { value, disposition, retention })
}

impl<I, S, F> fmt::Debug for IdempotencyService<I, S, F> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("IdempotencyService").field("protection", &self.protection).finish_non_exhaustive()
    }
}
