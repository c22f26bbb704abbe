//! What the records of a store amount to.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use idem_core::{RecordCounts, Timestamp};
use metrics::{Counter, Label, Recorder};

use crate::register::{BODY_BYTES, COUNT_FAILURES, COUNTED_AT, OLDEST_IN_PROGRESS, PURGE_LAG, RECORDS, Register};

/// The gauges of the records of a store.
///
/// A [`StoreScan`](crate::StoreScan) keeps them up to date. Before the first whole count there are no gauges, because zeros would
/// look like an empty store. Each process that counts a store reports its own last count. Take the maximum over those whose
/// `idem_store_counted_timestamp_seconds` is recent.
pub struct StoreGauges {
    register: Register,
    name: Arc<str>,
    failures: Counter,
}

impl StoreGauges {
    /// The gauges of a store, with the label `store="name"`, in the recorder that is installed for the process: install it first.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self::of(Register::Installed, name)
    }

    /// The same in this recorder.
    #[must_use]
    pub fn with_recorder(recorder: Arc<dyn Recorder + Send + Sync>, name: &str) -> Self {
        Self::of(Register::Of(recorder), name)
    }

    fn of(register: Register, name: &str) -> Self {
        register.describe();
        let failures = register.counter(COUNT_FAILURES, vec![Label::new("store", name.to_owned())]);
        Self { register, name: name.into(), failures }
    }

    /// Records the counts of all records. `now` is the store's time at the end of the count.
    pub fn record(&self, counts: &RecordCounts, now: Timestamp) {
        let &RecordCounts {
            in_progress,
            abandoned,
            completed,
            failed,
            outcome_unknown,
            retryable,
            expired,
            unreadable,
            body_bytes,
            oldest_in_progress,
            oldest_expired,
            // Counters of the engine say more of rates.
            made_last_hour: _,
            unsuccessful_last_hour: _,
        } = counts;
        for (state, count) in [
            ("in-progress", in_progress),
            ("abandoned", abandoned),
            ("completed", completed),
            ("failed", failed),
            ("outcome-unknown", outcome_unknown),
            ("retryable", retryable),
            ("expired", expired),
            ("unreadable", unreadable),
        ] {
            self.set(RECORDS, Some(state), count as f64);
        }
        let age = |oldest: Option<Timestamp>| {
            oldest.map_or(Duration::ZERO, |oldest| now.saturating_duration_since(oldest)).as_secs_f64()
        };
        self.set(BODY_BYTES, None, body_bytes as f64);
        self.set(OLDEST_IN_PROGRESS, None, age(oldest_in_progress));
        self.set(PURGE_LAG, None, age(oldest_expired));
        self.set(COUNTED_AT, None, now.unix_micros() as f64 / 1e6);
    }

    pub(crate) fn count_failure(&self) {
        self.failures.increment(1);
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    fn set(&self, gauge: &'static str, state: Option<&'static str>, value: f64) {
        let state = state.map(|state| Label::new("state", state));
        let labels = [Label::new("store", Arc::clone(&self.name))].into_iter().chain(state).collect();
        self.register.gauge(gauge, labels).set(value);
    }
}

impl fmt::Debug for StoreGauges {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("StoreGauges").field("name", &self.name).finish_non_exhaustive()
    }
}
