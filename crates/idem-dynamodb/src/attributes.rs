//! Attributes of items.

use std::collections::HashMap;
use std::time::Duration;

use aws_sdk_dynamodb::primitives::Blob;
use aws_sdk_dynamodb::types::AttributeValue;
use idem_core::StoreError;

use crate::error::damaged;

/// The attributes of an item.
pub(crate) type Item = HashMap<String, AttributeValue>;

/// How much later than a record the service may remove its item. Its clocks may differ.
const TTL_SLACK: Duration = Duration::from_secs(60);

pub(crate) fn key_of(partition: &[u8], sort: &str) -> Item {
    HashMap::from([("pk".to_owned(), bytes(partition)), ("sk".to_owned(), text(sort))])
}

/// The attribute `ttl` of an item that expires then.
pub(crate) fn ttl(expires_at: i64) -> AttributeValue {
    let slack = i64::try_from(TTL_SLACK.as_secs()).unwrap_or_default();
    number(expires_at.saturating_add(999_999) / 1_000_000 + slack)
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        // Writing to a string does not fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

pub(crate) fn bytes(bytes: impl Into<Vec<u8>>) -> AttributeValue {
    AttributeValue::B(Blob::new(bytes))
}

pub(crate) fn text(text: impl Into<String>) -> AttributeValue {
    AttributeValue::S(text.into())
}

pub(crate) fn number(number: i64) -> AttributeValue {
    AttributeValue::N(number.to_string())
}

pub(crate) fn bytes_of<'a>(item: &'a Item, name: &'static str) -> Result<Option<&'a [u8]>, StoreError> {
    let value = item.get(name).map(|value| value.as_b().map(AsRef::as_ref).map_err(|_| damaged(name)));
    value.transpose()
}

pub(crate) fn text_of<'a>(item: &'a Item, name: &'static str) -> Result<Option<&'a str>, StoreError> {
    item.get(name).map(|value| value.as_s().map(String::as_str).map_err(|_| damaged(name))).transpose()
}

pub(crate) fn number_of(item: &Item, name: &'static str) -> Result<Option<i64>, StoreError> {
    let number = |value: &AttributeValue| value.as_n().ok()?.parse().ok();
    item.get(name).map(|value| number(value).ok_or_else(|| damaged(name))).transpose()
}
