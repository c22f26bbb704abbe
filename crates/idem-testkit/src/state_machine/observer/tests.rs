use idem_core::{
    Acquire, Acquisition, Algorithm, Lease, Replay, ReplayKind, Settlement, StoredResponse, Takeover, Term,
};

use super::*;
use crate::fixture::{KEPT, LEASE, completed, mismatch_of, repeat_of, request, response};
use crate::model::Model;

const START: Timestamp = Timestamp::from_unix_micros(1_000_000);

fn seconds(seconds: u64) -> Timestamp {
    START.saturating_add(Duration::from_secs(seconds))
}

/// An observer that has seen a correct history of one record.
struct Seen {
    observer: Observer,
    model: Model,
    request: Acquire,
    lease: Lease,
    /// The record as it stands.
    record: Option<Record>,
}

impl Seen {
    fn acquired() -> Self {
        let request = request();
        let (id, owner) = (request.id, request.owner);
        let lease = Lease {
            id,
            fingerprint: request.fingerprint,
            owner,
            attempt: 1,
            acquisition: Acquisition::Fresh,
            checkpoint: None,
        };
        let observer = Observer::new(Duration::ZERO);
        let mut seen = Self { observer, model: Model::default(), request: request.clone(), lease, record: None };
        seen.correctly(&Operation::Acquire(request), START);
        seen
    }

    fn settled(settlement: Settlement) -> Self {
        let mut seen = Self::acquired();
        seen.correctly(&Operation::Settle(seen.lease.clone(), settlement, KEPT), seconds(1));
        seen
    }

    fn correctly(&mut self, operation: &Operation, now: Timestamp) {
        let answer = self.model.apply(operation, now);
        let Answer::Peek(record) = self.model.apply(&Operation::Peek(self.request.id), now) else { unreachable!() };
        self.record = record;
        let after = self.record.clone();
        let sight = Sight { id: self.request.id, now, operation, answer: &answer, after: after.as_ref() };
        self.observer.see(&sight).expect("the model keeps the laws");
    }

    /// Asserts that the observer names `law` if the operation gets this answer and leaves `after`.
    #[track_caller]
    fn breaks(&self, law: &str, operation: Operation, answer: Answer, after: Option<Record>, now: Timestamp) {
        let sight = Sight { id: self.request.id, now, operation: &operation, answer: &answer, after: after.as_ref() };
        let verdict = self.observer.clone().see(&sight).expect_err("the observer saw nothing wrong");
        assert!(verdict.starts_with(&format!("law {law} is broken")), "{verdict}");
    }

    fn running(&self) -> Record {
        self.record.clone().expect("the record is there")
    }
}

fn acquired(lease: Lease) -> Answer {
    Answer::Acquire(AcquireOutcome::Acquired(lease))
}

/// The record and the lease after a takeover by `request`.
fn taken_over(seen: &Seen, request: &Acquire, attempt: u32, now: Timestamp) -> (Lease, Record) {
    let lease = Lease { owner: request.owner, attempt, acquisition: Acquisition::Takeover, ..seen.lease.clone() };
    let lease_until = now.saturating_add(LEASE);
    let (acquisition, takeover) = (Acquisition::Takeover, Takeover::Rerun);
    let state = State::InProgress { lease_until, acquisition, takeover };
    let expires_at = lease_until.saturating_add(KEPT);
    (lease, Record { owner: request.owner, attempt, updated_at: now, expires_at, state, ..seen.running() })
}

#[test]
fn a_second_owner_within_the_lease_breaks_l1() {
    let seen = Seen::acquired();
    let rival = repeat_of(&seen.request);
    let (lease, record) = taken_over(&seen, &rival, 2, seconds(5));
    seen.breaks("L1", Operation::Acquire(rival), acquired(lease), Some(record), seconds(5));
}

#[test]
fn a_settled_record_that_changes_breaks_l2() {
    let seen = Seen::settled(completed());
    let changed = Record { updated_at: seconds(2), ..seen.running() };
    let outcome = Answer::Owner(OwnerOutcome::Applied);
    let operation = Operation::Settle(seen.lease.clone(), completed(), KEPT);
    seen.breaks("L2", operation, outcome, Some(changed), seconds(2));
}

#[test]
fn a_settled_record_that_vanishes_breaks_l2() {
    let seen = Seen::settled(completed());
    let operation = Operation::Peek(seen.request.id);
    seen.breaks("L2", operation, Answer::Peek(None), None, seconds(2));
}

#[test]
fn a_replay_of_other_bytes_breaks_l2() {
    let seen = Seen::settled(completed());
    let other = StoredResponse { status: 200, ..response() };
    let replay = Replay { response: other, kind: ReplayKind::Completed, attempt: 1, settled_at: seconds(1) };
    let (operation, record) = (Operation::Acquire(repeat_of(&seen.request)), seen.running());
    seen.breaks("L2", operation, Answer::Acquire(AcquireOutcome::Replay(replay)), Some(record), seconds(2));
}

#[test]
fn a_stranger_that_is_obeyed_breaks_l3() {
    let stranger = |seen: &Seen| Lease { owner: repeat_of(&seen.request).owner, ..seen.lease.clone() };
    let term = Term { lease: LEASE, retention: KEPT };
    let operations: [fn(Lease, Term) -> Operation; 2] =
        [Operation::Renew, |lease, _| Operation::Settle(lease, Settlement::Released, KEPT)];
    for operation in operations {
        let seen = Seen::acquired();
        let (operation, record) = (operation(stranger(&seen), term), seen.running());
        seen.breaks("L3", operation, Answer::Owner(OwnerOutcome::Applied), Some(record), seconds(2));
    }
}

#[test]
fn a_refusal_that_changes_the_record_breaks_l3() {
    let seen = Seen::acquired();
    let changed = Record { updated_at: seconds(2), ..seen.running() };
    let operation = Operation::Renew(seen.lease.clone(), seen.request.term);
    seen.breaks("L3", operation, Answer::Owner(OwnerOutcome::LeaseLost), Some(changed), seconds(2));
}

#[test]
fn a_renewal_of_what_is_settled_breaks_l3() {
    let seen = Seen::settled(completed());
    let (operation, record) = (Operation::Renew(seen.lease.clone(), seen.request.term), seen.running());
    seen.breaks("L3", operation, Answer::Owner(OwnerOutcome::Applied), Some(record), seconds(2));
}

#[test]
fn another_request_that_runs_or_is_answered_breaks_l4() {
    let seen = Seen::acquired();
    let (operation, record) = (Operation::Acquire(mismatch_of(&seen.request)), seen.running());
    let answer = Answer::Acquire(AcquireOutcome::InProgress { lease_left: LEASE, age: Duration::ZERO });
    seen.breaks("L4", operation, answer, Some(record), seconds(2));
    let seen = Seen::settled(completed());
    let (operation, record) = (Operation::Acquire(mismatch_of(&seen.request)), seen.running());
    let replay = Replay { response: response(), kind: ReplayKind::Completed, attempt: 1, settled_at: seconds(1) };
    seen.breaks("L4", operation, Answer::Acquire(AcquireOutcome::Replay(replay)), Some(record), seconds(2));
}

#[test]
fn a_mismatch_that_changes_the_record_breaks_l4() {
    let seen = Seen::acquired();
    let changed = Record { updated_at: seconds(2), ..seen.running() };
    let answer = Answer::Acquire(AcquireOutcome::Mismatch { stored_algorithm: Algorithm::V1 });
    seen.breaks("L4", Operation::Acquire(mismatch_of(&seen.request)), answer, Some(changed), seconds(2));
}

#[test]
fn a_key_that_waits_for_a_lease_that_is_over_breaks_l5() {
    let seen = Seen::acquired();
    let (operation, record) = (Operation::Acquire(repeat_of(&seen.request)), seen.running());
    let answer = Answer::Acquire(AcquireOutcome::InProgress { lease_left: LEASE, age: Duration::ZERO });
    seen.breaks("L5", operation, answer, Some(record), START.saturating_add(LEASE));
}

#[test]
fn a_record_that_another_verb_changed_breaks_l6() {
    let seen = Seen::acquired();
    let changed = Record { updated_at: seconds(2), ..seen.running() };
    let verdict = seen.observer.finish(seen.request.id, seconds(2), Some(&changed)).unwrap_err();
    assert!(verdict.starts_with("law L6"), "{verdict}");
    seen.observer.finish(seen.request.id, seconds(2), Some(&seen.running())).unwrap();
    seen.observer.finish(seen.request.id, seen.running().expires_at, None).unwrap();
}

#[test]
fn an_attempt_that_does_not_grow_breaks_l7() {
    let seen = Seen::acquired();
    let rival = repeat_of(&seen.request);
    let now = START.saturating_add(LEASE);
    let (lease, record) = taken_over(&seen, &rival, 1, now);
    seen.breaks("L7", Operation::Acquire(rival), acquired(lease), Some(record), now);
}

#[test]
fn a_repeated_acquire_that_changes_the_record_breaks_l8() {
    let seen = Seen::acquired();
    let (lease, changed) = (seen.lease.clone(), Record { updated_at: seconds(2), ..seen.running() });
    seen.breaks("L8", Operation::Acquire(seen.request.clone()), acquired(lease), Some(changed), seconds(2));
}

#[test]
fn a_peek_that_shows_something_else_breaks_l8() {
    let seen = Seen::acquired();
    let record = seen.running();
    seen.breaks("L8", Operation::Peek(seen.request.id), Answer::Peek(None), Some(record), seconds(2));
}

#[test]
fn times_that_are_not_the_stores_break_l9() {
    let seen = Seen::acquired();
    let ahead = Record { updated_at: seconds(9), ..seen.running() };
    let operation = Operation::Renew(seen.lease.clone(), seen.request.term);
    seen.breaks("L9", operation, Answer::Owner(OwnerOutcome::Applied), Some(ahead), seconds(2));
}

#[test]
fn a_record_that_ends_before_its_lease_breaks_l10() {
    let seen = Seen::acquired();
    let short = Record { expires_at: seconds(5), ..seen.running() };
    let operation = Operation::Renew(seen.lease.clone(), seen.request.term);
    seen.breaks("L10", operation, Answer::Owner(OwnerOutcome::Applied), Some(short), seconds(2));
}
