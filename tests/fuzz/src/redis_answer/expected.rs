//! What answers mean, by the headers of the scripts in `lua/` and by none of the code that is tried.

use std::time::Duration;

use bytes::Bytes;
use idem_core::codec::FlatRecord;
use idem_core::{
    Acquire, AcquireOutcome, Acquisition, Algorithm, Checkpoint, FastRead, Lease, LiveRecord, OwnerOutcome, Record,
    Timestamp,
};
use redis::Value;

use crate::records;

pub(super) fn acquire(value: &Value, request: &Acquire) -> Option<AcquireOutcome> {
    let Value::Array(values) = value else { return None };
    let (Value::BulkString(tag), values) = values.split_first()? else { return None };
    match (tag.as_slice(), values) {
        (b"acquired", [attempt, how, name, data]) => {
            let acquisition = match number(how)?? {
                1 => Acquisition::Fresh,
                2 => Acquisition::Takeover,
                3 => Acquisition::Retry,
                4 => Acquisition::Probe,
                _ => return None,
            };
            let checkpoint = match (text(name)?, bytes(data)?) {
                (Some(name), Some(data)) => {
                    let (sequence, data) = data.split_first_chunk::<4>()?;
                    let sequence = u32::from_be_bytes(*sequence);
                    Some(Checkpoint { sequence, name: name.into(), data: data.to_vec().into() })
                }
                (None, None) => None,
                _ => return None,
            };
            let attempt = u32::try_from(number(attempt)??).ok().filter(|attempt| *attempt > 0)?;
            Some(AcquireOutcome::Acquired(Lease {
                id: request.id,
                owner: request.owner,
                attempt,
                acquisition,
                checkpoint,
            }))
        }
        (b"in_progress", [left]) => Some(AcquireOutcome::InProgress { retry_after: micros(left)? }),
        (b"backoff", [left]) => Some(AcquireOutcome::Backoff { retry_after: micros(left)? }),
        (b"mismatch", [algorithm]) => {
            let algorithm = u16::try_from(number(algorithm)??).ok()?;
            Some(AcquireOutcome::Mismatch { stored_algorithm: Algorithm::from_number(algorithm) })
        }
        (b"replay", fields) => record(fields)?.replay().map(AcquireOutcome::Replay),
        _ => None,
    }
}

pub(super) fn owner(value: &Value) -> Option<OwnerOutcome> {
    match value {
        Value::Int(0) => Some(OwnerOutcome::LeaseLost),
        Value::Int(1) => Some(OwnerOutcome::Applied),
        _ => None,
    }
}

pub(super) fn peek(value: &Value) -> Option<Option<LiveRecord>> {
    match value {
        Value::Nil => Some(None),
        Value::Array(values) => {
            let (left, fields) = values.split_first()?;
            Some(Some(LiveRecord { remaining: micros(left)?, record: record(fields)? }))
        }
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
    let Value::BulkString(digits) = value else { return None };
    String::from_utf8(digits.clone()).ok()?.parse().ok().map(Timestamp::from_unix_micros)
}

/// The fields of `everything`, and nothing after them.
fn record(fields: &[Value]) -> Option<Record> {
    let [head, who, point, data, headers, body] = fields else { return None };
    let (head, who) = (<[u8; 45]>::try_from(bytes(head)??).ok()?, <[u8; 48]>::try_from(bytes(who)??).ok()?);
    let packed = |from: usize, to: usize| {
        let number = head[from..to].iter().fold(0_u64, |number, byte| number * 256 + u64::from(*byte));
        i64::try_from(number).unwrap_or(i64::MAX)
    };
    let state = packed(8, 9);
    let in_progress = |number| Some(number).filter(|_| state == 1);
    let flat = FlatRecord {
        format: packed(0, 2),
        fingerprint_algorithm: packed(2, 4),
        fingerprint: who[..32].to_vec(),
        owner: who[32..].to_vec(),
        attempt: packed(4, 8),
        state,
        acquisition: in_progress(packed(9, 10)),
        takeover: in_progress(packed(10, 11)),
        lease_until: in_progress(packed(13, 21)),
        not_before: Some(packed(13, 21)).filter(|_| state == 5),
        checkpoint_name: text(point)?,
        checkpoint_data: bytes(data)?,
        status: Some(packed(11, 13)).filter(|_| state != 1),
        headers: bytes(headers)?,
        body: bytes(body)?.map(Bytes::from),
        created_at: packed(21, 29),
        updated_at: packed(29, 37),
        expires_at: packed(37, 45),
    };
    records::are_a_record(&flat).then(|| Record::try_from(flat).ok()).flatten()
}

fn bytes(value: &Value) -> Option<Option<Vec<u8>>> {
    match value {
        Value::BulkString(bytes) => Some(Some(bytes.clone())),
        Value::Nil => Some(None),
        _ => None,
    }
}

fn text(value: &Value) -> Option<Option<String>> {
    bytes(value)?.map_or(Some(None), |bytes| String::from_utf8(bytes).ok().map(Some))
}

fn number(value: &Value) -> Option<Option<i64>> {
    match value {
        Value::Int(number) => Some(Some(*number)),
        value => text(value)?.map_or(Some(None), |digits| digits.parse().ok().map(Some)),
    }
}

fn micros(value: &Value) -> Option<Duration> {
    u64::try_from(number(value)??).ok().map(Duration::from_micros)
}
