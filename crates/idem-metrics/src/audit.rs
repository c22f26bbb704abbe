//! What became of the decisions that were audited.

use std::fmt;
use std::sync::Arc;

use metrics::{Counter, Label, Recorder};

use crate::register::{AUDIT_DROPPED, AUDIT_WRITTEN, Register};

/// The counters of an audit. Record them before each scrape, or at an interval.
///
/// Make them before the first request: the alert on dropped decisions does not see a counter that appears with its first value.
pub struct AuditCounters {
    written: Counter,
    dropped: Counter,
}

impl AuditCounters {
    /// Counters with the label `audit="name"`, in the recorder that is installed for the process: install it first.
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
        let labels = || vec![Label::new("audit", name.to_owned())];
        let [written, dropped] = [AUDIT_WRITTEN, AUDIT_DROPPED].map(|metric| register.counter(metric, labels()));
        Self { written, dropped }
    }

    /// Records `AuditObserver::written` and `AuditObserver::dropped` of `idem-audit`.
    pub fn record(&self, written: u64, dropped: u64) {
        self.written.absolute(written);
        self.dropped.absolute(dropped);
    }
}

impl fmt::Debug for AuditCounters {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("AuditCounters").finish_non_exhaustive()
    }
}
