use super::*;

#[test]
fn renew_moves_the_lease_to_count_from_now_and_keeps_the_rest() {
    let record = acquire(Some(&in_progress()), &never_rerun(2), START).0.unwrap();
    let record = Record { checkpoint: Some(checkpoint("charged")), ..record };
    let term = Term { lease: Duration::from_secs(20), retention: Duration::from_secs(30) };
    let (next, outcome) = apply(Some(&record), token(1), OwnerAction::Renew(term), seconds(5));
    assert_eq!(outcome, OwnerOutcome::Applied);
    let (acquisition, takeover) = (Acquisition::Fresh, Takeover::Rerun);
    let state = State::InProgress { lease_until: seconds(25), acquisition, takeover };
    assert_eq!(next, Some(Record { updated_at: seconds(5), expires_at: seconds(55), state, ..record }));
}

#[test]
fn a_lease_that_ran_out_but_was_not_taken_over_still_belongs_to_its_owner() {
    let record = in_progress();
    let actions = [
        OwnerAction::Renew(TERM),
        OwnerAction::Checkpoint(&checkpoint("charged")),
        OwnerAction::Settle(&Settlement::Completed(response()), KEPT),
        OwnerAction::Settle(&Settlement::Released, KEPT),
    ];
    for action in actions {
        assert_eq!(apply(Some(&record), token(1), action, seconds(109)).1, OwnerOutcome::Applied);
    }
}

#[test]
fn nothing_is_owned_once_the_retention_of_an_abandoned_record_is_over() {
    let done = Settlement::Completed(response());
    let check = checkpoint("charged");
    let actions = [OwnerAction::Renew(TERM), OwnerAction::Checkpoint(&check), OwnerAction::Settle(&done, KEPT)];
    for action in actions {
        let gone = (None, OwnerOutcome::LeaseLost);
        assert_eq!(apply(Some(&in_progress()), token(1), action, after(LEASE + RETENTION)), gone);
        assert_eq!(apply(None, token(1), action, START), gone);
    }
}

#[test]
fn a_checkpoint_that_does_not_follow_the_stored_one_is_refused_unless_it_is_the_same() {
    let stored = Checkpoint { sequence: 2, ..checkpoint("charged") };
    let record = Record { checkpoint: Some(stored.clone()), ..in_progress() };
    for late in [checkpoint("intended"), Checkpoint { sequence: 2, ..checkpoint("other") }] {
        assert_lease_lost(&record, 1, OwnerAction::Checkpoint(&late), seconds(3));
    }
    let repeated = apply(Some(&record), token(1), OwnerAction::Checkpoint(&stored), seconds(3));
    assert_eq!(repeated, (Some(record), OwnerOutcome::Applied));
}

#[test]
fn a_checkpoint_replaces_the_one_before_and_extends_nothing() {
    let record = Record { checkpoint: Some(checkpoint("old")), ..in_progress() };
    let new = Checkpoint { sequence: 2, ..checkpoint("new") };
    let action = OwnerAction::Checkpoint(&new);
    let (next, outcome) = apply(Some(&record), token(1), action, seconds(3));
    assert_eq!(outcome, OwnerOutcome::Applied);
    assert_eq!(next, Some(Record { checkpoint: Some(new.clone()), updated_at: seconds(3), ..record }));
}

#[test]
fn a_stale_owner_changes_nothing_in_any_state() {
    let done = Settlement::Completed(response());
    let check = checkpoint("stale");
    for record in [in_progress(), settled(&done), settled(&retryable(LEASE))] {
        for now in [seconds(2), seconds(40)] {
            assert_lease_lost(&record, 2, OwnerAction::Renew(TERM), now);
            assert_lease_lost(&record, 2, OwnerAction::Checkpoint(&check), now);
            assert_lease_lost(&record, 2, OwnerAction::Settle(&done, KEPT), now);
            assert_lease_lost(&record, 2, OwnerAction::Settle(&retryable(LEASE), KEPT), now);
            assert_lease_lost(&record, 2, OwnerAction::Settle(&Settlement::Released, KEPT), now);
        }
    }
}

#[test]
fn a_settled_record_can_no_longer_be_renewed_checkpointed_or_released_by_its_owner() {
    let terminal = Settlement::FailedTerminal(response());
    for settlement in [Settlement::Completed(response()), terminal, retryable(LEASE)] {
        let record = settled(&settlement);
        assert_lease_lost(&record, 1, OwnerAction::Renew(TERM), seconds(2));
        assert_lease_lost(&record, 1, OwnerAction::Checkpoint(&checkpoint("late")), seconds(2));
        assert_lease_lost(&record, 1, OwnerAction::Settle(&Settlement::Released, KEPT), seconds(2));
    }
}
