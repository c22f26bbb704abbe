//! Has a runtime look at its timers, from a thread of its own.
//!
//! Whichever of tokio's threads runs out of work first waits for sockets and timers, for all of them. When one event wakes
//! it, and what that wakes up computes for long, nobody waits in its place: the other threads sleep until somebody gives them
//! work. In a process that does nothing else no timer goes off until then, and no lease is renewed by one.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::time::Instant;

/// How long after a timer an alarm rings: a timer that somebody waits for has gone off by then, a tick of tokio's wheel and one of
/// the kernel's clock late, a millisecond each. If one has not, nobody waits, and whoever is woken will.
const AFTER: Duration = Duration::from_millis(5);

static ALARMS: Alarms =
    Alarms { state: Mutex::new(State { due: BTreeMap::new(), last: 0, has_thread: false }), changed: Condvar::new() };

/// One thread for all engines of a process, which sleeps while there is nothing to do.
struct Alarms {
    state: Mutex<State>,
    /// Something is due earlier than what the thread waits for.
    changed: Condvar,
}

struct State {
    due: BTreeMap<Place, Handle>,
    last: u64,
    has_thread: bool,
}

/// When it is due, and a number, as several may be due at once.
type Place = (Instant, u64);

/// One that is set, until this is dropped.
pub(super) struct Alarm(Option<Place>);

impl Drop for Alarm {
    fn drop(&mut self) {
        let runtime = self.0.and_then(|place| lock().due.remove(&place));
        // Outside of the lock, as it may be the last of its runtime.
        drop(runtime);
    }
}

fn lock() -> MutexGuard<'static, State> {
    // No change is left half done by a panic.
    ALARMS.state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Has a thread of `runtime` look at its timers soon after this time, if one is left that does not compute. For a timer that
/// goes off in time, drop this then.
pub(super) fn set(runtime: &Handle, at: Instant) -> Alarm {
    let mut state = lock();
    if !state.has_thread {
        let started = thread::Builder::new().name("idem-alarms".to_owned()).spawn(ring);
        if let Err(error) = started {
            drop(state);
            let error = &error as &dyn std::error::Error;
            tracing::error!(error, "operations that never yield may lose their leases");
            return Alarm(None);
        }
        state.has_thread = true;
    }
    state.last += 1;
    let place = (at + AFTER, state.last);
    state.due.insert(place, runtime.clone());
    if state.due.first_key_value().is_some_and(|(first, _)| *first == place) {
        ALARMS.changed.notify_one();
    }
    Alarm(Some(place))
}

/// Should the thread end by a panic, such as one of what a runtime does for each task, the next alarm starts another.
struct Running;

impl Drop for Running {
    fn drop(&mut self) {
        lock().has_thread = false;
    }
}

fn ring() {
    let _running = Running;
    let mut state = lock();
    loop {
        let Some(first) = state.due.first_entry() else {
            state = ALARMS.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            continue;
        };
        let left = first.key().0.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let runtime = first.remove();
            drop(state);
            // For this a thread that sleeps wakes up. Then it finds nothing more to do, and waits for timers.
            drop(runtime.spawn(async {}));
            drop(runtime);
            state = lock();
        } else {
            state = ALARMS.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
