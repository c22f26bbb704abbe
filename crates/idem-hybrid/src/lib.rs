#![doc = include_str!("../README.md")]

mod breaker;
mod config;
mod entry;
mod front;
mod metrics;
mod runs;
mod shared;
mod store;
mod transaction;

pub use config::HybridConfig;
pub use metrics::HybridMetrics;
pub use store::{HybridHealth, HybridStore};
