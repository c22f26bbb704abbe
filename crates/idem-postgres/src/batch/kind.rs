//! The kinds of verbs, in the order in which a statement does them.
//!
//! Those that read a row come last. A row's version is the transaction that wrote it. So nothing in the same transaction may
//! change a row after its version was read.

use crate::batch::verb::Verb;

pub(crate) const RENEW: usize = 0;
pub(crate) const CHECKPOINT: usize = 1;
pub(crate) const SETTLE: usize = 2;
pub(crate) const RELEASE: usize = 3;
pub(crate) const REPLACE: usize = 4;
pub(crate) const REMOVE: usize = 5;
pub(crate) const ACQUIRE: usize = 6;
pub(crate) const LOOK: usize = 7;
pub(crate) const KINDS: usize = 8;

/// The kind of a verb.
pub(crate) fn kind(verb: &Verb) -> usize {
    match verb {
        Verb::Acquire { .. } => ACQUIRE,
        Verb::Lookup { .. } => LOOK,
        Verb::Renew { .. } => RENEW,
        Verb::Checkpoint { .. } => CHECKPOINT,
        Verb::Settle { .. } => SETTLE,
        Verb::Release { .. } => RELEASE,
        Verb::Replace { .. } => REPLACE,
        Verb::Remove { .. } => REMOVE,
    }
}
