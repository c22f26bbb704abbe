//! Settle and release, once and repeated (laws L2 and L8).

use idem_core::{
    Acquire, Acquisition, Failure, OwnerOutcome, Record, ReplayKind, Settlement, State, StoredResponse, Takeover,
};

use super::{assert_record_is, assert_replay, assert_time};
use crate::fixture::{BACKOFF, KEPT, LEASE, RETENTION, checkpoint, completed, failed, repeat_of, request, retryable};
use crate::subject::Subject;

fn state_after(settlement: Settlement, settled_at: idem_core::Timestamp) -> Option<State> {
    match settlement {
        Settlement::Completed(response) => Some(State::Completed { response }),
        Settlement::FailedTerminal(response) => Some(State::Failed { failure: Failure::Terminal, response }),
        Settlement::FailedRetryable { response, retry_after } => {
            let not_before = settled_at.saturating_add(retry_after);
            Some(State::Failed { failure: Failure::Retryable { not_before }, response })
        }
        Settlement::OutcomeUnknown => {
            let response = StoredResponse::outcome_unknown();
            Some(State::Failed { failure: Failure::OutcomeUnknown, response })
        }
        Settlement::Released => None,
    }
}

/// Each settlement leads to its state. Backoff and retention count from the settlement. The retention of a retryable failure
/// counts from when its next attempt may begin.
pub async fn each_settlement_leads_to_its_state(subject: &Subject) {
    for settlement in [completed(), failed(), retryable(), Settlement::OutcomeUnknown] {
        let request = request();
        let lease = subject.lease(&request).await;
        let before = subject.record(&request.id).await;
        subject.time.advance(LEASE / 2);
        assert_eq!(subject.settle(&lease, &settlement).await, OwnerOutcome::Applied);
        let record = subject.record(&request.id).await;
        let updated_at = record.updated_at;
        assert_time(subject, "updated_at", updated_at, before.updated_at.saturating_add(LEASE / 2));
        let state = state_after(settlement, updated_at).expect("these settlements keep the record");
        let kept_from = match state {
            State::Failed { failure: Failure::Retryable { not_before }, .. } => not_before,
            _ => updated_at,
        };
        assert_eq!(record, Record { updated_at, expires_at: kept_from.saturating_add(KEPT), state, ..before });
    }
}

/// After a failure, the next attempt or an operator needs the checkpoint.
pub async fn the_checkpoint_outlives_each_failure_but_no_success(subject: &Subject) {
    let charged = Some(checkpoint("charged"));
    let kept = [(completed(), None), (failed(), charged.clone()), (retryable(), charged)];
    for (settlement, expected) in kept {
        let lease = subject.lease(&request()).await;
        subject.checkpoint(&lease, &checkpoint("charged")).await;
        subject.settle(&lease, &settlement).await;
        assert_eq!(subject.record(&lease.id).await.checkpoint, expected, "after {settlement:?}");
    }
}

/// [`completed`] with its header fields in another order, which may keep or change that of fields with one name.
fn completed_in_another_order(keeps_order_within_names: bool) -> Settlement {
    let response = crate::fixture::response();
    let mut headers = response.headers.to_vec();
    if keeps_order_within_names {
        headers.sort_by(|one, other| one.name.cmp(&other.name));
    } else {
        headers.reverse();
    }
    Settlement::Completed(StoredResponse { headers: headers.into(), ..response })
}

/// Law L8: the same settlement again gets the same answer, and changes nothing. It may have its header fields in another order.
pub async fn a_repeated_settlement_is_answered_as_the_first_time(subject: &Subject) {
    for settlement in [completed(), failed(), retryable()] {
        let request = request();
        let lease = subject.lease(&request).await;
        assert_eq!(subject.settle(&lease, &settlement).await, OwnerOutcome::Applied);
        let record = subject.record(&request.id).await;
        subject.time.advance(BACKOFF / 2);
        assert_eq!(subject.settle(&lease, &settlement).await, OwnerOutcome::Applied);
        subject.advance_to_end_of(LEASE * 2);
        assert_eq!(subject.settle(&lease, &settlement).await, OwnerOutcome::Applied);
        if settlement == completed() {
            let reordered = completed_in_another_order(true);
            assert_ne!(reordered, settlement);
            assert_eq!(subject.settle(&lease, &reordered).await, OwnerOutcome::Applied);
        }
        assert_record_is(subject, &request, &record).await;
    }
}

/// A different settlement of a settled record is refused.
pub async fn a_different_settlement_of_a_settled_record_is_refused(subject: &Subject) {
    let other_body =
        StoredResponse { body: idem_core::StoredBody::Retained("other".into()), ..crate::fixture::response() };
    let as_failure = Settlement::FailedTerminal(crate::fixture::response());
    let as_retry = Settlement::FailedRetryable { response: crate::fixture::response(), retry_after: BACKOFF };
    let request = request();
    let lease = subject.lease(&request).await;
    subject.settle(&lease, &completed()).await;
    let record = subject.record(&request.id).await;
    let other_order = completed_in_another_order(false);
    let others = [
        Settlement::Completed(other_body),
        other_order,
        as_failure,
        as_retry,
        failed(),
        retryable(),
        Settlement::Released,
    ];
    for second in others {
        assert_eq!(subject.settle(&lease, &second).await, OwnerOutcome::LeaseLost, "{second:?}");
    }
    assert_record_is(subject, &request, &record).await;
}

/// A failure settled as retryable is not made final, or released, by a late second settlement.
pub async fn a_retryable_failure_is_not_settled_otherwise(subject: &Subject) {
    let request = request();
    let lease = subject.lease(&request).await;
    subject.settle(&lease, &retryable()).await;
    let record = subject.record(&request.id).await;
    let Settlement::FailedRetryable { response, .. } = retryable() else { unreachable!() };
    let terminal = Settlement::FailedTerminal(response.clone());
    let others = [terminal, Settlement::Completed(response), completed(), failed(), Settlement::Released];
    for second in others {
        assert_eq!(subject.settle(&lease, &second).await, OwnerOutcome::LeaseLost, "{second:?}");
    }
    assert_record_is(subject, &request, &record).await;
}

/// What is settled can be neither renewed nor checkpointed.
pub async fn a_settled_record_is_neither_renewed_nor_checkpointed(subject: &Subject) {
    for settlement in [completed(), failed(), retryable()] {
        let request = request();
        let lease = subject.lease(&request).await;
        subject.settle(&lease, &settlement).await;
        let record = subject.record(&request.id).await;
        assert_eq!(subject.renew(&lease, request.term).await, OwnerOutcome::LeaseLost);
        assert_eq!(subject.checkpoint(&lease, &checkpoint("late")).await, OwnerOutcome::LeaseLost);
        assert_record_is(subject, &request, &record).await;
    }
}

/// A release removes the record as if it had never been.
pub async fn a_release_removes_the_record(subject: &Subject) {
    let request = request();
    let lease = subject.lease(&request).await;
    assert_eq!(subject.settle(&lease, &Settlement::Released).await, OwnerOutcome::Applied);
    assert_eq!(subject.peek(&request.id).await, None);
    let lease = subject.lease(&crate::fixture::mismatch_of(&request)).await;
    assert_eq!((lease.attempt, lease.acquisition, lease.checkpoint), (1, Acquisition::Fresh, None));
}

/// A release does not forget that an earlier run may have had effects: the attempt and the checkpoint stay.
pub async fn a_release_keeps_the_attempt_and_the_checkpoint_of_an_earlier_run(subject: &Subject) {
    let request = request();
    let lease = subject.lease(&request).await;
    subject.checkpoint(&lease, &checkpoint("charged")).await;
    for attempt in 2..4 {
        subject.advance_to_end_of(LEASE);
        let lease = subject.lease(&repeat_of(&request)).await;
        assert_eq!((lease.attempt, &lease.checkpoint), (attempt, &Some(checkpoint("charged"))));
        assert_eq!(subject.settle(&lease, &Settlement::Released).await, OwnerOutcome::Applied);
        assert_eq!(subject.settle(&lease, &Settlement::Released).await, OwnerOutcome::Applied);
        // A late renewal or settlement does not apply to a released record.
        assert_eq!(subject.renew(&lease, request.term).await, OwnerOutcome::LeaseLost);
        assert_eq!(subject.settle(&lease, &completed()).await, OwnerOutcome::LeaseLost);
    }
    // The lease ended with the release, so the next caller need not wait for it.
    assert_eq!(subject.lease(&repeat_of(&request)).await.attempt, 4);
}

/// A failure that may run again still may after its retry was released, and its attempt and checkpoint stay. That holds under every
/// contract: the failure itself would run again too.
pub async fn a_released_retry_stays_a_retry_under_every_contract(subject: &Subject) {
    for takeover in [Takeover::Rerun, Takeover::Unknown, Takeover::Probe] {
        let request = Acquire { takeover, ..request() };
        let lease = subject.lease(&request).await;
        subject.checkpoint(&lease, &checkpoint("charged")).await;
        assert_eq!(subject.settle(&lease, &retryable()).await, OwnerOutcome::Applied);
        subject.advance_to_end_of(BACKOFF);
        for attempt in 2..4 {
            let lease = subject.lease(&repeat_of(&request)).await;
            assert_eq!((lease.attempt, lease.acquisition), (attempt, Acquisition::Retry), "{takeover:?}");
            assert_eq!(lease.checkpoint, Some(checkpoint("charged")), "{takeover:?}");
            assert_eq!(subject.settle(&lease, &Settlement::Released).await, OwnerOutcome::Applied);
            assert_eq!(subject.renew(&lease, request.term).await, OwnerOutcome::LeaseLost);
        }
        // A retry that crashes is none that was released.
        subject.lease(&repeat_of(&request)).await;
        subject.advance_to_end_of(LEASE);
        if takeover == Takeover::Unknown {
            let unknown = StoredResponse::outcome_unknown();
            assert_replay(&subject.acquire(&repeat_of(&request)).await, ReplayKind::OutcomeUnknown, 4, &unknown);
        }
    }
}

/// Law L8: a release can be repeated, also after the record is forgotten.
pub async fn a_repeated_release_is_answered_as_the_first_time(subject: &Subject) {
    let lease = subject.lease(&request()).await;
    for _ in 0..3 {
        assert_eq!(subject.settle(&lease, &Settlement::Released).await, OwnerOutcome::Applied);
    }
    assert_eq!(subject.peek(&lease.id).await, None);
    let lease = subject.lease(&request()).await;
    subject.advance_to_end_of(LEASE + RETENTION);
    assert_eq!(subject.settle(&lease, &Settlement::Released).await, OwnerOutcome::Applied);
    assert_eq!(subject.peek(&lease.id).await, None);
}

/// A repeated release does not remove the record of the next owner.
pub async fn a_repeated_release_does_not_touch_the_next_owner(subject: &Subject) {
    let first = request();
    let lease = subject.lease(&first).await;
    subject.settle(&lease, &Settlement::Released).await;
    let second = repeat_of(&first);
    subject.lease(&second).await;
    let record = subject.record(&first.id).await;
    assert_eq!(subject.settle(&lease, &Settlement::Released).await, OwnerOutcome::LeaseLost);
    assert_record_is(subject, &second, &record).await;
}
