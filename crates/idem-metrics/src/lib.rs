#![doc = include_str!("../README.md")]

mod gauges;
mod observer;
mod register;

pub use self::gauges::EngineGauges;
#[cfg(feature = "hybrid")]
pub use self::gauges::HybridGauges;
pub use self::observer::MetricsObserver;
