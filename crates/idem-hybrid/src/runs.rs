//! When a run was asked for.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use idem_core::{Acquire, OwnerToken, RecordId, Timestamp};

/// How many are remembered before those are forgotten whose callers never came back.
const MOST: usize = 100_000;

/// Longer than anybody holds a lease.
const LONGEST: Duration = Duration::from_secs(3_600);

/// When each owner asked for its run first. An acquire may be repeated, because its answer was lost, and does not begin the
/// lease anew; a lock that is put then has to end with the lease that began before.
#[derive(Debug, Default)]
pub(crate) struct Runs(Mutex<HashMap<(RecordId, OwnerToken), Asked>>);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Asked {
    /// By the fast store's clock; `None` if that did not answer.
    pub(crate) at: Option<Timestamp>,
    pub(crate) lease: Duration,
    /// Whether it was the first time.
    pub(crate) is_new: bool,
}

impl Runs {
    fn known(&self) -> MutexGuard<'_, HashMap<(RecordId, OwnerToken), Asked>> {
        // Every change is one step on one entry, so a panic leaves the map whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Remembers that somebody asks, and says when that was first.
    pub(crate) fn ask(&self, request: &Acquire, at: Option<Timestamp>) -> Asked {
        let mut known = self.known();
        if known.len() >= MOST {
            let is_recent = |then: Timestamp| at.is_some_and(|now| now.saturating_duration_since(then) < LONGEST);
            known.retain(|_, asked| asked.at.is_some_and(is_recent));
            if known.len() >= MOST {
                known.clear();
            }
        }
        let now = Asked { at, lease: request.term.lease, is_new: true };
        match known.entry((request.id, request.owner)) {
            Entry::Occupied(first) => Asked { is_new: false, ..*first.get() },
            Entry::Vacant(place) => *place.insert(now),
        }
    }

    /// The lease lasts for `lease` from this time on.
    pub(crate) fn renew(&self, id: &RecordId, owner: &OwnerToken, at: Option<Timestamp>, lease: Duration) {
        if let Some(asked) = self.known().get_mut(&(*id, *owner)) {
            *asked = Asked { at, lease, is_new: false };
        }
    }

    /// The run has ended, or never was.
    pub(crate) fn forget(&self, id: &RecordId, owner: &OwnerToken) {
        self.known().remove(&(*id, *owner));
    }
}

#[cfg(test)]
mod tests {
    use idem_testkit::fixture::{repeat_of, request};

    use super::*;

    #[test]
    fn the_first_time_counts_until_the_run_has_ended() {
        let (runs, request) = (Runs::default(), request());
        let at = |micros| Some(Timestamp::from_unix_micros(micros));
        assert_eq!(runs.ask(&request, at(1)).at, at(1));
        assert_eq!(runs.ask(&request, at(2)).at, at(1));
        assert_eq!(runs.ask(&repeat_of(&request), at(2)).at, at(2));
        runs.forget(&request.id, &request.owner);
        assert_eq!(runs.ask(&request, at(3)).at, at(3));
    }

    #[test]
    fn those_who_never_came_back_are_forgotten_before_the_others() {
        let runs = Runs::default();
        let at = |seconds: i64| Some(Timestamp::from_unix_micros(seconds * 1_000_000));
        let recent = request();
        runs.ask(&recent, at(9_000));
        for _ in 1..MOST {
            runs.ask(&request(), at(1));
        }
        runs.ask(&request(), at(10_000));
        assert_eq!(runs.known().len(), 2);
        assert_eq!(runs.ask(&recent, at(10_000)).at, at(9_000));
    }
}
