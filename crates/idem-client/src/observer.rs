//! The events that a client reports, for metrics and logs.

use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;

use crate::error::ErrorKind;

/// Something that happened to one operation.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Event<'a> {
    /// What happened.
    pub kind: EventKind,
    /// The host of the request, without its path.
    pub host: &'a str,
    /// How often the request was sent.
    pub attempts: u32,
    /// The time since the operation began in this process.
    pub elapsed: Duration,
}

/// What happened to an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum EventKind {
    /// Decision: the caller gets a final answer.
    Answered {
        /// Its status.
        status: StatusCode,
        /// Whether the server marked it as a replay.
        replayed: bool,
    },
    /// Decision: there is no final answer.
    Stopped(ErrorKind),
    /// Decision: the caller dropped the operation, or another middleware failed.
    Abandoned,

    /// The request is sent.
    Sent,
    /// The `Location` of a 202 is asked.
    Polled,
    /// The request is sent again after a pause.
    Retry {
        /// Why, such as `timeout` or `in-progress`.
        reason: &'static str,
        /// The pause.
        after: Duration,
    },
    /// The host's retry budget is used up, so a retry waits.
    BudgetEmpty,
    /// The journal did not note something. The operation goes on.
    JournalFailed,
}

impl EventKind {
    /// Whether this event ends the operation. Each operation has exactly one such event, unless it is refused before it begins.
    #[must_use]
    pub fn is_decision(&self) -> bool {
        matches!(self, Self::Answered { .. } | Self::Stopped(_) | Self::Abandoned)
    }

    /// A name for metrics and logs, such as `replayed`. Names stay the same in later versions.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Answered { replayed: true, .. } => "replayed",
            Self::Answered { status, .. } if status.is_client_error() || status.is_server_error() => "refused",
            Self::Answered { .. } => "answered",
            Self::Stopped(kind) => kind.name(),
            Self::Abandoned => "abandoned",
            Self::Sent => "sent",
            Self::Polled => "polled",
            Self::Retry { reason, .. } => reason,
            Self::BudgetEmpty => "budget-empty",
            Self::JournalFailed => "journal-failed",
        }
    }
}

/// Receives events, such as a bridge to a metrics library.
///
/// Called inline, so it must be quick and must not block. A panic is caught and logged; the operation goes on.
pub trait Observer: fmt::Debug + Send + Sync + 'static {
    /// Something happened.
    fn observe(&self, event: &Event<'_>);
}

pub(crate) fn tell(observer: Option<&Arc<dyn Observer>>, event: &Event<'_>) {
    let Some(observer) = observer else { return };
    if std::panic::catch_unwind(AssertUnwindSafe(|| observer.observe(event))).is_err() {
        tracing::error!(event = event.kind.name(), "an observer of the client panicked");
    }
}
