#![doc = include_str!("../README.md")]

mod address;
mod config;
mod connection;
mod durability;
mod error;
mod fast;
mod health;
mod info;
mod inspect;
mod keys;
mod lossy;
mod packed;
#[cfg(feature = "deadpool")]
mod pool;
mod repairs;
mod reply;
mod script;
mod seen;
mod servers;
mod shared_connection;
mod store;
mod subscription;
mod transport;
mod verb;

pub use config::RedisConfig;
pub use durability::{DurabilityReport, NodeDurability};
pub use fast::RedisFastStore;
pub use health::RedisHealth;
pub use idem_core::TimeOffset;
pub use lossy::LossyRedisStore;
pub use store::RedisStore;
