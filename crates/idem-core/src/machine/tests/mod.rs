mod acquiring;
mod erasing;
mod mismatching;
mod owning;
mod resolving;
mod retrying;
mod settling;

use std::num::NonZeroU32;
use std::time::Duration;

use super::*;
use crate::fingerprint::{Algorithm, Fingerprint};
use crate::record::{Acquisition, Checkpoint, Failure, OwnerToken, State, StoredResponse, Takeover};
use crate::{RecordId, Scope};

const LEASE: Duration = Duration::from_secs(10);
const RETENTION: Duration = Duration::from_secs(100);
const KEPT: Duration = Duration::from_secs(50);
const TERM: Term = Term { lease: LEASE, retention: RETENTION };
const TICK: Duration = Duration::from_micros(1);
/// When the first acquire of every test happens.
const START: Timestamp = Timestamp::from_unix_micros(1_000_000_000);

fn after(duration: Duration) -> Timestamp {
    START.saturating_add(duration)
}

fn seconds(seconds: u64) -> Timestamp {
    after(Duration::from_secs(seconds))
}

fn token(number: u8) -> OwnerToken {
    OwnerToken::from_bytes([number; 16])
}

fn request(owner: u8) -> Acquire {
    Acquire {
        id: RecordId::from_bytes([9; 32]),
        origin: Origin { namespace: "test".into(), scope: Scope::single_tenant("pay") },
        trace: None,
        fingerprint: Fingerprint::of_bytes("pay", b"10 EUR"),
        owner: token(owner),
        term: TERM,
        takeover: Takeover::Rerun,
        max_attempts: NonZeroU32::new(3).unwrap(),
        on_mismatch: OnMismatch::Refuse,
    }
}

fn another_body(owner: u8) -> Acquire {
    let fingerprint = Fingerprint::from_parts(Algorithm::from_number(7), [3; 32]);
    Acquire { fingerprint, ..request(owner) }
}

fn never_rerun(owner: u8) -> Acquire {
    Acquire { takeover: Takeover::Unknown, ..request(owner) }
}

fn response() -> StoredResponse {
    StoredResponse::new(201, "paid")
}

fn retryable(retry_after: Duration) -> Settlement {
    Settlement::FailedRetryable { response: response(), retry_after }
}

/// The first checkpoint of an operation.
fn checkpoint(name: &str) -> Checkpoint {
    Checkpoint { sequence: 1, name: name.into(), data: "ch_1".into() }
}

/// The record that a first acquire by owner 1 at [`START`] leaves.
fn in_progress() -> Record {
    acquire(None, &request(1), START).0.unwrap()
}

fn settled(settlement: &Settlement) -> Record {
    settle(&in_progress(), 1, settlement, seconds(1)).0.unwrap()
}

fn settle(record: &Record, owner: u8, settlement: &Settlement, now: Timestamp) -> (Option<Record>, OwnerOutcome) {
    apply(Some(record), token(owner), OwnerAction::Settle(settlement, KEPT), now)
}

fn with_attempt(attempt: u32, record: Record) -> Record {
    Record { attempt, ..record }
}

fn acquired(attempt: u32, owner: u8, acquisition: Acquisition, checkpoint: Option<Checkpoint>) -> AcquireOutcome {
    let Acquire { id, fingerprint, .. } = request(owner);
    AcquireOutcome::Acquired(Lease { id, fingerprint, owner: token(owner), attempt, acquisition, checkpoint })
}

fn replay(kind: ReplayKind, response: StoredResponse, attempt: u32, settled_at: Timestamp) -> AcquireOutcome {
    AcquireOutcome::Replay(Replay { response, kind, attempt, settled_at })
}

#[track_caller]
fn assert_unchanged(record: &Record, request: &Acquire, now: Timestamp, outcome: AcquireOutcome) {
    assert_eq!(acquire(Some(record), request, now), (Some(record.clone()), outcome));
}

#[track_caller]
fn assert_lease_lost(record: &Record, owner: u8, action: OwnerAction<'_>, now: Timestamp) {
    assert_eq!(apply(Some(record), token(owner), action, now), (Some(record.clone()), OwnerOutcome::LeaseLost));
}

#[test]
fn the_transition_passes_every_command_to_its_decision() {
    let acquired = acquire(None, &request(1), START);
    let (record, outcome) = transition(None, Command::Acquire(&request(1)), START);
    assert_eq!((record.clone(), outcome), (acquired.0, Outcome::Acquire(acquired.1)));
    let renewal = OwnerAction::Renew(TERM);
    let renewed = apply(record.as_ref(), token(1), renewal, seconds(1));
    let (next, outcome) = transition(record.as_ref(), Command::Owner(token(1), renewal), seconds(1));
    assert_eq!((next, outcome), (renewed.0, Outcome::Owner(renewed.1)));
    let seen = record.as_ref().unwrap().version();
    let resolution = Resolution::OutcomeUnknown;
    let request = Resolve { id: request(1).id, action: token(2), seen, resolution, retention: KEPT };
    let resolved = resolve(record.as_ref(), &request, after(LEASE));
    let (next, outcome) = transition(record.as_ref(), Command::Resolve(&request), after(LEASE));
    assert_eq!((next, outcome), (resolved.0, Outcome::Resolve(resolved.1)));
}

#[test]
fn a_record_is_current_until_it_expires() {
    let record = in_progress();
    assert_eq!(current(Some(&record), after(LEASE + RETENTION - TICK)), Some(&record));
    assert_eq!(current(Some(&record), after(LEASE + RETENTION)), None);
    assert_eq!(current(None, START), None);
}
