//! A decision as it is stored.

use std::fmt;
use std::time::SystemTime;

use idem_core::{RecordId, TraceParent};

/// A decision of an engine. It never has the key.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct AuditEntry {
    /// When the decision was made, by the clock of this process.
    pub decided_at: SystemTime,
    /// The principal of the request; `None` if there was none, or none was known yet.
    pub principal: Option<String>,
    /// The operation of the request, such as `POST /v1/payments`.
    pub operation: String,
    /// The record; `None` when the request was refused before it had one.
    pub record: Option<RecordId>,
    /// The outcome, as [`EventKind::name`](idem_core::engine::EventKind::name) says it.
    pub outcome: &'static str,
    /// The trace of the request, if it named one.
    pub trace: Option<TraceParent>,
}

/// The principal is left out, as in all logs.
impl fmt::Debug for AuditEntry {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("AuditEntry")
            .field("decided_at", &self.decided_at)
            .field("operation", &self.operation)
            .field("record", &self.record)
            .field("outcome", &self.outcome)
            .field("trace", &self.trace)
            .finish_non_exhaustive()
    }
}
