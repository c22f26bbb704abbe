//! The runs that were asked for in this process.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use idem_core::{Acquire, OwnerToken, RecordId, Timestamp};

/// The limit of runs. At the limit, old runs whose callers never came back are dropped.
const MOST: usize = 100_000;

/// Longer than an owner holds a lease.
const LONGEST: Duration = Duration::from_secs(3_600);

/// The time at which each owner first asked for its run, until that run has ended.
///
/// An owner may repeat an acquire whose answer was lost. That does not restart its lease, so its lock has to end with the
/// lease that began before.
#[derive(Debug, Default)]
pub(crate) struct ActiveRuns(Mutex<HashMap<(RecordId, OwnerToken), Run>>);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Run {
    /// When it was asked for, or its lease was renewed, by the fast store's clock; `None` if that did not answer.
    pub(crate) at: Option<Timestamp>,
    pub(crate) lease: Duration,
    /// Whether the owner has asked for the first time.
    pub(crate) is_new: bool,
    /// The attempt whose lock was put.
    pub(crate) locked: Option<u32>,
    /// Whether a put of the lock is in flight or had no answer: the lock may arrive after the end of its run.
    pub(crate) is_on_its_way: bool,
}

impl ActiveRuns {
    fn known(&self) -> MutexGuard<'_, HashMap<(RecordId, OwnerToken), Run>> {
        // Every change is one step on one entry, so a panic leaves the map whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Remembers that an owner asks for its run, and returns the run as of its first request.
    pub(crate) fn ask(&self, request: &Acquire, at: Option<Timestamp>) -> Run {
        let mut known = self.known();
        if known.len() >= MOST {
            let is_recent = |then: Timestamp| at.is_some_and(|now| now.saturating_duration_since(then) < LONGEST);
            known.retain(|_, run| run.at.is_some_and(is_recent));
            // With so many recent runs, every further call would scan all of them.
            if known.len() > MOST / 2 {
                known.clear();
            }
        }
        let now = Run { at, lease: request.term.lease, is_new: true, locked: None, is_on_its_way: false };
        match known.entry((request.id, request.owner)) {
            Entry::Occupied(first) => Run { is_new: false, ..*first.get() },
            Entry::Vacant(place) => *place.insert(now),
        }
    }

    pub(crate) fn knows(&self, id: &RecordId, owner: &OwnerToken) -> bool {
        self.known().contains_key(&(*id, *owner))
    }

    /// Notes that the lock of this attempt is about to be put.
    pub(crate) fn lock(&self, id: &RecordId, owner: &OwnerToken, attempt: u32) {
        if let Some(run) = self.known().get_mut(&(*id, *owner)) {
            run.locked = Some(attempt);
            run.is_on_its_way = true;
        }
    }

    /// Notes that the fast store has answered the put of a lock.
    pub(crate) fn has_come(&self, id: &RecordId, owner: &OwnerToken) {
        if let Some(run) = self.known().get_mut(&(*id, *owner)) {
            run.is_on_its_way = false;
        }
    }

    /// Notes that the lease lasts for `lease` from `at` on; if `puts`, that an extended lock is about to be put.
    ///
    /// `false` when the run has ended meanwhile, or is not known.
    pub(crate) fn renew(
        &self,
        id: &RecordId,
        owner: &OwnerToken,
        at: Option<Timestamp>,
        lease: Duration,
        puts: bool,
    ) -> bool {
        let mut known = self.known();
        let Some(run) = known.get_mut(&(*id, *owner)) else { return false };
        *run = Run { at, lease, is_on_its_way: run.is_on_its_way || puts, ..*run };
        true
    }

    /// Forgets a run that has ended or never began.
    pub(crate) fn forget(&self, id: &RecordId, owner: &OwnerToken) -> Option<Run> {
        self.known().remove(&(*id, *owner))
    }
}

#[cfg(test)]
mod tests {
    use idem_testkit::fixture::{repeat_of, request};

    use super::*;

    #[test]
    fn the_first_time_counts_until_the_run_has_ended() {
        let (runs, request) = (ActiveRuns::default(), request());
        let at = |micros| Some(Timestamp::from_unix_micros(micros));
        assert_eq!(runs.ask(&request, at(1)).at, at(1));
        assert_eq!(runs.ask(&request, at(2)).at, at(1));
        assert_eq!(runs.ask(&repeat_of(&request), at(2)).at, at(2));
        assert!(runs.renew(&request.id, &request.owner, at(3), LONGEST, false));
        assert_eq!(runs.ask(&request, at(4)).at, at(3));
        runs.lock(&request.id, &request.owner, 7);
        assert_eq!(runs.forget(&request.id, &request.owner).unwrap().locked, Some(7));
        assert!(!runs.renew(&request.id, &request.owner, at(5), LONGEST, true));
        assert_eq!(runs.ask(&request, at(6)).at, at(6));
    }

    #[test]
    fn those_who_never_came_back_are_forgotten_before_the_others() {
        let runs = ActiveRuns::default();
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
