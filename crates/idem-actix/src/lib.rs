#![doc = include_str!("../README.md")]

mod convert;
mod extract;
mod failure;
mod handler;
mod layer;
mod runtime;
mod service;

pub use extract::{IdempotencyContext, IdempotentTransaction, Rejection};
pub use layer::IdempotencyLayer;
pub use service::IdempotencyService;

pub use idem_core::engine::{Idempotency, Purger, Settings};
pub use idem_http::{
    AnsweredWith, ByPrincipal, HttpPolicy, Meaning, NotProtected, ProblemKind, ResponseDirectives, ScopeMissing,
    ScopeSource, SingleTenant,
};
