//! What became of the decisions that were audited.

use std::fmt;
use std::sync::Arc;

use metrics::{Counter, Recorder};

use crate::register::{AUDIT_DROPPED, AUDIT_WRITTEN, Register};

/// The counters of an audit. Record them before each scrape, or at an interval.
pub struct AuditCounters {
    written: Counter,
    dropped: Counter,
}

impl AuditCounters {
    /// Counters in the recorder that is installed for the process: install it first.
    #[must_use]
    pub fn new() -> Self {
        Self::of(&Register::Installed)
    }

    /// The same in this recorder.
    #[must_use]
    pub fn with_recorder(recorder: Arc<dyn Recorder + Send + Sync>) -> Self {
        Self::of(&Register::Of(recorder))
    }

    fn of(register: &Register) -> Self {
        register.describe();
        let [written, dropped] = [AUDIT_WRITTEN, AUDIT_DROPPED].map(|name| register.counter(name, Vec::new()));
        Self { written, dropped }
    }

    /// Records `AuditObserver::written` and `AuditObserver::dropped` of `idem-audit`.
    pub fn record(&self, written: u64, dropped: u64) {
        self.written.absolute(written);
        self.dropped.absolute(dropped);
    }
}

impl Default for AuditCounters {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for AuditCounters {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("AuditCounters").finish_non_exhaustive()
    }
}
