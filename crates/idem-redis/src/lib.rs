#![doc = include_str!("../README.md")]

mod address;
mod config;
mod connection;
mod durability;
mod error;
mod fast;
mod health;
mod info;
mod keys;
mod link;
mod lossy;
mod notices;
mod reply;
mod script;
mod servers;
mod slot;
mod store;

pub use config::RedisConfig;
pub use durability::{DurabilityReport, NodeDurability};
pub use fast::RedisFastStore;
pub use health::RedisHealth;
pub use idem_core::TimeOffset;
pub use lossy::LossyRedisStore;
pub use store::RedisStore;
