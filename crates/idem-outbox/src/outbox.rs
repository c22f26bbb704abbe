//! The port of an outbox, as its relay sees it.

use std::fmt;
use std::num::NonZeroU32;
use std::time::Duration;

use async_trait::async_trait;
use idem_core::StoreError;

use crate::message::{InvalidMessage, MessageToSend};

/// Committed messages that have not been sent.
#[async_trait]
pub trait Outbox: fmt::Debug + Send + Sync + 'static {
    /// Claims up to `most` messages, in the order of their publication, and not many more than 4 MiB. Messages whose
    /// [key](StoredMessage::key) is `held_back` are left out. `None` if there are none, or if another relay has a claim: two relays
    /// that send at once would break the order.
    ///
    /// A claim ends with its value. It also ends when its process dies, and about 30 seconds after its begin at the latest.
    ///
    /// # Errors
    /// [`StoreError`], also if sent messages could not be removed later.
    async fn claim(&self, most: NonZeroU32, held_back: &[String]) -> Result<Option<Box<dyn Claim>>, StoreError>;

    /// Counts the messages that wait.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn backlog(&self) -> Result<Backlog, StoreError>;
}

/// Messages that this relay alone sends.
#[async_trait]
pub trait Claim: fmt::Debug + Send + Sync {
    /// The messages, in the order of their publication.
    fn messages(&self) -> &[StoredMessage];

    /// Removes those that the broker has confirmed, and ends the claim. The others stay.
    ///
    /// # Errors
    /// [`StoreError`]. The messages may be sent again.
    async fn finish(self: Box<Self>, sent: &[i64]) -> Result<(), StoreError>;
}

/// A message of an outbox.
#[derive(Debug)]
#[expect(clippy::exhaustive_structs, reason = "it is made by outboxes of other crates")]
pub struct StoredMessage {
    /// Its place in the outbox.
    pub sequence: i64,
    /// Its ordering key, or its id if it has none.
    pub key: String,
    /// The message. If it cannot be read, those behind it with the same key wait.
    pub message: Result<MessageToSend, StoreError>,
}

/// What waits to be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "it is made by outboxes of other crates")]
pub struct Backlog {
    /// How many messages wait.
    pub messages: u64,
    /// How long ago the oldest of them was published; zero if none waits.
    pub lag: Duration,
}

/// Why a message was not published. Its transaction should be rolled back.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OutboxError {
    /// The message cannot be sent.
    #[error("the message cannot be sent")]
    Invalid(#[from] InvalidMessage),
    /// The outbox has another message with this id.
    #[error("the outbox has another message with the id `{id}`; each message of a run needs a name of its own")]
    OtherMessage {
        /// The id.
        id: String,
    },
    /// The database has refused it.
    #[error("the message could not be added to the outbox")]
    Database(#[from] StoreError),
}
