//! The outbox on each database, and its relay to brokers.

#![expect(clippy::unwrap_used, reason = "a test panics where it fails")]

mod brokers;
mod publishing;
mod relaying;
mod support;
