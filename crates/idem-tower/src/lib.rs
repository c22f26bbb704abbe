#![doc = include_str!("../README.md")]

mod convert;
mod framework;
mod layer;
mod service;

pub use framework::{BoxError, Error, Framework, Plain, Route};
pub use layer::{FrameworkLayer, IdempotencyLayer};
pub use service::IdempotencyService;

pub use idem_core::engine::{Context, Idempotency, Purger, Settings};
pub use idem_http::{
    AnsweredWith, ByPrincipal, HttpPolicy, Meaning, NotProtected, ProblemKind, ResponseDirectives, ScopeMissing,
    ScopeSource, SingleTenant, context_of, optional_transaction_of, transaction_of,
};
