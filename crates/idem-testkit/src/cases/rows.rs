//! Acquire, row by row of the state machine's table.

use idem_core::{
    Acquire, AcquireOutcome, Acquisition, Failure, Lease, Record, ReplayKind, Settlement, State, StoredResponse,
    Takeover, Term,
};

use super::{assert_backoff, assert_in_progress, assert_record_is, assert_replay, assert_time};
use crate::fixture::{BACKOFF, KEPT, LEASE, RETENTION, checkpoint, completed, failed, repeat_of, request, response};
use crate::fixture::{mismatch_of, retryable};
use crate::subject::Subject;

/// An unused key runs as attempt 1.
pub async fn a_new_key_is_acquired(subject: &Subject) {
    let request = request();
    let (id, owner) = (request.id, request.owner);
    let lease = subject.lease(&request).await;
    assert_eq!(
        lease,
        Lease {
            id,
            fingerprint: request.fingerprint,
            owner,
            attempt: 1,
            acquisition: Acquisition::Fresh,
            checkpoint: None
        }
    );
}

/// Peek shows every field of a fresh record as the machine would hold it.
pub async fn a_fresh_record_holds_what_was_asked(subject: &Subject) {
    let request = Acquire { takeover: Takeover::Unknown, ..request() };
    subject.lease(&request).await;
    let record = subject.record(&request.id).await;
    let lease_until = record.created_at.saturating_add(LEASE);
    let expected = Record {
        fingerprint: request.fingerprint,
        owner: request.owner,
        attempt: 1,
        checkpoint: None,
        created_at: record.created_at,
        updated_at: record.created_at,
        expires_at: lease_until.saturating_add(RETENTION),
        state: State::InProgress { lease_until, acquisition: Acquisition::Fresh, takeover: Takeover::Unknown },
    };
    assert_eq!(record, expected);
    assert_time(subject, "created_at", record.created_at, subject.now().await);
}

/// Row 2: the same owner token gets the same lease, and the record stays as it is.
pub async fn a_repeated_acquire_is_answered_as_the_first_time(subject: &Subject) {
    let request = request();
    let lease = subject.lease(&request).await;
    let record = subject.record(&request.id).await;
    assert_eq!(subject.lease(&request).await, lease);
    subject.advance_to_end_of(LEASE);
    assert_eq!(subject.lease(&request).await, lease);
    assert_record_is(subject, &request, &record).await;
}

/// A repeated acquire returns the same acquisition and checkpoint, also after a takeover.
pub async fn a_repeated_takeover_is_answered_as_the_first_time(subject: &Subject) {
    let first = request();
    let lease = subject.lease(&first).await;
    subject.checkpoint(&lease, &checkpoint("charged")).await;
    subject.advance_to_end_of(LEASE);
    let second = repeat_of(&first);
    let lease = subject.lease(&second).await;
    assert_eq!(subject.lease(&second).await, lease);
    assert_eq!(lease.checkpoint, Some(checkpoint("charged")));
}

/// Row 3: while the lease is live, other callers get the time that is left of it, and change nothing.
pub async fn a_live_lease_turns_others_away(subject: &Subject) {
    let request = request();
    subject.lease(&request).await;
    let record = subject.record(&request.id).await;
    assert_in_progress(subject, &subject.acquire(&repeat_of(&request)).await, LEASE);
    let left = subject.advance_to_just_before(LEASE);
    assert_in_progress(subject, &subject.acquire(&repeat_of(&request)).await, left);
    assert_record_is(subject, &request, &record).await;
}

/// Row 4: a lease is taken over at its end, with the next attempt and the last checkpoint.
pub async fn a_lease_that_is_over_is_taken_over(subject: &Subject) {
    let first = request();
    let lease = subject.lease(&first).await;
    let born = subject.record(&first.id).await.created_at;
    subject.checkpoint(&lease, &checkpoint("charged")).await;
    subject.advance_to_end_of(LEASE);
    let second = repeat_of(&first);
    let lease = subject.lease(&second).await;
    assert_eq!((lease.owner, lease.attempt, lease.acquisition), (second.owner, 2, Acquisition::Takeover));
    assert_eq!(lease.checkpoint, Some(checkpoint("charged")));
    let record = subject.record(&first.id).await;
    assert_eq!((record.owner, record.attempt, record.created_at), (second.owner, 2, born));
    assert_eq!(record.checkpoint, Some(checkpoint("charged")));
    let lease_until = record.updated_at.saturating_add(LEASE);
    let (acquisition, takeover) = (Acquisition::Takeover, Takeover::Rerun);
    assert_eq!(record.state, State::InProgress { lease_until, acquisition, takeover });
    assert_eq!(record.expires_at, lease_until.saturating_add(RETENTION));
}

/// A takeover holds a full lease, for which the next caller must wait.
pub async fn a_takeover_is_a_lease_like_any_other(subject: &Subject) {
    let request = request();
    subject.lease(&request).await;
    for attempt in 2..5 {
        subject.advance_to_end_of(LEASE);
        assert_eq!(subject.lease(&repeat_of(&request)).await.attempt, attempt);
        assert_in_progress(subject, &subject.acquire(&repeat_of(&request)).await, LEASE);
    }
}

/// Row 5: if a crash means an unknown outcome, nothing runs again, and the record keeps that outcome.
pub async fn a_lease_over_becomes_an_unknown_outcome(subject: &Subject) {
    let first = Acquire { takeover: Takeover::Unknown, ..request() };
    let lease = subject.lease(&first).await;
    subject.checkpoint(&lease, &checkpoint("charged")).await;
    subject.advance_to_end_of(LEASE);
    let unknown = StoredResponse::outcome_unknown();
    for _ in 0..3 {
        assert_replay(&subject.acquire(&repeat_of(&first)).await, ReplayKind::OutcomeUnknown, 1, &unknown);
    }
    let record = subject.record(&first.id).await;
    assert_eq!(record.state, State::Failed { failure: Failure::OutcomeUnknown, response: unknown });
    assert_eq!((record.owner, record.attempt), (first.owner, 1));
    assert_eq!(record.checkpoint, Some(checkpoint("charged")));
    assert_eq!(record.expires_at, record.updated_at.saturating_add(RETENTION));
    assert_eq!(subject.settle(&lease, &completed()).await, idem_core::OwnerOutcome::LeaseLost);
}

/// A caller with a probe gets the record of a crashed owner, whatever that owner ran under. If that caller crashes too, the
/// next one with a probe gets the record. Any other caller gets an unknown outcome.
pub async fn a_lease_over_is_handed_to_whoever_can_find_out(subject: &Subject) {
    for crashed in [Takeover::Rerun, Takeover::Unknown, Takeover::Probe] {
        let first = Acquire { takeover: crashed, ..request() };
        subject.lease(&first).await;
        for attempt in 2..4 {
            subject.advance_to_end_of(LEASE);
            let prober = Acquire { takeover: Takeover::Probe, ..repeat_of(&first) };
            let lease = subject.lease(&prober).await;
            assert_eq!((lease.attempt, lease.acquisition), (attempt, Acquisition::Probe));
            assert!(matches!(subject.acquire(&repeat_of(&first)).await, AcquireOutcome::InProgress { .. }));
        }
        subject.advance_to_end_of(LEASE);
        let plain = Acquire { takeover: Takeover::Rerun, ..repeat_of(&first) };
        let unknown = StoredResponse::outcome_unknown();
        assert_replay(&subject.acquire(&plain).await, ReplayKind::OutcomeUnknown, 3, &unknown);
    }
}

/// If a caller with a probe releases the key, the record still remembers the crashed run.
pub async fn a_release_before_finding_out_does_not_forget_the_crash(subject: &Subject) {
    let first = Acquire { takeover: Takeover::Probe, ..request() };
    subject.lease(&first).await;
    subject.advance_to_end_of(LEASE);
    let lease = subject.lease(&Acquire { owner: idem_core::OwnerToken::random(), ..first.clone() }).await;
    assert_eq!(subject.settle(&lease, &Settlement::Released).await, idem_core::OwnerOutcome::Applied);
    let next = subject.lease(&Acquire { owner: idem_core::OwnerToken::random(), ..first.clone() }).await;
    assert_eq!((next.attempt, next.acquisition), (3, Acquisition::Probe));
    assert_eq!(subject.settle(&next, &Settlement::Released).await, idem_core::OwnerOutcome::Applied);
    let plain = Acquire { takeover: Takeover::Unknown, ..repeat_of(&first) };
    let unknown = StoredResponse::outcome_unknown();
    assert_replay(&subject.acquire(&plain).await, ReplayKind::OutcomeUnknown, 3, &unknown);
}

/// It runs again only if both the crashed owner and the new caller say so.
pub async fn it_runs_again_only_if_both_say_so(subject: &Subject) {
    for (stored, asked) in [
        (Takeover::Rerun, Takeover::Unknown),
        (Takeover::Unknown, Takeover::Rerun),
        (Takeover::Probe, Takeover::Rerun),
        (Takeover::Probe, Takeover::Unknown),
    ] {
        let first = Acquire { takeover: stored, ..request() };
        subject.lease(&first).await;
        subject.advance_to_end_of(LEASE);
        let second = Acquire { takeover: asked, ..repeat_of(&first) };
        let unknown = StoredResponse::outcome_unknown();
        assert_replay(&subject.acquire(&second).await, ReplayKind::OutcomeUnknown, 1, &unknown);
    }
}

/// Row 6: a completed record answers every caller, its owner too, and says when it was settled.
pub async fn a_completed_record_is_replayed(subject: &Subject) {
    let first = request();
    let lease = subject.lease(&first).await;
    subject.settle(&lease, &completed()).await;
    let record = subject.record(&first.id).await;
    for request in [first.clone(), repeat_of(&first), Acquire { takeover: Takeover::Unknown, ..repeat_of(&first) }] {
        let outcome = subject.acquire(&request).await;
        assert_replay(&outcome, ReplayKind::Completed, 1, &response());
        assert!(matches!(outcome, AcquireOutcome::Replay(replay) if replay.settled_at == record.updated_at));
    }
    assert_record_is(subject, &first, &record).await;
}

/// Row 7: a terminal failure is replayed as well.
pub async fn a_terminal_failure_is_replayed(subject: &Subject) {
    let request = request();
    let lease = subject.lease(&request).await;
    subject.settle(&lease, &failed()).await;
    let record = subject.record(&request.id).await;
    let Settlement::FailedTerminal(answer) = failed() else { unreachable!() };
    for _ in 0..2 {
        assert_replay(&subject.acquire(&repeat_of(&request)).await, ReplayKind::Failed, 1, &answer);
    }
    assert_record_is(subject, &request, &record).await;
}

/// Row 8: a retryable failure makes every caller wait for its time.
pub async fn a_retryable_failure_backs_off(subject: &Subject) {
    let first = request();
    let lease = subject.lease(&first).await;
    subject.settle(&lease, &retryable()).await;
    let record = subject.record(&first.id).await;
    assert_backoff(subject, &subject.acquire(&first).await, BACKOFF);
    let left = subject.advance_to_just_before(BACKOFF);
    assert_backoff(subject, &subject.acquire(&repeat_of(&first)).await, left);
    assert_record_is(subject, &first, &record).await;
}

/// Row 9: at its time, a retryable failure runs again, with the next attempt and the last checkpoint.
pub async fn a_retryable_failure_runs_again_at_its_time(subject: &Subject) {
    let first = request();
    let lease = subject.lease(&first).await;
    let born = subject.record(&first.id).await.created_at;
    subject.checkpoint(&lease, &checkpoint("charged")).await;
    subject.settle(&lease, &retryable()).await;
    subject.advance_to_end_of(BACKOFF);
    let second = Acquire { takeover: Takeover::Unknown, ..repeat_of(&first) };
    let lease = subject.lease(&second).await;
    assert_eq!((lease.owner, lease.attempt, lease.acquisition), (second.owner, 2, Acquisition::Retry));
    assert_eq!(lease.checkpoint, Some(checkpoint("charged")));
    let record = subject.record(&first.id).await;
    assert_eq!((record.owner, record.attempt, record.created_at), (second.owner, 2, born));
    assert_eq!(record.checkpoint, Some(checkpoint("charged")));
    let lease_until = record.updated_at.saturating_add(LEASE);
    let (acquisition, takeover) = (Acquisition::Retry, Takeover::Unknown);
    assert_eq!(record.state, State::InProgress { lease_until, acquisition, takeover });
    assert_eq!(record.expires_at, lease_until.saturating_add(RETENTION));
}

/// Row 10: the last attempt is the one that `max_attempts` names; then its response is final.
pub async fn used_up_attempts_fail_for_good(subject: &Subject) {
    let request = request();
    let last = request.max_attempts.get();
    for attempt in 1..=last {
        let lease = subject.lease(&repeat_of(&request)).await;
        assert_eq!(lease.attempt, attempt);
        subject.checkpoint(&lease, &checkpoint("charged")).await;
        subject.settle(&lease, &retryable()).await;
        assert_backoff(subject, &subject.acquire(&repeat_of(&request)).await, BACKOFF);
        subject.advance_to_end_of(BACKOFF);
    }
    let Settlement::FailedRetryable { response, .. } = retryable() else { unreachable!() };
    for _ in 0..2 {
        assert_replay(&subject.acquire(&repeat_of(&request)).await, ReplayKind::Failed, last, &response);
    }
    let record = subject.record(&request.id).await;
    assert_eq!(record.state, State::Failed { failure: Failure::Terminal, response });
    assert_eq!(record.checkpoint, Some(checkpoint("charged")));
    assert_eq!(record.expires_at, record.updated_at.saturating_add(RETENTION));
}

/// Takeovers are not retries: `max_attempts` does not limit them.
pub async fn max_attempts_does_not_limit_takeovers(subject: &Subject) {
    let request = Acquire { max_attempts: std::num::NonZeroU32::MIN, ..request() };
    subject.lease(&request).await;
    subject.advance_to_end_of(LEASE);
    assert_eq!(subject.lease(&repeat_of(&request)).await.attempt, 2);
}

/// Law L7: the attempt grows through takeovers, retries and the releases after them.
pub async fn the_attempt_grows_through_takeover_and_retry(subject: &Subject) {
    let request = request();
    let lease = subject.lease(&request).await;
    subject.settle(&lease, &retryable()).await;
    subject.advance_to_end_of(BACKOFF);
    assert_eq!(subject.lease(&repeat_of(&request)).await.attempt, 2);
    subject.advance_to_end_of(LEASE);
    let lease = subject.lease(&repeat_of(&request)).await;
    assert_eq!(lease.attempt, 3);
    subject.settle(&lease, &Settlement::Released).await;
    assert_eq!(subject.lease(&repeat_of(&request)).await.attempt, 4);
}

/// Row 1: a settled record counts until its retention is over. After that its key is fresh, even for another request.
pub async fn a_settled_record_is_forgotten_after_its_retention(subject: &Subject) {
    let first = request();
    let lease = subject.lease(&first).await;
    subject.settle(&lease, &completed()).await;
    subject.advance_to_just_before(KEPT);
    assert_replay(&subject.acquire(&repeat_of(&first)).await, ReplayKind::Completed, 1, &response());
    subject.advance_to_end_of(subject.precision * 2 + std::time::Duration::from_micros(1));
    assert_eq!(subject.peek(&first.id).await, None);
    let second = mismatch_of(&first);
    let lease = subject.lease(&second).await;
    assert_eq!((lease.attempt, lease.acquisition, lease.checkpoint), (1, Acquisition::Fresh, None));
    let record = subject.record(&first.id).await;
    assert_eq!((record.fingerprint, record.created_at), (second.fingerprint, record.updated_at));
}

/// An abandoned record counts until lease and retention are over. After that its key is fresh.
pub async fn an_abandoned_record_is_forgotten_after_lease_and_retention(subject: &Subject) {
    let first = request();
    let lease = subject.lease(&first).await;
    subject.checkpoint(&lease, &checkpoint("charged")).await;
    subject.advance_to_just_before(LEASE + RETENTION);
    assert!(subject.peek(&first.id).await.is_some());
    subject.advance_to_end_of(subject.precision * 2 + std::time::Duration::from_micros(1));
    assert_eq!(subject.peek(&first.id).await, None);
    let lease = subject.lease(&repeat_of(&first)).await;
    assert_eq!((lease.attempt, lease.acquisition, lease.checkpoint), (1, Acquisition::Fresh, None));
}

/// Law L5: whatever a crashed owner did before, one lease later the key runs again or has its answer.
pub async fn nothing_is_stuck_one_lease_after_a_crash(subject: &Subject) {
    for takeover in [Takeover::Rerun, Takeover::Unknown] {
        let request = Acquire { takeover, ..request() };
        let lease = subject.lease(&request).await;
        subject.advance_to_just_before(LEASE);
        let term = Term { lease: LEASE / 2, retention: RETENTION };
        subject.renew(&lease, term).await;
        subject.checkpoint(&lease, &checkpoint("charged")).await;
        subject.advance_to_end_of(LEASE / 2);
        let outcome = subject.acquire(&repeat_of(&request)).await;
        let free = matches!(outcome, AcquireOutcome::Acquired(_) | AcquireOutcome::Replay(_));
        assert!(free, "the key is stuck: {outcome:?}");
    }
}
