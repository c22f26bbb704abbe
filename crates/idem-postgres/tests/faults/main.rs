//! The store while its server, or the way to it, fails: what is acknowledged is there, what is not acknowledged is an
//! error in time, and nothing has to be opened again.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::expect_used,
    clippy::unwrap_used,
    reason = "tests say what they expect by failing, and share more than each needs"
)]

mod crowded;
mod lost_answers;
mod outages;
mod proxy;
mod refusals;
mod replicas;
mod sessions;
mod standby;
#[path = "../support/mod.rs"]
mod support;
mod terminated;
mod world;
