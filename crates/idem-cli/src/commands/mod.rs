//! The commands, one module each.

pub(crate) mod check;
pub(crate) mod list;
pub(crate) mod purge;
pub(crate) mod repairs;
pub(crate) mod resolve;
pub(crate) mod show;
pub(crate) mod stats;
pub(crate) mod sweep;

use std::num::NonZeroU32;

/// How many records a command reads or changes at a time.
pub(crate) const PART: NonZeroU32 = NonZeroU32::new(5_000).expect("not zero");
