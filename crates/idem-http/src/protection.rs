//! A layer without its framework: who is asked what, and in which order.

use std::fmt;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::{FutureExt, Stream, StreamExt};
use idem_core::Scope;
use idem_core::engine::{Answer, Conclusion, Context, Idempotency, Operation};

use crate::budget::Reservation;
use crate::headers::{HeaderFields, declared_bytes};
use crate::policy::{HttpPolicy, Inspection, PendingOperation, ProtectedRequest};
use crate::problem::{Problem, ProblemKind};
use crate::reply::Reply;
use crate::request::{BufferedRequest, RequestBuffer};
use crate::scope::{ByPrincipal, ScopeMissing, ScopeSource, SingleTenant};

/// What all layers are made of: an engine, a policy, and a scope, without which none of them compiles.
#[derive(Clone)]
pub struct Protection<S = ScopeMissing> {
    engine: Idempotency,
    policy: Arc<HttpPolicy>,
    scope: S,
}

/// The head of a request, as far as a layer looks at it.
#[derive(Debug)]
#[expect(clippy::exhaustive_structs, reason = "an adapter must say everything that counts")]
pub struct RequestHead<'a, F> {
    /// The method.
    pub method: &'a str,
    /// Host and port of a target in absolute form (RFC 9112 section 3.2.2), or of `:authority`; not the field `Host`, which is
    /// one of the header fields.
    pub authority: Option<&'a str>,
    /// The path as the client sent it.
    pub path: &'a str,
    /// The query as the client sent it.
    pub query: Option<&'a str>,
    /// The pattern of the route; a layer outside of all routers sees none, and takes the path.
    pub route: Option<&'a str>,
    /// The header fields.
    pub headers: F,
    /// Whether another layer protects the request already, so that its extensions have a [`Context`].
    pub is_protected: bool,
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
    Receive(Box<Arrival>),
}

/// A request whose body is still to come.
#[derive(Debug)]
pub struct Arrival {
    policy: Arc<HttpPolicy>,
    scope: Scope,
    pending: PendingOperation,
    buffer: RequestBuffer,
    /// The length that the body must have, if that is known.
    expected_bytes: Option<u64>,
}

/// A request that has arrived wholly.
#[non_exhaustive]
pub struct Arrived {
    /// What it asks for, to be given to [`Protection::execute`].
    pub operation: Operation,
    /// The body, in one or more chunks, none of them empty.
    pub chunks: Vec<Bytes>,
    /// Its share of the budget; drop it when the handler has had the body.
    pub reservation: Reservation,
}

/// Why no more of a request body comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "adapters must say which it is")]
pub enum BodyError {
    /// It broke off.
    Incomplete,
    /// It is over a limit of the framework's own.
    TooLarge,
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
        let RequestHead { method, authority, path, query, headers, .. } = head;
        let protected = match self.policy.inspect(method, *authority, path, *query, headers) {
            Inspection::Pass => return Decision::Pass,
            Inspection::Refuse(problem) => Err(problem),
            Inspection::Protect(protected) => Ok(protected),
        };
        match self.begin(request, head, protected) {
            Ok(arrival) => Decision::Receive(Box::new(arrival)),
            Err(problem) => Decision::Refuse(self.policy.problem(&problem)),
        }
    }

    fn begin<H>(
        &self,
        request: &H,
        head: &RequestHead<'_, impl HeaderFields>,
        protected: Result<ProtectedRequest, Problem>,
    ) -> Result<Arrival, Problem>
    where
        S: ScopeSource<H>,
    {
        if head.is_protected {
            let detail = "The route has two idempotency layers; give it one.";
            return Err(Problem::new(ProblemKind::Misconfigured).detail(detail));
        }
        let operation = format!("{} {}", head.method, head.route.unwrap_or(head.path));
        let scope = self.scope.scope_of(request, operation);
        let scope = scope.ok_or_else(|| Problem::new(ProblemKind::PrincipalMissing))?;
        let (pending, buffer) = protected?.buffer(&self.policy, scope.principal());
        let declared = declared_bytes(&head.headers);
        buffer.expect(declared.unwrap_or(0))?;
        // What is encoded has another length, once an outer layer has decoded it.
        let expected_bytes = declared.filter(|_| head.headers.values("content-encoding").next().is_none());
        Ok(Arrival { policy: Arc::clone(&self.policy), scope, pending, buffer, expected_bytes })
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

impl Arrival {
    /// Collects the body. No lease is held while it arrives, and it may take as long as the policy says.
    ///
    /// # Errors
    /// The reply to a body that is too large, too slow, or breaks off; and to one that is shorter than its head declares, of
    /// which somebody else has consumed a part before: bodies that differ only there would be the same. Nothing ran.
    pub async fn receive(
        mut self: Box<Self>,
        body: impl Stream<Item = Result<Bytes, BodyError>>,
    ) -> Result<Arrived, Reply> {
        let mut body = pin!(body);
        let arriving = async {
            while let Some(chunk) = body.next().await {
                self.buffer.push(chunk.map_err(Problem::from)?)?;
            }
            let is_whole = self.expected_bytes.is_none_or(|expected| self.buffer.length() >= expected);
            if is_whole { Ok(()) } else { Err(consumed()) }
        };
        let arrived = tokio::time::timeout(self.policy.body_timeout(), arriving).await;
        let arrived = arrived.unwrap_or_else(|_| Err(Problem::new(ProblemKind::BodyTooSlow)));
        arrived.map_err(|problem| self.policy.problem(&problem))?;
        let BufferedRequest { fingerprint, chunks, reservation } = self.buffer.finish();
        Ok(Arrived { operation: self.pending.complete(self.scope, fingerprint), chunks, reservation })
    }
}

/// A body that breaks off is an error, so one that ends in good order and is too short was changed on its way. One that is
/// longer was put there by somebody who wanted it so.
fn consumed() -> Problem {
    Problem::new(ProblemKind::Misconfigured).detail(
        "The request body was consumed before it came to the idempotency layer, or a part of it. What reads it has to put \
         all of it back for the layers inside, or to stand inside of this one; nothing ran.",
    )
}

/// Shows none of the body.
impl fmt::Debug for Arrived {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Arrived").field("operation", &self.operation).finish_non_exhaustive()
    }
}

impl From<BodyError> for Problem {
    fn from(error: BodyError) -> Self {
        Self::new(match error {
            BodyError::Incomplete => ProblemKind::BodyIncomplete,
            BodyError::TooLarge => ProblemKind::BodyTooLarge,
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
