//! What goes over the wire, and what callers get.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by a panic")]

mod budget;
#[cfg(feature = "journal")]
mod journal;
#[cfg(feature = "metrics")]
mod metrics;
mod sending;
mod server;
