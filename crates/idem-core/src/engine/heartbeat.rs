//! Keeps a lease alive while its operation runs, and says when it is lost.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::runtime::{self, Handle};
use tokio::task::AbortHandle;
use tokio::time::Instant;
use tracing::{Instrument as _, Span};

use super::observer::EventKind;
use super::{Context, alarm};
use crate::machine::OwnerOutcome;

/// For how long the task of a [`Pacemaker`] stays at least, counted from when it is made. Most operations have ended before it
/// runs at all: each would make another one.
const STAY: Duration = Duration::from_secs(1);

/// Renews a lease in a task of its own until dropped.
///
/// A task of its own, because an operation that computes for long between two awaits would starve it otherwise. It is made
/// when the first renewal is due: most operations have ended by then.
pub(super) struct Heartbeat {
    pacemaker: Arc<Pacemaker>,
    place: Place,
    settling: Arc<AtomicBool>,
}

impl Heartbeat {
    /// Renews the lease of a run at a third of it. The run is told that it has lost its lease when somebody else owns the
    /// record, and when by this process's monotonic clock the lease is about to end unrenewed.
    pub(super) fn start(run: Context, acquired_at: Instant) -> Self {
        let settling = Arc::new(AtomicBool::new(false));
        let until = acquired_at + run.shared().settings.held_at_most;
        let first = acquired_at + run.shared().settings.lease / 3;
        let pacemaker = Arc::clone(&run.shared().pacemaker);
        let pulse = Pulse { run, settling: Arc::clone(&settling), until, renewed_at: acquired_at };
        Self { place: pacemaker.begin_at(first, pulse), pacemaker, settling }
    }

    /// From now on a renewal that is refused is no news: it may come after the settlement.
    pub(super) fn expect_the_end(&self) {
        self.settling.store(true, Ordering::Relaxed);
    }
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        self.expect_the_end();
        self.pacemaker.end(self.place);
    }
}

/// Begins the heartbeats of an engine's operations when they are due, by one task for all of them.
///
/// The task runs on the runtime of the operation that needed it first, and ends when it wakes and finds nothing to wait for. It
/// takes only what is due after it wakes next by itself: if an operation woke it, the thread of that operation might be the
/// one that runs it, after the operation, which may compute for long. What it does not take, such as operations on other
/// runtimes, begins at once, in a task of its own. For each of these tasks there is an [`alarm`], as its timer alone might not
/// go off.
#[derive(Default)]
pub(super) struct Pacemaker(Mutex<Beginnings>);

/// When the first renewal is due, and a number, as several may be due at once.
type Place = (Instant, u64);

#[derive(Default)]
struct Beginnings {
    task: Option<Task>,
    due: BTreeMap<Place, (Pulse, Span)>,
    begun: BTreeMap<Place, AbortHandle>,
    last: u64,
}

/// The task of a pacemaker, as others see it.
struct Task {
    runtime: runtime::Id,
    /// When it wakes; `None` until it runs.
    wakes_at: Option<Instant>,
}

impl Pacemaker {
    fn lock(&self) -> MutexGuard<'_, Beginnings> {
        // No change is left half done by a panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a heartbeat at this time, unless it has [ended](Self::end) by then.
    fn begin_at(self: &Arc<Self>, at: Instant, pulse: Pulse) -> Place {
        let (here, span) = (Handle::current(), Span::current());
        let mut state = self.lock();
        state.last += 1;
        let place = (at, state.last);
        let is_first = state.task.is_none();
        let task = state.task.get_or_insert(Task { runtime: here.id(), wakes_at: None });
        if is_first || task.runtime == here.id() && task.wakes_at.is_some_and(|wakes_at| wakes_at <= at) {
            state.due.insert(place, (pulse, span));
            // A runtime that has ended drops a task at once, which takes the lock.
            drop(state);
            if is_first {
                let stay_until = at.min(Instant::now() + STAY);
                let pacing = Pacing { pacemaker: Arc::clone(self), runtime: here.id(), is_over: false };
                spawn_for_others(&here, pacing.pace(stay_until));
            }
        } else {
            drop(state);
            let beating = spawn_for_others(&here, pulse.beat(at).instrument(span));
            self.lock().begun.insert(place, beating);
        }
        place
    }

    /// Begins what is due, in the task on `runtime`, and says when to look again. When there is nothing to wait for that is
    /// `stay_until`, and after it never again.
    fn begin_what_is_due(&self, runtime: runtime::Id, stay_until: Instant) -> Option<Instant> {
        let mut state = self.lock();
        let now = Instant::now();
        loop {
            let Some(first) = state.due.first_entry() else {
                let wakes_at = (now < stay_until).then_some(stay_until);
                state.task = wakes_at.map(|_| Task { runtime, wakes_at });
                return wakes_at;
            };
            let (at, _) = *first.key();
            if at > now {
                state.task = Some(Task { runtime, wakes_at: Some(at) });
                return Some(at);
            }
            let (place, (pulse, span)) = first.remove_entry();
            // Under the lock, so that it cannot end before it can be aborted.
            let beating = tokio::spawn(pulse.beat(at).instrument(span));
            state.begun.insert(place, beating.abort_handle());
        }
    }

    fn end(&self, place: Place) {
        let mut state = self.lock();
        let (due, begun) = (state.due.remove(&place), state.begun.remove(&place));
        drop(state);
        // Outside of the lock, as what it holds may be the last of a transaction, or of the engine.
        drop(due);
        if let Some(begun) = begun {
            begun.abort();
        }
    }
}

/// Spawns a task that another thread takes over while this one computes.
fn spawn_for_others(runtime: &Handle, task: impl Future<Output = ()> + Send + 'static) -> AbortHandle {
    let spawned = runtime.spawn(task).abort_handle();
    // What a thread of tokio has spawned last stays with it, to be run next; now that is this one.
    drop(runtime.spawn(async {}));
    spawned
}

/// The task of a pacemaker. When it is cut off, because its runtime ends, the next operation makes another one.
struct Pacing {
    pacemaker: Arc<Pacemaker>,
    runtime: runtime::Id,
    is_over: bool,
}

impl Pacing {
    async fn pace(mut self, stay_until: Instant) {
        let here = Handle::current();
        while let Some(wake_at) = self.pacemaker.begin_what_is_due(self.runtime, stay_until) {
            let _alarm = alarm::set(&here, wake_at);
            tokio::time::sleep_until(wake_at).await;
        }
        // Another one may have its place by now.
        self.is_over = true;
    }
}

impl Drop for Pacing {
    fn drop(&mut self) {
        if !self.is_over {
            let mut state = self.pacemaker.lock();
            state.task = None;
            // Their runtime has ended. Dropping them tells operations that go on elsewhere that they are not renewed.
            let orphans = std::mem::take(&mut state.due);
            drop(state);
            drop(orphans);
        }
    }
}

struct Pulse {
    /// Its transaction is rolled back, should nobody end it, when this task is gone too.
    run: Context,
    settling: Arc<AtomicBool>,
    /// The lease is not renewed after this.
    until: Instant,
    /// When the renewal that succeeded last was sent.
    renewed_at: Instant,
}

impl Pulse {
    /// Renews, from `next` on.
    async fn beat(mut self, mut next: Instant) {
        let lease = self.run.shared().settings.lease;
        let here = Handle::current();
        loop {
            // A tenth of the lease early: the operation needs time to stop what it does.
            let about_to_end = self.renewed_at + lease - lease / 10;
            // The second is for the answer to the renewal.
            let _alarms = [next, next + lease / 10, about_to_end].map(|at| alarm::set(&here, at));
            tokio::select! {
                () = tokio::time::sleep_until(about_to_end), if !self.run.lost().is_cancelled() => {
                    tracing::warn!(record = %self.run.id(), "the lease is about to end and could not be renewed");
                    self.run.observe(EventKind::LeaseLost);
                    self.run.lost().cancel();
                }
                renewed = self.renew_at(next) => match renewed {
                    Renewed::At(sent) => {
                        self.renewed_at = sent;
                        next = sent + lease / 3;
                    }
                    // Soon again: a third of the lease is left for a few more tries.
                    Renewed::Failed => next = Instant::now() + lease / 10,
                    // It may follow this run's own settlement, so it is not reported. Until that is acknowledged, it forbids
                    // to answer with success.
                    Renewed::Lost if self.settling.load(Ordering::Relaxed) => return self.run.lost().cancel(),
                    Renewed::Lost => {
                        tracing::warn!(record = %self.run.id(), "somebody else owns the record of a running operation");
                        self.run.observe(EventKind::LeaseLost);
                        return self.run.lost().cancel();
                    }
                },
            }
        }
    }

    async fn renew_at(&self, next: Instant) -> Renewed {
        tokio::time::sleep_until(next).await;
        // Without a lease there is nothing to renew, and one that is held for as long as anyone may is renewed no more: from
        // here on only its end is told.
        let Some(lease) = self.run.lease().filter(|_| next < self.until) else { return std::future::pending().await };
        let sent = Instant::now();
        let shared = self.run.shared();
        match shared.bounded(self.run.subject(), shared.store().renew(lease, shared.settings.term())).await {
            Ok(OwnerOutcome::Applied) => Renewed::At(sent),
            Ok(OwnerOutcome::LeaseLost) => Renewed::Lost,
            Err(_) => Renewed::Failed,
        }
    }
}

/// Renewals that end before their run, by a panic or with their runtime, tell the run.
impl Drop for Pulse {
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

    use tokio::sync::Notify;

    use super::*;
    use crate::engine::{Conclusion, Disposition, Idempotency, Operation, Settings};
    use crate::{Fingerprint, MemoryStore, Scope, Writes};

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

    fn engine() -> Idempotency {
        Idempotency::at_least_once(Arc::new(MemoryStore::new(NonZeroUsize::MAX)), Settings::new())
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_is_left_of_an_operation_that_has_ended() {
        let engine = engine();
        for takes in [Duration::ZERO, Duration::from_secs(25)] {
            run(&engine, takes, &Arc::default()).await;
            let pacemaker = engine.shared.pacemaker.lock();
            assert!(pacemaker.due.is_empty() && pacemaker.begun.is_empty(), "after {takes:?}");
        }
        tokio::time::sleep(Duration::from_secs(10)).await;
        assert!(engine.shared.pacemaker.lock().task.is_none(), "nothing is waited for");
    }

    #[tokio::test(start_paused = true)]
    async fn operations_that_end_at_once_share_one_task() {
        let (engine, begun) = (engine(), Instant::now());
        let wakes_at = || engine.shared.pacemaker.lock().task.as_ref().and_then(|task| task.wakes_at);
        for after in [0, 900] {
            tokio::time::sleep_until(begun + Duration::from_millis(after)).await;
            run(&engine, Duration::ZERO, &Arc::default()).await;
            tokio::task::yield_now().await;
            assert_eq!(wakes_at(), Some(begun + STAY), "the task of the first, after {after} ms");
        }
        tokio::time::sleep(STAY).await;
        assert!(engine.shared.pacemaker.lock().task.is_none(), "nothing is waited for");
    }

    #[test]
    fn a_task_that_ends_with_its_runtime_makes_room_for_another_one() {
        let (engine, begun) = (engine(), Arc::new(Notify::new()));
        let runtime = || runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let first = runtime();
        first.block_on(async {
            let (engine, asked) = (engine.clone(), Arc::clone(&begun));
            tokio::spawn(async move { run(&engine, Duration::MAX, &asked).await });
            begun.notified().await;
        });
        assert!(engine.shared.pacemaker.lock().task.is_some());
        drop(first);
        assert!(engine.shared.pacemaker.lock().task.is_none());
    }
}
