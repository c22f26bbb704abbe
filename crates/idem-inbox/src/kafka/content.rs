//! The message of a record of Kafka.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use rdkafka::message::{BorrowedMessage, Headers as _, Message as _};

use crate::message::{Message, distinct_text};
use crate::settings::SUSPECT_FROM;

/// The header field with the id of a message.
const ID: &str = "Idem-Message-Id";

/// The message of a record. The age of a suspect is not told: it would count as forgotten, although it may be delivered for the first
/// time. A record whose header fields cannot be read has no id.
pub(super) fn content(record: &BorrowedMessage<'_>, is_suspect: bool) -> Message {
    let (topic, number, offset) = (record.topic(), record.partition(), record.offset());
    let fields = fields(record);
    // Another message can get the same offset, if the cluster has lost messages or the topic is made again.
    let place = || format!("{topic}:{number}:{offset}:{}", record.timestamp().to_millis().unwrap_or_default());
    let id = match &fields {
        Some(fields) => {
            let field = fields.iter().find(|(name, _)| name.eq_ignore_ascii_case(ID));
            field.map_or_else(place, |(_, id)| distinct_text(id))
        }
        None => String::new(),
    };
    let published = record.timestamp().to_millis().and_then(|millis| u64::try_from(millis).ok());
    let published = published.and_then(|millis| SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(millis)));
    let age = published.and_then(|published| SystemTime::now().duration_since(published).ok());
    Message {
        ordering_key: Some(record.key().map_or_else(|| format!("{topic}:{number}"), distinct_text)),
        headers: fields.unwrap_or_default(),
        delivery: if is_suspect { SUSPECT_FROM } else { 1 },
        age: age.filter(|_| !is_suspect),
        ..Message::new(id, topic, record.payload().map(Bytes::copy_from_slice).unwrap_or_default())
    }
}

/// The header fields of a record; `None` if they cannot be read: the client panics at a name that is no UTF-8.
fn fields(record: &BorrowedMessage<'_>) -> Option<Vec<(String, Bytes)>> {
    let read = || {
        let fields = record.headers().into_iter().flat_map(|headers| headers.iter());
        let value = |value: Option<&[u8]>| value.map(Bytes::copy_from_slice).unwrap_or_default();
        fields.map(|field| (field.key.to_owned(), value(field.value))).collect()
    };
    catch_unwind(AssertUnwindSafe(read)).ok()
}
