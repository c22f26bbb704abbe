//! The framework-independent part of a layer: it asks scope, policy and engine in the right order.

use std::error::Error;
use std::fmt;
use std::future::{Future, ready};
use std::pin::pin;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::future::Either;
use futures_util::{FutureExt, Stream, StreamExt};
use idem_core::engine::{Answer, Conclusion, Context, Idempotency, Operation};
use scopeguard::ScopeGuard;

use crate::head::{KeyedHead, RequestHead};
use crate::headers::HeaderFields;
use crate::policy::HttpPolicy;
use crate::problem::{Problem, ProblemKind};
use crate::reply::Reply;
use crate::request::{BodyError, IncomingRequest, ReceivedRequest};
use crate::response::BrokenResponse;
use crate::retention::StatedRetention;
use crate::scope::{ByPrincipal, ScopeMissing, ScopeSource, SingleTenant};

/// The parts of every layer: an engine, a policy, and a scope. A layer without a scope does not compile.
#[derive(Clone)]
pub struct Protection<S = ScopeMissing> {
    engine: Idempotency,
    policy: Arc<HttpPolicy>,
    scope: S,
}

/// What to do with a request, decided before its body arrives.
#[derive(Debug)]
#[expect(clippy::exhaustive_enums, reason = "adapters must handle every decision")]
pub enum Decision {
    /// The request is not protected: pass it on unchanged. No record is made.
    Pass,
    /// Answer with this; nothing runs.
    Refuse(Reply),
    /// Receive its body. Boxed, because it is much larger than the other variants.
    Receive(Box<IncomingRequest>),
}

impl Protection {
    /// Protects by this engine; it has no scope yet.
    #[must_use]
    pub fn new(engine: Idempotency) -> Self {
        Self { engine, policy: Arc::new(HttpPolicy::new()), scope: ScopeMissing }
    }

    /// Sets the function that names the principal of a request.
    #[must_use]
    pub fn scope<F>(self, principal: F) -> Protection<ByPrincipal<F>> {
        Protection { engine: self.engine, policy: self.policy, scope: ByPrincipal(principal) }
    }

    /// Gives all keys to one tenant.
    #[must_use]
    pub fn single_tenant(self) -> Protection<SingleTenant> {
        Protection { engine: self.engine, policy: self.policy, scope: SingleTenant }
    }
}

impl<S> Protection<S> {
    /// Sets the policy. Default [`HttpPolicy::new`].
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

    /// The policy, to capture a handler's response with.
    #[must_use]
    pub fn shared_policy(&self) -> &Arc<HttpPolicy> {
        &self.policy
    }

    /// What the handler's answers state about the retention of their records.
    #[must_use]
    pub fn stated_retention(&self) -> StatedRetention {
        StatedRetention::new(self.engine.contract(), self.engine.settings().record_retention())
    }

    /// Decides by the head of a request. The principal is checked before the key: a request without a principal gets 401,
    /// even if its key is missing or malformed.
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
            return Err(Problem::misconfigured("the route has two idempotency layers; give it one"));
        }
        let scope = self.scope.scope_of(request, operation.to_owned());
        let scope = scope.ok_or_else(|| Problem::new(ProblemKind::PrincipalMissing))?;
        IncomingRequest::new(scope, read?, &head.headers, &self.policy)
    }

    /// Collects the body of a request. No lease is held while it arrives. The [policy](HttpPolicy::request_body_timeout)
    /// limits how long it may take.
    ///
    /// # Errors
    /// The reply to a body that
    ///
    /// - is too large, too slow, over the budget, or breaks off;
    /// - lacks a valid key, if the policy takes the key from the body;
    /// - is shorter than its head declares, because middleware outside has consumed a part of it. Bodies that differ only in
    ///   that part would have the same fingerprint.
    ///
    /// Nothing ran.
    ///
    /// # Cancellation safety
    /// Dropping the returned future drops what has arrived. The engine's observer then sees a refusal: `interrupted`.
    pub async fn receive(
        &self,
        request: Box<IncomingRequest>,
        body: impl Stream<Item = Result<Bytes, BodyError>>,
    ) -> Result<ReceivedRequest, Reply> {
        let mut body = pin!(body);
        // If the client disconnects meanwhile, this future is dropped.
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

    /// The reply to a request that is refused before it becomes an operation. The engine's observer sees the refusal.
    fn refuse(&self, operation: &str, problem: &Problem) -> Reply {
        if let Some(cause) = problem.cause() {
            tracing::error!(operation, cause, "a request is refused because the server is misconfigured");
        }
        self.engine.refused(operation, problem.kind().name());
        self.policy.problem(problem)
    }

    /// Runs the handler, or returns the reply that takes its place.
    ///
    /// `run` concludes the handler's response by [`HttpPolicy::capture`]. A broken response, which is logged, and a panic both
    /// count as a failure of the handler.
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
        R: Future<Output = Result<Conclusion<T>, BrokenResponse>> + Send + 'static,
    {
        let (policy, on_panic) = (Arc::clone(&self.policy), Arc::clone(&self.policy));
        let run = move |context: Context| {
            let record = *context.record_id();
            run(context).map(move |concluded| match concluded {
                Ok(Conclusion { value, disposition, retention }) => {
                    Conclusion { value: Ok(value), disposition, retention }
                }
                Err(error) => {
                    tracing::warn!(record = %record, error = &error as &dyn Error, "a response counts as a failure of its handler");
                    policy.handler_failed()
                }
            })
        };
        let policy = Arc::clone(&self.policy);
        let continued = policy.continuation.as_ref().map(|_| self.engine.acquire_for(&operation).id);
        self.engine.execute(operation, run, move || on_panic.handler_failed()).then(move |answer| {
            match (answer, continued) {
                (Ok(Answer::Replay(replay)), Some(request)) => {
                    Either::Right(Box::pin(async move { Err(policy.final_reply(&request, &replay).await) }))
                }
                (answer, _) => Either::Left(ready(policy.reply(answer))),
            }
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
