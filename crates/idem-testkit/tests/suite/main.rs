//! The suites themselves: they pass on a store that is right, and notice one that is not.
#![allow(unreachable_pub, clippy::expect_used, clippy::unwrap_used, reason = "tests say what they expect by failing")]

mod broken_stores;
mod case_list;
mod faults;
mod memory;
mod memory_database;
mod precision;
mod sweep;
