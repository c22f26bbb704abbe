//! The tower layer: a contract, a scope, a policy.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use http::request::Parts;
use idem_core::engine::{Idempotency, Settings};
use idem_core::{DurableStore, IdempotencyStore, TransactionalStore};
use idem_http::{ByPrincipal, HttpPolicy, Protection, ScopeMissing, ScopeSource, SingleTenant};
use tower_layer::Layer;

use crate::framework::{Framework, Plain};
use crate::service::IdempotencyService;

/// Protects the requests of a service without a framework; see [`FrameworkLayer`].
pub type IdempotencyLayer<S = ScopeMissing> = FrameworkLayer<S, Plain>;

/// Protects the requests of a router or of one route, by a framework `F`.
///
/// The contract and the scope have no default, and a layer without a scope does not compile. Put it *inside* compression,
/// authentication, rate limiting, CORS and tracing. In a router of axum, add it before them: layers that are added later are
/// outside. Give every route at most one.
pub struct FrameworkLayer<S, F> {
    protection: Protection<S>,
    framework: PhantomData<fn() -> F>,
}

impl<S, F> FrameworkLayer<S, F> {
    fn of(protection: Protection<S>) -> Self {
        Self { protection, framework: PhantomData }
    }
}

impl<S: Clone, F> Clone for FrameworkLayer<S, F> {
    fn clone(&self) -> Self {
        Self::of(self.protection.clone())
    }
}

impl<S, F> fmt::Debug for FrameworkLayer<S, F> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_tuple("IdempotencyLayer").field(&self.protection).finish()
    }
}

impl<F: Framework> FrameworkLayer<ScopeMissing, F> {
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
    #[must_use]
    pub fn new(engine: Idempotency) -> Self {
        Self::of(Protection::new(engine))
    }

    /// Keys belong to the principal that `principal` names from the head of the request; without a principal, or
    /// with an empty one, the answer is 401. Method and route are added to the scope.
    ///
    /// Take it from something authenticated, such as an extension that an outer layer has set.
    #[must_use]
    pub fn scope<W, P>(self, principal: W) -> FrameworkLayer<ByPrincipal<W>, F>
    where
        W: Fn(&Parts) -> Option<P> + Clone + Send + Sync + 'static,
        P: Into<String>,
    {
        FrameworkLayer::of(self.protection.scope(principal))
    }

    /// Declares that there is only one tenant: all callers share one space of keys for each route.
    #[must_use]
    pub fn single_tenant(self) -> FrameworkLayer<SingleTenant, F> {
        FrameworkLayer::of(self.protection.single_tenant())
    }
}

impl<S, F> FrameworkLayer<S, F> {
    /// The HTTP policy. Default [`HttpPolicy::new`].
    #[must_use]
    pub fn policy(self, policy: HttpPolicy) -> Self {
        Self::of(self.protection.policy(policy))
    }

    /// Adds to the description of an operation what clients of this layer must know: the key header, the header of replays,
    /// and answers such as 400, 409 and 422. See `HttpPolicy::describe`.
    #[cfg(feature = "openapi")]
    pub fn describe(&self, operation: &mut utoipa::openapi::path::Operation) {
        self.protection.shared_policy().describe(operation);
    }

    /// The engine, to be [shut down](Idempotency::shutdown) after the server. Handlers run in separate tasks, and may still
    /// run after the last connection is closed.
    #[must_use]
    pub fn engine(&self) -> &Idempotency {
        self.protection.engine()
    }
}

impl<S: ScopeSource<Parts>, F: Framework, I> Layer<I> for FrameworkLayer<S, F> {
    type Service = IdempotencyService<I, S, F>;

    fn layer(&self, inner: I) -> Self::Service {
        IdempotencyService::new(inner, self.protection.clone())
    }
}
