//! The commands, one module each.

pub(crate) mod capacity;
pub(crate) mod check;
mod confirm;
#[cfg(feature = "console")]
pub(crate) mod console;
pub(crate) mod erase;
pub(crate) mod generate;
pub(crate) mod identity;
pub(crate) mod list;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub(crate) mod parked;
pub(crate) mod purge;
pub(crate) mod repairs;
pub(crate) mod resolve;
mod scan;
mod sealed;
pub(crate) mod show;
pub(crate) mod stats;
pub(crate) mod sweep;
pub(crate) mod watch;
