//! Parses the replies of the server.

use std::fmt;

use bytes::Bytes;
use idem_core::{FastRead, StoreError, Timestamp};
use redis::Value;

use crate::error::unreadable;

/// Exactly `N` values.
pub(crate) fn array<const N: usize>(values: Vec<Value>) -> Result<[Value; N], StoreError> {
    values.try_into().map_err(|values: Vec<Value>| other(format_args!("{} values and not {N}", values.len())))
}

/// What a script returns as a table.
pub(crate) fn table<const N: usize>(value: Value) -> Result<[Value; N], StoreError> {
    match value {
        Value::Array(values) => array(values),
        _ => Err(other("something else than a table")),
    }
}

/// Whether a script has changed something: it returns 1 or 0.
pub(crate) fn is_changed(values: &[Value]) -> Result<bool, StoreError> {
    match values {
        [Value::Int(1)] => Ok(true),
        [Value::Int(0)] => Ok(false),
        _ => Err(other("neither 0 nor 1")),
    }
}

/// A string that may be missing.
pub(crate) fn maybe_bytes(value: Value) -> Result<Option<Bytes>, StoreError> {
    match value {
        Value::BulkString(bytes) => Ok(Some(bytes.into())),
        Value::Nil => Ok(None),
        _ => Err(other("something else than a string")),
    }
}

pub(crate) fn number(value: &Value) -> Result<i64, StoreError> {
    match value {
        Value::Int(number) => Ok(*number),
        Value::BulkString(digits) => std::str::from_utf8(digits).map_err(unreadable)?.parse().map_err(unreadable),
        _ => Err(other("something else than a number")),
    }
}

/// What `TIME` answers: seconds and microseconds.
pub(crate) fn server_time(value: Value) -> Result<Timestamp, StoreError> {
    let [seconds, micros] = table(value)?;
    let (seconds, micros) = (number(&seconds)?, number(&micros)?);
    Ok(Timestamp::from_unix_micros(seconds.saturating_mul(1_000_000).saturating_add(micros)))
}

/// What `fast_get.lua` returns.
pub(crate) fn fast_read(value: Value) -> Result<FastRead, StoreError> {
    let [now, entry] = table(value)?;
    let bytes = match entry {
        Value::BulkString(entry) => without_rank(entry),
        _ => None,
    };
    Ok(FastRead { now: time(&now)?, bytes })
}

/// The bytes of an entry, after its rank; `None` when the string is no entry.
fn without_rank(entry: Vec<u8>) -> Option<Bytes> {
    let colon = entry.iter().position(|byte| !byte.is_ascii_digit())?;
    (entry[colon] == b':').then(|| Bytes::from(entry).slice(colon + 1..))
}

/// What the other scripts of the fast store return.
pub(crate) fn time(value: &Value) -> Result<Timestamp, StoreError> {
    number(value).map(Timestamp::from_unix_micros)
}

pub(crate) fn other(what: impl fmt::Display) -> StoreError {
    unreadable(format!("there came {what}"))
}

#[cfg(test)]
mod tests {
    use idem_core::StoreErrorKind;

    use super::*;

    #[test]
    fn an_answer_that_is_shorter_or_longer_than_it_should_be_is_refused() {
        assert_eq!(array(vec![Value::Int(5)]).unwrap(), [Value::Int(5)]);
        for values in [vec![], vec![Value::Int(5), Value::Int(5)]] {
            assert_eq!(array::<1>(values).unwrap_err().kind(), StoreErrorKind::Corrupt);
        }
        assert_eq!(table::<2>(Value::Int(1)).unwrap_err().kind(), StoreErrorKind::Corrupt);
        assert_eq!(is_changed(&[Value::Int(2)]).unwrap_err().kind(), StoreErrorKind::Corrupt);
    }

    #[test]
    fn an_entry_is_what_comes_after_its_rank() {
        let bytes = |entry: &[u8]| without_rank(entry.to_vec());
        assert_eq!(bytes(b"17:a:b").as_deref(), Some(b"a:b".as_slice()));
        assert_eq!(bytes(b"17:").as_deref(), Some(b"".as_slice()));
        for garbage in [b"".as_slice(), b"17", b"a:b", b"1a:b"] {
            assert_eq!(bytes(garbage), None);
        }
    }
}
