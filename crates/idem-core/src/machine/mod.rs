//! The state machine: every decision about a record, and nothing else.
//!
//! [`transition`] is total and pure: from the record, a command and the store's time it computes the next record and
//! the outcome. No clock, no I/O, no panic. Every store calls it. Postgres also decides commands in SQL, as a
//! translation of these rules. The conformance suite of `idem-testkit` proves that both agree.
//!
//! A record whose `expires_at` has passed counts as absent for every command.

mod acquire;
mod command;
mod erase;
mod expiry;
mod owner;
mod resolve;

pub use acquire::acquire;
pub use command::{
    Acquire, AcquireOutcome, Command, Erase, EraseOutcome, Lease, OnMismatch, Origin, Outcome, OwnerAction,
    OwnerOutcome, Refusal, Replay, ReplayKind, Resolution, Resolve, ResolveOutcome, Settlement, Term,
};
pub use erase::erase;
pub use expiry::{SHORTEST_RETENTION, current};
#[cfg(feature = "engine")]
pub(crate) use owner::is_settled_so;
pub use owner::{apply, follows};
pub use resolve::resolve;

use crate::record::Record;
use crate::timestamp::Timestamp;

/// Decides one command on one record: returns the next record (`None`: there is none) and the outcome.
///
/// `now` is the time of the store that holds the record. When the returned record equals the one passed in, there is
/// nothing to write.
#[must_use]
pub fn transition(record: Option<&Record>, command: Command<'_>, now: Timestamp) -> (Option<Record>, Outcome) {
    match command {
        Command::Acquire(request) => {
            let (next, outcome) = acquire(record, request, now);
            (next, Outcome::Acquire(outcome))
        }
        Command::Owner(owner, action) => {
            let (next, outcome) = apply(record, owner, action, now);
            (next, Outcome::Owner(outcome))
        }
        Command::Resolve(request) => {
            let (next, outcome) = resolve(record, request, now);
            (next, Outcome::Resolve(outcome))
        }
        Command::Erase(request) => {
            let (next, outcome) = erase(record, request, now);
            (next, Outcome::Erase(outcome))
        }
    }
}

#[cfg(test)]
mod laws;
#[cfg(test)]
mod tests;
