//! Renews leases while their operations run, as a heartbeat, and reports when one is lost.
//!
//! A dedicated thread with its own runtime renews for all engines of the process, because an operation that computes or
//! blocks for long keeps its runtime busy. To name another runtime, use
//! [`Settings::renewals_on`](super::Settings::renewals_on).

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::Duration;
use std::{future, io, thread};

use futures_util::future::BoxFuture;
use tokio::runtime::{Builder, Handle};
use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;
use tracing::{Instrument as _, Span};

use super::observer::EventKind;
use super::settings::Settings;
use crate::machine::OwnerOutcome;
use crate::record_id::RecordId;
use crate::store::StoreError;

/// A run whose lease is renewed.
pub(super) trait LeasedRun: Send + Sync + 'static {
    fn id(&self) -> &RecordId;

    /// Cancelled when the lease is lost, or about to end unrenewed.
    fn lost(&self) -> &CancellationToken;

    /// Notes that what was sent at `sent` has acquired or renewed the lease.
    fn renewed(&self, sent: Instant);

    /// Has the store extend the lease. `home` is the runtime of the operation.
    fn renew<'a>(&'a self, home: &'a Handle) -> BoxFuture<'a, Result<OwnerOutcome, StoreError>>;

    /// Tells the observer.
    fn observe(&self, kind: EventKind<'_>);
}

/// Renews the lease of a run until dropped.
pub(super) struct Renewal {
    schedule: Arc<Schedule>,
    turn: Turn,
    settling: Arc<AtomicBool>,
}

impl Renewal {
    /// Starts to renew the lease, first after a third of it.
    ///
    /// The lease counts as lost when another owner has the record. It also counts as lost when it is about to end
    /// unrenewed by this process's monotonic clock.
    pub(super) fn start(
        schedule: &Arc<Schedule>,
        settings: &Settings,
        run: Arc<dyn LeasedRun>,
        acquired_at: Instant,
    ) -> Self {
        run.renewed(acquired_at);
        let settling = Arc::new(AtomicBool::new(false));
        let lease = settings.lease;
        let until = acquired_at + settings.renewal_limit;
        let home = Handle::current();
        let renewals =
            LeaseRenewals { run, home, settling: Arc::clone(&settling), lease, until, renewed_at: acquired_at };
        let turn = schedule.add(&runtime(settings), acquired_at + lease / 3, renewals);
        Self { schedule: Arc::clone(schedule), turn, settling }
    }

    /// From now on, a refused renewal is not reported: it may come after the settlement.
    pub(super) fn expect_the_end(&self) {
        self.settling.store(true, Ordering::Relaxed);
    }
}

impl Drop for Renewal {
    fn drop(&mut self) {
        self.expect_the_end();
        self.schedule.remove(self.turn);
    }
}

/// When a lease counts as lost: a tenth before its end, as the operation needs time to stop.
pub(super) fn about_to_end(renewed_at: Instant, lease: Duration) -> Instant {
    renewed_at + lease - lease / 10
}

/// The runtime that drives renewals.
fn runtime(settings: &Settings) -> Handle {
    settings.renewals_on.clone().unwrap_or_else(|| {
        thread().unwrap_or_else(|error| {
            let error = &error as &dyn std::error::Error;
            tracing::error!(
                error,
                "the thread that renews leases cannot start: an operation that never yields loses its lease"
            );
            Handle::current()
        })
    })
}

/// The runtime of the thread that renews leases. The thread starts on first use and stays.
fn thread() -> io::Result<Handle> {
    static THREAD: Mutex<Option<Handle>> = Mutex::new(None);
    // A panic leaves it as it was.
    let mut thread = THREAD.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(runtime) = &*thread {
        return Ok(runtime.clone());
    }
    // The thread makes the runtime. If the thread cannot start, a runtime made here is dropped in asynchronous code,
    // which panics.
    let (started, starts) = mpsc::sync_channel(1);
    let drive = move || match Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => {
            if started.send(Ok(runtime.handle().clone())).is_ok() {
                runtime.block_on(future::pending::<()>());
            }
        }
        // Without a receiver nothing waits for the error.
        Err(error) => drop(started.send(Err(error))),
    };
    thread::Builder::new().name("idem-renewals".to_owned()).spawn(drive)?;
    let runtime = starts.recv().map_err(io::Error::other)??;
    *thread = Some(runtime.clone());
    Ok(runtime)
}

/// The renewals of an engine. One task waits for the first renewal of every lease, and then starts a task for that
/// lease: most operations end before.
#[derive(Default)]
pub(super) struct Schedule {
    state: Mutex<State>,
    /// Something is due before the task wakes.
    is_earlier: Notify,
}

/// When the first renewal is due, and a number, because several may be due at once.
type Turn = (Instant, u64);

#[derive(Default)]
struct State {
    /// When the task wakes; `None` when there is none.
    wakes_at: Option<Instant>,
    due: BTreeMap<Turn, (LeaseRenewals, Span)>,
    begun: HashMap<Turn, AbortHandle>,
    last: u64,
}

impl Schedule {
    fn lock(&self) -> MutexGuard<'_, State> {
        // No change is left half done by a panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Schedules the first renewal for `at`, unless it is [removed](Self::remove) before.
    fn add(self: &Arc<Self>, runtime: &Handle, at: Instant, renewals: LeaseRenewals) -> Turn {
        let mut state = self.lock();
        state.last += 1;
        let turn = (at, state.last);
        state.due.insert(turn, (renewals, Span::current()));
        let wakes_at = state.wakes_at;
        state.wakes_at = wakes_at.or(Some(at));
        // A runtime that has ended drops a new task at once, and that drop takes the lock.
        drop(state);
        match wakes_at {
            None => drop(runtime.spawn(Waiting { schedule: Arc::clone(self), is_over: false }.wait(at))),
            Some(wakes_at) if at < wakes_at => self.is_earlier.notify_one(),
            Some(_) => {}
        }
        turn
    }

    /// Starts the renewals that are due, and returns when to look again; `None` when the task ends.
    ///
    /// Without renewals, the task stays until `stay_until`: most operations end before it runs, and each would start
    /// another task.
    fn begin_what_is_due(&self, stay_until: Instant) -> Option<Instant> {
        let mut state = self.lock();
        let now = Instant::now();
        while let Some(first) = state.due.first_entry() {
            let (at, _) = *first.key();
            if at > now {
                state.wakes_at = Some(at);
                return Some(at);
            }
            let (turn, (renewals, span)) = first.remove_entry();
            // Under the lock, so that it cannot end before it can be aborted.
            let begun = tokio::spawn(renewals.renew(at).instrument(span));
            state.begun.insert(turn, begun.abort_handle());
        }
        state.wakes_at = (now < stay_until).then_some(stay_until);
        state.wakes_at
    }

    fn remove(&self, turn: Turn) {
        let mut state = self.lock();
        let (due, begun) = (state.due.remove(&turn), state.begun.remove(&turn));
        drop(state);
        // Outside of the lock: it may hold the last reference to a transaction or to the engine.
        drop(due);
        if let Some(begun) = begun {
            begun.abort();
        }
    }
}

/// The task that waits for first renewals. If its runtime ends, the next operation starts another one.
struct Waiting {
    schedule: Arc<Schedule>,
    is_over: bool,
}

impl Waiting {
    async fn wait(mut self, stay_until: Instant) {
        while let Some(wake_at) = self.schedule.begin_what_is_due(stay_until) {
            tokio::select! {
                () = sleep_until(wake_at) => {}
                () = self.schedule.is_earlier.notified() => {}
            }
        }
        // Another task may have replaced it by now.
        self.is_over = true;
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if !self.is_over {
            let mut state = self.schedule.lock();
            state.wakes_at = None;
            // Dropping them reports the loss to operations that go on elsewhere.
            let orphans = std::mem::take(&mut state.due);
            drop(state);
            drop(orphans);
        }
    }
}

/// The renewals of one lease.
struct LeaseRenewals {
    /// Keeps the run's transaction: if it is never finished, it is rolled back once this task is gone too.
    run: Arc<dyn LeasedRun>,
    /// The runtime of the operation.
    home: Handle,
    settling: Arc<AtomicBool>,
    /// How long a lease lasts.
    lease: Duration,
    /// The lease is not renewed after this.
    until: Instant,
    /// When the renewal that succeeded last was sent.
    renewed_at: Instant,
}

impl LeaseRenewals {
    /// Renews, from `next` on.
    async fn renew(mut self, mut next: Instant) {
        let lease = self.lease;
        loop {
            tokio::select! {
                () = sleep_until(about_to_end(self.renewed_at, lease)), if !self.run.lost().is_cancelled() => {
                    tracing::warn!(record = %self.run.id(), "the lease is about to end and could not be renewed");
                    self.run.observe(EventKind::LeaseLost);
                    self.run.lost().cancel();
                }
                renewed = self.renew_at(next) => match renewed {
                    Renewed::At(sent) => {
                        self.renewed_at = sent;
                        self.run.renewed(sent);
                        next = sent + lease / 3;
                    }
                    // Soon, while the lease leaves time for a few more tries.
                    Renewed::Failed => next = Instant::now() + lease / 10,
                    // It may follow this run's own settlement, so it is not reported. Until the settlement is
                    // acknowledged, it forbids an answer of success.
                    Renewed::Lost if self.settling.load(Ordering::Relaxed) => return self.run.lost().cancel(),
                    Renewed::Lost => {
                        tracing::warn!(record = %self.run.id(), "another owner has the record of a running operation");
                        self.run.observe(EventKind::LeaseLost);
                        return self.run.lost().cancel();
                    }
                },
            }
        }
    }

    async fn renew_at(&self, next: Instant) -> Renewed {
        sleep_until(next).await;
        if next >= self.until {
            // From here on, only the end of the lease is reported.
            return future::pending().await;
        }
        let sent = Instant::now();
        match self.run.renew(&self.home).await {
            Ok(OwnerOutcome::Applied) => Renewed::At(sent),
            Ok(OwnerOutcome::LeaseLost) => Renewed::Lost,
            Err(_) => Renewed::Failed,
        }
    }
}

/// Reports the loss of the lease if its renewals end before its run, by a panic or with their runtime.
impl Drop for LeaseRenewals {
    fn drop(&mut self) {
        if !self.settling.load(Ordering::Relaxed) && !self.run.lost().is_cancelled() {
            tracing::error!(record = %self.run.id(), "the renewals of a lease ended before its operation");
            self.run.observe(EventKind::LeaseLost);
            self.run.lost().cancel();
        }
    }
}

enum Renewed {
    At(Instant),
    Failed,
    Lost,
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;
    use std::time::Duration;

    use tokio::runtime;

    use super::*;
    use crate::engine::{Conclusion, Disposition, Idempotency, Operation, Settings};
    use crate::{Fingerprint, MemoryStore, RecordId, Scope, Writes};

    /// A run whose renewals never get an answer.
    struct Nothing(RecordId, CancellationToken);

    impl LeasedRun for Nothing {
        fn id(&self) -> &RecordId {
            &self.0
        }

        fn lost(&self) -> &CancellationToken {
            &self.1
        }

        fn renewed(&self, _: Instant) {}

        fn renew<'a>(&'a self, _: &'a Handle) -> BoxFuture<'a, Result<OwnerOutcome, StoreError>> {
            Box::pin(future::pending())
        }

        fn observe(&self, _: EventKind<'_>) {}
    }

    async fn run(engine: &Idempotency, takes: Duration, begun: &Arc<Notify>) {
        let begun = Arc::clone(begun);
        let run = move |_| async move {
            begun.notify_one();
            tokio::time::sleep(takes).await;
            Conclusion { value: (), disposition: Disposition::Release { writes: Writes::Discard }, retention: None }
        };
        let never =
            || Conclusion { value: (), disposition: Disposition::Release { writes: Writes::Discard }, retention: None };
        let operation =
            Operation::new(Scope::new("acme", "pay"), "k".parse().unwrap(), Fingerprint::of_bytes("pay", b""));
        engine.execute(operation, run, never).await.unwrap();
    }

    fn engine(renewals_on: Handle) -> Idempotency {
        let settings = Settings::new().renewals_on(renewals_on);
        Idempotency::at_least_once(Arc::new(MemoryStore::new(NonZeroUsize::MAX)), settings)
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_is_left_of_an_operation_that_has_ended() {
        let engine = engine(Handle::current());
        for takes in [Duration::ZERO, Duration::from_secs(25)] {
            run(&engine, takes, &Arc::default()).await;
            let state = engine.shared.renewals.lock();
            assert!(state.due.is_empty() && state.begun.is_empty(), "after {takes:?}");
        }
        tokio::time::sleep(Duration::from_secs(10)).await;
        assert!(engine.shared.renewals.lock().wakes_at.is_none(), "nothing is waited for");
    }

    #[tokio::test(start_paused = true)]
    async fn operations_that_end_at_once_share_one_task() {
        let engine = engine(Handle::current());
        let begun = Instant::now();
        for after in [0, 9_000] {
            sleep_until(begun + Duration::from_millis(after)).await;
            run(&engine, Duration::ZERO, &Arc::default()).await;
            tokio::task::yield_now().await;
            let wakes_at = engine.shared.renewals.lock().wakes_at;
            assert_eq!(wakes_at, Some(begun + Duration::from_secs(10)), "the task of the first, after {after} ms");
        }
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert!(engine.shared.renewals.lock().wakes_at.is_none(), "nothing is waited for");
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_due_earlier_wakes_the_task() {
        let schedule = Arc::new(Schedule::default());
        let now = Instant::now();
        let add = |after| {
            let lease = Duration::from_secs(30);
            let until = now + Duration::from_secs(600);
            let run: Arc<dyn LeasedRun> = Arc::new(Nothing(RecordId::from_bytes([0; 32]), CancellationToken::new()));
            let home = Handle::current();
            let renewals = LeaseRenewals { run, home, settling: Arc::default(), lease, until, renewed_at: now };
            schedule.add(&Handle::current(), now + Duration::from_secs(after), renewals)
        };
        let turns = [add(9), add(3)];
        tokio::time::sleep(Duration::from_secs(4)).await;
        assert_eq!(schedule.lock().begun.keys().collect::<Vec<_>>(), [&turns[1]]);
        turns.into_iter().for_each(|turn| schedule.remove(turn));
    }

    #[test]
    fn operations_that_are_renewed_no_more_are_told_and_the_next_one_makes_another_task() {
        let home = runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let renewing = runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let engine = engine(renewing.handle().clone());
        home.block_on(async {
            let begun = Arc::new(Notify::new());
            let (asked, asking) = (Arc::clone(&begun), engine.clone());
            let running = tokio::spawn(async move { run(&asking, Duration::MAX, &asked).await });
            begun.notified().await;
            assert!(engine.shared.renewals.lock().wakes_at.is_some());
            renewing.shutdown_background();
            while engine.shared.renewals.lock().wakes_at.is_some() {
                tokio::task::yield_now().await;
            }
            assert!(engine.shared.renewals.lock().due.is_empty(), "its run was told");
            running.abort();
        });
    }
}
