//! Tests of the engine on a store with injected faults, on tokio's clock, which stands still unless every task waits.
#![expect(clippy::unwrap_used, reason = "a test says what it expects by failing")]

mod commits;
mod contracts;
mod events;
mod faults;
mod fingerprints;
mod late_acquires;
mod leases;
mod limits;
mod probes;
mod purging;
mod renewals;
mod runtimes;
mod steps;
mod support;
mod typed;
mod waiting;
