use super::*;

#[test]
fn a_retryable_failure_backs_off_until_its_time_and_runs_exactly_then() {
    let record = settled(&retryable(LEASE));
    for (now, retry_after) in [(seconds(1), LEASE), (after(LEASE + Duration::from_secs(1) - TICK), TICK)] {
        assert_unchanged(&record, &request(2), now, AcquireOutcome::Backoff { retry_after });
        assert_unchanged(&record, &request(1), now, AcquireOutcome::Backoff { retry_after });
    }
    let (next, outcome) = acquire(Some(&record), &request(2), seconds(11));
    assert_eq!(outcome, acquired(2, 2, Acquisition::Retry, None));
    let next = next.unwrap();
    assert_eq!((next.owner, next.attempt, next.created_at, next.updated_at), (token(2), 2, START, seconds(11)));
    assert_eq!(next.expires_at, seconds(121));
    let (acquisition, takeover) = (Acquisition::Retry, Takeover::Rerun);
    assert_eq!(next.state, State::InProgress { lease_until: seconds(21), acquisition, takeover });
}

#[test]
fn a_retry_goes_on_from_the_checkpoint() {
    let record = Record { checkpoint: Some(checkpoint("charged")), ..settled(&retryable(Duration::ZERO)) };
    let (next, outcome) = acquire(Some(&record), &request(2), seconds(1));
    assert_eq!(outcome, acquired(2, 2, Acquisition::Retry, Some(checkpoint("charged"))));
    assert_eq!(next.unwrap().checkpoint, Some(checkpoint("charged")));
}

#[test]
fn a_retry_runs_also_where_a_crash_is_an_unknown_outcome() {
    let outcome = acquire(Some(&settled(&retryable(Duration::ZERO))), &never_rerun(2), seconds(1)).1;
    assert_eq!(outcome, acquired(2, 2, Acquisition::Retry, None));
}

#[test]
fn the_last_attempt_is_the_one_that_max_attempts_names() {
    let failed = settled(&retryable(Duration::ZERO));
    let outcome = acquire(Some(&with_attempt(2, failed.clone())), &request(2), seconds(1)).1;
    assert_eq!(outcome, acquired(3, 2, Acquisition::Retry, None));
    let record = Record { checkpoint: Some(checkpoint("charged")), ..with_attempt(3, failed) };
    let (next, outcome) = acquire(Some(&record), &request(2), seconds(5));
    assert_eq!(outcome, replay(ReplayKind::Failed, response(), 3, seconds(5)));
    let expected = Record {
        updated_at: seconds(5),
        expires_at: seconds(105),
        state: State::Failed { failure: Failure::Terminal, response: response() },
        ..record
    };
    assert_eq!(next, Some(expected));
}

#[test]
fn used_up_attempts_still_wait_for_the_backoff() {
    let record = with_attempt(3, settled(&retryable(LEASE)));
    assert_unchanged(&record, &request(2), seconds(1), AcquireOutcome::Backoff { retry_after: LEASE });
}

#[test]
fn takeovers_are_not_limited_by_max_attempts() {
    let outcome = acquire(Some(&with_attempt(3, in_progress())), &request(2), after(LEASE)).1;
    assert_eq!(outcome, acquired(4, 2, Acquisition::Takeover, None));
}

#[test]
fn an_attempt_number_that_cannot_grow_settles_the_record_instead() {
    let endless = Acquire { max_attempts: NonZeroU32::MAX, ..request(2) };
    let running = with_attempt(u32::MAX, in_progress());
    let outcome = acquire(Some(&running), &endless, after(LEASE)).1;
    let unknown = StoredResponse::outcome_unknown();
    assert_eq!(outcome, replay(ReplayKind::OutcomeUnknown, unknown, u32::MAX, after(LEASE)));
    let failed = with_attempt(u32::MAX, settled(&retryable(Duration::ZERO)));
    let outcome = acquire(Some(&failed), &endless, seconds(1)).1;
    assert_eq!(outcome, replay(ReplayKind::Failed, response(), u32::MAX, seconds(1)));
    let last = with_attempt(u32::MAX - 1, in_progress());
    let outcome = acquire(Some(&last), &endless, after(LEASE)).1;
    assert_eq!(outcome, acquired(u32::MAX, 2, Acquisition::Takeover, None));
}
