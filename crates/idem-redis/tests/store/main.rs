//! What the conformance suite does not ask: servers that stop, hang or lose answers, what is in the keys, what a server
//! has to be.
#![allow(
    unreachable_pub,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::await_holding_lock,
    reason = "a test says what it expects by failing"
)]

#[path = "../support/mod.rs"]
mod support;

mod connecting;
mod data;
mod expiry;
mod fast;
mod golden;
mod hostile;
mod lost_answers;
mod memory;
mod notices;
mod opening;
mod outages;
#[cfg(feature = "deadpool")]
mod pool;
mod proxy;
mod refusals;
mod replicas;
mod scripts;
mod sweep;
mod world;
