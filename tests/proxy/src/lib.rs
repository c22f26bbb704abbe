//! TCP proxies that harm the traffic of tests: a [`Proxy`] carries connections, and a [`Harm`] decides what goes wrong.
//!
//! toxiproxy does much of what [`Network`] does, but as a separate process. It does not count bytes over connections, and it does
//! not read statements.
#![allow(
    clippy::missing_panics_doc,
    clippy::unwrap_used,
    clippy::exhaustive_enums,
    reason = "a test fails by a panic, and these are lists of faults"
)]

mod cuts;
mod network;
mod partition;
pub mod postgres;
mod proxy;
pub mod redis;
mod sluggish;

pub use cuts::{Cut, Cuts, Direction, Ending};
pub use network::{Network, Weather};
pub use partition::Partition;
pub use proxy::{Ended, Harm, Proxy};
pub use sluggish::Sluggish;
