//! Duplicates that wait in this process for the run of their key. One of them asks the store for all.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{OwnedMutexGuard, watch};
use tokio::time::{Instant, sleep_until};

use crate::fingerprint::Fingerprint;
use crate::machine::AcquireOutcome;
use crate::record::OwnerToken;
use crate::record_id::RecordId;
use crate::store::SettlementListener;

/// The first and the longest pause between two questions about a record that another process runs.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// The duplicates that wait, by record; bounded per record and in all.
pub(super) struct Waiters {
    most_per_record: usize,
    most: usize,
    waiting: Mutex<ByRecord>,
}

#[derive(Default)]
struct ByRecord {
    count: usize,
    records: HashMap<RecordId, Waiting>,
}

struct Waiting {
    count: usize,
    settled: watch::Sender<()>,
    /// Requests with different fingerprints get different answers. Two that wait at the same time are rare.
    groups: Vec<Arc<Group>>,
}

/// The waiters of one record that sent the same request.
struct Group {
    fingerprint: Fingerprint,
    /// Held by the waiter that asks the store.
    turn: Arc<tokio::sync::Mutex<Pace>>,
    told: watch::Sender<Told>,
}

/// What the waiter that asked tells the others.
#[derive(Debug, Clone)]
pub(super) enum Told {
    /// The answer, which is not [`AcquireOutcome::InProgress`].
    Answer(AcquireOutcome),
    /// The store could not answer. The operation may still be in progress.
    Nothing,
}

/// When the store is asked next. It is handed on with the turn, so that nothing is asked twice and no settlement is overlooked.
pub(super) struct Pace {
    settled: watch::Receiver<()>,
    next: Instant,
    pause: Duration,
}

impl Pace {
    fn new(settled: watch::Receiver<()>) -> Self {
        Self { settled, next: Instant::now(), pause: FIRST_PAUSE }
    }

    /// Waits until the next question is due, or a settlement is announced. Cancel-safe.
    pub(super) async fn due(&mut self) {
        let next = self.next;
        tokio::select! {
            biased;
            Ok(()) = self.settled.changed() => self.next = Instant::now(),
            () = sleep_until(next) => {}
        }
    }

    /// Makes the next question due at once, and starts over with the first pause.
    fn restart(&mut self) {
        (self.next, self.pause) = (Instant::now(), FIRST_PAUSE);
    }

    /// Schedules the next question: half to all of a pause from now. The random token is the jitter that keeps
    /// processes out of step.
    pub(super) fn asked(&mut self, owner: OwnerToken) {
        let random = u32::from(owner.as_bytes()[0]) + 1;
        self.next = Instant::now() + self.pause / 2 + self.pause * random / 512;
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
    }
}

impl Waiters {
    pub(super) fn new(most_per_record: NonZeroUsize, most: NonZeroUsize) -> Self {
        Self { most_per_record: most_per_record.get(), most: most.get(), waiting: Mutex::default() }
    }

    fn waiting(&self) -> MutexGuard<'_, ByRecord> {
        // Nothing panics while it is held.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Joins the waiters of a record; `None` when they are too many, of this record or in all.
    pub(super) fn enter(&self, id: RecordId, fingerprint: Fingerprint) -> Option<Waiter<'_>> {
        let mut waiting = self.waiting();
        if waiting.count == self.most {
            return None;
        }
        let entry = waiting.records.entry(id).or_insert_with(|| Waiting {
            count: 0,
            settled: watch::Sender::new(()),
            groups: Vec::new(),
        });
        if entry.count == self.most_per_record {
            return None;
        }
        entry.count += 1;
        let group = match entry.groups.iter().find(|group| group.fingerprint == fingerprint) {
            Some(group) => Arc::clone(group),
            None => {
                let turn = Arc::new(tokio::sync::Mutex::new(Pace::new(entry.settled.subscribe())));
                let group = Arc::new(Group { fingerprint, turn, told: watch::Sender::new(Told::Nothing) });
                entry.groups.push(Arc::clone(&group));
                group
            }
        };
        // Earlier answers are not for this waiter.
        let told = group.told.subscribe();
        waiting.count += 1;
        Some(Waiter { waiters: self, id, group, told })
    }

    /// How many wait, over all records.
    pub(super) fn count(&self) -> usize {
        self.waiting().count
    }

    /// Makes the waiters of `id` ask the store at once.
    pub(super) fn wake(&self, id: &RecordId) {
        if let Some(waiting) = self.waiting().records.get(id) {
            waiting.settled.send_replace(());
        }
    }
}

/// Wakes waiters on settlements that the store announces, such as those of other processes.
impl SettlementListener for Waiters {
    fn settled(&self, id: &RecordId) {
        self.wake(id);
    }
}

/// A place among the waiters, held until dropped.
pub(super) struct Waiter<'a> {
    waiters: &'a Waiters,
    id: RecordId,
    group: Arc<Group>,
    told: watch::Receiver<Told>,
}

impl Waiter<'_> {
    /// Waits for what the waiter that asks tells the others.
    pub(super) async fn told(&mut self) -> Told {
        match self.told.changed().await {
            Ok(()) => self.told.borrow_and_update().clone(),
            // Does not happen: the group has the sender, and this has the group.
            Err(_) => Told::Nothing,
        }
    }

    /// The turn to ask, once no other waiter has it.
    pub(super) fn turn(&self) -> impl Future<Output = OwnedMutexGuard<Pace>> + Send + use<> {
        Arc::clone(&self.group.turn).lock_owned()
    }

    /// Gives the answer to all waiters of the group. A later waiter asks again, at once.
    pub(super) fn tell(&self, pace: &mut Pace, told: Told) {
        pace.restart();
        self.group.told.send_replace(told);
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        let mut waiting = self.waiters.waiting();
        waiting.count -= 1;
        if let Entry::Occupied(mut entry) = waiting.records.entry(self.id) {
            entry.get_mut().count -= 1;
            // One reference is this waiter's, one is the list's.
            entry.get_mut().groups.retain(|group| !Arc::ptr_eq(group, &self.group) || Arc::strong_count(group) > 2);
            if entry.get().count == 0 {
                entry.remove();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;
    use crate::fingerprint::Algorithm;

    #[test]
    fn places_are_bounded_per_record_and_in_all_and_given_back() {
        let waiters = Waiters::new(NonZeroUsize::new(2).unwrap(), NonZeroUsize::new(3).unwrap());
        let (one, other) = (RecordId::from_bytes([1; 32]), RecordId::from_bytes([2; 32]));
        let body = Fingerprint::of_bytes("op", b"body");
        let first = waiters.enter(one, body).unwrap();
        let _second = waiters.enter(one, body).unwrap();
        assert!(waiters.enter(one, body).is_none());
        assert_eq!(waiters.count(), 2);
        let third = waiters.enter(other, body).unwrap();
        assert!(waiters.enter(other, body).is_none(), "three wait in all");
        drop((first, third));
        assert!(waiters.enter(one, body).is_some());
        assert_eq!(waiters.count(), 1);
        assert_eq!(waiters.waiting().records.len(), 1, "a record that nobody waits for takes no room");
    }

    #[tokio::test]
    async fn the_turn_goes_on_with_its_pace_and_answers_only_those_who_sent_the_same() {
        let waiters = Waiters::new(NonZeroUsize::MAX, NonZeroUsize::MAX);
        let id = RecordId::from_bytes([1; 32]);
        let [body, other] = [b"body", b"else"].map(|body| Fingerprint::of_bytes("op", body));
        let (first, mut second) = (waiters.enter(id, body).unwrap(), waiters.enter(id, body).unwrap());
        let mut stranger = waiters.enter(id, other).unwrap();
        let mut turn = first.turn().await;
        turn.due().await;
        turn.asked(OwnerToken::random());
        assert!(second.turn().now_or_never().is_none(), "it is another one's turn");
        assert!(stranger.turn().now_or_never().is_some(), "another request has a turn of its own");
        // Settled while no waiter listens.
        waiters.wake(&id);
        drop(turn);
        let mut turn = second.turn().await;
        assert!(turn.due().now_or_never().is_some(), "the settlement was overlooked");
        first.tell(&mut turn, Told::Answer(AcquireOutcome::Mismatch { stored_algorithm: Algorithm::V1 }));
        assert!(matches!(second.told().now_or_never(), Some(Told::Answer(_))));
        assert!(second.told().now_or_never().is_none(), "it was told once");
        assert!(stranger.told().now_or_never().is_none());
        let mut late = waiters.enter(id, body).unwrap();
        assert!(late.told().now_or_never().is_none(), "what was told before is not for those who come later");
        drop((first, second, late));
        assert_eq!(waiters.waiting().records[&id].groups.len(), 1, "a group without waiters takes no room");
    }
}
