//! What a server promises about idempotency keys.

use std::time::Duration;

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// What the server promises about keys. There is no default: a retry against a server that ignores keys doubles the effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Profile {
    /// A server that uses idem. It names its refusals by problem types (RFC 9457), marks replays, and keeps records for 24 h
    /// unless it is configured otherwise.
    Idem,
    /// A server that follows draft-ietf-httpapi-idempotency-key-header. The draft names neither a retention, nor a problem type
    /// for a request in progress: see [`RetryPolicy::in_progress_type`](crate::RetryPolicy::in_progress_type).
    IetfDraft {
        /// How long the server's documentation says that it keeps keys.
        retention: Duration,
    },
    /// The API of Stripe. It takes bare keys, keeps them for at least 24 h, stores and replays every answer of an
    /// operation that began, 500s included, and says by `Stripe-Should-Retry` what to repeat.
    Stripe,
}

impl Profile {
    /// How long the server keeps an answer, as far as the profile says.
    #[must_use]
    pub fn retention(self) -> Duration {
        match self {
            Self::Idem | Self::Stripe => DAY,
            Self::IetfDraft { retention } => retention,
        }
    }

    /// The retention that the server's documentation promises and no answer can lengthen; `None` if answers state it.
    pub(crate) fn promised_retention(self) -> Option<Duration> {
        match self {
            Self::Idem => None,
            Self::Stripe | Self::IetfDraft { .. } => Some(self.retention()),
        }
    }

    /// The header that marks replays.
    pub(crate) fn replay_header(self) -> &'static str {
        match self {
            Self::Idem | Self::IetfDraft { .. } => "idempotency-replayed",
            Self::Stripe => "idempotent-replayed",
        }
    }
}
