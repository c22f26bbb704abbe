use super::*;

#[test]
fn each_settlement_leads_to_its_state_and_counts_the_retention_from_now_or_from_its_next_attempt() {
    let not_before = seconds(14);
    let states = [
        (Settlement::Completed(response()), State::Completed { response: response() }, seconds(54)),
        (
            Settlement::FailedTerminal(response()),
            State::Failed { failure: Failure::Terminal, response: response() },
            seconds(54),
        ),
        (
            retryable(LEASE),
            State::Failed { failure: Failure::Retryable { not_before }, response: response() },
            seconds(64),
        ),
    ];
    for (settlement, state, expires_at) in states {
        let (next, outcome) = settle(&in_progress(), 1, &settlement, seconds(4));
        assert_eq!(outcome, OwnerOutcome::Applied);
        let expected = Record { updated_at: seconds(4), expires_at, state, ..in_progress() };
        assert_eq!(next, Some(expected));
    }
}

#[test]
fn a_release_removes_the_record_and_can_be_repeated() {
    let (next, outcome) = settle(&in_progress(), 1, &Settlement::Released, seconds(4));
    assert_eq!((next, outcome), (None, OwnerOutcome::Applied));
    let release = OwnerAction::Settle(&Settlement::Released, KEPT);
    assert_eq!(apply(None, token(1), release, seconds(5)), (None, OwnerOutcome::Applied));
    let expired = after(LEASE + RETENTION);
    assert_eq!(apply(Some(&in_progress()), token(1), release, expired), (None, OwnerOutcome::Applied));
}

#[test]
fn a_release_does_not_forget_a_run_that_may_have_had_effects() {
    let charged = Record { checkpoint: Some(checkpoint("charged")), ..in_progress() };
    let release = OwnerAction::Settle(&Settlement::Released, KEPT);
    // Released under a live lease, and released when it is over already.
    for (record, now) in [(charged, seconds(4)), (with_attempt(2, in_progress()), seconds(11))] {
        let (next, outcome) = apply(Some(&record), token(1), release, now);
        let given_back = next.unwrap();
        let lease_until = now.min(after(LEASE));
        let state = State::InProgress { lease_until, acquisition: Acquisition::Fresh, takeover: Takeover::Rerun };
        let expected = Record { owner: OwnerToken::NOBODY, updated_at: now, state, ..record.clone() };
        assert_eq!((&given_back, outcome), (&expected, OwnerOutcome::Applied));
        assert_eq!(
            acquire(Some(&given_back), &request(2), now).1,
            acquired(record.attempt + 1, 2, Acquisition::Takeover, record.checkpoint)
        );
    }
}

#[test]
fn a_record_that_was_given_back_belongs_to_nobody() {
    let record = with_attempt(2, in_progress());
    let given_back = settle(&record, 1, &Settlement::Released, seconds(4)).0.unwrap();
    assert_lease_lost(&given_back, 1, OwnerAction::Renew(TERM), seconds(4));
    assert_lease_lost(&given_back, 1, OwnerAction::Checkpoint(&checkpoint("late")), seconds(4));
    assert_lease_lost(&given_back, 1, OwnerAction::Settle(&Settlement::Completed(response()), KEPT), seconds(4));
    let again = settle(&given_back, 1, &Settlement::Released, seconds(5));
    assert_eq!(again, (Some(given_back), OwnerOutcome::Applied));
}

#[test]
fn an_owner_may_settle_that_the_outcome_is_unknown_and_repeat_it() {
    let (next, outcome) = settle(&in_progress(), 1, &Settlement::OutcomeUnknown, seconds(4));
    let record = next.unwrap();
    let state = State::Failed { failure: Failure::OutcomeUnknown, response: StoredResponse::outcome_unknown() };
    assert_eq!((&record.state, outcome), (&state, OwnerOutcome::Applied));
    let again = settle(&record, 1, &Settlement::OutcomeUnknown, seconds(5));
    assert_eq!(again, (Some(record.clone()), OwnerOutcome::Applied));
    let terminal = Settlement::FailedTerminal(StoredResponse::outcome_unknown());
    assert_eq!(settle(&record, 1, &terminal, seconds(5)).1, OwnerOutcome::LeaseLost);
    assert_eq!(settle(&settled(&terminal), 1, &Settlement::OutcomeUnknown, seconds(5)).1, OwnerOutcome::LeaseLost);
}

#[test]
fn a_release_before_finding_out_does_not_forget_the_crash() {
    let probing = Acquire { takeover: Takeover::Probe, ..request(2) };
    let first = acquire(None, &Acquire { owner: token(1), ..probing.clone() }, START).0.unwrap();
    assert_eq!(settle(&first, 1, &Settlement::Released, seconds(1)).0, None, "a first run is forgotten");
    let probed = acquire(Some(&first), &probing, after(LEASE)).0.unwrap();
    let given_back = settle(&probed, 2, &Settlement::Released, after(LEASE)).0.unwrap();
    let third = Acquire { owner: token(3), ..probing };
    assert_eq!(acquire(Some(&given_back), &third, after(LEASE)).1, acquired(3, 3, Acquisition::Probe, None));
}

#[test]
fn a_released_retry_is_retried_although_a_crash_of_it_would_be_unknown() {
    let failed =
        settle(&acquire(None, &never_rerun(1), START).0.unwrap(), 1, &retryable(Duration::from_secs(1)), START).0;
    let retried = acquire(failed.as_ref(), &never_rerun(2), seconds(9)).0.unwrap();
    let released = settle(&retried, 2, &Settlement::Released, seconds(9)).0.unwrap();
    assert_eq!(released.owner, OwnerToken::NOBODY);
    assert_eq!(acquire(Some(&released), &never_rerun(3), seconds(9)).1, acquired(3, 3, Acquisition::Retry, None));
    // The store's clock has gone back.
    assert_eq!(acquire(Some(&released), &never_rerun(3), seconds(2)).1, acquired(3, 3, Acquisition::Retry, None));
    let last = Record { attempt: u32::MAX, ..released };
    let (_, outcome) = acquire(Some(&last), &never_rerun(3), seconds(9));
    assert!(matches!(outcome, AcquireOutcome::Replay(replay) if replay.kind == ReplayKind::OutcomeUnknown));
    let crashed = acquire(Some(&retried), &never_rerun(3), after(LEASE * 2)).1;
    assert!(matches!(crashed, AcquireOutcome::Replay(replay) if replay.kind == ReplayKind::OutcomeUnknown));
}

#[test]
fn a_release_of_what_never_runs_again_by_itself_removes_it_whatever_its_attempt() {
    let record = with_attempt(2, acquire(None, &never_rerun(1), START).0.unwrap());
    let released = settle(&record, 1, &Settlement::Released, seconds(4));
    assert_eq!(released, (None, OwnerOutcome::Applied));
}

#[test]
fn a_repeated_release_does_not_touch_the_next_owners_record() {
    let next = acquire(None, &request(2), seconds(5)).0.unwrap();
    assert_lease_lost(&next, 1, OwnerAction::Settle(&Settlement::Released, KEPT), seconds(6));
}

#[test]
fn a_repeated_settlement_is_answered_as_the_first_time_and_changes_nothing() {
    let terminal = Settlement::FailedTerminal(response());
    for settlement in [Settlement::Completed(response()), terminal, retryable(LEASE)] {
        let record = settled(&settlement);
        let again = settle(&record, 1, &settlement, seconds(7));
        assert_eq!(again, (Some(record), OwnerOutcome::Applied));
    }
}

#[test]
fn a_repeated_retryable_failure_may_name_another_backoff() {
    let record = settled(&retryable(LEASE));
    let again = settle(&record, 1, &retryable(Duration::ZERO), seconds(7));
    assert_eq!(again, (Some(record), OwnerOutcome::Applied));
}

#[test]
fn a_different_settlement_of_a_settled_record_is_lost() {
    let other = StoredResponse::new(500, "paid");
    let kinds: [fn(StoredResponse) -> Settlement; 3] =
        [Settlement::Completed, Settlement::FailedTerminal, |response| Settlement::FailedRetryable {
            response,
            retry_after: LEASE,
        }];
    for (stored, first) in kinds.iter().enumerate() {
        let record = settled(&first(response()));
        for (sent, second) in kinds.iter().enumerate() {
            let changed = second(other.clone());
            assert_lease_lost(&record, 1, OwnerAction::Settle(&changed, KEPT), seconds(2));
            if sent != stored {
                let same_response = second(response());
                assert_lease_lost(&record, 1, OwnerAction::Settle(&same_response, KEPT), seconds(2));
            }
        }
    }
}

#[test]
fn the_checkpoint_outlives_each_failure_but_no_success() {
    let record = Record { checkpoint: Some(checkpoint("charged")), ..in_progress() };
    let kept = |settlement| settle(&record, 1, &settlement, seconds(1)).0.unwrap().checkpoint;
    assert_eq!(kept(retryable(LEASE)), Some(checkpoint("charged")));
    assert_eq!(kept(Settlement::FailedTerminal(response())), Some(checkpoint("charged")));
    assert_eq!(kept(Settlement::OutcomeUnknown), Some(checkpoint("charged")));
    assert_eq!(kept(Settlement::Completed(response())), None);
}
