//! How the two stores work together: which one answers, and what the fast store holds.

use std::collections::HashMap;
use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use idem_core::{
    Acquire, AcquireOutcome, DurableStore, Erase, EraseOutcome, FastStore, Lease, LiveRecord, OwnerOutcome, RecordId,
    ReplayKind, Settlement, StoreError, StoreErrorKind, Term, Timestamp, machine,
};
use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout};

use crate::active_runs::{ActiveRuns, Run};
use crate::cache::{Cache, CacheRead, Put};
use crate::config::HybridConfig;
use crate::entry::Entry;
use crate::metrics::{Counter, HybridMetrics};

/// How long a claim lasts if no entry replaces it, for instance because its process has died.
const CLAIM: Duration = Duration::from_millis(500);

/// The timeout for reading a record to copy it. No caller waits for it, but it occupies a background task.
const LOOK: Duration = Duration::from_secs(10);

/// The backoff of a caller that finds a claim: the pause doubles from the first to the last.
const FIRST_PAUSE: Duration = Duration::from_millis(2);
const LAST_PAUSE: Duration = Duration::from_millis(16);

/// The limit of background tasks for the fast store. Beyond it, the next caller that misses a copy has to make it, and a lock
/// stays until it ends.
const BEHIND: usize = 1024;

/// How long a record is not copied again after a copy that failed. An answer that is too large to arrive in time would cost
/// every repeat a transfer, and the fast store's connection with it. It is long beside the pauses of clients that repeat, and
/// short beside the retention of a record.
const COPY_AGAIN: Duration = Duration::from_secs(5);

/// At this number, failed copies are forgotten. It is four times the limit of background tasks, so running ones do not reach it.
const MOST_COPYING: usize = 4 * BEHIND;

/// How long the durable store may take to answer a request that the fast store turns away but may not answer. It is below the
/// engine's default `store_timeout` of 2 s: after that the engine may run an operation without protection, if it fails open.
const TURNED_AWAY_WAIT: Duration = Duration::from_secs(1);

/// The pauses between tries to remove a lock. Together they are the default lease, after which the lock has expired.
const PAUSES: [Duration; 5] = [
    Duration::from_secs(1),
    Duration::from_secs(2),
    Duration::from_secs(4),
    Duration::from_secs(8),
    Duration::from_secs(15),
];

/// Both stores, and what the clones of the hybrid store share.
pub(crate) struct Shared<D: ?Sized> {
    pub(crate) cache: Cache,
    pub(crate) config: HybridConfig,
    durable_fails: AtomicBool,
    durable_replays: Counter,
    durable_in_progress: Counter,
    pub(crate) runs: ActiveRuns,
    behind: Arc<Semaphore>,
    /// Records that are being copied, or when their copy has failed.
    copying: Mutex<HashMap<RecordId, Option<Instant>>>,
    pub(crate) durable: Arc<D>,
}

/// The result of asking the fast store.
pub(crate) enum FastDecision {
    Given(AcquireOutcome),
    /// The durable store has to decide.
    Undecided(Undecided),
}

/// What the fast store has said of a record that the durable store has to decide about.
#[derive(Clone, Copy)]
pub(crate) struct Undecided {
    /// Its time; `None` if it did not answer.
    pub(crate) seen_at: Option<Timestamp>,
    /// Whether it knows a record that turns the request away, although it may not answer itself. So the request must not run,
    /// not even without protection.
    is_turned_away: bool,
}

impl<D: DurableStore + ?Sized> Shared<D> {
    pub(crate) fn new(durable: Arc<D>, fast: Arc<dyn FastStore>, config: HybridConfig) -> Self {
        Self {
            cache: Cache::new(fast, durable.identity(), config.patience),
            config,
            durable_fails: AtomicBool::new(false),
            durable_replays: Counter::default(),
            durable_in_progress: Counter::default(),
            runs: ActiveRuns::default(),
            behind: Arc::new(Semaphore::new(BEHIND)),
            copying: Mutex::default(),
            durable,
        }
    }

    pub(crate) fn metrics(&self) -> HybridMetrics {
        self.cache.metrics(self.durable_replays.total(), self.durable_in_progress.total())
    }

    /// Asks the fast store, and claims a record that it does not know. A caller that finds a claim waits for a moment: the
    /// answer is on its way.
    pub(crate) async fn ask(&self, request: &Acquire) -> FastDecision {
        // An owner that asks again, because an answer was lost, may own the record by now. A lock is then an old one of another
        // run, and a claim is the owner's.
        let asks_again = self.runs.knows(&request.id, &request.owner);
        let give_up_at = Instant::now() + self.config.patience;
        let mut pause = FIRST_PAUSE;
        loop {
            let Some(read) = self.cache.read(&request.id, self.claim()).await else {
                return FastDecision::Undecided(Undecided { seen_at: None, is_turned_away: false });
            };
            if read.is_claimed && !asks_again && Instant::now() + pause < give_up_at {
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(LAST_PAUSE);
                continue;
            }
            return match read.answer(request) {
                Some(outcome) if self.may_answer(&read, asks_again) => {
                    self.cache.answered(&outcome);
                    FastDecision::Given(outcome)
                }
                outcome => FastDecision::Undecided(Undecided {
                    seen_at: Some(read.now),
                    is_turned_away: outcome.is_some() && !(asks_again && read.is_lock()),
                }),
            };
        }
    }

    /// How long a record is claimed; `None` if no entry would replace the claim.
    fn claim(&self) -> Option<Duration> {
        (self.config.locks && self.config.caches).then_some(CLAIM)
    }

    async fn unclaim(&self, id: &RecordId) {
        if self.claim().is_some() {
            self.cache.unclaim(id).await;
        }
    }

    fn may_answer(&self, read: &CacheRead, asks_again: bool) -> bool {
        if read.is_lock() {
            return self.config.locks && !asks_again;
        }
        let may_replay = self.config.replays_while_durable_fails || !self.durable_fails.load(Ordering::Relaxed);
        self.config.caches && may_replay
    }

    /// Asks the durable store, and remembers whether it answers.
    pub(crate) async fn decide<T>(&self, verb: impl Future<Output = Result<T, StoreError>>) -> Result<T, StoreError> {
        let mut asking = Asking { fails: &self.durable_fails, is_answered: false };
        let answer = verb.await;
        asking.is_answered = true;
        self.heard(answer)
    }

    /// Remembers whether the durable store answered.
    fn heard<T>(&self, answer: Result<T, StoreError>) -> Result<T, StoreError> {
        let is_away =
            |error: &StoreError| matches!(error.kind(), StoreErrorKind::Unavailable | StoreErrorKind::Timeout);
        self.durable_fails.store(answer.as_ref().is_err_and(is_away), Ordering::Relaxed);
        answer
    }

    /// Asks the durable store for a run. After an indeterminate error, the run may have begun, and is not forgotten. Neither is
    /// one that an earlier acquire of the same owner has begun.
    pub(crate) async fn admit<T>(
        &self,
        request: &Acquire,
        fast: Undecided,
        run: Run,
        verb: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        let asked = async {
            if !fast.is_turned_away {
                return self.decide(verb).await;
            }
            // The engine's timeout would know nothing of the record.
            timeout(TURNED_AWAY_WAIT, self.decide(verb)).await.unwrap_or_else(|_| {
                let message = format!("the durable store did not answer within {TURNED_AWAY_WAIT:?}");
                Err(StoreError::new(StoreErrorKind::Timeout, message).indeterminate())
            })
        };
        let error = match asked.await {
            Ok(answer) => return Ok(answer),
            Err(error) => error,
        };
        if run.is_new && !error.is_indeterminate() {
            self.runs.forget(&request.id, &request.owner);
        }
        if fast.seen_at.is_some() {
            self.unclaim(&request.id).await;
        }
        Err(if fast.is_turned_away { error.with_existing_record() } else { error })
    }

    /// Puts the lock of a run. It lasts as long as the lease, but no longer than `at_most`.
    ///
    /// If the fast store does not answer, it is not asked to remove the claim either: that soon expires.
    pub(crate) async fn lock(&self, request: &Acquire, lease: &Lease, fast: Undecided, run: Run, at_most: Duration) {
        let is_claimed = match run.at.filter(|_| self.config.locks) {
            Some(asked_at) => {
                self.runs.lock(&lease.id, &lease.owner, lease.attempt);
                let entry = Entry::lock(request, lease, asked_at, run.lease.min(at_most));
                self.put_lock(lease, &entry).await == Put::TooLate
            }
            None => fast.seen_at.is_some(),
        };
        if is_claimed {
            self.unclaim(&request.id).await;
        }
    }

    /// Renews a lease, and then its lock.
    pub(crate) async fn renew(self: &Arc<Self>, lease: &Lease, term: Term) -> Result<OwnerOutcome, StoreError> {
        let read = if self.config.locks { self.cache.read(&lease.id, None).await } else { None };
        // An abandoned renewal says nothing about the store: another one may have succeeded meanwhile.
        let outcome = self.heard(self.durable.renew(lease, term).await)?;
        if outcome == OwnerOutcome::Applied {
            self.relock(lease, read, term.lease).await;
        }
        Ok(outcome)
    }

    /// Extends the lock of a run to the end of its lease, which was renewed after `read`.
    async fn relock(self: &Arc<Self>, lease: &Lease, read: Option<CacheRead>, lasts: Duration) {
        let seen_at = read.as_ref().map(|read| read.now);
        let entry = read.and_then(|CacheRead { now, entry, .. }| entry?.renewed(lease, now, lasts));
        if !self.runs.renew(&lease.id, &lease.owner, seen_at, lasts, entry.is_some()) {
            return;
        }
        if let Some(entry) = entry {
            self.put_lock(lease, &entry).await;
            // The run may have ended meanwhile, and its lock may have been removed before this one arrived.
            if !self.runs.knows(&lease.id, &lease.owner) {
                self.unlock(lease.id, lease.attempt).await;
            }
        }
    }

    /// Puts a lock that [`ActiveRuns`] has noted.
    ///
    /// # Cancellation safety
    /// If the caller is gone, or if there is no answer, the lock may still arrive. The end of the run then removes it later.
    async fn put_lock(&self, lease: &Lease, entry: &Entry) -> Put {
        let put = self.cache.put(&lease.id, entry).await;
        if put != Put::Unanswered {
            self.runs.has_come(&lease.id, &lease.owner);
        }
        put
    }

    /// Updates the fast store when the durable store has answered a caller that does not run.
    pub(crate) async fn learn(
        self: &Arc<Self>,
        request: &Acquire,
        outcome: &AcquireOutcome,
        run: Run,
        seen_at: Option<Timestamp>,
    ) {
        // An owner that sends another request keeps the run that it has.
        if run.is_new || !matches!(outcome, AcquireOutcome::Mismatch { .. }) {
            self.runs.forget(&request.id, &request.owner);
        }
        let is_final = matches!(outcome, AcquireOutcome::Replay(replay) if replay.kind != ReplayKind::OutcomeUnknown);
        let copies = self.config.caches && is_final;
        match outcome {
            AcquireOutcome::Replay(_) => {
                self.durable_replays.count();
                if let Some(seen_at) = seen_at.filter(|_| copies) {
                    self.copy_behind(request.id, seen_at).await;
                }
            }
            AcquireOutcome::InProgress { .. } => self.durable_in_progress.count(),
            _ => {}
        }
        // A copy takes the place of the claim.
        if seen_at.is_some() && !copies {
            self.unclaim(&request.id).await;
        }
    }

    /// Updates the fast store at the end of a run, before the caller gets its answer.
    ///
    /// It removes the lock, and starts a copy in the background, for which other callers wait. If the lease was lost, the lock
    /// has expired, or belongs to another run. It is still this run's if the handler has settled it in a transaction of its own.
    pub(crate) async fn ended(self: &Arc<Self>, lease: &Lease, settlement: &Settlement, outcome: OwnerOutcome) {
        let run = self.runs.forget(&lease.id, &lease.owner);
        if outcome == OwnerOutcome::LeaseLost && !self.is_still_of(lease).await {
            return;
        }
        let locked = run.and_then(|run| run.locked);
        // An owner whose acquire had no answer knows no attempt; rank 0 would be a claim's.
        let attempt = locked.unwrap_or(lease.attempt).max(1);
        let is_final = matches!(settlement, Settlement::Completed(_) | Settlement::FailedTerminal(_));
        let copies = outcome == OwnerOutcome::Applied && is_final && self.config.caches;
        let unlocked = self.cache.unlock(&lease.id, attempt, self.claim().filter(|_| copies)).await;
        if let Some(seen_at) = unlocked.filter(|_| copies) {
            self.copy_behind(lease.id, seen_at).await;
        }
        // A lock that is still in flight arrives after its removal.
        let may_be_locked = run.is_none_or(|run| run.locked.is_some());
        if run.is_some_and(|run| run.is_on_its_way) || unlocked.is_none() && may_be_locked {
            self.unlock_later(lease.id, attempt);
        }
    }

    /// Whether no other run has taken the record over.
    async fn is_still_of(&self, lease: &Lease) -> bool {
        let record = self.decide(self.durable.peek(&lease.id)).await;
        record.is_ok_and(|record| record.is_some_and(|record| record.owner == lease.owner))
    }

    /// Ends the run of a transaction that was dropped, and removes its lock.
    pub(crate) fn dropped(self: &Arc<Self>, lease: &Lease) {
        let run = self.runs.forget(&lease.id, &lease.owner);
        if let Some(Run { locked: Some(attempt), is_on_its_way, .. }) = run {
            let (shared, id) = (Arc::clone(self), lease.id);
            self.behind(async move {
                shared.unlock(id, attempt).await;
                if is_on_its_way {
                    shared.unlock_later(id, attempt);
                }
            });
        }
    }

    async fn unlock(self: &Arc<Self>, id: RecordId, attempt: u32) {
        if self.cache.unlock(&id, attempt, None).await.is_none() {
            self.unlock_later(id, attempt);
        }
    }

    /// Removes a lock later, in the background: one that could not be removed, or that may arrive late.
    fn unlock_later(self: &Arc<Self>, id: RecordId, attempt: u32) {
        let shared = Arc::clone(self);
        self.behind(async move {
            for pause in PAUSES {
                tokio::time::sleep(pause).await;
                if shared.cache.unlock(&id, attempt, None).await.is_some() {
                    return;
                }
            }
        });
    }

    /// Copies a record in the background, once for all concurrent callers. The copy takes the place of the claim.
    async fn copy_behind(self: &Arc<Self>, id: RecordId, seen_at: Timestamp) {
        if !self.cache.answers() {
            return self.unclaim(&id).await;
        }
        match self.begin_copy(id) {
            CopyState::Begun => {}
            CopyState::Running => return,
            CopyState::Failed => return self.unclaim(&id).await,
        }
        let mut copying = Copying { shared: Arc::clone(self), id, failed_at: None };
        let has_room = self.behind(async move {
            if !copying.shared.copy(&id, seen_at).await {
                copying.failed_at = Some(Instant::now());
                copying.shared.unclaim(&id).await;
            }
        });
        if !has_room {
            self.unclaim(&id).await;
        }
    }

    /// Notes that a record is being copied, unless that is so already, or failed a moment ago.
    fn begin_copy(&self, id: RecordId) -> CopyState {
        let mut copying = self.copying();
        if copying.len() >= MOST_COPYING {
            // Scanned once in a while, and not at every copy.
            copying.retain(|_, failed_at| failed_at.is_none());
        }
        match copying.get(&id) {
            Some(None) => CopyState::Running,
            Some(Some(failed_at)) if failed_at.elapsed() < COPY_AGAIN => CopyState::Failed,
            _ => {
                copying.insert(id, None);
                CopyState::Begun
            }
        }
    }

    /// Copies the record to the fast store if its settlement is final; `false` when there may be no copy.
    ///
    /// `seen_at` is a time of the fast store from before the record is read.
    async fn copy(&self, id: &RecordId, seen_at: Timestamp) -> bool {
        let look = tokio::time::timeout(LOOK, self.durable.live_record(id)).await;
        let Ok(Ok(look)) = look else { return false };
        match look.and_then(|look| Entry::settled(look, seen_at)) {
            Some(entry) => self.cache.put(id, &entry).await == Put::Done,
            None => false,
        }
    }

    /// Puts a tombstone in place of the copy of a record that `request` erases, and returns it; `None` if the state machine refuses.
    ///
    /// The durable store still has the record, so that a crash between both leaves nothing readable here, and all of it to be found
    /// there.
    pub(crate) async fn begin_erasure(&self, request: &Erase) -> Result<Option<Entry>, StoreError> {
        let away = || {
            let message = "the fast store did not answer, so it may keep a copy; nothing was erased: try it again";
            StoreError::new(StoreErrorKind::Unavailable, message)
        };
        let before = self.cache.read(&request.id, None).await.ok_or_else(away)?;
        let Some(look) = self.decide(self.durable.live_record(&request.id)).await? else { return Ok(None) };
        // The time only matters for a lease and for the end of the retention, and the record has neither behind it.
        let (next, outcome) = machine::erase(Some(&look.record), request, look.record.updated_at);
        let (EraseOutcome::Erased, Some(record)) = (outcome, next) else { return Ok(None) };
        let Some(tombstone) = Entry::settled(LiveRecord { record, ..look }, before.now) else { return Ok(None) };
        if self.cache.put_tentatively(&request.id, &tombstone).await == Put::Unanswered {
            return Err(away());
        }
        // An entry of another hand may have a higher rank.
        let left = self.cache.read(&request.id, None).await.ok_or_else(away)?.entry;
        if left.is_some_and(|entry| !entry.is_erased()) {
            return Err(away());
        }
        if before.entry.is_some_and(|entry| !entry.is_lock() && !entry.is_erased()) {
            self.cache.erased_copy();
        }
        Ok(Some(tombstone))
    }

    /// Makes the tombstone of an erasure stay, or takes it back, as the durable store has decided.
    pub(crate) async fn end_erasure(
        &self,
        id: &RecordId,
        tombstone: &Entry,
        decision: Result<EraseOutcome, StoreError>,
    ) -> Result<EraseOutcome, StoreError> {
        match &decision {
            Ok(EraseOutcome::Erased) => {
                if self.cache.put(id, tombstone).await == Put::Unanswered {
                    let message =
                        "the record is erased, but the fast store did not confirm its tombstone: try it again";
                    return Err(StoreError::new(StoreErrorKind::Unavailable, message).indeterminate());
                }
            }
            // It may be erased.
            Err(error) if error.is_indeterminate() => {}
            // Clients get the answer again.
            Ok(_) | Err(_) => self.cache.take_back(id).await,
        }
        decision
    }

    /// Spawns a background task; `false` at the limit, and outside a runtime.
    fn behind(&self, work: impl Future<Output = ()> + Send + 'static) -> bool {
        let (Ok(place), Ok(runtime)) = (Arc::clone(&self.behind).try_acquire_owned(), Handle::try_current()) else {
            return false;
        };
        runtime.spawn(async move {
            work.await;
            drop(place);
        });
        true
    }

    fn copying(&self) -> MutexGuard<'_, HashMap<RecordId, Option<Instant>>> {
        // Every change is one step, so a panic leaves the map whole.
        self.copying.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A call to the durable store. If its caller gives up, the store counts as not answering.
struct Asking<'a> {
    fails: &'a AtomicBool,
    is_answered: bool,
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        if !self.is_answered {
            self.fails.store(true, Ordering::Relaxed);
        }
    }
}

/// What has become of the wish to copy a record.
enum CopyState {
    Begun,
    /// Another caller's copy is on its way.
    Running,
    /// Another caller's copy has failed a moment ago.
    Failed,
}

/// A copy in progress, until it is dropped.
struct Copying<D: DurableStore + ?Sized> {
    shared: Arc<Shared<D>>,
    id: RecordId,
    failed_at: Option<Instant>,
}

impl<D: DurableStore + ?Sized> Drop for Copying<D> {
    fn drop(&mut self) {
        let mut copying = self.shared.copying();
        match self.failed_at {
            Some(_) => copying.insert(self.id, self.failed_at),
            None => copying.remove(&self.id),
        };
    }
}
