//! What an inbox decides, and why.

use std::time::Duration;

/// What the broker has to be told about a message.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "a consumer must handle every case")]
pub enum Decision {
    /// The message has taken effect, now or before. Acknowledge it.
    Ack,
    /// The message was set aside for this reason. Acknowledge it.
    Parked(ParkReason),
    /// The message is handled elsewhere, or its next attempt is due later. Deliver it again after this time.
    RedeliverAfter(Duration),
    /// The store is unavailable, or the engine shuts down. Give the message back, and take no other one for this time.
    Pause(Duration),
}

/// Why a message was set aside.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ParkReason {
    /// The handler has rejected the message, or has failed in all its attempts.
    #[error("failed: {0}")]
    Failed(String),
    /// A run was interrupted under AtMostOnce.
    #[error("outcome unknown: a run was interrupted, and may have taken effect")]
    OutcomeUnknown,
    /// Another payload has this id.
    #[error("another payload: a message with this id and another payload was handled before")]
    OtherPayload,
    /// Each of its runs has ended its process, or could not be committed.
    #[error("lost: its runs ended with their process, or could not be committed")]
    Lost,
    /// It has no id, so that repeats could not be recognised.
    #[error("no id: a repeat of the message could not be recognised")]
    NoId,
    /// It was delivered before, and so long ago that its record may have been purged.
    #[error("forgotten: it was delivered before, and a record of that time is no longer kept")]
    Forgotten,
}

/// Why a message was not handled. Every error becomes a [`Fault`](Self::Fault) by `?`.
#[derive(Debug)]
#[expect(clippy::exhaustive_enums, reason = "there is no fourth way to fail")]
pub enum MessageError {
    /// The message can never be handled: it is parked.
    Reject {
        /// What is wrong with it. It is kept with the parked message.
        why: String,
    },
    /// It had no effect, and may run again.
    Retry {
        /// How long to wait; by default the engine's backoff.
        after: Option<Duration>,
        /// What went wrong. It is kept with the message if that is parked.
        why: String,
    },
    /// An unexpected error. Under AtMostOnce the message is parked. Under the other contracts it runs again after the engine's
    /// backoff, up to its [`max_attempts`](idem_core::engine::Settings::max_attempts), and is parked then.
    Fault(Box<dyn std::error::Error + Send + Sync>),
}

impl<E: std::error::Error + Send + Sync + 'static> From<E> for MessageError {
    fn from(error: E) -> Self {
        Self::Fault(error.into())
    }
}

/// An inbox that cannot work.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidInbox {
    /// The name is not 1 to 64 ASCII letters, digits, `-`, `_` and `.`.
    #[error("`{0}` is no name of a subscriber: it has 1 to 64 ASCII letters, digits, '-', '_' and '.'")]
    Subscriber(String),
    /// The engine answers a message with another payload like the first one, so that it would be acknowledged without an effect.
    #[error(
        "the engine of the inbox has on_mismatch(ReplayOriginal), by which another payload under an id is lost; remove it"
    )]
    IgnoresPayloads,
    /// The engine runs messages without a record if its store is unavailable. Their repeats would run again.
    #[error("the engine of the inbox has dangerous_fail_open, by which a message can run without a record; remove it")]
    FailsOpen,
    /// A message could be delivered again when the record of its first run is no longer kept.
    #[error(
        "the broker may deliver a message again for {redelivery:?}, and records are kept for {retention:?} only; set the \
         retention of the inbox's engine to more"
    )]
    Retention {
        /// The longest time between two deliveries of a message.
        redelivery: Duration,
        /// The retention of the engine.
        retention: Duration,
    },
}
