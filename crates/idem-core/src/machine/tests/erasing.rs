use super::*;
use crate::machine::{Erase, EraseOutcome, erase};
use crate::record::StoredBody;

const OPERATOR: u8 = 9;

fn erasure(record: &Record) -> Erase {
    Erase { id: request(1).id, action: token(OPERATOR), seen: record.version(), principal: None }
}

#[test]
fn a_final_answer_becomes_a_tombstone() {
    for settlement in [Settlement::Completed(response()), Settlement::FailedTerminal(response())] {
        let record = Record { checkpoint: Some(checkpoint("charged")), ..with_attempt(2, settled(&settlement)) };
        let (next, outcome) = erase(Some(&record), &erasure(&record), seconds(5));
        assert_eq!(outcome, EraseOutcome::Erased);
        let bare = StoredResponse { body: StoredBody::NotRetained, ..StoredResponse::new(response().status, "") };
        let state = match &record.state {
            State::Failed { failure, .. } => State::Failed { failure: *failure, response: bare },
            _ => State::Completed { response: bare },
        };
        let expected =
            Record { owner: token(OPERATOR), checkpoint: None, updated_at: seconds(5), state, ..record.clone() };
        assert!(expected.is_erased() && !record.is_erased());
        assert_eq!(next, Some(expected), "attempt, fingerprint, creation and retention stay");
        let repeat = acquire(next.as_ref(), &request(2), seconds(6)).1;
        let AcquireOutcome::Replay(replay) = repeat else { panic!("it does not run again: {repeat:?}") };
        assert_eq!((replay.response.status, replay.response.body), (response().status, StoredBody::NotRetained));
    }
}

#[test]
fn what_may_still_run_is_not_erased() {
    let live = in_progress();
    assert_eq!(erase(Some(&live), &erasure(&live), after(LEASE - TICK)), (Some(live.clone()), EraseOutcome::Live));
    let cases = [
        (live, after(LEASE)),
        (settled(&retryable(Duration::from_secs(3))), seconds(2)),
        (settled(&retryable(Duration::ZERO)), seconds(2)),
        (settled(&Settlement::OutcomeUnknown), seconds(2)),
    ];
    for (record, now) in cases {
        assert_eq!(erase(Some(&record), &erasure(&record), now), (Some(record), EraseOutcome::Unsettled));
    }
}

#[test]
fn an_erasure_is_fenced_and_can_be_repeated() {
    let record = settled(&Settlement::Completed(response()));
    let by = erasure(&record);
    for action in [OwnerToken::NOBODY, record.owner] {
        let refused = erase(Some(&record), &Erase { action, ..by.clone() }, seconds(2));
        assert_eq!(refused, (Some(record.clone()), EraseOutcome::Token));
    }
    let other = Record { owner: token(2), ..record.clone() };
    assert_eq!(erase(Some(&other), &by, seconds(2)), (Some(other), EraseOutcome::Changed));
    assert_eq!(erase(None, &by, seconds(2)), (None, EraseOutcome::Changed));
    assert_eq!(erase(Some(&record), &by, record.expires_at), (None, EraseOutcome::Changed), "its retention is over");
    let next = erase(Some(&record), &by, seconds(2)).0;
    assert_eq!(erase(next.as_ref(), &by, seconds(3)), (next.clone(), EraseOutcome::Erased));
    let again = Erase { action: token(8), ..by };
    assert_eq!(erase(next.as_ref(), &again, seconds(3)), (next.clone(), EraseOutcome::Changed));
    let late = OwnerAction::Settle(&Settlement::Completed(response()), KEPT);
    assert_lease_lost(next.as_ref().unwrap(), 1, late, seconds(3));
}

#[test]
fn debug_output_hides_the_principal() {
    let by = Erase { principal: Some("alice".into()), ..erasure(&in_progress()) };
    assert!(!format!("{by:?}").contains("alice"));
}
