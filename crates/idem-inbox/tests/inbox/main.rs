//! The inbox on each database, and its consumers on real brokers.

#![expect(clippy::unwrap_used, reason = "a test panics where it fails")]

mod handling;
mod kafka;
mod losing;
mod nats;
mod parking;
mod rabbitmq;
mod redis;
mod support;
