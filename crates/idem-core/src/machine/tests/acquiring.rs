use super::*;

#[test]
fn a_new_key_is_acquired_with_attempt_one() {
    let (record, outcome) = acquire(None, &request(1), START);
    assert_eq!(outcome, acquired(1, 1, Acquisition::Fresh, None));
    let expected = Record {
        fingerprint: request(1).fingerprint,
        owner: token(1),
        attempt: 1,
        checkpoint: None,
        created_at: START,
        updated_at: START,
        expires_at: after(LEASE + RETENTION),
        state: State::InProgress {
            lease_until: after(LEASE),
            acquisition: Acquisition::Fresh,
            takeover: Takeover::Rerun,
        },
    };
    assert_eq!(record, Some(expected));
}

#[test]
fn the_takeover_of_the_contract_is_kept_in_the_record() {
    let record = acquire(None, &never_rerun(1), START).0.unwrap();
    assert!(matches!(record.state, State::InProgress { takeover: Takeover::Unknown, .. }));
}

#[test]
fn a_record_counts_until_just_before_its_retention_ends_and_is_replaced_exactly_then() {
    let record = settled(&Settlement::Completed(response()));
    let end = seconds(51);
    assert_eq!(record.expires_at, end);
    let just_before = seconds(50).saturating_add(Duration::from_micros(999_999));
    assert_unchanged(&record, &request(2), just_before, replay(ReplayKind::Completed, response(), 1, seconds(1)));
    let (fresh, outcome) = acquire(Some(&record), &request(2), end);
    assert_eq!(outcome, acquired(1, 2, Acquisition::Fresh, None));
    assert_eq!(fresh.unwrap().created_at, end);
}

#[test]
fn an_expired_record_of_another_request_does_not_mismatch() {
    let outcome = acquire(Some(&in_progress()), &another_body(2), after(LEASE + RETENTION)).1;
    let AcquireOutcome::Acquired(lease) = outcome else { panic!("{outcome:?}") };
    assert_eq!((lease.attempt, lease.fingerprint), (1, another_body(2).fingerprint));
}

#[test]
fn a_repeated_acquire_by_the_same_owner_changes_nothing() {
    let record = in_progress();
    assert_unchanged(&record, &request(1), seconds(9), acquired(1, 1, Acquisition::Fresh, None));
    // Also after the lease: no other owner has taken the record over.
    assert_unchanged(&record, &request(1), seconds(99), acquired(1, 1, Acquisition::Fresh, None));
}

#[test]
fn a_repeated_acquire_says_again_how_the_record_was_acquired() {
    let record = acquire(Some(&in_progress()), &request(2), after(LEASE)).0.unwrap();
    assert_unchanged(&record, &request(2), seconds(11), acquired(2, 2, Acquisition::Takeover, None));
}

#[test]
fn a_live_lease_turns_others_away_until_it_ends() {
    let in_progress_for = |lease_left| AcquireOutcome::InProgress { lease_left, age: LEASE - lease_left };
    assert_unchanged(&in_progress(), &request(2), START, in_progress_for(LEASE));
    assert_unchanged(&in_progress(), &request(2), seconds(4), in_progress_for(Duration::from_secs(6)));
    assert_unchanged(&in_progress(), &request(2), after(LEASE - TICK), in_progress_for(TICK));
    assert_unchanged(&in_progress(), &never_rerun(2), after(LEASE - TICK), in_progress_for(TICK));
}

#[test]
fn a_lease_is_taken_over_exactly_at_its_end() {
    let before = apply(Some(&in_progress()), token(1), OwnerAction::Checkpoint(&checkpoint("charged")), seconds(1));
    let now = after(LEASE);
    let (record, outcome) = acquire(before.0.as_ref(), &request(2), now);
    assert_eq!(outcome, acquired(2, 2, Acquisition::Takeover, Some(checkpoint("charged"))));
    let record = record.unwrap();
    assert_eq!((record.owner, record.attempt), (token(2), 2));
    assert_eq!((record.created_at, record.updated_at), (START, now));
    assert_eq!(record.expires_at, now.saturating_add(LEASE + RETENTION));
    assert_eq!(record.checkpoint, Some(checkpoint("charged")));
    let lease_until = now.saturating_add(LEASE);
    let (acquisition, takeover) = (Acquisition::Takeover, Takeover::Rerun);
    assert_eq!(record.state, State::InProgress { lease_until, acquisition, takeover });
}

#[test]
fn whoever_can_find_out_gets_the_record_and_has_to() {
    let probing = |owner| Acquire { takeover: Takeover::Probe, ..request(owner) };
    let crashed = [in_progress(), acquire(None, &never_rerun(1), START).0.unwrap()];
    for record in crashed.into_iter().chain([acquire(None, &probing(1), START).0.unwrap()]) {
        let (next, outcome) = acquire(Some(&record), &probing(2), after(LEASE));
        assert_eq!(outcome, acquired(2, 2, Acquisition::Probe, None));
        let (lease_until, acquisition) = (after(LEASE + LEASE), Acquisition::Probe);
        let state = State::InProgress { lease_until, acquisition, takeover: Takeover::Probe };
        assert_eq!(next.unwrap().state, state);
        let last = with_attempt(u32::MAX, record);
        let (_, outcome) = acquire(Some(&last), &probing(2), after(LEASE));
        assert!(matches!(outcome, AcquireOutcome::Replay(replay) if replay.kind == ReplayKind::OutcomeUnknown));
    }
}

#[test]
fn an_unknown_outcome_is_settled_unless_both_say_that_it_may_run_again() {
    let strict_record = acquire(None, &never_rerun(1), START).0.unwrap();
    let pairs = [(strict_record.clone(), request(2)), (strict_record, never_rerun(2)), (in_progress(), never_rerun(2))];
    for (record, request) in pairs {
        let (next, outcome) = acquire(Some(&record), &request, after(LEASE));
        let unknown = StoredResponse::outcome_unknown();
        assert_eq!(outcome, replay(ReplayKind::OutcomeUnknown, unknown.clone(), 1, after(LEASE)));
        let expected = Record {
            updated_at: after(LEASE),
            expires_at: after(LEASE + RETENTION),
            state: State::Failed { failure: Failure::OutcomeUnknown, response: unknown },
            ..record
        };
        assert_eq!(next, Some(expected));
    }
}

#[test]
fn an_unknown_outcome_is_kept_with_the_checkpoint_for_the_retention_of_the_request_that_found_it() {
    let record = Record { checkpoint: Some(checkpoint("charged")), ..in_progress() };
    let term = Term { retention: Duration::from_secs(7), ..TERM };
    let next = acquire(Some(&record), &Acquire { term, ..never_rerun(2) }, seconds(20)).0.unwrap();
    assert_eq!(next.expires_at, seconds(27));
    assert_eq!(next.checkpoint, Some(checkpoint("charged")));
    assert_eq!(next.owner, token(1));
}

#[test]
fn the_owner_of_an_unknown_outcome_can_no_longer_settle() {
    let record = acquire(Some(&in_progress()), &never_rerun(2), after(LEASE)).0.unwrap();
    let done = Settlement::Completed(response());
    assert_lease_lost(&record, 1, OwnerAction::Settle(&done, KEPT), seconds(11));
    let unknown = Settlement::FailedTerminal(StoredResponse::outcome_unknown());
    assert_lease_lost(&record, 1, OwnerAction::Settle(&unknown, KEPT), seconds(11));
}

#[test]
fn settled_records_are_replayed_to_everybody_and_stay_as_they_are() {
    let unknown = acquire(Some(&in_progress()), &never_rerun(2), seconds(10)).0.unwrap();
    let lost = StoredResponse::outcome_unknown();
    let records = [
        (settled(&Settlement::Completed(response())), ReplayKind::Completed, response(), 1),
        (settled(&Settlement::FailedTerminal(response())), ReplayKind::Failed, response(), 1),
        (unknown, ReplayKind::OutcomeUnknown, lost, 10),
    ];
    for (record, kind, response, settled_at) in records {
        for request in [request(1), request(2), never_rerun(2)] {
            let outcome = replay(kind, response.clone(), 1, seconds(settled_at));
            assert_unchanged(&record, &request, seconds(12), outcome);
        }
    }
}

#[test]
fn a_replay_names_the_attempt_that_gave_the_response() {
    let record = with_attempt(4, settled(&Settlement::Completed(response())));
    assert_unchanged(&record, &request(2), seconds(2), replay(ReplayKind::Completed, response(), 4, seconds(1)));
}

#[test]
fn a_record_gives_its_replay_only_once_it_is_settled_for_good() {
    let expected = Replay { response: response(), kind: ReplayKind::Completed, attempt: 1, settled_at: seconds(1) };
    assert_eq!(settled(&Settlement::Completed(response())).replay(), Some(expected));
    assert_eq!(in_progress().replay(), None);
    assert_eq!(settled(&retryable(LEASE)).replay(), None);
}
