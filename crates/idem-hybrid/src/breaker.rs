//! The circuit breaker in front of the fast store.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use failsafe::backoff::{self, Exponential};
use failsafe::failure_policy::{self, ConsecutiveFailures};
use failsafe::{Config, Instrument, StateMachine};

use crate::metrics::Counter;

/// How many consecutive failures open it. Few, since each may have cost a caller the whole timeout; more than one, since a
/// restart of the server ends a connection.
const FAILURES: u32 = 5;

/// How long it is open at first, and at most. The time doubles whenever the store still fails. The library takes nothing
/// below a second.
const FIRST: Duration = Duration::from_secs(1);
const LAST: Duration = Duration::from_secs(10);

/// Opens when the fast store fails, and lets one caller at a time try again after a while.
#[derive(Debug)]
pub(crate) struct Breaker {
    machine: StateMachine<ConsecutiveFailures<Exponential>, Watch>,
    watch: Watch,
}

/// The permission for one call. If it is dropped without a result, the call has neither succeeded nor failed.
#[derive(Debug)]
pub(crate) struct Permit<'a> {
    breaker: &'a Breaker,
    tries: bool,
}

/// Observes the breaker, for metrics and logs.
#[derive(Debug, Clone, Default)]
struct Watch(Arc<Watched>);

#[derive(Debug, Default)]
struct Watched {
    opened: Counter,
    skipped: Counter,
    is_open: AtomicBool,
    /// Until the caller whose failure has opened it knows.
    just_opened: AtomicBool,
    /// Since when a caller tries. After [`LAST`] it counts as stuck: its runtime may not be driven any more.
    tried_since: Mutex<Option<Instant>>,
}

impl Breaker {
    pub(crate) fn new() -> Self {
        let policy = failure_policy::consecutive_failures(FAILURES, backoff::exponential(FIRST, LAST));
        let watch = Watch::default();
        Self { machine: Config::new().failure_policy(policy).instrument(watch.clone()).build(), watch }
    }

    /// Permits a call; `None` while the breaker is open, and while another caller tries.
    pub(crate) fn permit(&self) -> Option<Permit<'_>> {
        if !self.machine.is_call_permitted() {
            return None;
        }
        let tries = self.is_open();
        if tries && !self.watch.0.begin_to_try() {
            self.watch.0.skipped.count();
            return None;
        }
        Some(Permit { breaker: self, tries })
    }

    pub(crate) fn opened(&self) -> u64 {
        self.watch.0.opened.total()
    }

    pub(crate) fn skipped(&self) -> u64 {
        self.watch.0.skipped.total()
    }

    /// Whether it is open or half-open.
    pub(crate) fn is_open(&self) -> bool {
        self.watch.0.is_open.load(Ordering::Acquire)
    }
}

impl Permit<'_> {
    pub(crate) fn succeeded(self) {
        self.breaker.machine.on_success();
    }

    /// Returns whether this failure has opened the breaker.
    pub(crate) fn failed(self) -> bool {
        self.breaker.machine.on_error();
        self.breaker.watch.0.just_opened.swap(false, Ordering::AcqRel)
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        if self.tries {
            self.breaker.watch.0.stop_trying();
        }
    }
}

impl Watched {
    /// `false` while another caller tries.
    fn begin_to_try(&self) -> bool {
        let mut since = self.tried_since.lock().unwrap_or_else(PoisonError::into_inner);
        let is_free = since.is_none_or(|since| since.elapsed() >= LAST);
        if is_free {
            *since = Some(Instant::now());
        }
        is_free
    }

    fn stop_trying(&self) {
        *self.tried_since.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

impl Instrument for Watch {
    fn on_call_rejected(&self) {
        self.0.skipped.count();
    }

    fn on_open(&self) {
        if !self.0.is_open.swap(true, Ordering::AcqRel) {
            self.0.opened.count();
            self.0.just_opened.store(true, Ordering::Release);
        }
    }

    fn on_half_open(&self) {}

    fn on_closed(&self) {
        if self.0.is_open.swap(false, Ordering::AcqRel) {
            tracing::info!("the fast store answers again");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_caller_that_tries_and_never_ends_keeps_the_others_out_for_a_while_only() {
        let breaker = Breaker::new();
        for _ in 0..FAILURES {
            breaker.permit().unwrap().failed();
        }
        assert!(breaker.is_open() && breaker.permit().is_none());
        std::thread::sleep(FIRST + Duration::from_millis(100));
        // Like that of a future that is neither driven nor dropped.
        std::mem::forget(breaker.permit().unwrap());
        assert!(breaker.permit().is_none());
        let long_ago = Instant::now().checked_sub(LAST).unwrap();
        *breaker.watch.0.tried_since.lock().unwrap() = Some(long_ago);
        breaker.permit().unwrap().succeeded();
        assert!(!breaker.is_open());
    }
}
