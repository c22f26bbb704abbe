//! A message that is to be sent.

use std::fmt;

use bytes::Bytes;
use idem_core::engine::Context;
use uuid::Uuid;

/// The header field with the id of the record of the run that published a message.
const RECORD: &str = "Idem-Record";

/// The most bytes of a payload: what JetStream and Redis take by default, and far less than what Kafka takes if it is asked to. Keep a
/// large content elsewhere, and its address in the payload.
const MAX_PAYLOAD_BYTES: usize = 1024 * 1024;

/// A message that is to be sent. `Debug` shows neither payload nor header fields.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct MessageToSend {
    /// Its id. It stays the same however often the message is sent.
    pub id: String,
    /// The subject, topic, stream or routing key.
    pub topic: String,
    /// Messages with equal ordering keys are sent one after the other, in the order of their commits.
    pub ordering_key: Option<String>,
    /// Names and values of the header fields.
    pub headers: Vec<(String, String)>,
    /// The content.
    pub payload: Bytes,
}

/// A message that cannot be sent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidMessage {
    /// A part is no text that every broker and database can keep.
    #[error("the {part} of the message has a control character; brokers and databases refuse those")]
    ControlCharacter {
        /// Which part.
        part: &'static str,
    },
    /// A part is empty.
    #[error("the {part} of the message is empty")]
    Empty {
        /// Which part.
        part: &'static str,
    },
    /// The payload is too large.
    #[error("the payload has {bytes} bytes; at most 1048576 are sent, so keep it elsewhere and send its address")]
    PayloadTooLarge {
        /// Its size.
        bytes: usize,
    },
}

impl MessageToSend {
    /// A message with a random id.
    #[must_use]
    pub fn new(topic: impl Into<String>, payload: impl Into<Bytes>) -> Self {
        Self {
            id: Uuid::new_v4().to_string(),
            topic: topic.into(),
            ordering_key: None,
            headers: Vec::new(),
            payload: payload.into(),
        }
    }

    /// The message of this name of a run. Its id follows from the record of the run and the name, so that a further attempt sends no
    /// second message. A header field `Idem-Record` names the record.
    ///
    /// Use it for each message that a handler publishes, with a name that the handler uses once.
    #[must_use]
    pub fn of_run(run: &Context, name: &str, topic: impl Into<String>, payload: impl Into<Bytes>) -> Self {
        let id = run.downstream_key(&format!("message:{name}"));
        Self { id, ..Self::new(topic, payload) }.header(RECORD, run.record_id().to_string())
    }

    /// Adds a header field, such as `traceparent`.
    #[must_use]
    pub fn header(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.headers.push((name.into(), value.into()));
        self
    }

    /// Sets the ordering key.
    ///
    /// Transactions that publish under one key wait for each other, from their first such message to their end. So publish
    /// late in a transaction, and several keys always in one order.
    #[must_use]
    pub fn ordered_by(mut self, key: impl Into<String>) -> Self {
        self.ordering_key = Some(key.into());
        self
    }

    /// # Errors
    /// [`InvalidMessage`].
    pub(crate) fn check(&self) -> Result<(), InvalidMessage> {
        let named = [("id", &self.id), ("topic", &self.topic)].into_iter();
        let named = named.chain(self.ordering_key.iter().map(|key| ("ordering key", key)));
        let names = self.headers.iter().map(|(name, _)| ("name of a header field", name));
        for (part, text) in named.chain(names) {
            if text.is_empty() {
                return Err(InvalidMessage::Empty { part });
            }
            if text.contains(char::is_control) {
                return Err(InvalidMessage::ControlCharacter { part });
            }
        }
        if self.headers.iter().any(|(_, value)| value.contains(char::is_control)) {
            return Err(InvalidMessage::ControlCharacter { part: "value of a header field" });
        }
        let bytes = self.payload.len();
        if bytes > MAX_PAYLOAD_BYTES { Err(InvalidMessage::PayloadTooLarge { bytes }) } else { Ok(()) }
    }
}

impl fmt::Debug for MessageToSend {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("MessageToSend")
            .field("id", &self.id)
            .field("topic", &self.topic)
            .field("ordering_key", &self.ordering_key)
            .field("payload_bytes", &self.payload.len())
            .finish_non_exhaustive()
    }
}
