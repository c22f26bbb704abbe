use std::num::NonZeroU32;
use std::time::Duration;

use super::*;
use crate::fingerprint::{Algorithm, Fingerprint};
use crate::record::{Acquisition, Checkpoint, Failure, OwnerToken, State, StoredResponse, Takeover};
use crate::{RecordId, Scope};

const LEASE: Duration = Duration::from_secs(10);
const RETENTION: Duration = Duration::from_secs(100);
const KEPT: Duration = Duration::from_secs(50);
const TERM: Term = Term { lease: LEASE, retention: RETENTION };
const TICK: Duration = Duration::from_micros(1);
/// When the first acquire of every test happens.
const START: Timestamp = Timestamp::from_unix_micros(1_000_000_000);

fn after(duration: Duration) -> Timestamp {
    START.saturating_add(duration)
}

fn seconds(seconds: u64) -> Timestamp {
    after(Duration::from_secs(seconds))
}

fn token(number: u8) -> OwnerToken {
    OwnerToken::from_bytes([number; 16])
}

fn request(owner: u8) -> Acquire {
    Acquire {
        id: RecordId::from_bytes([9; 32]),
        origin: Origin { namespace: "test".into(), scope: Scope::single_tenant("pay") },
        fingerprint: Fingerprint::of_bytes("pay", b"10 EUR"),
        owner: token(owner),
        term: TERM,
        takeover: Takeover::Rerun,
        max_attempts: NonZeroU32::new(3).unwrap(),
        on_mismatch: OnMismatch::Refuse,
    }
}

fn another_body(owner: u8) -> Acquire {
    let fingerprint = Fingerprint::from_parts(Algorithm::from_number(7), [3; 32]);
    Acquire { fingerprint, ..request(owner) }
}

fn never_rerun(owner: u8) -> Acquire {
    Acquire { takeover: Takeover::Unknown, ..request(owner) }
}

fn response() -> StoredResponse {
    StoredResponse::new(201, "paid")
}

fn retryable(retry_after: Duration) -> Settlement {
    Settlement::FailedRetryable { response: response(), retry_after }
}

fn checkpoint(name: &str) -> Checkpoint {
    Checkpoint { name: name.into(), data: "ch_1".into() }
}

/// The record that a first acquire by owner 1 at [`START`] leaves.
fn in_progress() -> Record {
    acquire(None, &request(1), START).0.unwrap()
}

fn settled(settlement: &Settlement) -> Record {
    settle(&in_progress(), 1, settlement, seconds(1)).0.unwrap()
}

fn settle(record: &Record, owner: u8, settlement: &Settlement, now: Timestamp) -> (Option<Record>, OwnerOutcome) {
    apply(Some(record), token(owner), OwnerAction::Settle(settlement, KEPT), now)
}

fn with_attempt(attempt: u32, record: Record) -> Record {
    Record { attempt, ..record }
}

fn acquired(attempt: u32, owner: u8, acquisition: Acquisition, checkpoint: Option<Checkpoint>) -> AcquireOutcome {
    AcquireOutcome::Acquired(Lease { id: request(owner).id, owner: token(owner), attempt, acquisition, checkpoint })
}

fn replay(kind: ReplayKind, response: StoredResponse, attempt: u32, settled_at: Timestamp) -> AcquireOutcome {
    AcquireOutcome::Replay(Replay { response, kind, attempt, settled_at })
}

#[track_caller]
fn assert_unchanged(record: &Record, request: &Acquire, now: Timestamp, outcome: AcquireOutcome) {
    assert_eq!(acquire(Some(record), request, now), (Some(record.clone()), outcome));
}

#[track_caller]
fn assert_lease_lost(record: &Record, owner: u8, action: OwnerAction<'_>, now: Timestamp) {
    assert_eq!(apply(Some(record), token(owner), action, now), (Some(record.clone()), OwnerOutcome::LeaseLost));
}

mod acquiring {
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
        assert_eq!(outcome, acquired(1, 2, Acquisition::Fresh, None));
    }

    #[test]
    fn a_repeated_acquire_by_the_same_owner_changes_nothing() {
        let record = in_progress();
        assert_unchanged(&record, &request(1), seconds(9), acquired(1, 1, Acquisition::Fresh, None));
        // Also after the lease: nobody else took it over.
        assert_unchanged(&record, &request(1), seconds(99), acquired(1, 1, Acquisition::Fresh, None));
    }

    #[test]
    fn a_repeated_acquire_says_again_how_the_record_was_acquired() {
        let record = acquire(Some(&in_progress()), &request(2), after(LEASE)).0.unwrap();
        assert_unchanged(&record, &request(2), seconds(11), acquired(2, 2, Acquisition::Takeover, None));
    }

    #[test]
    fn a_live_lease_turns_others_away_until_it_ends() {
        let in_progress_for = |retry_after| AcquireOutcome::InProgress { retry_after };
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
        let pairs =
            [(strict_record.clone(), request(2)), (strict_record, never_rerun(2)), (in_progress(), never_rerun(2))];
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
    fn an_unknown_outcome_is_kept_for_the_retention_of_whoever_found_it_and_loses_the_checkpoint() {
        let record = Record { checkpoint: Some(checkpoint("charged")), ..in_progress() };
        let term = Term { retention: Duration::from_secs(7), ..TERM };
        let next = acquire(Some(&record), &Acquire { term, ..never_rerun(2) }, seconds(20)).0.unwrap();
        assert_eq!(next.expires_at, seconds(27));
        assert_eq!(next.checkpoint, None);
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
}

mod retrying {
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
            checkpoint: None,
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
}

mod mismatching {
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
            assert_unchanged(
                &completed,
                &lenient(owner),
                now,
                replay(ReplayKind::Completed, response(), 1, seconds(1)),
            );
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
        let outcome = AcquireOutcome::InProgress { retry_after: LEASE };
        assert_unchanged(&in_progress(), &lenient, START, outcome);
    }
}

mod owning {
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
    fn a_checkpoint_replaces_the_one_before_and_extends_nothing() {
        let record = Record { checkpoint: Some(checkpoint("old")), ..in_progress() };
        let action = OwnerAction::Checkpoint(&checkpoint("new"));
        let (next, outcome) = apply(Some(&record), token(1), action, seconds(3));
        assert_eq!(outcome, OwnerOutcome::Applied);
        assert_eq!(next, Some(Record { checkpoint: Some(checkpoint("new")), updated_at: seconds(3), ..record }));
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
}

mod settling {
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
    fn the_checkpoint_outlives_a_retryable_failure_only() {
        let record = Record { checkpoint: Some(checkpoint("charged")), ..in_progress() };
        let kept = |settlement| settle(&record, 1, &settlement, seconds(1)).0.unwrap().checkpoint;
        assert_eq!(kept(retryable(LEASE)), Some(checkpoint("charged")));
        assert_eq!(kept(Settlement::Completed(response())), None);
        assert_eq!(kept(Settlement::FailedTerminal(response())), None);
    }
}

#[test]
fn the_transition_passes_every_command_to_its_decision() {
    let acquired = acquire(None, &request(1), START);
    let (record, outcome) = transition(None, Command::Acquire(&request(1)), START);
    assert_eq!((record.clone(), outcome), (acquired.0, Outcome::Acquire(acquired.1)));
    let renewal = OwnerAction::Renew(TERM);
    let renewed = apply(record.as_ref(), token(1), renewal, seconds(1));
    let (next, outcome) = transition(record.as_ref(), Command::Owner(token(1), renewal), seconds(1));
    assert_eq!((next, outcome), (renewed.0, Outcome::Owner(renewed.1)));
}

#[test]
fn a_record_is_current_until_it_expires() {
    let record = in_progress();
    assert_eq!(current(Some(&record), after(LEASE + RETENTION - TICK)), Some(&record));
    assert_eq!(current(Some(&record), after(LEASE + RETENTION)), None);
    assert_eq!(current(None, START), None);
}
