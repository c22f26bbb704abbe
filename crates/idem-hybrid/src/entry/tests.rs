use idem_core::{Acquisition, HeaderField, OwnerToken, Settlement, StoredBody, StoredResponse, Term};
use idem_testkit::fixture::{self, mismatch_of, repeat_of};
use proptest::prelude::*;

use super::*;

fn at(micros: i64) -> Timestamp {
    Timestamp::from_unix_micros(micros)
}

/// The request for a record, and the lease of its owner.
fn run() -> (Acquire, Lease) {
    let request = fixture::request();
    let lease = Lease {
        id: request.id,
        fingerprint: request.fingerprint,
        owner: request.owner,
        attempt: 3,
        acquisition: Acquisition::Fresh,
        checkpoint: None,
    };
    (request, lease)
}

fn lock() -> (Acquire, Entry) {
    let (request, lease) = run();
    let entry = Entry::lock(&request, &lease, at(1_000), Duration::from_micros(500));
    (request, entry)
}

fn settled(settlement: &Settlement) -> (Acquire, Option<Entry>) {
    let request = Acquire { term: Term { lease: SECOND, retention: SECOND }, ..fixture::request() };
    let (record, _) = machine::acquire(None, &request, at(50));
    let action = idem_core::OwnerAction::Settle(settlement, Duration::from_micros(900));
    let (record, _) = machine::apply(record.as_ref(), request.owner, action, at(60));
    let look = LiveRecord::at(record.unwrap(), at(460));
    (request, look.and_then(|look| Entry::settled(look, at(1_000))))
}

const STORE: [u8; 16] = [7; 16];

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn a_lock_turns_the_same_request_away_until_it_is_over() {
    let (request, entry) = lock();
    let others = repeat_of(&request);
    let answer = |now| match entry.answer(&others, now) {
        Some(AcquireOutcome::InProgress { lease_left, .. }) => Some(lease_left.as_micros()),
        other => panic!("{other:?}"),
    };
    assert_eq!(answer(at(1_000)), Some(500));
    assert_eq!(answer(at(1_499)), Some(1));
    assert_eq!(entry.answer(&others, at(1_500)), None);
}

#[test]
fn nothing_is_believed_by_a_clock_that_was_set_back() {
    let (request, entry) = lock();
    assert_eq!(entry.answer(&repeat_of(&request), at(999)), None);
    let (request, entry) = settled(&Settlement::FailedTerminal(StoredResponse::new(422, "")));
    assert_eq!(entry.unwrap().answer(&request, at(999)), None);
}

#[test]
fn a_lock_says_nothing_to_its_owner_nor_to_another_request() {
    let (request, entry) = lock();
    assert_eq!(entry.answer(&request, at(1_100)), None);
    assert_eq!(entry.answer(&mismatch_of(&request), at(1_100)), None);
}

#[test]
fn a_lock_that_outlasts_its_lease_does_not_say_what_became_of_the_run() {
    let (request, mut entry) = lock();
    entry.until = at(2_000);
    assert_eq!(entry.answer(&repeat_of(&request), at(1_700)), None);
}

#[test]
fn a_lock_is_renewed_by_its_owner_only() {
    let (request, lease) = run();
    let lock = || Entry::lock(&request, &lease, at(1_000), Duration::from_micros(500));
    let renewed = lock().renewed(&lease, at(1_400), Duration::from_micros(500)).unwrap();
    let left = Duration::from_micros(200);
    let others = repeat_of(&request);
    let answer = renewed.answer(&others, at(1_700));
    assert!(matches!(answer, Some(AcquireOutcome::InProgress { lease_left, .. }) if lease_left == left), "{answer:?}");
    assert_eq!(lock().renewed(&Lease { owner: OwnerToken::random(), ..lease.clone() }, at(1_400), SECOND), None);
    assert_eq!(lock().renewed(&Lease { attempt: 4, ..lease.clone() }, at(1_400), SECOND), None);
    assert_eq!(lock().renewed(&lease, at(1_500), SECOND), None, "it was over");
}

#[test]
fn a_settled_record_is_replayed_for_as_long_as_it_is_one() {
    for settlement in [
        Settlement::Completed(StoredResponse::new(201, "made")),
        Settlement::FailedTerminal(StoredResponse::new(422, "")),
    ] {
        let (request, entry) = settled(&settlement);
        let entry = entry.unwrap();
        for now in [1_000, 1_499] {
            let Some(AcquireOutcome::Replay(replay)) = entry.answer(&request, at(now)) else { panic!("at {now}") };
            assert_eq!(replay.settled_at, at(60));
            let mismatch = entry.answer(&mismatch_of(&request), at(now));
            assert!(matches!(mismatch, Some(AcquireOutcome::Mismatch { .. })), "{mismatch:?}");
        }
        // 500 of its 900 microseconds were left when it was read.
        assert_eq!(entry.answer(&request, at(1_500)), None);
    }
}

#[test]
fn what_may_run_again_is_in_no_entry() {
    let retryable = Settlement::FailedRetryable { response: StoredResponse::new(503, ""), retry_after: Duration::ZERO };
    assert_eq!(settled(&retryable).1, None);
    let request = fixture::request();
    let (running, _) = machine::acquire(None, &request, at(50));
    assert_eq!(Entry::settled(LiveRecord { record: running.unwrap(), remaining: SECOND }, at(60)), None);
}

#[test]
fn nothing_but_the_entry_of_the_record_can_be_read() {
    let (request, entry) = settled(&Settlement::Completed(StoredResponse::new(200, "body")));
    let entry = entry.unwrap();
    let bytes = entry.encode(&STORE, &request.id).unwrap().bytes;
    assert_eq!(Entry::decode(&STORE, &request.id, &bytes), Some(entry));
    assert_eq!(Entry::decode(&STORE, &fixture::request().id, &bytes), None, "another record's");
    assert_eq!(Entry::decode(&[8; 16], &request.id, &bytes), None, "another store's");
    for cut in 0..bytes.len() {
        assert_eq!(Entry::decode(&STORE, &request.id, &bytes.slice(..cut)), None, "the first {cut} bytes");
    }
    for at in 0..bytes.len() {
        let mut damaged = bytes.to_vec();
        damaged[at] ^= 0x10;
        assert_eq!(Entry::decode(&STORE, &request.id, &damaged.into()), None, "byte {at} differs");
    }
    assert_eq!(Entry::decode(&STORE, &request.id, &[bytes.as_ref(), b"x"].concat().into()), None, "one more byte");
}

/// A client of the fast store that has seen entries, but does not know the store's identity, cannot forge one.
#[test]
fn an_entry_without_the_key_is_not_believed() {
    use sha2::Digest as _;
    let (request, entry) = settled(&Settlement::Completed(StoredResponse::new(200, "body")));
    let whole = entry.unwrap().encode(&STORE, &request.id).unwrap().bytes;
    let form = &whole[MAGIC.len() + TAG..];
    let tag = |bytes: &[&[u8]]| Sha256::digest(bytes.concat()).to_vec();
    let id = request.id.as_bytes();
    for forged in [
        vec![0; TAG],
        tag(&[form]),
        tag(&[MAGIC, id, form]),
        // A plain hash that begins with the key is not accepted: it permits length extension.
        tag(&[MAGIC, &STORE, id, form]),
        tag(&[&STORE, MAGIC, id, form]),
        authenticator(&[0; 16], &request.id, form).unwrap().finalize().into_bytes().to_vec(),
        authenticator(&STORE, &request.id, &form[1..]).unwrap().finalize().into_bytes().to_vec(),
    ] {
        let bytes = [MAGIC, &forged, form].concat().into();
        assert_eq!(Entry::decode(&STORE, &request.id, &bytes), None, "{forged:02x?}");
    }
}

/// Test case 2 of RFC 4231 pins the algorithm. Its key has four bytes and ours sixteen: trailing zeros do not change the HMAC.
#[test]
fn the_tag_is_hmac_sha_256() {
    let mut key = [0; 16];
    key[..4].copy_from_slice(b"Jefe");
    let mut tag = Hmac::<Sha256>::new_from_slice(&key).unwrap();
    tag.update(b"what do ya want for nothing?");
    let expected = "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843";
    assert_eq!(tag.finalize().into_bytes().iter().map(|byte| format!("{byte:02x}")).collect::<String>(), expected);
    let (id, form) = (RecordId::from_bytes([3; 32]), b"what it says");
    let mut whole = Hmac::<Sha256>::new_from_slice(&STORE).unwrap();
    whole.update(&[MAGIC, id.as_bytes(), form].concat());
    assert!(authenticator(&STORE, &id, form).unwrap().verify(&whole.finalize().into_bytes()).is_ok());
}

/// An earlier entry of the same record that was put back is valid in its original period.
#[test]
fn an_earlier_entry_is_believed_within_its_times_only() {
    let (request, lock) = lock();
    let bytes = lock.encode(&STORE, &request.id).unwrap().bytes;
    let again = || Entry::decode(&STORE, &request.id, &bytes).unwrap();
    let others = repeat_of(&request);
    assert!(matches!(again().answer(&others, at(1_499)), Some(AcquireOutcome::InProgress { .. })));
    for now in [999, 1_500, 1_000_000] {
        assert_eq!(again().answer(&others, at(now)), None, "at {now}");
    }
    let (request, copy) = settled(&Settlement::Completed(StoredResponse::new(200, "body")));
    let bytes = copy.unwrap().encode(&STORE, &request.id).unwrap().bytes;
    let again = || Entry::decode(&STORE, &request.id, &bytes).unwrap();
    assert!(matches!(again().answer(&request, at(1_499)), Some(AcquireOutcome::Replay(_))));
    for now in [999, 1_500, 1_000_000] {
        assert_eq!(again().answer(&request, at(now)), None, "at {now}");
    }
}

/// A change of the encoding needs another number in `MAGIC`.
#[test]
fn the_form_of_an_entry_is_this() {
    let id = RecordId::from_bytes([3; 32]);
    let request = Acquire { id, owner: OwnerToken::from_bytes([5; 16]), ..fixture::request() };
    let lease = Lease {
        id,
        fingerprint: request.fingerprint,
        owner: request.owner,
        attempt: 2,
        acquisition: Acquisition::Takeover,
        checkpoint: None,
    };
    let entry = Entry::lock(&request, &lease, at(1_000), Duration::from_micros(500));
    let bytes = entry.encode(&STORE, &id).unwrap().bytes;
    let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(digits, GOLDEN);
}

const GOLDEN: &str = "6964656d010d0e96c50e32d4f64fe4e2bdb3811125b8096645b8f69134c0ddc33582638e82d00fb8170202205089bf8de7fc8a1ef2b624de\
    a4d7b910c12f68b38a113791ac48630d1c11ca23100505050505050505050505050505050504020104010401b817000000d00fd00fb817";

#[test]
fn an_unknown_outcome_is_not_kept_because_an_operator_may_resolve_it() {
    assert!(settled(&Settlement::OutcomeUnknown).1.is_none());
    // An earlier version kept it.
    let (request, entry) = settled(&Settlement::FailedTerminal(StoredResponse::outcome_unknown()));
    let mut entry = entry.unwrap();
    assert!(entry.answer(&request, at(1_000)).is_some());
    let response = StoredResponse::outcome_unknown();
    entry.record.state = State::Failed { failure: idem_core::Failure::OutcomeUnknown, response };
    assert_eq!(entry.answer(&request, at(1_000)), None);
}

#[test]
fn a_settled_record_outranks_every_lock_and_a_later_lock_an_earlier_one() {
    let (request, lock) = lock();
    let (_, settled) = settled(&Settlement::FailedTerminal(StoredResponse::new(422, "")));
    let rank = |entry: Entry| entry.encode(&STORE, &request.id).unwrap().rank;
    assert_eq!(rank(lock), lock_rank(3));
    assert!(lock_rank(3) < lock_rank(4) && lock_rank(u32::MAX) < rank(settled.unwrap()));
}

proptest! {
    #[test]
    fn an_answer_survives_byte_for_byte(
        status in any::<u16>(),
        names in prop::collection::vec("[a-z]{1,8}", 0..5),
        value in prop::collection::vec(any::<u8>(), 0..20),
        body in prop::option::of(prop::collection::vec(any::<u8>(), 0..300)),
    ) {
        let headers = names.into_iter().map(|name| HeaderField { name: name.into(), value: value.clone().into() });
        let body = body.map_or(StoredBody::NotRetained, |body| StoredBody::Retained(body.into()));
        let response = StoredResponse { status, headers: headers.collect(), body, trace: None };
        let (request, entry) = settled(&Settlement::Completed(response.clone()));
        let entry = Entry::decode(&STORE, &request.id, &entry.unwrap().encode(&STORE, &request.id).unwrap().bytes).unwrap();
        let Some(AcquireOutcome::Replay(replay)) = entry.answer(&request, at(1_000)) else { panic!("no replay") };
        prop_assert_eq!(replay.response, response);
    }
}
