//! The tower service: from axum's types to the policy and the engine, and back. It decides nothing itself.

use std::convert::Infallible;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context as TaskContext, Poll};
use std::time::Duration;

use axum::body::{Body, HttpBody};
use axum::extract::{MatchedPath, OriginalUri, Request};
use axum::response::Response;
use http::HeaderMap;
use http::request::Parts;
use http_body_util::{BodyExt, LengthLimitError};
use idem_core::engine::{Answer, Conclusion, Context, Idempotency};
use idem_http::{
    BufferedRequest, Captured, HttpPolicy, Inspection, Problem, ProblemKind, ProtectedRequest, RequestBuffer,
    ResponseDirectives,
};
use tower_service::Service;

use crate::convert::{Fields, respond, sendable};
use crate::scope::ScopeSource;

/// What [`IdempotencyLayer`](crate::IdempotencyLayer) makes of a service.
#[derive(Clone)]
pub struct IdempotencyService<I, S> {
    inner: I,
    engine: Idempotency,
    policy: Arc<HttpPolicy>,
    scope: S,
}

impl<I, S> IdempotencyService<I, S> {
    pub(crate) fn new(inner: I, engine: Idempotency, policy: Arc<HttpPolicy>, scope: S) -> Self {
        Self { inner, engine, policy, scope }
    }
}

impl<I, S> Service<Request> for IdempotencyService<I, S>
where
    I: Service<Request, Response = Response, Error = Infallible> + Clone + Send + 'static,
    I::Future: Send + 'static,
    S: ScopeSource,
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
        Box::pin(async move { Ok(service.handle(request).await) })
    }
}

impl<I, S> IdempotencyService<I, S>
where
    I: Service<Request, Response = Response, Error = Infallible> + Send + 'static,
    I::Future: Send + 'static,
    S: ScopeSource,
{
    async fn handle(mut self, request: Request) -> Response {
        let (head, body) = request.into_parts();
        let (path, query) = target(&head);
        let protected = match self.policy.inspect(head.method.as_str(), path, query, &Fields(&head.headers)) {
            Inspection::Pass => {
                let Ok(response) = self.inner.call(Request::from_parts(head, body)).await;
                return response;
            }
            Inspection::Refuse(problem) => Err(problem),
            Inspection::Protect(protected) => Ok(protected),
        };
        let policy = Arc::clone(&self.policy);
        self.protect(protected, head, body).await.unwrap_or_else(|problem| respond(policy.problem(&problem)))
    }

    /// Who asks comes before what is asked: a request without a principal gets 401 whatever its key.
    async fn protect(
        self,
        protected: Result<ProtectedRequest, Problem>,
        mut head: Parts,
        body: Body,
    ) -> Result<Response, Problem> {
        if head.extensions.get::<Context>().is_some() {
            let detail = "The route has two idempotency layers; give it one.";
            return Err(Problem::new(ProblemKind::Misconfigured).detail(detail));
        }
        let scope = self.scope.scope_of(&head, operation_name(&head));
        let scope = scope.ok_or_else(|| Problem::new(ProblemKind::PrincipalMissing))?;
        let (pending, buffer) = protected?.buffer(&self.policy);
        let (BufferedRequest { fingerprint, chunks, reservation }, trailers) =
            receive(buffer, body, self.policy.body_timeout()).await?;
        let operation = pending.complete(scope, fingerprint);
        let (mut inner, policy) = (self.inner, Arc::clone(&self.policy));
        let run = move |context: Context| async move {
            head.extensions.insert(context);
            let request = Request::from_parts(head, sendable(chunks, trailers, None));
            let Ok(response) = inner.call(request).await;
            // The handler has had the body.
            drop(reservation);
            conclude(&policy, response).await
        };
        let policy = Arc::clone(&self.policy);
        let on_panic = move || handler_failed(&policy);
        Ok(match self.engine.execute(operation, run, on_panic).await {
            Ok(Answer::Ran { value, .. }) => value,
            Ok(Answer::Replay(replay)) => respond(self.policy.replay(&replay)),
            Ok(Answer::InProgress { retry_after }) => {
                return Err(Problem::new(ProblemKind::InProgress).retry_after(retry_after));
            }
            Ok(Answer::Backoff { retry_after }) => {
                return Err(Problem::new(ProblemKind::Backoff).retry_after(retry_after));
            }
            Ok(Answer::Mismatch) => return Err(Problem::new(ProblemKind::Mismatch)),
            Err(error) => respond(self.policy.failure(&error)),
        })
    }
}

/// Path and query as the client sent them: a nested router sees less of the path.
fn target(head: &Parts) -> (&str, Option<&str>) {
    let uri = head.extensions.get::<OriginalUri>().map_or(&head.uri, |original| &original.0);
    (uri.path(), uri.query())
}

/// Method and route. A layer outside of all routers sees no route, and takes the path.
fn operation_name(head: &Parts) -> String {
    let route = head.extensions.get::<MatchedPath>().map_or_else(|| target(head).0, MatchedPath::as_str);
    format!("{} {route}", head.method)
}

/// Collects the request body, and its trailers. No lease is held while it arrives.
async fn receive(
    mut buffer: RequestBuffer,
    mut body: Body,
    limit: Duration,
) -> Result<(BufferedRequest, Option<HeaderMap>), Problem> {
    buffer.expect(body.size_hint().lower())?;
    let arriving = async {
        let mut trailers = None;
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| match error.into_inner().downcast::<LengthLimitError>() {
                Ok(_) => Problem::new(ProblemKind::BodyTooLarge),
                Err(_) => Problem::new(ProblemKind::BodyIncomplete),
            })?;
            match frame.into_data() {
                Ok(chunk) => buffer.push(chunk)?,
                Err(frame) => trailers = frame.into_trailers().ok(),
            }
        }
        Ok(trailers)
    };
    let arrived = tokio::time::timeout(limit, arriving).await;
    let trailers = arrived.unwrap_or_else(|_| Err(Problem::new(ProblemKind::BodyTooSlow)))?;
    Ok((buffer.finish(), trailers))
}

/// Reads the response until it can be settled, and puts together what the client gets.
async fn conclude(policy: &HttpPolicy, response: Response) -> Conclusion<Response> {
    let (head, mut body) = response.into_parts();
    let directives = head.extensions.get::<ResponseDirectives>();
    let mut capture = policy.capture(head.status.as_u16(), &Fields(&head.headers), directives);
    let mut wanted = capture.begin();
    let mut trailers = None;
    while wanted == Captured::More {
        match body.frame().await {
            None => break,
            Some(Err(_)) => return handler_failed(policy),
            Some(Ok(frame)) => match frame.into_data() {
                Ok(chunk) => wanted = capture.push(chunk),
                Err(frame) => trailers = frame.into_trailers().ok(),
            },
        }
    }
    let Conclusion { value: chunks, disposition, retention } = capture.conclude();
    let rest = (wanted == Captured::Enough).then_some(body);
    let value = Response::from_parts(head, sendable(chunks, trailers, rest));
    Conclusion { value, disposition, retention }
}

fn handler_failed(policy: &HttpPolicy) -> Conclusion<Response> {
    policy.handler_failed(respond(policy.problem(&Problem::new(ProblemKind::HandlerFailed))))
}

impl<I, S> fmt::Debug for IdempotencyService<I, S> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("IdempotencyService").field("engine", &self.engine).finish_non_exhaustive()
    }
}
