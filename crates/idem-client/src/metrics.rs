//! Counts the events of a client.

use metrics::{Key, Label, Level, Metadata, Recorder, Unit};

use std::fmt;
use std::sync::Arc;

use crate::observer::{Event, EventKind, Observer};

const METADATA: Metadata<'static> = Metadata::new("idem", Level::INFO, Some("idem_client"));

const OPERATIONS: &str = "idem_client_operations_total";
const ATTEMPTS: &str = "idem_client_attempts_total";
const RETRIES: &str = "idem_client_retries_total";
const SECONDS: &str = "idem_client_operation_seconds";

/// Records the events of a client as metrics.
///
/// | metric | kind | labels | meaning |
/// |---|---|---|---|
/// | `idem_client_operations_total` | counter | `outcome` | operations that have ended: `answered`, `refused` (a final 4xx or 5xx), `replayed`, or why they stopped |
/// | `idem_client_attempts_total` | counter | | requests that were sent with a key |
/// | `idem_client_retries_total` | counter | `reason` | pauses before a further request, by reason, and waits for the budget (`budget-empty`) |
/// | `idem_client_operation_seconds` | histogram | `outcome` | the time from the call to the end, with all pauses |
///
/// Labels have values of this crate only: no URL, host or key is one.
pub struct MetricsObserver {
    recorder: Option<Arc<dyn Recorder + Send + Sync>>,
}

impl MetricsObserver {
    /// Records with the recorder that is installed for the process: install it first.
    #[must_use]
    pub fn new() -> Self {
        Self::of(None)
    }

    /// Records with this recorder.
    #[must_use]
    pub fn with_recorder(recorder: Arc<dyn Recorder + Send + Sync>) -> Self {
        Self::of(Some(recorder))
    }

    fn of(recorder: Option<Arc<dyn Recorder + Send + Sync>>) -> Self {
        let observer = Self { recorder };
        observer.with(|recorder| {
            let count = |name: &'static str, meaning: &'static str| {
                recorder.describe_counter(name.into(), Some(Unit::Count), meaning.into());
            };
            count(OPERATIONS, "Operations that have ended, by outcome.");
            count(ATTEMPTS, "Requests that were sent with a key.");
            count(RETRIES, "Pauses before a further request, by reason.");
            let meaning = "The time from the call to the end of an operation.";
            recorder.describe_histogram(SECONDS.into(), Some(Unit::Seconds), meaning.into());
        });
        observer
    }

    fn with<T>(&self, record: impl FnOnce(&dyn Recorder) -> T) -> T {
        match &self.recorder {
            None => metrics::with_recorder(record),
            Some(recorder) => record(&**recorder),
        }
    }

    fn count(&self, name: &'static str, labels: Vec<Label>) {
        self.with(|recorder| recorder.register_counter(&Key::from_parts(name, labels), &METADATA)).increment(1);
    }
}

impl Default for MetricsObserver {
    fn default() -> Self {
        Self::new()
    }
}

impl Observer for MetricsObserver {
    fn observe(&self, event: &Event<'_>) {
        let label = |name| vec![Label::new(name, event.kind.name())];
        match event.kind {
            EventKind::Sent => self.count(ATTEMPTS, Vec::new()),
            EventKind::Retry { .. } | EventKind::BudgetEmpty => self.count(RETRIES, label("reason")),
            kind if kind.is_decision() => {
                self.count(OPERATIONS, label("outcome"));
                let key = Key::from_parts(SECONDS, label("outcome"));
                self.with(|recorder| recorder.register_histogram(&key, &METADATA)).record(event.elapsed);
            }
            _ => {}
        }
    }
}

impl fmt::Debug for MetricsObserver {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("MetricsObserver").finish_non_exhaustive()
    }
}
