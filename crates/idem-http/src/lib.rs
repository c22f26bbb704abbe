#![doc = include_str!("../README.md")]

mod access;
mod authority;
mod budget;
mod content;
mod continuation;
mod directives;
mod head;
mod headers;
mod key_header;
mod key_member;
mod meaning;
#[cfg(feature = "openapi")]
mod openapi;
mod policy;
mod prefer;
mod principal_limit;
pub mod problem;
mod problem_style;
mod protection;
mod reply;
mod request;
mod response;
mod retention;
mod scope;
mod syntax;

pub use access::{NotProtected, context_of, optional_transaction_of, transaction_of};
pub use budget::{ByteBudget, Reservation};
pub use continuation::Continuation;
pub use directives::ResponseDirectives;
pub use head::RequestHead;
pub use headers::HeaderFields;
pub use key_header::{KeyHeaderError, parse_key_header};
pub use meaning::{AnsweredWith, Meaning};
pub use policy::HttpPolicy;
pub use problem::{Problem, ProblemKind};
pub use protection::{Decision, Protection};
pub use reply::Reply;
pub use request::{BodyError, IncomingRequest, ReceivedRequest};
pub use response::{BrokenResponse, Captured, ResponseCapture, never_began};
pub use retention::{RETENTION_HEADER, StatedRetention};
pub use scope::{ByPrincipal, ScopeMissing, ScopeSource, SingleTenant};
