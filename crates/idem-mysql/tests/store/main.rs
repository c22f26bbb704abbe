//! The MySQL store on a real MariaDB. One executable, so that its tests share one server.
#![allow(unreachable_pub, clippy::expect_used, clippy::unwrap_used, reason = "tests say what they expect by failing")]

mod batches;
mod concurrency;
mod conformance;
mod cuts;
mod database;
mod killed;
mod privileges;
mod settings;
mod support;
mod sweep;
mod transactions;
mod within;
