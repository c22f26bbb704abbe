//! The breaker in front of the fast store.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use failsafe::backoff::{self, Exponential};
use failsafe::failure_policy::{self, ConsecutiveFailures};
use failsafe::{Config, Instrument, StateMachine};

use crate::metrics::Counter;

/// How many failures in a row open it: few, since each may have cost somebody the whole patience, and more than the
/// connection that ends when a server restarts.
const FAILURES: u32 = 5;

/// For how long it is open at first, and at most; it doubles each time that the store still fails. The library takes
/// nothing below a second.
const FIRST: Duration = Duration::from_secs(1);
const LAST: Duration = Duration::from_secs(10);

/// Opens when the fast store fails, and lets somebody try again after a while.
#[derive(Debug)]
pub(crate) struct Breaker {
    machine: StateMachine<ConsecutiveFailures<Exponential>, Watch>,
    watch: Watch,
}

/// What happens to the breaker.
#[derive(Debug, Clone, Default)]
struct Watch(Arc<Watched>);

#[derive(Debug, Default)]
struct Watched {
    opened: Counter,
    skipped: Counter,
    is_open: AtomicBool,
}

impl Breaker {
    pub(crate) fn new() -> Self {
        let policy = failure_policy::consecutive_failures(FAILURES, backoff::exponential(FIRST, LAST));
        let watch = Watch::default();
        Self { machine: Config::new().failure_policy(policy).instrument(watch.clone()).build(), watch }
    }

    pub(crate) fn permits(&self) -> bool {
        self.machine.is_call_permitted()
    }

    pub(crate) fn succeeded(&self) {
        self.machine.on_success();
    }

    pub(crate) fn failed(&self) {
        self.machine.on_error();
    }

    pub(crate) fn opened(&self) -> u64 {
        self.watch.0.opened.total()
    }

    pub(crate) fn skipped(&self) -> u64 {
        self.watch.0.skipped.total()
    }

    pub(crate) fn is_open(&self) -> bool {
        self.watch.0.is_open.load(Ordering::Relaxed)
    }
}

impl Instrument for Watch {
    fn on_call_rejected(&self) {
        self.0.skipped.count();
    }

    fn on_open(&self) {
        self.0.opened.count();
        if !self.0.is_open.swap(true, Ordering::Relaxed) {
            tracing::warn!("the fast store fails, so the durable one is asked alone");
        }
    }

    fn on_half_open(&self) {}

    fn on_closed(&self) {
        if self.0.is_open.swap(false, Ordering::Relaxed) {
            tracing::info!("the fast store answers again");
        }
    }
}
