//! Counts events and measures durations.

use std::collections::BTreeMap;
use std::fmt;
use std::num::NonZeroUsize;
use std::sync::{Arc, PoisonError, RwLock};

use idem_core::engine::{Contract, Durations, Event, Observer};
use metrics::{Counter, Histogram, Label, Recorder};

use crate::register::{EVENTS, REQUESTS, RUN_SECONDS, Register, SETTLE_SECONDS, STORE_SECONDS, WAIT_SECONDS};

/// How many operations have metrics of their own by default. Operations are routes, and services have fewer. Without a limit, an
/// operation that is named by a part of a path would make a time series for each of its values.
const MOST_OPERATIONS: usize = 256;

/// The label of operations beyond the limit.
const OTHER: &str = "other";

/// The rare outcomes and events that alerts are about. Each operation has their counters from its first request on, at 0: the
/// `increase()` of Prometheus does not see a counter that appears with 1. So it misses an event before the first scrape.
const ALERTED_OUTCOMES: [&str; 1] = ["outcome-unknown"];
const ALERTED_EVENTS: [&str; 3] = ["failed-open", "settlement-lost", "steps-not-undone"];

/// Records the events of engines as metrics. The crate's documentation has a table of them.
///
/// Give it to [`Settings::observer`](idem_core::engine::Settings::observer). Several engines can share one.
///
/// # Cost
/// A request costs two or three atomic additions and one to four samples of histograms. Handles are kept: the recorder is asked once
/// for each label. After that, nothing is allocated or hashed.
pub struct MetricsObserver {
    register: Register,
    most_operations: usize,
    operations: RwLock<Operations>,
    next: Option<Arc<dyn Observer>>,
}

/// By contract, then by name. Most services have few operations, which a tree finds with fewer instructions than a hash.
type Operations = [BTreeMap<Arc<str>, Arc<OperationMetrics>>; 3];

/// By outcome or by event.
type Counters = RwLock<BTreeMap<&'static str, Counter>>;

/// The metrics of one operation under one contract.
struct OperationMetrics {
    register: Register,
    labels: [Label; 2],
    requests: Counters,
    events: Counters,
    store: Histogram,
    wait: Histogram,
    run: Histogram,
    settle: Histogram,
}

impl MetricsObserver {
    /// Records with the recorder that is installed for the process: install it first.
    #[must_use]
    pub fn new() -> Self {
        Self::of(Register::Installed)
    }

    /// Records with this recorder.
    #[must_use]
    pub fn with_recorder(recorder: Arc<dyn Recorder + Send + Sync>) -> Self {
        Self::of(Register::Of(recorder))
    }

    fn of(register: Register) -> Self {
        register.describe();
        Self { register, most_operations: MOST_OPERATIONS, operations: RwLock::default(), next: None }
    }

    /// How many operations have metrics of their own; the others share the label `other`. Each contract of an operation counts.
    ///
    /// Default: 256.
    #[must_use]
    pub fn most_operations(mut self, most: NonZeroUsize) -> Self {
        self.most_operations = most.get();
        self
    }

    /// Passes each event on to another observer, too.
    #[must_use]
    pub fn and(mut self, next: Arc<dyn Observer>) -> Self {
        self.next = Some(next);
        self
    }

    fn operation(&self, contract: Contract, operation: &str) -> Arc<OperationMetrics> {
        let place = place(contract);
        let count = |operations: &Operations| operations.iter().map(BTreeMap::len).sum::<usize>();
        let known = |operations: &Operations| {
            let is_full = || count(operations) >= self.most_operations;
            let of_contract = &operations[place];
            of_contract.get(operation).or_else(|| of_contract.get(OTHER).filter(|_| is_full())).map(Arc::clone)
        };
        if let Some(known) = known(&self.operations.read().unwrap_or_else(PoisonError::into_inner)) {
            return known;
        }
        let mut operations = self.operations.write().unwrap_or_else(PoisonError::into_inner);
        // Another thread may have been here since.
        if let Some(known) = known(&operations) {
            return known;
        }
        let name = if count(&operations) < self.most_operations { operation } else { OTHER };
        let make = || Arc::new(OperationMetrics::new(self.register.clone(), contract, name));
        Arc::clone(operations[place].entry(name.into()).or_insert_with(make))
    }
}

impl Default for MetricsObserver {
    fn default() -> Self {
        Self::new()
    }
}

impl Observer for MetricsObserver {
    fn observe(&self, event: &Event<'_>) {
        let metrics = self.operation(event.contract, event.operation);
        if event.kind.is_decision() {
            let outcome = event.kind.name();
            metrics.count(&metrics.requests, REQUESTS, "outcome", outcome, 1);
            metrics.measure(event.durations);
        } else {
            metrics.count(&metrics.events, EVENTS, "event", event.kind.name(), 1);
        }
        if let Some(next) = &self.next {
            next.observe(event);
        }
    }
}

/// The place of a contract among the [`Operations`].
fn place(contract: Contract) -> usize {
    match contract {
        Contract::Transactional => 0,
        Contract::AtMostOnce => 1,
        Contract::AtLeastOnce => 2,
    }
}

impl OperationMetrics {
    fn new(register: Register, contract: Contract, operation: &str) -> Self {
        let contract = match contract {
            Contract::Transactional => "transactional",
            Contract::AtMostOnce => "at-most-once",
            Contract::AtLeastOnce => "at-least-once",
        };
        let labels = [Label::new("operation", operation.to_owned()), Label::new("contract", contract)];
        let histogram = |name| register.histogram(name, labels.to_vec());
        let [store, wait, run, settle] = [STORE_SECONDS, WAIT_SECONDS, RUN_SECONDS, SETTLE_SECONDS].map(histogram);
        let made =
            Self { register, labels, requests: RwLock::default(), events: RwLock::default(), store, wait, run, settle };
        ALERTED_OUTCOMES.iter().for_each(|outcome| made.count(&made.requests, REQUESTS, "outcome", outcome, 0));
        ALERTED_EVENTS.iter().for_each(|event| made.count(&made.events, EVENTS, "event", event, 0));
        made
    }

    fn count(&self, counters: &Counters, metric: &'static str, label: &'static str, value: &'static str, times: u64) {
        if let Some(counter) = counters.read().unwrap_or_else(PoisonError::into_inner).get(value) {
            return counter.increment(times);
        }
        let mut counters = counters.write().unwrap_or_else(PoisonError::into_inner);
        let make = || {
            let labels = self.labels.iter().cloned().chain([Label::new(label, value)]).collect();
            self.register.counter(metric, labels)
        };
        counters.entry(value).or_insert_with(make).increment(times);
    }

    /// Records the parts of a request that happened.
    fn measure(&self, durations: Durations) {
        let Durations { store, wait, run, settle, .. } = durations;
        let parts = [(&self.store, store), (&self.wait, wait), (&self.run, run), (&self.settle, settle)];
        for (histogram, took) in parts.into_iter().filter(|(_, took)| !took.is_zero()) {
            histogram.record(took);
        }
    }
}

impl fmt::Debug for MetricsObserver {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("MetricsObserver")
            .field("most_operations", &self.most_operations)
            .field("next", &self.next)
            .finish_non_exhaustive()
    }
}
