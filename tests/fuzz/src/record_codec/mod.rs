//! Fuzzes the flat form of a record, which all stores use.
//!
//! The first byte of an input says what follows: encoded header fields, columns, or a record.

use arbitrary::Unstructured;
use bytes::Bytes;
use idem_core::codec::{self, FlatRecord};
use idem_core::{HeaderField, Record, RecordId, State};

use crate::records;

pub(crate) fn check(input: &[u8]) {
    let Some((kind, rest)) = input.split_first() else { return };
    let mut input = Unstructured::new(rest);
    match kind % 3 {
        0 => header_fields_are_read_as_they_were_written(rest),
        1 => {
            if let Ok(flat) = records::columns(&mut input) {
                columns_are_a_record_or_an_error(&flat);
            }
        }
        _ => {
            if let Ok(record) = records::record(&mut input) {
                a_record_survives_its_columns(&record);
            }
        }
    }
}

fn header_fields_are_read_as_they_were_written(bytes: &[u8]) {
    let expected = records::trace_and_fields(bytes);
    match codec::decode_headers(Bytes::copy_from_slice(bytes)) {
        Err(error) => {
            assert!(expected.is_none(), "header fields are refused: {error}");
            assert!(!error.to_string().is_empty());
        }
        Ok((read, trace)) => {
            let pair = |field: &HeaderField| (field.name.clone(), field.value.clone());
            let expected = expected.map(|(trace, fields)| (trace, fields.into_iter().map(copied).collect::<Vec<_>>()));
            assert_eq!(Some((trace, read.iter().map(pair).collect())), expected);
            assert_eq!(codec::encode_headers(&read, trace.as_ref()), bytes);
        }
    }
}

fn copied((name, value): (&[u8], &[u8])) -> (Bytes, Bytes) {
    (Bytes::copy_from_slice(name), Bytes::copy_from_slice(value))
}

fn columns_are_a_record_or_an_error(flat: &FlatRecord) {
    match Record::try_from(flat.clone()) {
        Err(error) => {
            assert!(!records::are_a_record(flat), "a record is refused: {error}");
            assert!(!error.to_string().is_empty());
        }
        Ok(record) => {
            assert!(records::are_a_record(flat), "columns that are no record are read as {record:?}");
            assert!(FlatRecord::from(&record) == meant(flat), "{record:?} does not say what its columns say");
            a_record_survives_its_columns(&record);
        }
    }
}

/// The columns that count in the record's state; the others may hold anything.
fn meant(flat: &FlatRecord) -> FlatRecord {
    let (is_running, waits) = (flat.state == 1, flat.state == 5);
    FlatRecord {
        acquisition: flat.acquisition.filter(|_| is_running),
        takeover: flat.takeover.filter(|_| is_running),
        lease_until: flat.lease_until.filter(|_| is_running),
        not_before: flat.not_before.filter(|_| waits),
        status: flat.status.filter(|_| !is_running),
        headers: flat.headers.clone().filter(|_| !is_running),
        body: flat.body.clone().filter(|_| !is_running),
        ..flat.clone()
    }
}

fn a_record_survives_its_columns(record: &Record) {
    let flat = FlatRecord::from(record);
    assert!(records::are_a_record(&flat), "{record:?} is written as something that is no record");
    assert_eq!(Record::try_from(flat).as_ref(), Ok(record));
    // The representation of a record in logs.
    assert!(!format!("{record:?} {} {}", record.expires_at, RecordId::from_bytes([0; 32])).is_empty());
    let is_settled = !matches!(record.state, State::InProgress { .. }) && FlatRecord::from(record).state != 5;
    assert_eq!(record.replay().is_some(), is_settled, "{record:?}");
}
