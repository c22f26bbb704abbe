use proptest::prelude::*;

use super::*;
use crate::record::HeaderField;
use crate::trace::TraceParent;

fn record(state: State) -> Record {
    Record {
        fingerprint: Fingerprint::from_parts(Algorithm::V1, [0xF1; 32]),
        owner: OwnerToken::from_bytes([0x0A; 16]),
        attempt: 3,
        checkpoint: Some(Checkpoint { sequence: 7, name: "charged".into(), data: vec![0, 255].into() }),
        created_at: Timestamp::from_unix_micros(10),
        updated_at: Timestamp::from_unix_micros(20),
        expires_at: Timestamp::from_unix_micros(30),
        state,
    }
}

fn response() -> StoredResponse {
    let field = |name: &'static str, value: &'static [u8]| HeaderField { name: name.into(), value: value.into() };
    StoredResponse {
        status: 201,
        headers: [field("location", b"/p/1"), field("x-raw", b"\xFF\x80"), field("x-raw", b"")].into(),
        body: StoredBody::Retained(Bytes::from_static(b"\0body\xFF")),
        trace: None,
    }
}

fn trace() -> Option<TraceParent> {
    Some("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01".parse().unwrap())
}

fn every_state() -> Vec<Record> {
    let lease_until = Timestamp::from_unix_micros(25);
    let not_before = Timestamp::from_unix_micros(27);
    let mut states = vec![State::Completed { response: response() }];
    for acquisition in [Acquisition::Fresh, Acquisition::Takeover, Acquisition::Retry, Acquisition::Probe] {
        for takeover in [Takeover::Rerun, Takeover::Unknown, Takeover::Probe] {
            states.push(State::InProgress { lease_until, acquisition, takeover });
        }
    }
    for failure in [Failure::Terminal, Failure::OutcomeUnknown, Failure::Retryable { not_before }] {
        states.push(State::Failed { failure, response: response() });
    }
    let tombstone = StoredResponse { body: StoredBody::NotRetained, ..response() };
    states.push(State::Completed { response: tombstone });
    states.push(State::Completed { response: StoredResponse { trace: trace(), ..response() } });
    let mut records: Vec<Record> = states.into_iter().map(record).collect();
    records.push(Record { checkpoint: None, ..records[0].clone() });
    records
}

#[test]
fn every_record_survives_flattening() {
    for record in every_state() {
        assert_eq!(Record::try_from(FlatRecord::from(&record)), Ok(record));
    }
}

#[cfg(feature = "serde")]
#[test]
fn every_record_survives_serde() {
    for record in every_state() {
        let json = serde_json::to_string(&FlatRecord::from(&record)).unwrap();
        let flat: FlatRecord = serde_json::from_str(&json).unwrap();
        assert_eq!(Record::try_from(flat), Ok(record));
    }
}

/// Golden: format 1 as it is in users' stores.
#[test]
fn format_1_is_read_for_ever() {
    let headers = b"\0\0\0\x08location\0\0\0\x04/p/1\0\0\0\x05x-raw\0\0\0\x02\xFF\x80\0\0\0\x05x-raw\0\0\0\0";
    let flat = FlatRecord {
        format: 1,
        fingerprint_algorithm: 1,
        fingerprint: vec![0xF1; 32],
        owner: vec![0x0A; 16],
        attempt: 3,
        state: 5,
        acquisition: None,
        takeover: None,
        lease_until: None,
        not_before: Some(27),
        checkpoint_name: Some("charged".to_owned()),
        checkpoint_data: Some(vec![0, 0, 0, 7, 0, 255]),
        status: Some(201),
        headers: Some(headers.to_vec()),
        body: Some(Bytes::from_static(b"\0body\xFF")),
        created_at: 10,
        updated_at: 20,
        expires_at: 30,
    };
    let failure = Failure::Retryable { not_before: Timestamp::from_unix_micros(27) };
    let expected = record(State::Failed { failure, response: response() });
    assert!(FlatRecord::from(&expected) == flat);
    assert_eq!(Record::try_from(flat), Ok(expected));
    let trace_in_bytes = [
        &[255; 4][..],
        b"\x4B\xF9\x2F\x35\x77\xB3\x4D\xA6\xA3\xCE\x92\x9D\x0E\x0E\x47\x36",
        &[0, 0xF0],
        b"\x67\xAA\x0B\xA9\x02\xB7\x01",
    ];
    assert_eq!(encode_headers(&response().headers, trace().as_ref()), [&trace_in_bytes.concat()[..], headers].concat());
    let numbers: Vec<_> =
        every_state().iter().map(FlatRecord::from).map(|f| (f.state, f.acquisition, f.takeover)).collect();
    let running = |acquisition, takeover| (1, Some(acquisition), Some(takeover));
    let settled = |state| (state, None, None);
    let mut expected = vec![settled(2)];
    expected.extend((1..=4).flat_map(|acquisition| (1..=3).map(move |takeover| running(acquisition, takeover))));
    expected.extend([settled(3), settled(4), settled(5), settled(2), settled(2), settled(2)]);
    assert_eq!(numbers, expected);
}

type Damage = fn(&mut FlatRecord);

#[test]
fn damage_is_named_and_never_read_as_something_else() {
    let damages: [(Damage, CodecError); 14] = [
        (|flat| flat.format = 2, CodecError::UnknownFormat(2)),
        (|flat| flat.fingerprint.truncate(31), CodecError::Damaged("fingerprint")),
        (|flat| flat.fingerprint_algorithm = 65_536, CodecError::Damaged("algorithm")),
        (|flat| flat.owner.push(0), CodecError::Damaged("owner")),
        (|flat| flat.attempt = -1, CodecError::Damaged("attempt")),
        (|flat| flat.attempt = 0, CodecError::Damaged("attempt")),
        (|flat| flat.state = 6, CodecError::Damaged("state")),
        (|flat| flat.state = 1, CodecError::Damaged("lease")),
        (|flat| flat.state = 5, CodecError::Damaged("time of the next attempt")),
        (|flat| flat.checkpoint_data = None, CodecError::Damaged("checkpoint")),
        (|flat| flat.checkpoint_data = Some(vec![0, 0, 7]), CodecError::Damaged("checkpoint")),
        (|flat| flat.status = Some(70_000), CodecError::Damaged("status")),
        (|flat| flat.headers = None, CodecError::Damaged("header fields")),
        (|flat| flat.headers = Some(vec![0, 0, 0, 9, b'x']), CodecError::Damaged("header fields")),
    ];
    let whole = FlatRecord::from(&record(State::Completed { response: response() }));
    for (damage, expected) in damages {
        let mut flat = whole.clone();
        damage(&mut flat);
        assert_eq!(Record::try_from(flat), Err(expected));
    }
}

proptest! {
    #[test]
    fn any_bytes_decode_to_headers_that_encode_to_them_or_not_at_all(
        has_trace in any::<bool>(),
        bytes in prop::collection::vec(0u8..4, 0..64),
    ) {
        let bytes = if has_trace { [&[255; 4][..], &bytes].concat() } else { bytes };
        if let Ok((headers, trace)) = decode_headers(bytes.clone().into()) {
            prop_assert_eq!(encode_headers(&headers, trace.as_ref()), bytes);
        }
    }
}

#[test]
fn a_damaged_trace_is_refused() {
    let encoded = encode_headers(&response().headers, trace().as_ref());
    assert_eq!(decode_headers(encoded.clone().into()), Ok((response().headers, trace())));
    let of_zeros = [&[255; 4][..], &[0; 25]].concat();
    for damaged in [&encoded[..28], &encoded[..4], &of_zeros] {
        assert_eq!(decode_headers(Bytes::copy_from_slice(damaged)), Err(CodecError::Damaged("trace")), "{damaged:?}");
    }
}
