//! Reading what scripts return.

use std::time::Duration;

use bytes::Bytes;
use idem_core::codec::{self, FlatRecord};
use idem_core::{
    Acquire, AcquireOutcome, Algorithm, Checkpoint, FastRead, Lease, LiveRecord, OwnerOutcome, Record, StoreError,
    Timestamp,
};
use redis::Value;

use crate::error::unreadable;

/// What `acquire.lua` returns.
pub(crate) fn acquire(value: Value, request: &Acquire) -> Result<AcquireOutcome, StoreError> {
    let mut values = Values::of(value)?;
    let outcome = outcome(&mut values, request)?;
    values.end()?;
    Ok(outcome)
}

fn outcome(values: &mut Values, request: &Acquire) -> Result<AcquireOutcome, StoreError> {
    let tag = values.bytes()?;
    match tag.as_slice() {
        b"acquired" => {
            let (attempt, how) = (values.number()?, values.number()?);
            let attempt = u32::try_from(attempt).map_err(unreadable)?;
            if attempt == 0 {
                return Err(unreadable("a record was acquired for no attempt"));
            }
            Ok(AcquireOutcome::Acquired(Lease {
                id: request.id,
                owner: request.owner,
                attempt,
                acquisition: codec::acquisition(how)
                    .ok_or_else(|| unreadable("a record was acquired in an unknown way"))?,
                checkpoint: values.checkpoint()?,
            }))
        }
        b"in_progress" => Ok(AcquireOutcome::InProgress { retry_after: values.micros()? }),
        b"backoff" => Ok(AcquireOutcome::Backoff { retry_after: values.micros()? }),
        b"mismatch" => {
            let algorithm = u16::try_from(values.number()?).map_err(unreadable)?;
            Ok(AcquireOutcome::Mismatch { stored_algorithm: Algorithm::from_number(algorithm) })
        }
        b"replay" => {
            let replay = values.record()?.replay();
            replay.map(AcquireOutcome::Replay).ok_or_else(|| unreadable("a record to replay is not settled"))
        }
        _ => Err(unreadable("a script returned an unknown outcome")),
    }
}

/// What the scripts of owners return.
pub(crate) fn owner(value: &Value) -> Result<OwnerOutcome, StoreError> {
    match value {
        Value::Int(1) => Ok(OwnerOutcome::Applied),
        Value::Int(0) => Ok(OwnerOutcome::LeaseLost),
        _ => Err(unreadable("a script returned an unknown outcome")),
    }
}

/// What `peek.lua` returns.
pub(crate) fn peek(value: Value) -> Result<Option<LiveRecord>, StoreError> {
    match value {
        Value::Nil => Ok(None),
        value => {
            let mut values = Values::of(value)?;
            let remaining = values.micros()?;
            let record = values.record()?;
            values.end()?;
            Ok(Some(LiveRecord { record, remaining }))
        }
    }
}

/// What `fast_get.lua` returns.
pub(crate) fn fast_read(value: Value) -> Result<FastRead, StoreError> {
    let Value::Array(answer) = value else { return Err(misanswered()) };
    let [now, entry] = <[Value; 2]>::try_from(answer).map_err(|_| misanswered())?;
    let bytes = match entry {
        Value::BulkString(entry) => without_rank(entry),
        _ => None,
    };
    Ok(FastRead { now: time(&now)?, bytes })
}

/// The bytes of an entry; `None` when it is none.
fn without_rank(entry: Vec<u8>) -> Option<Bytes> {
    let colon = entry.iter().position(|byte| !byte.is_ascii_digit())?;
    (entry[colon] == b':').then(|| Bytes::from(entry).slice(colon + 1..))
}

/// What the other scripts of the fast store return.
pub(crate) fn time(value: &Value) -> Result<Timestamp, StoreError> {
    let Value::BulkString(digits) = value else { return Err(misanswered()) };
    let digits = std::str::from_utf8(digits).map_err(unreadable)?;
    digits.parse().map(Timestamp::from_unix_micros).map_err(unreadable)
}

fn misanswered() -> StoreError {
    unreadable("a script returned something else than it does")
}

/// An array, read from its beginning.
struct Values(std::vec::IntoIter<Value>);

impl Values {
    fn of(value: Value) -> Result<Self, StoreError> {
        match value {
            Value::Array(values) => Ok(Self(values.into_iter())),
            _ => Err(unreadable("a script returned something that is no array")),
        }
    }

    /// What is left over means that the answer is not the one it was taken for.
    fn end(self) -> Result<(), StoreError> {
        if self.0.as_slice().is_empty() { Ok(()) } else { Err(unreadable("a script returned more than it does")) }
    }

    fn maybe_bytes(&mut self) -> Result<Option<Vec<u8>>, StoreError> {
        match self.0.next() {
            Some(Value::BulkString(bytes)) => Ok(Some(bytes)),
            Some(Value::Nil) => Ok(None),
            _ => Err(unreadable("a script returned a value of an unknown type")),
        }
    }

    fn bytes(&mut self) -> Result<Vec<u8>, StoreError> {
        self.maybe_bytes()?.ok_or_else(|| unreadable("a record lacks a field"))
    }

    fn maybe_text(&mut self) -> Result<Option<String>, StoreError> {
        self.maybe_bytes()?.map(String::from_utf8).transpose().map_err(unreadable)
    }

    /// Scripts write numbers as such or as digits.
    fn number(&mut self) -> Result<i64, StoreError> {
        if let Some(&Value::Int(number)) = self.0.as_slice().first() {
            self.0.next();
            return Ok(number);
        }
        std::str::from_utf8(&self.bytes()?).map_err(unreadable)?.parse().map_err(unreadable)
    }

    fn micros(&mut self) -> Result<Duration, StoreError> {
        u64::try_from(self.number()?).map(Duration::from_micros).map_err(unreadable)
    }

    fn checkpoint(&mut self) -> Result<Option<Checkpoint>, StoreError> {
        codec::decode_checkpoint(self.maybe_text()?, self.maybe_bytes()?).map_err(unreadable)
    }

    /// What `everything` in `record.lua` returns.
    fn record(&mut self) -> Result<Record, StoreError> {
        let (head, who) = (self.bytes()?, self.bytes()?);
        let (mut head, mut who) = (Packed(&head), Packed(&who));
        let (format, fingerprint_algorithm) = (head.number::<2>()?, head.number::<2>()?);
        let (attempt, state) = (head.number::<4>()?, head.number::<1>()?);
        let (acquisition, takeover) = (head.number::<1>()?, head.number::<1>()?);
        let (status, till) = (head.number::<2>()?, head.number::<8>()?);
        let (created_at, updated_at, expires_at) = (head.number::<8>()?, head.number::<8>()?, head.number::<8>()?);
        head.end()?;
        let (fingerprint, owner) = (who.array::<32>()?, who.array::<16>()?);
        who.end()?;
        let (runs, waits) = (state == codec::state::IN_PROGRESS, state == codec::state::FAILED_RETRYABLE);
        let flat = FlatRecord {
            format,
            fingerprint_algorithm,
            fingerprint: fingerprint.to_vec(),
            owner: owner.to_vec(),
            attempt,
            state,
            acquisition: runs.then_some(acquisition),
            takeover: runs.then_some(takeover),
            lease_until: runs.then_some(till),
            not_before: waits.then_some(till),
            checkpoint_name: self.maybe_text()?,
            checkpoint_data: self.maybe_bytes()?,
            status: (!runs).then_some(status),
            headers: self.maybe_bytes()?,
            body: self.maybe_bytes()?.map(Bytes::from),
            created_at,
            updated_at,
            expires_at,
        };
        Record::try_from(flat).map_err(unreadable)
    }
}

/// A packed field of a record, read from its beginning; `record.lua` says what is in it.
struct Packed<'a>(&'a [u8]);

impl<'a> Packed<'a> {
    fn array<const N: usize>(&mut self) -> Result<&'a [u8; N], StoreError> {
        let (array, rest) =
            self.0.split_first_chunk().ok_or_else(|| unreadable("a packed field of a record is too short"))?;
        self.0 = rest;
        Ok(array)
    }

    /// A number of so many bytes. Lua's reach further than ours: a time beyond the last one is for ever.
    fn number<const N: usize>(&mut self) -> Result<i64, StoreError> {
        let number = self.array::<N>()?.iter().fold(0, |number: u64, &byte| number << 8 | u64::from(byte));
        Ok(i64::try_from(number).unwrap_or(i64::MAX))
    }

    fn end(self) -> Result<(), StoreError> {
        if self.0.is_empty() { Ok(()) } else { Err(unreadable("a packed field of a record is too long")) }
    }
}

#[cfg(test)]
mod tests {
    use idem_core::StoreErrorKind;
    use idem_testkit::fixture::request;

    use super::*;

    fn array(words: &[&str]) -> Value {
        Value::Array(words.iter().map(|word| Value::BulkString(word.as_bytes().to_vec())).collect())
    }

    #[test]
    fn an_answer_that_goes_on_after_its_end_is_refused() {
        let outcome = acquire(array(&["in_progress", "5"]), &request());
        assert_eq!(outcome.unwrap(), AcquireOutcome::InProgress { retry_after: Duration::from_micros(5) });
        let error = acquire(array(&["in_progress", "5", "5"]), &request()).unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Corrupt);
    }

    #[test]
    fn nobody_acquires_for_an_attempt_before_the_first() {
        let acquired = |attempt| {
            let Value::Array(mut values) = array(&["acquired", attempt, "1"]) else { panic!("no array") };
            values.extend([Value::Nil, Value::Nil]);
            acquire(Value::Array(values), &request())
        };
        assert!(acquired("1").is_ok());
        assert_eq!(acquired("0").unwrap_err().kind(), StoreErrorKind::Corrupt);
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
