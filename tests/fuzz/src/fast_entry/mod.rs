//! Fuzzes the entries of the fast store in front of a durable one.
//!
//! An input holds the current time and an entry. The first byte says whether the entry is used as it is, is sealed with a valid
//! digest, or is replaced by a generated valid entry.

mod form;
mod stores;

use arbitrary::{Result, Unstructured};
use bytes::Bytes;
use hmac::{Hmac, KeyInit as _, Mac as _};
use idem_core::codec::FlatRecord;
use idem_core::{Acquire, AcquireOutcome, Record, RecordId, ReplayKind, State, Timestamp};
use sha2::Sha256;

use crate::bytes_of::array;
use crate::records;
use form::Form;

/// The identity of the durable store to which the entries belong.
const IDENTITY: [u8; 16] = [9; 16];

const MAGIC: &[u8] = b"idem\x01";

pub(crate) fn check(input: &[u8]) {
    let Some((kind, rest)) = input.split_first() else { return };
    // An input that ends too soon tests nothing.
    let _ = match kind % 3 {
        0 => found(rest, Bytes::copy_from_slice),
        1 => found(rest, |form| sealed(&IDENTITY, &records::request().id, form)),
        _ => made_up(rest),
    };
}

fn found(rest: &[u8], entry: impl Fn(&[u8]) -> Bytes) -> Result<()> {
    let Some((now, rest)) = rest.split_first_chunk() else { return Ok(()) };
    is_never_a_reason_to_run(&entry(rest), Timestamp::from_unix_micros(i64::from_be_bytes(*now)));
    Ok(())
}

/// Generates an entry of some record: mostly the requested one, and mostly at a time when the entry is valid.
fn made_up(rest: &[u8]) -> Result<()> {
    let input = &mut Unstructured::new(rest);
    let request = records::request();
    let mut record = records::record(input)?;
    if input.ratio(7, 8)? {
        record.fingerprint = request.fingerprint;
    }
    if input.ratio(1, 8)? {
        record.owner = request.owner;
    }
    let (since, life, later) = (input.arbitrary::<i64>()?, input.arbitrary::<u32>()?, input.arbitrary::<u32>()?);
    let now = since.saturating_add(i64::from(later));
    let flat =
        FlatRecord { checkpoint_name: None, checkpoint_data: None, not_before: None, ..FlatRecord::from(&record) };
    let form = Form { since, until: since.saturating_add(i64::from(life)), flat };
    let (mut identity, mut id, mut bytes) = (IDENTITY, request.id, form.written());
    match input.int_in_range(0..=15)? {
        0 => identity = array(input)?,
        1 => id = RecordId::from_bytes(array(input)?),
        2 => bytes.push(input.arbitrary()?),
        3 => bytes.truncate(input.int_in_range(0..=bytes.len())?),
        _ => {}
    }
    let now = Timestamp::from_unix_micros(now);
    let entry = sealed(&identity, &id, &bytes);
    is_never_a_reason_to_run(&entry, now);
    let is_whole = identity == IDENTITY && id == request.id && bytes == form.written();
    if is_whole && let Some(record) = form.record(now) {
        answers_as_its_record_says(&entry, now, &record, &request);
    }
    Ok(())
}

fn sealed(identity: &[u8; 16], id: &RecordId, form: &[u8]) -> Bytes {
    // This cannot fail: a key may have any length.
    let Ok(mut tag) = Hmac::<Sha256>::new_from_slice(identity) else { return Bytes::new() };
    tag.update(&[MAGIC, id.as_bytes(), form].concat());
    [MAGIC, &tag.finalize().into_bytes(), form].concat().into()
}

/// The record of an entry, if the entry belongs to the requested record and is valid now.
fn believed(entry: &[u8], now: Timestamp) -> Option<Record> {
    let form = entry.get(MAGIC.len() + 32..)?;
    if entry != sealed(&IDENTITY, &records::request().id, form) {
        return None;
    }
    Form::read(form)?.record(now)
}

fn is_never_a_reason_to_run(entry: &Bytes, now: Timestamp) {
    let request = records::request();
    let Some(outcome) = stores::asked(entry, now, &request) else { return };
    let Some(record) = believed(entry, now) else { panic!("{outcome:?} by what is no entry: {entry:?}") };
    match outcome {
        AcquireOutcome::Acquired(_) | AcquireOutcome::Backoff { .. } => panic!("the fast store decided {outcome:?}"),
        AcquireOutcome::InProgress { .. } => {
            let State::InProgress { lease_until, .. } = record.state else { panic!("{outcome:?} by {record:?}") };
            assert!(record.owner != request.owner && now < lease_until, "{record:?} at {now}");
        }
        AcquireOutcome::Replay(replay) => assert_eq!(record.replay().as_ref(), Some(&replay)),
        AcquireOutcome::Mismatch { stored_algorithm } => {
            assert!(record.replay().is_some() && record.fingerprint != request.fingerprint, "{record:?}");
            assert_eq!(stored_algorithm, record.fingerprint.algorithm());
        }
    }
}

fn answers_as_its_record_says(entry: &Bytes, now: Timestamp, record: &Record, request: &Acquire) {
    if let Some(replay) = record.replay()
        && record.fingerprint == request.fingerprint
        && record.updated_at < record.expires_at
    {
        // An operator may have resolved an unknown outcome since.
        let is_final = replay.kind != ReplayKind::OutcomeUnknown;
        let expected = is_final.then_some(AcquireOutcome::Replay(replay));
        assert_eq!(stores::asked(entry, now, request), expected, "at {now}");
    }
}
