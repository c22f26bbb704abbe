#![doc = include_str!("../README.md")]

mod audit;
mod gauges;
mod messages;
mod observer;
mod register;
mod scan;
mod store;

pub use self::audit::AuditCounters;
pub use self::gauges::EngineGauges;
#[cfg(feature = "hybrid")]
pub use self::gauges::HybridGauges;
pub use self::messages::{InboxGauges, OutboxGauges};
pub use self::observer::MetricsObserver;
pub use self::scan::StoreScan;
pub use self::store::StoreGauges;
