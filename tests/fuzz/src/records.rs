//! Generates records from an input's bytes, and decides whether columns are a valid record.

use std::num::NonZeroU32;
use std::time::Duration;

use arbitrary::{Result, Unstructured};
use bytes::Bytes;
use idem_core::codec::FlatRecord;
use idem_core::{
    Acquire, Acquisition, Algorithm, Checkpoint, Failure, Fingerprint, HeaderField, OnMismatch, Origin, OwnerToken,
    Record, RecordId, Scope, State, StoredBody, StoredResponse, Takeover, Term, Timestamp, TraceParent,
};

use crate::bytes_of::{array, bytes, maybe, text};

/// The longest part of a record, in bytes; longer parts test nothing new.
const LONGEST: usize = 40;

pub(crate) fn record(input: &mut Unstructured<'_>) -> Result<Record> {
    Ok(Record {
        fingerprint: Fingerprint::from_parts(Algorithm::from_number(input.arbitrary()?), array(input)?),
        owner: OwnerToken::from_bytes(array(input)?),
        attempt: input.arbitrary::<u32>()?.max(1),
        checkpoint: maybe(input, |input| {
            Ok(Checkpoint {
                sequence: input.arbitrary()?,
                name: text(input, LONGEST)?.into(),
                data: bytes(input, LONGEST)?.into(),
            })
        })?,
        created_at: time(input)?,
        updated_at: time(input)?,
        expires_at: time(input)?,
        state: state(input)?,
    })
}

fn state(input: &mut Unstructured<'_>) -> Result<State> {
    use Acquisition::{Fresh, Probe, Retry};
    let failed = |failure, input: &mut Unstructured<'_>| Ok(State::Failed { failure, response: response(input)? });
    match input.int_in_range(1..=5)? {
        1 => Ok(State::InProgress {
            lease_until: time(input)?,
            acquisition: *input.choose(&[Fresh, Acquisition::Takeover, Retry, Probe])?,
            takeover: *input.choose(&[Takeover::Rerun, Takeover::Unknown, Takeover::Probe])?,
        }),
        2 => Ok(State::Completed { response: response(input)? }),
        3 => failed(Failure::Terminal, input),
        4 => failed(Failure::OutcomeUnknown, input),
        _ => failed(Failure::Retryable { not_before: time(input)? }, input),
    }
}

fn response(input: &mut Unstructured<'_>) -> Result<StoredResponse> {
    let fields = input.int_in_range(0..=3)?;
    let part = |input: &mut Unstructured<'_>| bytes(input, LONGEST).map(Bytes::from);
    let headers = (0..fields).map(|_| Ok(HeaderField { name: part(input)?, value: part(input)? }));
    let headers = headers.collect::<Result<Vec<_>>>()?.into();
    let body = maybe(input, part)?.map_or(StoredBody::NotRetained, StoredBody::Retained);
    let trace = maybe(input, array::<25>)?.and_then(|trace| TraceParent::from_bytes(trace).ok());
    Ok(StoredResponse { status: input.arbitrary()?, headers, body, trace })
}

fn time(input: &mut Unstructured<'_>) -> Result<Timestamp> {
    input.arbitrary().map(Timestamp::from_unix_micros)
}

/// Generates columns: some are a valid record, and most are nearly one.
pub(crate) fn columns(input: &mut Unstructured<'_>) -> Result<FlatRecord> {
    Ok(FlatRecord {
        format: if input.ratio(9, 10)? { 1 } else { number(input)? },
        fingerprint_algorithm: number(input)?,
        fingerprint: nearly::<32>(input)?,
        owner: nearly::<16>(input)?,
        attempt: number(input)?,
        state: number(input)?,
        acquisition: maybe(input, number)?,
        takeover: maybe(input, number)?,
        lease_until: maybe(input, number)?,
        not_before: maybe(input, number)?,
        checkpoint_name: maybe(input, |input| text(input, LONGEST))?,
        checkpoint_data: maybe(input, |input| bytes(input, LONGEST))?,
        status: maybe(input, number)?,
        headers: maybe(input, headers)?,
        body: maybe(input, |input| bytes(input, LONGEST))?.map(Bytes::from),
        created_at: number(input)?,
        updated_at: number(input)?,
        expires_at: number(input)?,
    })
}

fn headers(input: &mut Unstructured<'_>) -> Result<Vec<u8>> {
    Ok(match input.int_in_range(0..=3)? {
        0 | 1 => Vec::new(),
        2 => [&[255; 4], nearly::<25>(input)?.as_slice()].concat(),
        _ => bytes(input, LONGEST)?,
    })
}

/// A number that has a meaning in one of the columns, or any number.
fn number(input: &mut Unstructured<'_>) -> Result<i64> {
    match input.int_in_range(0..=9)? {
        0 => input.arbitrary(),
        1 => input.choose(&[-1, 65_535, 65_536, 4_294_967_295, 4_294_967_296, i64::MIN, i64::MAX]).copied(),
        _ => input.int_in_range(0..=6),
    }
}

fn nearly<const LENGTH: usize>(input: &mut Unstructured<'_>) -> Result<Vec<u8>> {
    let mut bytes = array::<LENGTH>(input)?.to_vec();
    match input.int_in_range(0..=15)? {
        0 => bytes.push(0),
        1 => bytes.truncate(LENGTH - 1),
        _ => {}
    }
    Ok(bytes)
}

/// Whether the columns are a valid record, by the documentation of [`FlatRecord`].
pub(crate) fn are_a_record(flat: &FlatRecord) -> bool {
    let is_running = flat.lease_until.is_some()
        && flat.acquisition.is_some_and(|number| (1..=4).contains(&number))
        && flat.takeover.is_some_and(|number| (1..=3).contains(&number))
        && (flat.not_before, flat.status) == (None, None)
        && flat.headers.is_none()
        && flat.body.is_none();
    let has_ended = flat.status.is_some_and(|status| (0..=65_535).contains(&status))
        && flat.headers.as_deref().is_some_and(|headers| trace_and_fields(headers).is_some());
    flat.format == 1
        && (0..=65_535).contains(&flat.fingerprint_algorithm)
        && flat.fingerprint.len() == 32
        && flat.owner.len() == 16
        && (1..=4_294_967_295).contains(&flat.attempt)
        && flat.checkpoint_name.is_some() == flat.checkpoint_data.is_some()
        && flat.checkpoint_data.as_ref().is_none_or(|data| data.len() >= 4)
        && match flat.state {
            1 => is_running,
            2..=4 => has_ended,
            5 => has_ended && flat.not_before.is_some(),
            _ => false,
        }
}

/// A trace and header fields.
type TraceAndFields<'a> = (Option<TraceParent>, Vec<(&'a [u8], &'a [u8])>);

/// Parses a trace after four bytes of 255, and then names and values; `None` if the bytes are none of that.
pub(crate) fn trace_and_fields(bytes: &[u8]) -> Option<TraceAndFields<'_>> {
    match bytes.strip_prefix(&[255; 4]) {
        Some(rest) => {
            let (trace, rest) = rest.split_first_chunk()?;
            Some((Some(TraceParent::from_bytes(*trace).ok()?), header_fields(rest)?))
        }
        None => Some((None, header_fields(bytes)?)),
    }
}

/// Parses names and values, each after its length in four bytes; `None` if the bytes do not end with one.
fn header_fields(mut bytes: &[u8]) -> Option<Vec<(&[u8], &[u8])>> {
    fn part<'a>(bytes: &mut &'a [u8]) -> Option<&'a [u8]> {
        let (length, rest) = bytes.split_first_chunk()?;
        let (part, rest) = rest.split_at_checked(u32::from_be_bytes(*length).try_into().ok()?)?;
        *bytes = rest;
        Some(part)
    }
    let mut fields = Vec::new();
    while !bytes.is_empty() {
        fields.push((part(&mut bytes)?, part(&mut bytes)?));
    }
    Some(fields)
}

/// The request for whose record the targets generate answers.
pub(crate) fn request() -> Acquire {
    Acquire {
        id: RecordId::from_bytes([3; 32]),
        origin: Origin { namespace: "fuzz".into(), scope: Scope::new("acme", "POST /v1/payments") },
        trace: None,
        fingerprint: Fingerprint::from_parts(Algorithm::V1, [7; 32]),
        owner: OwnerToken::from_bytes([5; 16]),
        term: Term { lease: Duration::from_secs(30), retention: Duration::from_secs(60) },
        takeover: Takeover::Rerun,
        max_attempts: NonZeroU32::MIN,
        on_mismatch: OnMismatch::Refuse,
    }
}
