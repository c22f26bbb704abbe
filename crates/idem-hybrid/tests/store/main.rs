//! The hybrid store, in memory and on real servers. One executable, so that its tests wait side by side.
#![allow(unreachable_pub, clippy::expect_used, clippy::unwrap_used, reason = "tests say what they expect by failing")]

mod cache;
mod conformance;
mod erasing;
mod hostile;
mod lies;
mod races;
mod support;
mod transactions;
