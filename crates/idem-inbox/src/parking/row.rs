//! How a parked message is kept in a row.

use std::time::Duration;

use bytes::Bytes;

use crate::message::Message;

/// The parts of a message that are kept besides its payload, as JSON.
#[derive(serde::Serialize, serde::Deserialize)]
struct Envelope {
    id: String,
    topic: String,
    ordering_key: Option<String>,
    headers: Vec<(String, Vec<u8>)>,
}

pub(super) fn envelope(message: &Message) -> Result<String, serde_json::Error> {
    let headers = message.headers.iter().map(|(name, value)| (name.clone(), value.to_vec())).collect();
    let Message { id, topic, ordering_key, .. } = message.clone();
    serde_json::to_string(&Envelope { id, topic, ordering_key, headers })
}

pub(super) fn read_message(envelope: &str, payload: Vec<u8>) -> Result<Message, serde_json::Error> {
    let Envelope { id, topic, ordering_key, headers } = serde_json::from_str(envelope)?;
    let headers = headers.into_iter().map(|(name, value)| (name, Bytes::from(value))).collect();
    Ok(Message { ordering_key, headers, ..Message::new(id, topic, payload) })
}

/// As much as every database can subtract from a time.
pub(super) fn micros(duration: Duration) -> i64 {
    const CENTURY: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);
    i64::try_from(duration.min(CENTURY).as_micros()).unwrap_or(i64::MAX)
}
