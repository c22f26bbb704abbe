#![doc = include_str!("../README.md")]

mod active_runs;
mod breaker;
mod cache;
mod config;
mod entry;
mod metrics;
mod shared;
mod store;
mod transaction;

pub use config::HybridConfig;
pub use metrics::HybridMetrics;
pub use store::{HybridHealth, HybridStore};
