//! How handles of metrics are made, and what the metrics mean.

use std::sync::Arc;

use metrics::{Counter, Gauge, Histogram, Key, Label, Level, Metadata, Recorder, Unit};

const METADATA: Metadata<'static> = Metadata::new("idem", Level::INFO, Some("idem_metrics"));

/// The metrics with their meanings.
const COUNTERS: [(&str, &str); 11] = [
    (REQUESTS, "Requests by their outcome. Each request has exactly one."),
    (EVENTS, "What happened to requests on the way to their outcome."),
    (OBSERVER_PANICS, "Panics of the engine's observer."),
    (HYBRID_ANSWERS, "Repeats and duplicates that a store answered, the fast or the durable one."),
    (FAST_FAILURES, "Calls to the fast store that failed or timed out."),
    (FAST_SKIPPED, "Calls to the fast store that were skipped, since it had failed before."),
    (FAST_UNREADABLE, "Entries of the fast store that could not be decoded or authenticated."),
    (BREAKER_OPENED, "Times that the breaker of the fast store opened after it had been closed."),
    (COUNT_FAILURES, "Parts of the records that the store did not count."),
    (AUDIT_WRITTEN, "Decisions that were written to the audit."),
    (AUDIT_DROPPED, "Decisions that are missing from the audit."),
];
const DURATIONS: [(&str, &str); 4] = [
    (STORE_SECONDS, "Asking the store whether an operation may run."),
    (WAIT_SECONDS, "Waiting for the end of another request's run."),
    (RUN_SECONDS, "The operation itself, or the probe before it."),
    (SETTLE_SECONDS, "Settling the record."),
];
const GAUGES: [(&str, Unit, &str); 14] = [
    (RUNNING, Unit::Count, "Operations that run now, from their acquire until their record is settled."),
    (WAITING, Unit::Count, "Requests that wait in this process for another one's run."),
    (SETTLING, Unit::Count, "Settlements that go on after their answers, because the store did not take them in time."),
    (BREAKER_OPEN, Unit::Count, "1 while the breaker of the fast store is open."),
    (RECORDS, Unit::Count, "Records by state, at the last whole count."),
    (BODY_BYTES, Unit::Bytes, "The bytes of the stored bodies, at the last whole count."),
    (OLDEST_IN_PROGRESS, Unit::Seconds, "The age of the oldest record in progress; 0 if there is none."),
    (PURGE_LAG, Unit::Seconds, "For how long the oldest expired record has waited for the purge; 0 if there is none."),
    (
        COUNTED_AT,
        Unit::Seconds,
        "When the store was last counted as a whole, in seconds since 1970 by the store's clock.",
    ),
    (INBOX_PARKED, Unit::Count, "Messages of a subscriber that are parked."),
    (
        INBOX_OBSERVED_AT,
        Unit::Seconds,
        "When the parked messages of a subscriber were last counted, in seconds since 1970.",
    ),
    (OUTBOX_OBSERVED_AT, Unit::Seconds, "When the messages of the outbox were last counted, in seconds since 1970."),
    (OUTBOX_MESSAGES, Unit::Count, "Messages that wait in the outbox."),
    (
        OUTBOX_LAG,
        Unit::Seconds,
        "How long ago the oldest message that waits in the outbox was published; 0 if none waits.",
    ),
];

pub(crate) const REQUESTS: &str = "idem_requests_total";
pub(crate) const EVENTS: &str = "idem_events_total";
pub(crate) const OBSERVER_PANICS: &str = "idem_observer_panics_total";
pub(crate) const STORE_SECONDS: &str = "idem_store_seconds";
pub(crate) const WAIT_SECONDS: &str = "idem_wait_seconds";
pub(crate) const RUN_SECONDS: &str = "idem_run_seconds";
pub(crate) const SETTLE_SECONDS: &str = "idem_settle_seconds";
pub(crate) const RUNNING: &str = "idem_running";
pub(crate) const WAITING: &str = "idem_waiting";
pub(crate) const SETTLING: &str = "idem_settling";
pub(crate) const HYBRID_ANSWERS: &str = "idem_hybrid_answers_total";
pub(crate) const FAST_FAILURES: &str = "idem_fast_store_failures_total";
pub(crate) const FAST_SKIPPED: &str = "idem_fast_store_skipped_total";
pub(crate) const FAST_UNREADABLE: &str = "idem_fast_store_unreadable_total";
pub(crate) const BREAKER_OPENED: &str = "idem_fast_store_breaker_opened_total";
pub(crate) const BREAKER_OPEN: &str = "idem_fast_store_breaker_open";
pub(crate) const RECORDS: &str = "idem_records";
pub(crate) const BODY_BYTES: &str = "idem_store_body_bytes";
pub(crate) const OLDEST_IN_PROGRESS: &str = "idem_oldest_in_progress_seconds";
pub(crate) const PURGE_LAG: &str = "idem_purge_lag_seconds";
pub(crate) const COUNTED_AT: &str = "idem_store_counted_timestamp_seconds";
pub(crate) const COUNT_FAILURES: &str = "idem_store_count_failures_total";
pub(crate) const AUDIT_WRITTEN: &str = "idem_audit_written_total";
pub(crate) const AUDIT_DROPPED: &str = "idem_audit_dropped_total";
pub(crate) const INBOX_PARKED: &str = "idem_inbox_parked";
pub(crate) const INBOX_OBSERVED_AT: &str = "idem_inbox_observed_timestamp_seconds";
pub(crate) const OUTBOX_OBSERVED_AT: &str = "idem_outbox_observed_timestamp_seconds";
pub(crate) const OUTBOX_MESSAGES: &str = "idem_outbox_messages";
pub(crate) const OUTBOX_LAG: &str = "idem_outbox_lag_seconds";

/// Makes handles: of a recorder, or of the one that is installed for the process.
#[derive(Clone)]
pub(crate) enum Register {
    Installed,
    Of(Arc<dyn Recorder + Send + Sync>),
}

impl Register {
    pub(crate) fn counter(&self, name: &'static str, labels: Vec<Label>) -> Counter {
        let key = Key::from_parts(name, labels);
        self.with(|recorder| recorder.register_counter(&key, &METADATA))
    }

    pub(crate) fn gauge(&self, name: &'static str, labels: Vec<Label>) -> Gauge {
        let key = Key::from_parts(name, labels);
        self.with(|recorder| recorder.register_gauge(&key, &METADATA))
    }

    pub(crate) fn histogram(&self, name: &'static str, labels: Vec<Label>) -> Histogram {
        let key = Key::from_parts(name, labels);
        self.with(|recorder| recorder.register_histogram(&key, &METADATA))
    }

    /// Tells the recorder the meanings of the metrics.
    pub(crate) fn describe(&self) {
        self.with(|recorder| {
            for (name, meaning) in COUNTERS {
                recorder.describe_counter(name.into(), Some(Unit::Count), meaning.into());
            }
            for (name, meaning) in DURATIONS {
                recorder.describe_histogram(name.into(), Some(Unit::Seconds), meaning.into());
            }
            for (name, unit, meaning) in GAUGES {
                recorder.describe_gauge(name.into(), Some(unit), meaning.into());
            }
        });
    }

    fn with<T>(&self, make: impl FnOnce(&dyn Recorder) -> T) -> T {
        match self {
            Self::Installed => metrics::with_recorder(make),
            Self::Of(recorder) => make(recorder),
        }
    }
}
