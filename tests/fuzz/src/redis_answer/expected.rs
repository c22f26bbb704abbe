//! Reads answers by the headers of the scripts in `lua/` and the table in `packed.rs`, independently of the tested code.

use bytes::Bytes;
use idem_core::codec::FlatRecord;
use idem_core::{FastRead, Record, Timestamp};
use redis::Value;

use crate::records;

/// The time and the record, if there is one. `None` if the record expired before its expiry was read.
pub(super) fn seen(values: &[Value]) -> Option<Option<(Timestamp, Option<Record>)>> {
    let [Value::Array(time), found, expires] = values else { return None };
    let [seconds, micros] = time.as_slice() else { return None };
    let now = number(seconds)?.saturating_mul(1_000_000).saturating_add(number(micros)?);
    let expires_ms = number(expires)?;
    match found {
        Value::Nil => Some(Some((Timestamp::from_unix_micros(now), None))),
        Value::BulkString(_) if expires_ms == -2 => Some(None),
        Value::BulkString(bytes) if expires_ms >= 0 => {
            let record = record(bytes, expires_ms)?;
            Some(Some((Timestamp::from_unix_micros(now).max(record.updated_at), Some(record))))
        }
        _ => None,
    }
}

pub(super) fn is_changed(values: &[Value]) -> Option<bool> {
    match values {
        [Value::Int(0)] => Some(false),
        [Value::Int(1)] => Some(true),
        _ => None,
    }
}

pub(super) fn fast_read(value: &Value) -> Option<FastRead> {
    let Value::Array(values) = value else { return None };
    let [now, entry] = values.as_slice() else { return None };
    let bytes = match entry {
        Value::BulkString(entry) => {
            let rank = entry.iter().take_while(|byte| byte.is_ascii_digit()).count();
            entry[rank..].strip_prefix(b":").map(Bytes::copy_from_slice)
        }
        _ => None,
    };
    Some(FastRead { now: time(now)?, bytes })
}

pub(super) fn time(value: &Value) -> Option<Timestamp> {
    number(value).map(Timestamp::from_unix_micros)
}

/// Parses the bytes of a record, with nothing after them.
fn record(bytes: &[u8], expires_ms: i64) -> Option<Record> {
    let (head, mut rest) = bytes.split_first_chunk::<92>()?;
    let packed = |from: usize, to: usize| {
        head[from..to].iter().fold(0_u64, |number, byte| number.wrapping_mul(256) | u64::from(*byte)) as i64
    };
    let mut parts: Vec<(u8, Vec<u8>)> = Vec::new();
    while let Some((number, after)) = rest.split_first() {
        let (length, after) = after.split_first_chunk::<4>()?;
        let length = u32::from_be_bytes(*length) as usize;
        if after.len() < length || parts.last().is_some_and(|(last, _)| last >= number) || matches!(number, 0 | 5..128)
        {
            return None;
        }
        parts.push((*number, after[..length].to_vec()));
        rest = &after[length..];
    }
    let part = |wanted: u8| parts.iter().find(|(number, _)| *number == wanted).map(|(_, part)| part.clone());
    let state = packed(2, 3);
    let in_progress = |number| Some(number).filter(|_| state == 1);
    let ends = expires_ms.saturating_mul(1_000).saturating_sub(packed(40, 42));
    let changed = ends.saturating_sub(packed(24, 32));
    let till = changed.saturating_add(packed(32, 40));
    let flat = FlatRecord {
        format: packed(0, 2),
        fingerprint_algorithm: packed(50, 52),
        fingerprint: head[52..84].to_vec(),
        owner: head[3..19].to_vec(),
        attempt: packed(19, 23),
        state,
        acquisition: in_progress(packed(84, 85)),
        takeover: in_progress(packed(85, 86)),
        lease_until: in_progress(till),
        not_before: Some(till).filter(|_| state == 5),
        checkpoint_name: part(1).map(String::from_utf8).transpose().ok()?,
        checkpoint_data: part(2),
        status: Some(packed(86, 88)).filter(|_| state != 1),
        headers: part(3),
        body: part(4).map(Bytes::from),
        created_at: Some(packed(42, 50)).filter(|created| *created != 0).unwrap_or(changed),
        updated_at: changed,
        expires_at: ends,
    };
    records::are_a_record(&flat).then(|| Record::try_from(flat).ok()).flatten()
}

fn number(value: &Value) -> Option<i64> {
    match value {
        Value::Int(number) => Some(*number),
        Value::BulkString(digits) => String::from_utf8(digits.clone()).ok()?.parse().ok(),
        _ => None,
    }
}
