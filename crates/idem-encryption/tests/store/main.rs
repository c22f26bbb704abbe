//! Encryption over stores in memory, on a file and on real servers. One executable, so that its tests wait side by side.
#![allow(unreachable_pub, clippy::expect_used, clippy::unwrap_used, reason = "tests say what they expect by failing")]

mod binding;
mod by_hand;
mod conformance;
mod dumps;
mod options;
mod rotation;
mod support;
