//! Tests that stop and kill real servers.
#![expect(clippy::unwrap_used, reason = "a test says what it expects by failing")]

mod client;
mod parents;
mod pgbouncer;
mod postgres;
mod postgres_pair;
mod redis;
mod redis_cluster;
mod redis_sentinel;
