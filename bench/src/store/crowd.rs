//! How many clients and records the contests have.

use crate::pace::Pace;

/// Clients at once, unless a contest sets another number.
pub(super) const CLIENTS: usize = 64;

/// How many clients, in words.
pub(super) fn crowd(clients: usize) -> String {
    if clients == 1 { "1 client".to_owned() } else { format!("{clients} clients") }
}

/// Settled records for replays.
pub(crate) fn replays(pace: Pace) -> u64 {
    if pace.quick { 10_000 } else { 100_000 }
}
