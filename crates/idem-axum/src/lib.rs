#![doc = include_str!("../README.md")]

mod convert;
mod extract;
mod layer;
mod scope;
mod service;

pub use extract::{IdempotencyContext, IdempotentTransaction, NotProtected};
pub use layer::IdempotencyLayer;
pub use scope::{ByPrincipal, ScopeMissing, ScopeSource, SingleTenant};
pub use service::IdempotencyService;

pub use idem_core::engine::{Idempotency, Settings};
pub use idem_http::{HttpPolicy, ProblemKind, ResponseDirectives};
