//! A message, as a broker delivers it.

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use idem_core::{IdempotencyKey, TraceParent};
use sha2::{Digest as _, Sha256};

/// What the key of a hashed id begins with. An id that begins so is hashed as well, so that no id has the key of another one.
const HASHED: &str = "sha256:";

/// A message that a broker has delivered. `Debug` shows neither payload nor header fields.
///
/// Clones share their buffers.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Message {
    /// The id that its publisher chose. It stays the same however often the message is published or delivered. Empty if the message
    /// has none: it is parked.
    pub id: String,
    /// The subject, topic, stream or routing key.
    pub topic: String,
    /// Messages with equal ordering keys are handled one after the other, if the consumer is asked for that.
    pub ordering_key: Option<String>,
    /// Names and values of the header fields.
    pub headers: Vec<(String, Bytes)>,
    /// The content. It is fingerprinted: another payload under one id is parked.
    pub payload: Bytes,
    /// Which delivery this is, from 1, as far as the broker counts. 1 if it is the first.
    pub delivery: u32,
    /// How long ago it was published, if the broker tells.
    pub age: Option<Duration>,
}

impl Message {
    /// The first delivery of a message without header fields.
    #[must_use]
    pub fn new(id: impl Into<String>, topic: impl Into<String>, payload: impl Into<Bytes>) -> Self {
        Self {
            id: id.into(),
            topic: topic.into(),
            ordering_key: None,
            headers: Vec::new(),
            payload: payload.into(),
            delivery: 1,
            age: None,
        }
    }

    /// The value of a header field. Names are compared without regard to case.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&Bytes> {
        self.headers.iter().find(|(field, _)| field.eq_ignore_ascii_case(name)).map(|(_, value)| value)
    }

    /// The trace of its header field `traceparent`. An invalid one, or more than one, counts as none.
    #[must_use]
    pub fn trace(&self) -> Option<TraceParent> {
        let is_it = |(name, _): &&(String, Bytes)| name.eq_ignore_ascii_case("traceparent");
        let mut fields = self.headers.iter().filter(is_it);
        let (_, only) = fields.next().filter(|_| fields.next().is_none())?;
        std::str::from_utf8(only).ok()?.parse().ok()
    }

    /// The key of the message's entry in the parking: 64 lower-case hexadecimal digits, made of its id and its payload. Two messages
    /// with one id and different payloads have two.
    #[must_use]
    pub fn parking_key(&self) -> String {
        let mut hash = Sha256::new();
        hash.update((self.id.len() as u64).to_be_bytes());
        hash.update(&self.id);
        hash.update(&self.payload);
        hexadecimal(&hash.finalize())
    }

    /// The key of the message's record: its id, or a hash of it if that is no valid key.
    #[must_use]
    pub fn key(&self) -> IdempotencyKey {
        match IdempotencyKey::new(&self.id) {
            Ok(key) if !self.id.starts_with(HASHED) => key,
            _ => hashed(&self.id),
        }
    }
}

#[expect(clippy::expect_used, reason = "a prefix and 64 hexadecimal digits are a key")]
pub(crate) fn hashed(id: &str) -> IdempotencyKey {
    IdempotencyKey::new(format!("{HASHED}{}", hexadecimal(&Sha256::digest(id)))).expect("visible ASCII")
}

/// A text as it is, and anything else in hexadecimal. Different bytes stay different.
#[cfg(any(feature = "kafka", feature = "redis"))]
pub(crate) fn distinct_text(bytes: &[u8]) -> String {
    const HEXADECIMAL: &str = "hex:";
    match std::str::from_utf8(bytes) {
        Ok(text) if !text.starts_with(HEXADECIMAL) => text.to_owned(),
        _ => format!("{HEXADECIMAL}{}", hexadecimal(bytes)),
    }
}

pub(crate) fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

impl fmt::Debug for Message {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Message")
            .field("id", &self.id)
            .field("topic", &self.topic)
            .field("ordering_key", &self.ordering_key)
            .field("payload_bytes", &self.payload.len())
            .field("delivery", &self.delivery)
            .field("age", &self.age)
            .finish_non_exhaustive()
    }
}
