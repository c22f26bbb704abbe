//! The outbox on each database, and its relay to a real broker.

#![expect(clippy::unwrap_used, reason = "a test panics where it fails")]

mod publishing;
mod relaying;
mod support;
