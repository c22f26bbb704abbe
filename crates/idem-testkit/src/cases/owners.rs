//! Renew and checkpoint, and which owners may call them (laws L3 and L8).

use std::time::Duration;

use idem_core::{Acquisition, Checkpoint, Lease, OwnerOutcome, OwnerToken, Record, Settlement, State, Takeover, Term};

use super::assert_in_progress;
use crate::fixture::{KEPT, LEASE, RETENTION, checkpoint, completed, failed, repeat_of, request, retryable};
use crate::subject::Subject;

const LONGER: Term = Term { lease: Duration::from_secs(1_000), retention: Duration::from_secs(5_000) };

/// Asserts that every owner's verb with this lease is refused, and that the record stays as it is.
async fn assert_refused(subject: &Subject, lease: &Lease) {
    let before = subject.peek(&lease.id).await;
    assert_eq!(subject.renew(lease, LONGER).await, OwnerOutcome::LeaseLost, "renew");
    assert_eq!(subject.checkpoint(lease, &checkpoint("stale")).await, OwnerOutcome::LeaseLost, "checkpoint");
    for settlement in [completed(), failed(), retryable()] {
        assert_eq!(subject.settle(lease, &settlement).await, OwnerOutcome::LeaseLost, "{settlement:?}");
    }
    if before.is_some() {
        assert_eq!(subject.settle(lease, &Settlement::Released).await, OwnerOutcome::LeaseLost, "release");
    }
    let after = subject.peek(&lease.id).await;
    assert!(before == after, "a refused verb changed {before:?} to {after:?}");
}

/// A renewal counts from now and keeps everything else.
pub async fn renew_moves_the_lease_to_count_from_now(subject: &Subject) {
    let request = request();
    let lease = subject.lease(&request).await;
    subject.checkpoint(&lease, &checkpoint("charged")).await;
    let before = subject.record(&request.id).await;
    subject.time.advance(LEASE / 2);
    assert_eq!(subject.renew(&lease, LONGER).await, OwnerOutcome::Applied);
    let record = subject.record(&request.id).await;
    let lease_until = record.updated_at.saturating_add(LONGER.lease);
    let expected = Record {
        updated_at: record.updated_at,
        expires_at: lease_until.saturating_add(LONGER.retention),
        state: State::InProgress { lease_until, acquisition: Acquisition::Fresh, takeover: Takeover::Rerun },
        ..before.clone()
    };
    assert_eq!(record, expected);
    let elapsed = record.updated_at.saturating_duration_since(before.updated_at);
    super::assert_duration(subject, "the time since the acquire", elapsed, LEASE / 2);
}

/// A store that stalls may deliver an earlier checkpoint after a later one. It changes nothing, also in the next attempt.
pub async fn an_earlier_checkpoint_that_comes_late_changes_nothing(subject: &Subject) {
    let request = request();
    let lease = subject.lease(&request).await;
    let charged = Checkpoint { sequence: 257, ..checkpoint("charged") };
    assert_eq!(subject.checkpoint(&lease, &charged).await, OwnerOutcome::Applied);
    let before = subject.record(&request.id).await;
    subject.time.advance(LEASE / 2);
    for sequence in [0, 1, 256, 257] {
        let late = Checkpoint { sequence, ..checkpoint("intended") };
        assert_eq!(subject.checkpoint(&lease, &late).await, OwnerOutcome::LeaseLost, "{sequence}");
    }
    let other = Checkpoint { data: "other".into(), ..charged.clone() };
    assert_eq!(subject.checkpoint(&lease, &other).await, OwnerOutcome::LeaseLost, "it has the same sequence");
    assert_eq!(subject.checkpoint(&lease, &charged).await, OwnerOutcome::Applied, "it is the same");
    assert_eq!(subject.record(&request.id).await, before);
    subject.advance_to_end_of(LEASE);
    let next = subject.lease(&repeat_of(&request)).await;
    assert_eq!(next.checkpoint, Some(charged));
    let shipped = Checkpoint { sequence: 65_536, ..checkpoint("shipped") };
    assert_eq!(subject.checkpoint(&next, &shipped).await, OwnerOutcome::Applied);
    assert_eq!(subject.record(&request.id).await.checkpoint, Some(shipped));
}

/// A renewed lease keeps others waiting beyond its first end.
pub async fn a_renewed_lease_turns_others_away_for_longer(subject: &Subject) {
    let request = request();
    let lease = subject.lease(&request).await;
    let left = subject.advance_to_just_before(LEASE);
    assert_eq!(subject.renew(&lease, request.term).await, OwnerOutcome::Applied);
    subject.advance_to_end_of(left);
    let rest = LEASE.saturating_sub(left + subject.precision);
    assert_in_progress(subject, &subject.acquire(&repeat_of(&request)).await, rest);
    subject.advance_to_end_of(rest);
    assert_eq!(subject.lease(&repeat_of(&request)).await.attempt, 2);
}

/// A renewal can also shorten a lease: it counts from now, whatever the lease was before.
pub async fn a_renewal_can_shorten_the_lease(subject: &Subject) {
    let request = request();
    let lease = subject.lease(&request).await;
    let term = Term { lease: LEASE / 10, retention: RETENTION };
    assert_eq!(subject.renew(&lease, term).await, OwnerOutcome::Applied);
    subject.advance_to_end_of(LEASE / 10);
    assert_eq!(subject.lease(&repeat_of(&request)).await.attempt, 2);
}

/// A lease that ran out but was not taken over still belongs to its owner.
pub async fn a_lease_that_ran_out_still_belongs_to_its_owner(subject: &Subject) {
    let request = request();
    let lease = subject.lease(&request).await;
    subject.advance_to_end_of(LEASE * 2);
    assert_eq!(subject.checkpoint(&lease, &checkpoint("late")).await, OwnerOutcome::Applied);
    assert_eq!(subject.renew(&lease, request.term).await, OwnerOutcome::Applied);
    assert_in_progress(subject, &subject.acquire(&repeat_of(&request)).await, LEASE);
    subject.advance_to_end_of(LEASE * 2);
    assert_eq!(subject.settle(&lease, &completed()).await, OwnerOutcome::Applied);
}

/// A checkpoint replaces the one before, and extends neither lease nor retention.
pub async fn a_checkpoint_replaces_the_one_before(subject: &Subject) {
    let request = request();
    let lease = subject.lease(&request).await;
    let before = subject.record(&request.id).await;
    assert_eq!(subject.checkpoint(&lease, &checkpoint("one")).await, OwnerOutcome::Applied);
    subject.time.advance(LEASE / 2);
    let two = Checkpoint { sequence: 2, ..checkpoint("two") };
    for _ in 0..2 {
        assert_eq!(subject.checkpoint(&lease, &two).await, OwnerOutcome::Applied);
    }
    let record = subject.record(&request.id).await;
    let updated_at = record.updated_at;
    assert_eq!(record, Record { checkpoint: Some(two), updated_at, ..before.clone() });
    let elapsed = updated_at.saturating_duration_since(before.updated_at);
    super::assert_duration(subject, "the time since the acquire", elapsed, LEASE / 2);
}

/// Law L3: an owner that was taken over changes nothing any more.
pub async fn an_owner_that_was_taken_over_changes_nothing(subject: &Subject) {
    let first = request();
    let stale = subject.lease(&first).await;
    subject.advance_to_end_of(LEASE);
    let lease = subject.lease(&repeat_of(&first)).await;
    assert_refused(subject, &stale).await;
    subject.settle(&lease, &completed()).await;
    assert_refused(subject, &stale).await;
}

/// Law L3: a caller that never owned the record changes nothing, even with the right attempt number.
pub async fn a_stranger_changes_nothing(subject: &Subject) {
    for settlement in [None, Some(completed()), Some(failed()), Some(retryable())] {
        let lease = subject.lease(&request()).await;
        if let Some(settlement) = settlement {
            subject.settle(&lease, &settlement).await;
        }
        assert_refused(subject, &Lease { owner: OwnerToken::random(), ..lease }).await;
    }
}

/// Law L3: after another owner retries its failed attempt, an owner changes nothing any more.
pub async fn an_owner_whose_failure_is_retried_changes_nothing(subject: &Subject) {
    let first = request();
    let stale = subject.lease(&first).await;
    subject.settle(&stale, &retryable()).await;
    subject.advance_to_end_of(crate::fixture::BACKOFF);
    subject.lease(&repeat_of(&first)).await;
    assert_refused(subject, &stale).await;
}

/// Law L3: an owner whose record was settled as unknown can no longer settle it.
pub async fn an_owner_whose_outcome_became_unknown_changes_nothing(subject: &Subject) {
    let first = idem_core::Acquire { takeover: Takeover::Unknown, ..request() };
    let stale = subject.lease(&first).await;
    subject.advance_to_end_of(LEASE);
    subject.acquire(&repeat_of(&first)).await;
    assert_refused(subject, &stale).await;
    let same_answer = Settlement::FailedTerminal(idem_core::StoredResponse::outcome_unknown());
    assert_eq!(subject.settle(&stale, &same_answer).await, OwnerOutcome::LeaseLost);
}

/// If there is no record, an owner's verbs change nothing.
pub async fn nobody_owns_a_record_that_is_not_there(subject: &Subject) {
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
    assert_refused(subject, &lease).await;
    assert_eq!(subject.peek(&id).await, None);
}

/// Once a record is forgotten, its owner's verbs come too late.
pub async fn nobody_owns_a_record_that_is_forgotten(subject: &Subject) {
    let lease = subject.lease(&request()).await;
    subject.advance_to_end_of(LEASE + RETENTION);
    assert_refused(subject, &lease).await;
    assert_eq!(subject.peek(&lease.id).await, None);
    let lease = subject.lease(&request()).await;
    subject.settle(&lease, &completed()).await;
    subject.advance_to_end_of(KEPT);
    assert_refused(subject, &lease).await;
    assert_eq!(subject.peek(&lease.id).await, None);
}
