//! The Redis store on real servers. One executable, so that its tests wait side by side.
#![allow(
    unreachable_pub,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::await_holding_lock,
    reason = "a test says what it expects by failing"
)]

mod conformance;
mod connecting;
mod data;
mod expiry;
mod fast;
mod golden;
mod hostile;
mod inspecting;
mod lost_answers;
mod memory;
mod notices;
mod opening;
mod outages;
#[cfg(feature = "deadpool")]
mod pool;
mod refusals;
mod replicas;
mod scripts;
mod support;
mod sweep;
mod world;
