//! A layer without its framework: who is asked what, and in which order.

use std::fmt;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::{FutureExt, Stream, StreamExt};
use idem_core::engine::{Answer, Conclusion, Context, Idempotency, Operation};
use scopeguard::ScopeGuard;

use crate::head::{KeyedHead, RequestHead};
use crate::headers::HeaderFields;
use crate::policy::HttpPolicy;
use crate::problem::{Problem, ProblemKind};
use crate::reply::Reply;
use crate::request::{BodyError, IncomingRequest, ReceivedRequest};
use crate::scope::{ByPrincipal, ScopeMissing, ScopeSource, SingleTenant};

/// What all layers are made of: an engine, a policy, and a scope, without which none of them compiles.
#[derive(Clone)]
pub struct Protection<S = ScopeMissing> {
    engine: Idempotency,
    policy: Arc<HttpPolicy>,
    scope: S,
}

/// What becomes of a request before its body arrives.
#[derive(Debug)]
#[expect(clippy::exhaustive_enums, reason = "adapters must handle every decision")]
pub enum Decision {
    /// None of the layer's business: pass it on untouched. No record is made.
    Pass,
    /// Answer with this; nothing runs.
    Refuse(Reply),
    /// Receive its body. Boxed, as it is many times as large as the others.
    Receive(Box<IncomingRequest>),
}

impl Protection {
    /// By this engine; it has no scope yet.
    #[must_use]
    pub fn new(engine: Idempotency) -> Self {
        Self { engine, policy: Arc::new(HttpPolicy::new()), scope: ScopeMissing }
    }

    /// For the principals that a function names.
    #[must_use]
    pub fn scope<F>(self, principal: F) -> Protection<ByPrincipal<F>> {
        Protection { engine: self.engine, policy: self.policy, scope: ByPrincipal(principal) }
    }

    /// For one tenant.
    #[must_use]
    pub fn single_tenant(self) -> Protection<SingleTenant> {
        Protection { engine: self.engine, policy: self.policy, scope: SingleTenant }
    }
}

impl<S> Protection<S> {
    /// With this policy instead of [`HttpPolicy::new`].
    #[must_use]
    pub fn policy(mut self, policy: HttpPolicy) -> Self {
        self.policy = Arc::new(policy);
        self
    }

    /// The engine.
    #[must_use]
    pub fn engine(&self) -> &Idempotency {
        &self.engine
    }

    /// The policy, for what a handler answers.
    #[must_use]
    pub fn shared_policy(&self) -> &Arc<HttpPolicy> {
        &self.policy
    }

    /// Decides by the head of a request. Who asks comes before what is asked: a request without a principal gets 401,
    /// also when its key is missing or malformed.
    #[must_use]
    pub fn decide<H>(&self, request: &H, head: &RequestHead<'_, impl HeaderFields>) -> Decision
    where
        S: ScopeSource<H>,
    {
        let read = match head.read(&self.policy) {
            Ok(None) => return Decision::Pass,
            Ok(Some(keyed)) => Ok(keyed),
            Err(problem) => Err(problem),
        };
        let operation = head.operation();
        match self.begin(request, head, &operation, read) {
            Ok(incoming) => Decision::Receive(Box::new(incoming)),
            Err(problem) => Decision::Refuse(self.refuse(&operation, &problem)),
        }
    }

    fn begin<H>(
        &self,
        request: &H,
        head: &RequestHead<'_, impl HeaderFields>,
        operation: &str,
        read: Result<KeyedHead, Problem>,
    ) -> Result<IncomingRequest, Problem>
    where
        S: ScopeSource<H>,
    {
        if head.is_protected {
            let detail = "The route has two idempotency layers; give it one.";
            return Err(Problem::new(ProblemKind::Misconfigured).detail(detail));
        }
        let scope = self.scope.scope_of(request, operation.to_owned());
        let scope = scope.ok_or_else(|| Problem::new(ProblemKind::PrincipalMissing))?;
        IncomingRequest::new(scope, read?, &head.headers, &self.policy)
    }

    /// Collects the body of a request. No lease is held while it arrives, and it may take as long as the
    /// [policy](HttpPolicy::request_body_timeout) says.
    ///
    /// # Errors
    /// The reply to a body that is too large, too slow, or breaks off; and to one that is shorter than its head declares, of
    /// which somebody else has consumed a part before: bodies that differ only there would be the same. Nothing ran.
    ///
    /// # Cancellation safety
    /// Dropping the returned future drops what has arrived. The engine's observer is told that the request was `interrupted`.
    pub async fn receive(
        &self,
        request: Box<IncomingRequest>,
        body: impl Stream<Item = Result<Bytes, BodyError>>,
    ) -> Result<ReceivedRequest, Reply> {
        let mut body = pin!(body);
        // Its client may go meanwhile, and then this is dropped.
        let mut request = scopeguard::guard(request, |request| self.engine.refused(request.operation(), "interrupted"));
        let arriving = async {
            while let Some(chunk) = body.next().await {
                request.push(chunk?)?;
            }
            request.expect_whole()
        };
        let arrived = tokio::time::timeout(self.policy.request_body_timeout, arriving).await;
        let request = ScopeGuard::into_inner(request);
        if let Err(problem) = arrived.unwrap_or_else(|_| Err(Problem::new(ProblemKind::BodyTooSlow))) {
            return Err(self.refuse(request.operation(), &problem));
        }
        let operation = request.operation().to_owned();
        request.finish(&self.policy).map_err(|problem| self.refuse(&operation, &problem))
    }

    /// The answer to a request that is refused before it is an operation; the engine's observer is told.
    fn refuse(&self, operation: &str, problem: &Problem) -> Reply {
        self.engine.refused(operation, problem.kind().name());
        self.policy.problem(problem)
    }

    /// Runs the handler, or says what to answer instead. `run` concludes the handler's answer by
    /// [`HttpPolicy::capture`]; `None` says that the answer broke off, and a panic counts as that too.
    ///
    /// # Errors
    /// The reply that takes the place of the handler's answer.
    ///
    /// # Cancellation safety
    /// Dropping the returned future cancels neither the handler nor its settlement.
    pub fn execute<T, F, R>(
        &self,
        operation: Operation,
        run: F,
    ) -> impl Future<Output = Result<T, Reply>> + Send + use<T, F, R, S>
    where
        T: Send + 'static,
        F: FnOnce(Context) -> R + Send + 'static,
        R: Future<Output = Option<Conclusion<T>>> + Send + 'static,
    {
        let (policy, on_panic) = (Arc::clone(&self.policy), Arc::clone(&self.policy));
        let conclude = move |concluded| match concluded {
            Some(Conclusion { value, disposition, retention }) => {
                Conclusion { value: Ok(value), disposition, retention }
            }
            None => policy.handler_failed(),
        };
        let run = move |context| run(context).map(conclude);
        let policy = Arc::clone(&self.policy);
        self.engine.execute(operation, run, move || on_panic.handler_failed()).map(move |answer| {
            let problem = match answer {
                Ok(Answer::Ran { value, .. }) => return value,
                Ok(Answer::Replay(replay)) => return Err(policy.replay(&replay)),
                Err(error) => return Err(policy.failure(&error)),
                Ok(Answer::InProgress { retry_after }) => {
                    Problem::new(ProblemKind::InProgress).retry_after(retry_after)
                }
                Ok(Answer::Backoff { retry_after }) => Problem::new(ProblemKind::Backoff).retry_after(retry_after),
                Ok(Answer::Mismatch) => Problem::new(ProblemKind::Mismatch),
            };
            Err(policy.problem(&problem))
        })
    }
}

impl<S> fmt::Debug for Protection<S> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Protection")
            .field("engine", &self.engine)
            .field("policy", &self.policy)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
