//! The middleware: a contract, a scope, a policy.

use std::future::{Ready, ready};
use std::sync::Arc;

use actix_web::body::MessageBody;
use actix_web::dev::{Service, ServiceRequest, ServiceResponse, Transform};
use actix_web::{Error, HttpRequest};
use idem_core::engine::{Idempotency, Settings};
use idem_core::{DurableStore, IdempotencyStore, TransactionalStore};
use idem_http::{ByPrincipal, HttpPolicy, Protection, ScopeMissing, ScopeSource, SingleTenant};

use crate::service::IdempotencyService;

/// Protects the requests of an app, a scope or one resource; give it to `wrap`.
///
/// The contract and the scope have no default, and a layer without a scope does not compile. Build it once, outside of the
/// closure that makes the app, and give each app a clone. Put it *inside* compression, authentication, rate limiting, CORS
/// and logging. In actix, wrap it before them: middlewares that are wrapped later are outside. Give every route at most one.
#[derive(Debug, Clone)]
pub struct IdempotencyLayer<S = ScopeMissing>(Protection<S>);

impl IdempotencyLayer {
    /// The key, the handler's writes and the response commit in one transaction; see [`Idempotency::transactional`].
    #[must_use]
    pub fn transactional(store: Arc<dyn TransactionalStore>) -> Self {
        Self::new(Idempotency::transactional(store, Settings::new()))
    }

    /// At most one run; see [`Idempotency::at_most_once`].
    #[must_use]
    pub fn at_most_once(store: Arc<dyn DurableStore>) -> Self {
        Self::new(Idempotency::at_most_once(store, Settings::new()))
    }

    /// At least one run, so the handler must be safe to repeat; see [`Idempotency::at_least_once`].
    #[must_use]
    pub fn at_least_once(store: Arc<dyn IdempotencyStore>) -> Self {
        Self::new(Idempotency::at_least_once(store, Settings::new()))
    }

    /// Builds the layer on an engine with other settings. Layers that share an engine share its shutdown.
    ///
    /// Unless the settings name a [runtime](Settings::runtime), the engine runs on a runtime of this crate, wherever the
    /// layer is built. An actix worker is one thread. A handler that does not yield would block the renewal of its lease
    /// there, and a worker that stops would drop settlements. If the store acquires without waiting, as a store in memory
    /// does, the worker drives the operation; see [`Idempotency::default_runtime`].
    #[must_use]
    pub fn new(engine: Idempotency) -> Self {
        Self(Protection::new(crate::runtime::off_the_workers(engine)))
    }

    /// Keys belong to the principal that `principal` names from the head of the request; without a principal, or
    /// with an empty one, the answer is 401. Method and route are added to the scope.
    ///
    /// Take it from something authenticated, such as an extension that an outer middleware has set.
    #[must_use]
    pub fn scope<F, P>(self, principal: F) -> IdempotencyLayer<ByPrincipal<F>>
    where
        F: Fn(&HttpRequest) -> Option<P> + Clone + Send + Sync + 'static,
        P: Into<String>,
    {
        IdempotencyLayer(self.0.scope(principal))
    }

    /// Declares that there is only one tenant: all callers share one space of keys for each route.
    #[must_use]
    pub fn single_tenant(self) -> IdempotencyLayer<SingleTenant> {
        IdempotencyLayer(self.0.single_tenant())
    }
}

impl<S> IdempotencyLayer<S> {
    /// The HTTP policy. Default [`HttpPolicy::new`].
    #[must_use]
    pub fn policy(self, policy: HttpPolicy) -> Self {
        Self(self.0.policy(policy))
    }

    /// Adds to the description of an operation what clients of this layer must know: the key header, the header of replays,
    /// and answers such as 400, 409 and 422. See `HttpPolicy::describe`.
    #[cfg(feature = "openapi")]
    pub fn describe(&self, operation: &mut utoipa::openapi::path::Operation) {
        self.0.shared_policy().describe(operation);
    }

    /// The engine, to be [shut down](Idempotency::shutdown) *before* the server stops its workers. Handlers run in separate
    /// tasks on the workers, and may still run after the last connection is closed.
    #[must_use]
    pub fn engine(&self) -> &Idempotency {
        self.0.engine()
    }
}

impl<S, I, B> Transform<I, ServiceRequest> for IdempotencyLayer<S>
where
    S: ScopeSource<HttpRequest>,
    I: Service<ServiceRequest, Response = ServiceResponse<B>, Error = Error> + 'static,
    B: MessageBody + 'static,
{
    type Response = ServiceResponse;
    type Error = Error;
    type Transform = IdempotencyService<I, S>;
    type InitError = ();
    type Future = Ready<Result<Self::Transform, ()>>;

    fn new_transform(&self, inner: I) -> Self::Future {
        ready(Ok(IdempotencyService::new(inner, self.0.clone())))
    }
}
