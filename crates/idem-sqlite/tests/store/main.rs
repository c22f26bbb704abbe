//! The SQLite store on real files. One executable, so that its tests wait concurrently.
#![allow(unreachable_pub, clippy::expect_used, clippy::unwrap_used, reason = "tests say what they expect by failing")]

mod batches;
mod conformance;
mod database;
mod engine;
mod erasing;
mod from_pool;
mod outages;
mod shadows;
mod steps;
mod support;
mod sweep;
mod tasks;
mod transactions;
