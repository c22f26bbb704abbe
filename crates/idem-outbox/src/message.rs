//! A message that is to be sent.

use std::collections::HashSet;
use std::fmt;

use bytes::Bytes;
use idem_core::engine::Context;
use uuid::Uuid;

/// The header field with the id of the record of the run that published a message.
const RECORD: &str = "Idem-Record";

/// The header field with the trace of the request that the run answers.
const TRACE: &str = "traceparent";

/// The most bytes of a payload, so that payload and header fields together fit into the mebibyte that JetStream takes by default.
/// Keep a large content elsewhere, and its address in the payload.
const MAX_PAYLOAD_BYTES: usize = 960 * 1024;

/// The most bytes of all header fields: they have to fit into one frame of RabbitMQ.
const MAX_HEADER_BYTES: usize = 32 * 1024;

/// The most bytes of an id, a topic, an ordering key and the name of a header field: RabbitMQ takes no more.
const MAX_NAME_BYTES: usize = 255;

/// Header fields that brokers, and `idem-inbox`, give a meaning of their own.
const RESERVED: [&str; 3] = ["nats-", "idem-message-id", "idem-ordering-key"];

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
    /// Names and values of the header fields, each name once: set them by [`header`](Self::header).
    pub headers: Vec<(String, String)>,
    /// The content.
    pub payload: Bytes,
}

/// A message that cannot be sent: some broker would refuse it for ever.
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
    /// A part is too long.
    #[error("the {part} of the message has {bytes} bytes; brokers take at most {limit}")]
    TooLong {
        /// Which part.
        part: &'static str,
        /// Its size.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// The topic has a blank, which subjects of NATS cannot have.
    #[error("the topic `{0}` has a blank, which no subject of NATS can have")]
    Topic(String),
    /// The name of a header field is none in HTTP, or occurs twice, or has a meaning for a broker.
    #[error(
        "`{0}` cannot be the name of a header field here: it has to be a token as in HTTP, occur once, and not begin with `Nats-`"
    )]
    HeaderName(String),
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

    /// The message of this name of a run. Its id is a [downstream key](Context::downstream_key) of the run, so that a consumer recognises
    /// what a further attempt sends. The header field `Idem-Record` names the record, and `traceparent` the [trace](Context::trace) of the run.
    ///
    /// Use it for each message that a handler publishes, with a name that the handler uses once.
    #[must_use]
    pub fn of_run(run: &Context, name: &str, topic: impl Into<String>, payload: impl Into<Bytes>) -> Self {
        let id = run.downstream_key(&format!("message:{name}"));
        let message = Self { id, ..Self::new(topic, payload) }.header(RECORD, run.record_id().to_string());
        match run.trace() {
            Some(trace) => message.header(TRACE, trace.to_string()),
            None => message,
        }
    }

    /// Sets a header field. It replaces one of this name, whose case does not count.
    #[must_use]
    pub fn header(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        let name = name.into();
        self.headers.retain(|(other, _)| !other.eq_ignore_ascii_case(&name));
        self.headers.push((name, value.into()));
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

    /// Checks that every broker can take the message. Outboxes call it before they add it.
    ///
    /// # Errors
    /// [`InvalidMessage`].
    pub fn check(&self) -> Result<(), InvalidMessage> {
        let named = [("id", &self.id), ("topic", &self.topic)].into_iter();
        for (part, text) in named.chain(self.ordering_key.iter().map(|key| ("ordering key", key))) {
            check_text(part, text)?;
            if text.is_empty() {
                return Err(InvalidMessage::Empty { part });
            }
            check_length(part, text.len(), MAX_NAME_BYTES)?;
        }
        if self.topic.contains(char::is_whitespace) {
            return Err(InvalidMessage::Topic(self.topic.clone()));
        }
        let mut names = HashSet::new();
        let mut bytes = 0;
        for (name, value) in &self.headers {
            check_text("value of a header field", value)?;
            check_length("name of a header field", name.len(), MAX_NAME_BYTES)?;
            let lower = name.to_ascii_lowercase();
            let is_reserved = RESERVED.iter().any(|reserved| lower.starts_with(reserved));
            if name.is_empty() || !name.bytes().all(is_token) || is_reserved || !names.insert(lower) {
                return Err(InvalidMessage::HeaderName(name.clone()));
            }
            bytes += name.len() + value.len();
        }
        check_length("header", bytes, MAX_HEADER_BYTES)?;
        check_length("payload", self.payload.len(), MAX_PAYLOAD_BYTES)
    }
}

fn check_text(part: &'static str, text: &str) -> Result<(), InvalidMessage> {
    if text.contains(char::is_control) { Err(InvalidMessage::ControlCharacter { part }) } else { Ok(()) }
}

fn check_length(part: &'static str, bytes: usize, limit: usize) -> Result<(), InvalidMessage> {
    if bytes > limit { Err(InvalidMessage::TooLong { part, bytes, limit }) } else { Ok(()) }
}

/// Whether a name of RFC 9110 may have the byte.
fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
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
