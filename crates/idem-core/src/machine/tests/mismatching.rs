use super::*;

fn mismatch() -> AcquireOutcome {
    AcquireOutcome::Mismatch { stored_algorithm: Algorithm::V1 }
}

#[test]
fn another_fingerprint_is_refused_in_every_state_at_every_time() {
    let records = [
        in_progress(),
        settled(&Settlement::Completed(response())),
        settled(&Settlement::FailedTerminal(response())),
        settled(&retryable(LEASE)),
    ];
    for record in records {
        for owner in [1, 2] {
            assert_unchanged(&record, &another_body(owner), seconds(1), mismatch());
            assert_unchanged(&record, &another_body(owner), seconds(40), mismatch());
        }
    }
}

#[test]
fn the_mismatch_names_the_stored_algorithm_and_not_the_sent_one() {
    let record = acquire(None, &another_body(1), START).0.unwrap();
    let outcome = AcquireOutcome::Mismatch { stored_algorithm: Algorithm::from_number(7) };
    assert_unchanged(&record, &request(2), seconds(1), outcome);
}

#[test]
fn replaying_the_original_gives_what_is_settled_and_runs_nothing() {
    let lenient = |owner| Acquire { on_mismatch: OnMismatch::ReplayOriginal, ..another_body(owner) };
    let completed = settled(&Settlement::Completed(response()));
    let failed = settled(&Settlement::FailedTerminal(response()));
    let unknown = acquire(Some(&in_progress()), &never_rerun(2), seconds(10)).0.unwrap();
    let lost = StoredResponse::outcome_unknown();
    for owner in [1, 2] {
        let now = seconds(40);
        assert_unchanged(&completed, &lenient(owner), now, replay(ReplayKind::Completed, response(), 1, seconds(1)));
        assert_unchanged(&failed, &lenient(owner), now, replay(ReplayKind::Failed, response(), 1, seconds(1)));
        let outcome = replay(ReplayKind::OutcomeUnknown, lost.clone(), 1, seconds(10));
        assert_unchanged(&unknown, &lenient(owner), now, outcome);
        for unsettled in [in_progress(), settled(&retryable(LEASE)), with_attempt(3, settled(&retryable(LEASE)))] {
            assert_unchanged(&unsettled, &lenient(owner), seconds(2), mismatch());
            assert_unchanged(&unsettled, &lenient(owner), now, mismatch());
        }
    }
}

#[test]
fn replaying_the_original_changes_nothing_for_the_same_request() {
    let lenient = Acquire { on_mismatch: OnMismatch::ReplayOriginal, ..request(2) };
    let outcome = AcquireOutcome::InProgress { lease_left: LEASE, age: Duration::ZERO };
    assert_unchanged(&in_progress(), &lenient, START, outcome);
}
