//! The commands, one module each.

pub(crate) mod check;
#[cfg(feature = "console")]
pub(crate) mod console;
pub(crate) mod list;
pub(crate) mod purge;
pub(crate) mod repairs;
pub(crate) mod resolve;
pub(crate) mod show;
pub(crate) mod stats;
pub(crate) mod sweep;
