//! The layer in a router: what a client gets, how often the handler runs, and what a repeat gets.
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a test says what it expects by failing")]

mod admission;
mod contract;
mod directives;
mod ends;
mod extractors;
#[cfg(feature = "openapi")]
mod openapi;
mod order;
mod panics;
mod request_bodies;
mod response_bodies;
mod routing;
mod stacking;
mod stores;
mod support;
mod transactions;
mod trials;
