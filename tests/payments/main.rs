//! Tests of the whole system: the payments example with real sockets and files, killed by real signals.
#![expect(clippy::unwrap_used, reason = "a test says what it expects by failing")]

mod away;
mod bodies;
mod client;
mod crashes;
mod decisions;
mod disconnects;
mod home;
mod hybrid;
mod metrics;
mod operator;
mod ops;
mod postgres;
mod readme;
mod redis;
mod slow_clients;
mod support;
