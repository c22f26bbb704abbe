//! Reads and writes the form of an entry independently of the library. Numbers are zigzag varints, byte strings follow their
//! length, and a byte says whether an optional value is present.

use bytes::Bytes;
use idem_core::codec::FlatRecord;
use idem_core::{Record, Timestamp};

use crate::records;

pub(super) struct Form {
    pub(super) since: i64,
    pub(super) until: i64,
    /// Without checkpoint and time of the next attempt, which no entry has.
    pub(super) flat: FlatRecord,
}

impl Form {
    /// The record, if the entry is valid at this time.
    pub(super) fn record(self: &Form, now: Timestamp) -> Option<Record> {
        let holds = self.since <= now.unix_micros() && now.unix_micros() < self.until;
        let is_record = holds && records::are_a_record(&self.flat);
        is_record.then(|| Record::try_from(self.flat.clone()).ok()).flatten()
    }

    pub(super) fn written(&self) -> Vec<u8> {
        let (mut out, flat) = (Vec::new(), &self.flat);
        for value in [self.since, self.until, flat.format, flat.fingerprint_algorithm] {
            put_number(&mut out, value);
        }
        for value in [&flat.fingerprint, &flat.owner] {
            put_bytes(&mut out, value);
        }
        for value in [flat.attempt, flat.state] {
            put_number(&mut out, value);
        }
        for value in [flat.acquisition, flat.takeover, flat.lease_until, flat.status] {
            out.push(u8::from(value.is_some()));
            value.into_iter().for_each(|value| put_number(&mut out, value));
        }
        for value in [flat.headers.as_deref(), flat.body.as_deref()] {
            out.push(u8::from(value.is_some()));
            value.into_iter().for_each(|value| put_bytes(&mut out, value));
        }
        for value in [flat.created_at, flat.updated_at, flat.expires_at] {
            put_number(&mut out, value);
        }
        out
    }

    /// Reads the form, which must use all bytes.
    pub(super) fn read(bytes: &[u8]) -> Option<Self> {
        let mut rest = Reader(bytes);
        let (since, until) = (rest.number()?, rest.number()?);
        let flat = FlatRecord {
            format: rest.number()?,
            fingerprint_algorithm: rest.number()?,
            fingerprint: rest.bytes()?,
            owner: rest.bytes()?,
            attempt: rest.number()?,
            state: rest.number()?,
            acquisition: rest.maybe(Reader::number)?,
            takeover: rest.maybe(Reader::number)?,
            lease_until: rest.maybe(Reader::number)?,
            not_before: None,
            checkpoint_name: None,
            checkpoint_data: None,
            status: rest.maybe(Reader::number)?,
            headers: rest.maybe(Reader::bytes)?,
            body: rest.maybe(Reader::bytes)?.map(Bytes::from),
            created_at: rest.number()?,
            updated_at: rest.number()?,
            expires_at: rest.number()?,
        };
        rest.0.is_empty().then_some(Self { since, until, flat })
    }
}

fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value > 0x7F {
        out.push(value.to_le_bytes()[0] | 0x80);
        value >>= 7;
    }
    out.push(value.to_le_bytes()[0]);
}

fn put_number(out: &mut Vec<u8>, value: i64) {
    put_varint(out, (value.cast_unsigned() << 1) ^ (value >> 63).cast_unsigned());
}

fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    put_varint(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (byte, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*byte)
    }

    fn varint(&mut self) -> Option<u64> {
        let mut value: u64 = 0;
        for at in 0..10 {
            let byte = self.byte()?;
            let bits = u64::from(byte & 0x7F);
            if at == 9 && bits > 1 {
                return None;
            }
            value |= bits << (7 * at);
            if byte & 0x80 == 0 {
                return Some(value);
            }
        }
        None
    }

    fn number(&mut self) -> Option<i64> {
        let value = self.varint()?;
        Some((value >> 1).cast_signed() ^ -(value & 1).cast_signed())
    }

    fn bytes(&mut self) -> Option<Vec<u8>> {
        let length = usize::try_from(self.varint()?).ok()?;
        let (bytes, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(bytes.to_vec())
    }

    fn maybe<T>(&mut self, read: impl FnOnce(&mut Self) -> Option<T>) -> Option<Option<T>> {
        match self.byte()? {
            0 => Some(None),
            1 => read(self).map(Some),
            _ => None,
        }
    }
}
