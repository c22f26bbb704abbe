//! Every queue, each with the store in the same database.

#![expect(clippy::unwrap_used, reason = "a test panics where it fails")]

mod api;
mod deadlines;
mod losing;
mod queues;
mod support;
mod workers;
mod working;
