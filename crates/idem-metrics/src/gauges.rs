//! What engines and stores with a cache say when they are asked.

use std::fmt;
use std::sync::Arc;

use idem_core::engine::Idempotency;
#[cfg(feature = "hybrid")]
use idem_hybrid::HybridMetrics;
use metrics::{Counter, Gauge, Label, Recorder};

#[cfg(feature = "hybrid")]
use crate::register::{BREAKER_OPEN, BREAKER_OPENED, FAST_FAILURES, FAST_SKIPPED, FAST_UNREADABLE, HYBRID_ANSWERS};
use crate::register::{OBSERVER_PANICS, RUNNING, Register, SETTLING, WAITING};

/// The gauges of an engine. Record them before each scrape, or at an interval.
///
/// Engines that are [attached](Idempotency::attached_to) to each other count their running operations and late settlements together,
/// and their waiting requests and panics alone. So take the maximum of the first two over them, and the sum of the others.
pub struct EngineGauges {
    engine: Idempotency,
    running: Gauge,
    waiting: Gauge,
    settling: Gauge,
    observer_panics: Counter,
}

impl EngineGauges {
    /// The gauges of `engine`, with the label `engine="name"`, in the recorder that is installed for the process: install it first.
    #[must_use]
    pub fn new(name: &str, engine: Idempotency) -> Self {
        Self::of(&Register::Installed, name, engine)
    }

    /// The same in this recorder.
    #[must_use]
    pub fn with_recorder(recorder: Arc<dyn Recorder + Send + Sync>, name: &str, engine: Idempotency) -> Self {
        Self::of(&Register::Of(recorder), name, engine)
    }

    fn of(register: &Register, name: &str, engine: Idempotency) -> Self {
        register.describe();
        let labels = || vec![Label::new("engine", name.to_owned())];
        let [running, waiting, settling] = [RUNNING, WAITING, SETTLING].map(|name| register.gauge(name, labels()));
        let observer_panics = register.counter(OBSERVER_PANICS, labels());
        Self { engine, running, waiting, settling, observer_panics }
    }

    /// Records the gauges as they are now.
    pub fn record(&self) {
        self.running.set(self.engine.running() as f64);
        self.waiting.set(self.engine.waiting() as f64);
        self.settling.set(self.engine.settling() as f64);
        self.observer_panics.absolute(self.engine.observer_panics());
    }
}

impl fmt::Debug for EngineGauges {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("EngineGauges").field("engine", &self.engine).finish_non_exhaustive()
    }
}

/// The metrics of a [`HybridStore`](idem_hybrid::HybridStore). Record them before each scrape, or at an interval.
#[cfg(feature = "hybrid")]
pub struct HybridGauges {
    fast_replays: Counter,
    fast_in_progress: Counter,
    durable_replays: Counter,
    durable_in_progress: Counter,
    failures: Counter,
    skipped: Counter,
    unreadable: Counter,
    opened: Counter,
    is_open: Gauge,
}

#[cfg(feature = "hybrid")]
impl HybridGauges {
    /// Metrics with the label `store="name"`, in the recorder that is installed for the process: install it first.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self::of(&Register::Installed, name)
    }

    /// The same in this recorder.
    #[must_use]
    pub fn with_recorder(recorder: Arc<dyn Recorder + Send + Sync>, name: &str) -> Self {
        Self::of(&Register::Of(recorder), name)
    }

    fn of(register: &Register, name: &str) -> Self {
        register.describe();
        let labels = || vec![Label::new("store", name.to_owned())];
        let answers = |by, answer| {
            let further = [Label::new("by", by), Label::new("answer", answer)];
            register.counter(HYBRID_ANSWERS, labels().into_iter().chain(further).collect())
        };
        Self {
            fast_replays: answers("fast", "replay"),
            fast_in_progress: answers("fast", "in-progress"),
            durable_replays: answers("durable", "replay"),
            durable_in_progress: answers("durable", "in-progress"),
            failures: register.counter(FAST_FAILURES, labels()),
            skipped: register.counter(FAST_SKIPPED, labels()),
            unreadable: register.counter(FAST_UNREADABLE, labels()),
            opened: register.counter(BREAKER_OPENED, labels()),
            is_open: register.gauge(BREAKER_OPEN, labels()),
        }
    }

    /// Records what [`HybridStore::metrics`](idem_hybrid::HybridStore::metrics) says now.
    pub fn record(&self, now: &HybridMetrics) {
        self.fast_replays.absolute(now.fast_replays);
        self.fast_in_progress.absolute(now.fast_in_progress);
        self.durable_replays.absolute(now.durable_replays);
        self.durable_in_progress.absolute(now.durable_in_progress);
        self.failures.absolute(now.fast_failures);
        self.skipped.absolute(now.fast_skipped);
        self.unreadable.absolute(now.unreadable);
        self.opened.absolute(now.opened);
        self.is_open.set(f64::from(u8::from(now.is_open)));
    }
}

#[cfg(feature = "hybrid")]
impl fmt::Debug for HybridGauges {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("HybridGauges").finish_non_exhaustive()
    }
}
