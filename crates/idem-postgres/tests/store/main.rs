//! The Postgres store on real servers. One executable, so that its tests wait side by side.
#![allow(unreachable_pub, clippy::expect_used, clippy::unwrap_used, reason = "tests say what they expect by failing")]

mod batch_workers;
mod coalescing;
mod conformance;
mod faults;
mod from_pool;
mod guard;
mod hostile;
mod join;
mod partitions;
mod plans;
mod purge;
mod races;
mod resolving;
mod roles;
mod savepoints;
mod schema;
mod settle_run;
mod steps;
mod support;
mod sweep;
mod transactions;
mod world;
