//! A sealed value opens in its place only, and damaged ones are errors.

use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use bytes::Bytes;
use idem_core::engine::{Idempotency, Operation, Ran, RunError, Settings};
use idem_core::{
    Algorithm, Checkpoint, Failure, Fingerprint, HeaderField, IdempotencyStore as _, Lease, OwnerToken, Record,
    RecordId, ReplayKind, Scope, Settlement, State, StoreErrorKind, StoredBody, StoredResponse, Timestamp,
};
use idem_encryption::{EncryptedStore, EncryptionConfig, Keys};
use idem_testkit::fixture::{LEASE, checkpoint, completed, repeat_of, request, response};
use proptest::prelude::*;

use crate::support::{File, blob, config, key, keys, lease, memory, replayed, settle};

fn store() -> EncryptedStore<idem_core::MemoryStore> {
    memory(config()).0
}

fn lease_of(id: u8) -> Lease {
    Lease {
        id: RecordId::from_bytes([id; 32]),
        fingerprint: Fingerprint::from_parts(Algorithm::V1, [7; 32]),
        owner: OwnerToken::from_bytes([3; 16]),
        attempt: 2,
        acquisition: idem_core::Acquisition::Fresh,
        checkpoint: None,
    }
}

fn record(lease: &Lease, response: StoredResponse) -> Record {
    let at = Timestamp::from_unix_micros;
    Record {
        fingerprint: lease.fingerprint,
        owner: lease.owner,
        attempt: lease.attempt,
        checkpoint: None,
        created_at: at(1),
        updated_at: at(2),
        expires_at: at(3),
        state: State::Completed { response },
    }
}

fn opened(lease: &Lease, record: &Record) -> Result<Record, StoreErrorKind> {
    store().open_record(&lease.id, record).map_err(|error| error.kind())
}

const CORRUPT: Result<Record, StoreErrorKind> = Err(StoreErrorKind::Corrupt);

#[test]
fn an_answer_opens_only_in_its_place() {
    let lease = lease_of(1);
    let sealed = store().seal_response(&lease, ReplayKind::Completed, &response()).unwrap();
    assert_eq!(opened(&lease, &record(&lease, sealed.clone())), Ok(record(&lease, response())));
    let moved = [
        ("another record", lease_of(2)),
        (
            "another fingerprint",
            Lease { fingerprint: Fingerprint::from_parts(Algorithm::V1, [8; 32]), ..lease.clone() },
        ),
        (
            "another algorithm",
            Lease { fingerprint: Fingerprint::from_parts(Algorithm::from_number(2), [7; 32]), ..lease.clone() },
        ),
    ];
    for (place, moved) in moved {
        assert_eq!(opened(&moved, &record(&moved, sealed.clone())), CORRUPT, "{place}");
    }
    let changed = [
        ("another status", StoredResponse { status: 200, ..sealed.clone() }),
        ("without its body", StoredResponse { body: StoredBody::NotRetained, ..sealed.clone() }),
        ("without its header fields", StoredResponse { headers: Arc::from([]), ..sealed.clone() }),
    ];
    for (change, response) in changed {
        assert_eq!(opened(&lease, &record(&lease, response)), CORRUPT, "{change}");
    }
    // An empty body has no bytes that could be missed.
    let empty = store().seal_response(&lease, ReplayKind::Completed, &StoredResponse::new(201, "")).unwrap();
    assert!(opened(&lease, &record(&lease, empty.clone())).is_ok());
    let tombstone = StoredResponse { body: StoredBody::NotRetained, ..empty };
    assert_eq!(opened(&lease, &record(&lease, tombstone)), CORRUPT);
    // The body of another answer of the same run.
    let other = store().seal_response(
        &lease,
        ReplayKind::Completed,
        &StoredResponse { body: response().body, ..StoredResponse::new(201, "") },
    );
    let mixed = StoredResponse { body: other.unwrap().body, ..sealed };
    assert_eq!(opened(&lease, &record(&lease, mixed)), CORRUPT);
}

/// The state machine makes a retryable failure a terminal one by itself, and never changes between success and failure.
#[test]
fn an_answer_opens_only_in_a_state_of_its_kind() {
    let lease = lease_of(1);
    let in_state = |state| opened(&lease, &Record { state, ..record(&lease, response()) }).is_ok();
    let failed = |failure, response| State::Failed { failure, response };
    let retryable = Failure::Retryable { not_before: Timestamp::from_unix_micros(2) };
    let Settlement::Completed(sealed) = store().seal_settlement(&lease, &completed()).unwrap() else { panic!() };
    assert!(in_state(State::Completed { response: sealed.clone() }));
    for failure in [Failure::Terminal, retryable, Failure::OutcomeUnknown] {
        assert!(!in_state(failed(failure, sealed.clone())), "{failure:?}");
    }
    let retry = Settlement::FailedRetryable { response: response(), retry_after: LEASE };
    for settlement in [Settlement::FailedTerminal(response()), retry] {
        let sealed = store().seal_settlement(&lease, &settlement).unwrap();
        let (Settlement::FailedTerminal(sealed) | Settlement::FailedRetryable { response: sealed, .. }) = sealed else {
            panic!()
        };
        assert!(in_state(failed(Failure::Terminal, sealed.clone())) && in_state(failed(retryable, sealed.clone())));
        assert!(!in_state(failed(Failure::OutcomeUnknown, sealed.clone())));
        assert!(!in_state(State::Completed { response: sealed }));
    }
}

/// Stores fence by the owner. A repeated acquire that arrives late gives the owner a later attempt than its run knows.
#[tokio::test]
async fn an_answer_opens_although_its_owner_has_a_later_attempt_unknowingly() {
    let (store, clock) = memory(config());
    let first = request();
    let held = lease(&store, &first).await;
    clock.advance(LEASE);
    lease(&store, &repeat_of(&first)).await;
    clock.advance(LEASE);
    assert_eq!(lease(&store, &first).await.attempt, 3);
    settle(&store, &held, &completed()).await;
    assert_eq!(replayed(store.acquire(&repeat_of(&first)).await), response());
    assert_eq!(store.peek(&first.id).await.unwrap().unwrap().replay().unwrap().response, response());
}

/// The body and the header fields are one ciphertext, whose parts must not be cut elsewhere.
#[test]
fn bytes_do_not_move_between_header_fields_and_body() {
    let lease = lease_of(1);
    let sealed = store().seal_response(&lease, ReplayKind::Completed, &response()).unwrap();
    let StoredBody::Retained(body) = &sealed.body else { panic!("it has a body") };
    let value = STANDARD_NO_PAD.decode(&sealed.headers[0].value).unwrap();
    let shifted = |value: &[u8], body: Vec<u8>| StoredResponse {
        headers: Arc::from([HeaderField { name: "idem-sealed".into(), value: STANDARD_NO_PAD.encode(value).into() }]),
        body: StoredBody::Retained(body.into()),
        ..sealed.clone()
    };
    assert_eq!(opened(&lease, &record(&lease, shifted(&value, body.to_vec()))), Ok(record(&lease, response())));
    let (kept, given) = value.split_at(value.len() - 1);
    assert_eq!(opened(&lease, &record(&lease, shifted(kept, [given, body].concat()))), CORRUPT);
    let longer = [&value[..], &body[..1]].concat();
    assert_eq!(opened(&lease, &record(&lease, shifted(&longer, body[1..].to_vec()))), CORRUPT);
    // A body that begins as header fields do: a client may have chosen it.
    let fields = idem_core::codec::encode_headers(&response().headers, None);
    let chosen =
        store().seal_response(&lease, ReplayKind::Completed, &StoredResponse::new(201, fields.clone())).unwrap();
    let StoredBody::Retained(body) = &chosen.body else { panic!("it has a body") };
    let value = STANDARD_NO_PAD.decode(&chosen.headers[0].value).unwrap();
    let moved = shifted(&[&value[..], body].concat(), Vec::new());
    assert_eq!(opened(&lease, &record(&lease, moved)), CORRUPT);
}

fn with_checkpoint(lease: &Lease, checkpoint: Checkpoint) -> Record {
    let state = State::Failed { failure: Failure::OutcomeUnknown, response: StoredResponse::outcome_unknown() };
    Record { checkpoint: Some(checkpoint), state, ..record(lease, response()) }
}

#[test]
fn a_checkpoint_opens_only_in_its_place() {
    let lease = lease_of(1);
    let sealed = store().seal_checkpoint(&lease, &checkpoint("charged")).unwrap();
    let expected = with_checkpoint(&lease, checkpoint("charged"));
    assert_eq!(opened(&lease, &with_checkpoint(&lease, sealed.clone())), Ok(expected));
    // The attempt that takes over reads it too.
    let next = Lease { attempt: 3, ..lease.clone() };
    assert!(opened(&next, &with_checkpoint(&next, sealed.clone())).is_ok());
    let fingerprint = Fingerprint::from_parts(Algorithm::V1, [8; 32]);
    for moved in [lease_of(2), Lease { fingerprint, ..lease.clone() }] {
        assert_eq!(opened(&moved, &with_checkpoint(&moved, sealed.clone())), CORRUPT, "{moved:?}");
    }
    let later = Checkpoint { sequence: 2, ..sealed };
    assert_eq!(opened(&lease, &with_checkpoint(&lease, later)), CORRUPT);
    // An answer in place of a checkpoint.
    let answer = store().seal_response(&lease, ReplayKind::Completed, &response()).unwrap();
    let data = STANDARD_NO_PAD.decode(&answer.headers[0].value).unwrap().into();
    let answer = Checkpoint { sequence: 1, name: "idem-sealed".into(), data };
    assert_eq!(opened(&lease, &with_checkpoint(&lease, answer)), CORRUPT);
}

#[test]
fn every_flipped_bit_and_every_cut_is_noticed() {
    let lease = lease_of(1);
    let sealed =
        store().seal_response(&lease, ReplayKind::Completed, &StoredResponse { status: 201, ..response() }).unwrap();
    let with = |value: Bytes, body: Bytes| {
        let headers = Arc::from([HeaderField { name: "idem-sealed".into(), value }]);
        let response = StoredResponse { headers, body: StoredBody::Retained(body), ..sealed.clone() };
        opened(&lease, &record(&lease, response))
    };
    let (value, StoredBody::Retained(body)) = (&sealed.headers[0].value, &sealed.body) else { panic!("it has a body") };
    assert!(with(value.clone(), body.clone()).is_ok());
    for damaged in damages(value) {
        assert_eq!(with(damaged.clone(), body.clone()), CORRUPT, "{damaged:?}");
    }
    for damaged in damages(body) {
        assert_eq!(with(value.clone(), damaged.clone()), CORRUPT, "{damaged:?}");
    }
    let sealed = store().seal_checkpoint(&lease, &checkpoint("charged")).unwrap();
    for data in damages(&sealed.data) {
        let damaged = Checkpoint { data, ..sealed.clone() };
        assert_eq!(opened(&lease, &with_checkpoint(&lease, damaged.clone())), CORRUPT, "{damaged:?}");
    }
}

/// Each byte with each bit flipped, each shorter length, and one byte more.
fn damages(bytes: &Bytes) -> Vec<Bytes> {
    let flipped = (0..bytes.len() * 8).map(|bit| {
        let mut damaged = bytes.to_vec();
        damaged[bit / 8] ^= 1 << (bit % 8);
        damaged.into()
    });
    let cut = (0..bytes.len()).map(|length| bytes.slice(..length));
    flipped.chain(cut).chain([[&bytes[..], b"A"].concat().into()]).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn arbitrary_bytes_never_open(
        head in prop::collection::vec(prop::sample::select(vec![0_u8, 1, 2, 255]), 0..6),
        rest in prop::collection::vec(any::<u8>(), 0..60),
        body in prop::option::of(prop::collection::vec(any::<u8>(), 0..60)),
        is_encoded: bool,
    ) {
        let lease = lease_of(1);
        let bytes = [head, rest].concat();
        let value: Bytes = if is_encoded { STANDARD_NO_PAD.encode(&bytes).into() } else { bytes.clone().into() };
        let headers = Arc::from([HeaderField { name: "idem-sealed".into(), value }]);
        let body = body.map_or(StoredBody::NotRetained, |body| StoredBody::Retained(body.into()));
        let response = StoredResponse { status: 201, headers, body, trace: None };
        prop_assert_eq!(opened(&lease, &record(&lease, response)), CORRUPT);
        let checkpoint = Checkpoint { sequence: 1, name: "idem-sealed".into(), data: bytes.into() };
        prop_assert_eq!(opened(&lease, &with_checkpoint(&lease, checkpoint)), CORRUPT);
    }

    #[test]
    fn every_answer_and_every_checkpoint_opens_again(
        status: u16,
        headers in prop::collection::vec((prop::collection::vec(any::<u8>(), 0..9), prop::collection::vec(any::<u8>(), 0..99)), 0..5),
        body in prop::option::of(prop::collection::vec(any::<u8>(), 0..200)),
        (sequence, name, data) in (any::<u32>(), ".{0,9}", prop::collection::vec(any::<u8>(), 0..99)),
    ) {
        let lease = lease_of(1);
        let fields = headers.into_iter().map(|(name, value)| HeaderField { name: name.into(), value: value.into() });
        let body = body.map_or(StoredBody::NotRetained, |body| StoredBody::Retained(body.into()));
        let response = StoredResponse { status, headers: fields.collect(), body, trace: None };
        let sealed = store().seal_response(&lease, ReplayKind::Completed, &response).unwrap();
        let length = |response: &StoredResponse| match &response.body {
            StoredBody::Retained(body) => Some(body.len()),
            StoredBody::NotRetained => None,
        };
        prop_assert_eq!(length(&sealed), length(&response), "listings show the length of the body");
        prop_assert!(sealed.headers[0].value.is_ascii(), "statements take header values as text");
        prop_assert_eq!(opened(&lease, &record(&lease, sealed)), Ok(record(&lease, response)));
        let checkpoint = Checkpoint { sequence, name: name.into(), data: data.into() };
        let sealed = store().seal_checkpoint(&lease, &checkpoint).unwrap();
        prop_assert_eq!(
            opened(&lease, &with_checkpoint(&lease, sealed)), Ok(with_checkpoint(&lease, checkpoint))
        );
    }
}

/// Sealed in another database, or by an attacker with the schema: the columns of one row in the other.
#[tokio::test]
async fn columns_that_change_places_do_not_open_and_run_nothing() {
    for columns in ["headers, body", "body", "headers"] {
        let file = File::new().await;
        let store = file.encrypted(config());
        let engine = Idempotency::at_most_once(Arc::new(store.clone()), Settings::new());
        let operation = |key: &str| {
            let fingerprint = Fingerprint::of_bytes("pay", b"10 EUR");
            Operation::new(Scope::new("acme", "pay"), key.parse().unwrap(), fingerprint)
        };
        for key in ["one", "two"] {
            let key = key.to_owned();
            engine.run(operation(&key.clone()), move |_| async { Ok::<_, String>(key) }).await.unwrap();
        }
        let [one, two] = ["one", "two"].map(|key| blob(&engine.acquire_for(&operation(key)).id));
        file.sql(&format!(
            "CREATE TABLE old AS SELECT * FROM idem_records;
             UPDATE idem_records SET ({columns}, status) = (SELECT {columns}, status FROM old WHERE id = {two}) WHERE id = {one};
             UPDATE idem_records SET ({columns}, status) = (SELECT {columns}, status FROM old WHERE id = {one}) WHERE id = {two};"
        ))
        .await;
        for key in ["one", "two"] {
            let refused: Result<Ran<String>, RunError<String>> =
                engine.run(operation(key), |_| async { panic!("it ran again") }).await;
            let error = format!("{:?}", refused.unwrap_err());
            assert!(error.contains("Corrupt") && error.contains("the key 1"), "{columns}: {error}");
            let id = engine.acquire_for(&operation(key)).id;
            assert_eq!(store.peek(&id).await.unwrap_err().kind(), StoreErrorKind::Corrupt);
        }
    }
}

/// Two systems with the same keys, one of which an attacker may write to.
#[test]
fn an_answer_and_a_checkpoint_open_only_in_their_context() {
    let lease = lease_of(1);
    let of = |context: &str| memory(config().with_context(context)).0;
    let answer = of("staging").seal_response(&lease, ReplayKind::Completed, &response()).unwrap();
    let charged = of("staging").seal_checkpoint(&lease, &checkpoint("charged")).unwrap();
    for record in [record(&lease, answer), with_checkpoint(&lease, charged)] {
        assert!(of("staging").open_record(&lease.id, &record).is_ok());
        for other in ["production", "stagin", ""] {
            let error = of(other).open_record(&lease.id, &record).unwrap_err();
            assert_eq!(error.kind(), StoreErrorKind::Corrupt, "{other}");
        }
    }
}

/// What a tool that got its keys from an operator finds out before it seals.
#[test]
fn a_record_proves_the_primary_key_if_it_has_sealed_a_part_of_it() {
    let lease = lease_of(1);
    let answer = store().seal_response(&lease, ReplayKind::Completed, &response()).unwrap();
    let charged = store().seal_checkpoint(&lease, &checkpoint("charged")).unwrap();
    let proves = |keys: Keys, record: &Record| {
        let store = memory(EncryptionConfig::new(keys)).0;
        store.proves_primary_key(&lease.id, record).map_err(|error| error.kind())
    };
    for record in [record(&lease, answer), with_checkpoint(&lease, charged)] {
        assert_eq!(proves(keys(1, 1), &record), Ok(true));
        assert_eq!(proves(keys(2, 2), &record), Ok(false), "an old key has sealed it");
        assert_eq!(proves(Keys::new(3, key(3)), &record), Ok(false));
        assert_eq!(proves(Keys::new(1, [9; 32]), &record), Err(StoreErrorKind::Corrupt));
    }
    for record in [record(&lease, response()), with_checkpoint(&lease, checkpoint("charged"))] {
        assert_eq!(proves(keys(1, 1), &record), Ok(false), "nothing is sealed");
    }
}

/// A key with the right id and other bytes.
#[tokio::test]
async fn another_key_of_the_same_id_opens_nothing() {
    let (store, _) = memory(config());
    let request = request();
    let lease = lease(&store, &request).await;
    settle(&store, &lease, &completed()).await;
    store.rotate(Keys::new(1, [9; 32]));
    let error = store.acquire(&repeat_of(&request)).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Corrupt);
    assert!(error.to_string().contains("does not open under the key 1: "), "{error}");
}

/// A change of these bytes needs another format, and a version that reads both. The bytes were made by another implementation of
/// AES-GCM-SIV, in OpenSSL.
#[test]
fn the_sealed_form_is_this() {
    let lease = lease_of(1);
    let keys = Keys::new(0x0102_0304, [5; 32]);
    let store = memory(EncryptionConfig::new(keys)).0;
    let headers = Arc::from([HeaderField { name: "location".into(), value: "/payments/1".into() }]);
    let response = StoredResponse { headers, ..StoredResponse::new(201, "paid") };
    let sealed = store.seal_response(&lease, ReplayKind::Completed, &response).unwrap();
    assert_eq!(
        &*sealed.headers,
        [HeaderField {
            name: "idem-sealed".into(),
            value: "AQECAwQgVeIKisUpuDa3PiH02RXmAAAAApAehoZrNH85EhZs51vz2hWHhBjErBEYxbHcAQ".into()
        }]
    );
    assert_eq!(sealed.body, StoredBody::Retained(b"\x88\xE6\xEB\x90"[..].into()));
    let sealed = store.seal_checkpoint(&lease, &checkpoint("charged")).unwrap();
    let data: String = sealed.data.iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(
        (sealed.sequence, &*sealed.name, &*data),
        (1, "idem-sealed", "0101020304d88f3f1dce45e974d5ea0135172614ec25d73e2ba62e41a2a46106641cc857f4dfa34b60f5")
    );
}
