//! What goes over the wire, and what callers get.

mod budget;
#[cfg(feature = "journal")]
mod journal;
#[cfg(feature = "metrics")]
mod metrics;
mod sending;
mod server;
