//! Where messages are set aside that cannot be handled.

#[cfg(feature = "postgres")]
mod postgres;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
mod row;
#[cfg(feature = "sqlite")]
mod sqlite;

use std::fmt;
use std::num::NonZeroU32;
use std::time::Duration;

use async_trait::async_trait;
use idem_core::StoreError;

#[cfg(feature = "postgres")]
pub use self::postgres::PostgresParking;
#[cfg(feature = "sqlite")]
pub use self::sqlite::SqliteParking;
use crate::message::Message;

/// How long listing parked messages may take. An index serves it, so that it only takes longer if the database does not answer, or if
/// the messages are too large for one part: ask for fewer then.
pub const LIST_TIMEOUT: Duration = Duration::from_secs(10);

/// Limits how long a list may take.
#[cfg(any(feature = "postgres", feature = "sqlite"))]
async fn within<T>(list: impl Future<Output = Result<T, StoreError>>) -> Result<T, StoreError> {
    tokio::time::timeout(LIST_TIMEOUT, list).await.unwrap_or_else(|_| {
        let message = format!("the parked messages could not be listed within {LIST_TIMEOUT:?}; ask for fewer at once");
        Err(StoreError::new(idem_core::StoreErrorKind::Timeout, message))
    })
}

/// Keeps messages that were set aside, and counts runs that were lost.
///
/// An entry belongs to a subscriber and the [key](Message::parking_key) of a message. Every method commits before it returns, asks the clock of its
/// server, and may be repeated: the same report twice counts once, except for [`begin`](Self::begin).
#[async_trait]
pub trait Parking: fmt::Debug + Send + Sync + 'static {
    /// Counts a run as lost until it is [reported](Self::report). Returns how many runs of the message count as lost, this one
    /// included.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn begin(&self, subscriber: &str, key: &str) -> Result<u32, StoreError>;

    /// Reports how many runs of the message count as lost. With zero, the entry is removed, unless the message is parked.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn report(&self, subscriber: &str, key: &str, lost: u32) -> Result<(), StoreError>;

    /// Parks a message, and forgets its lost runs. If it is parked already, it stays as it is. If it was replayed, it stays replayed:
    /// a late delivery of the first message must not bring it back.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn park(&self, subscriber: &str, message: &Message, reason: &str) -> Result<(), StoreError>;

    /// Lists up to `most` parked messages of a subscriber, the oldest first, after the entry `after`. With `only_requested`, those
    /// whose replay was requested. An entry that cannot be read is logged and left out. The list has ended when there is none. It takes
    /// at most [`LIST_TIMEOUT`].
    ///
    /// # Errors
    /// [`StoreError`]; of the kind `Timeout` after that time.
    async fn list(
        &self,
        subscriber: &str,
        only_requested: bool,
        after: Option<&ParkedMessage>,
        most: NonZeroU32,
    ) -> Result<Vec<ParkedMessage>, StoreError>;

    /// Asks the consumers of the subscriber to handle a parked message again. False if it is not parked.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn request_replay(&self, subscriber: &str, key: &str) -> Result<bool, StoreError>;

    /// Reports how this replay ended: well, or with another reason to park the message. A report about another replay changes
    /// nothing.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn replayed(&self, subscriber: &str, parked: &ParkedMessage, failure: Option<&str>)
    -> Result<(), StoreError>;

    /// Removes up to `most` entries of the subscriber that have not changed for `keep`, and returns how many. Messages that are parked
    /// stay.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn purge(&self, subscriber: &str, keep: Duration, most: NonZeroU32) -> Result<u32, StoreError>;
}

/// A message that was set aside.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ParkedMessage {
    /// The message.
    pub message: Message,
    /// Why it was parked.
    pub reason: String,
    /// When it was parked, in microseconds since 1970.
    pub parked_at_micros: i64,
    /// How many replays were requested.
    pub replays: u32,
    /// Whether the last of them has not ended.
    pub is_requested: bool,
}

impl ParkedMessage {
    /// A parked message, read back by its parking.
    #[must_use]
    pub fn new(message: Message, reason: String, parked_at_micros: i64, replays: u32, is_requested: bool) -> Self {
        Self { message, reason, parked_at_micros, replays, is_requested }
    }
}
