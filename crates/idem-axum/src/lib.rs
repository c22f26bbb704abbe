#![doc = include_str!("../README.md")]

mod extract;
mod framework;

pub use extract::{IdempotencyContext, IdempotentTransaction, Rejection};
pub use framework::Axum;

use idem_tower::FrameworkLayer;

/// Protects the requests of a router or of one route; see [`FrameworkLayer`].
pub type IdempotencyLayer<S = ScopeMissing> = FrameworkLayer<S, Axum>;

/// The service that [`IdempotencyLayer`] wraps around another one.
pub type IdempotencyService<I, S> = idem_tower::IdempotencyService<I, S, Axum>;

pub use idem_core::engine::{Idempotency, Purger, Settings};
pub use idem_http::{
    AnsweredWith, ByPrincipal, HttpPolicy, Meaning, NotProtected, ProblemKind, ResponseDirectives, ScopeMissing,
    ScopeSource, SingleTenant,
};
