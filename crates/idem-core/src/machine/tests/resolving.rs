use super::*;
use crate::machine::{Refusal, Resolution, Resolve, ResolveOutcome};

const OPERATOR: u8 = 9;

fn resolution(record: &Record, resolution: Resolution) -> Resolve {
    Resolve { id: request(1).id, action: token(OPERATOR), seen: record.version(), resolution, retention: KEPT }
}

fn completed() -> Resolution {
    Resolution::Completed(response())
}

fn may_run_again(retry_after: Duration) -> Resolution {
    Resolution::FailedRetryable { response: response(), retry_after }
}

fn unknown() -> Record {
    with_attempt(2, Record { checkpoint: Some(checkpoint("charged")), ..settled(&Settlement::OutcomeUnknown) })
}

/// A record whose owner has crashed.
fn abandoned() -> Record {
    Record { checkpoint: Some(checkpoint("charged")), ..acquire(None, &never_rerun(1), START).0.unwrap() }
}

#[test]
fn an_unknown_outcome_becomes_what_it_was() {
    let record = unknown();
    let terminal = Resolution::FailedTerminal(response());
    let cases = [
        (completed(), State::Completed { response: response() }, seconds(20)),
        (terminal, State::Failed { failure: Failure::Terminal, response: response() }, seconds(20)),
        (
            may_run_again(Duration::from_secs(3)),
            State::Failed { failure: Failure::Retryable { not_before: seconds(23) }, response: response() },
            seconds(23),
        ),
    ];
    for (how, state, kept_from) in cases {
        let has_checkpoint = !matches!(state, State::Completed { .. });
        let (next, outcome) = resolve(Some(&record), &resolution(&record, how), seconds(20));
        assert_eq!(outcome, ResolveOutcome::Resolved);
        let expected = Record {
            owner: token(OPERATOR),
            updated_at: seconds(20),
            expires_at: kept_from.saturating_add(KEPT).max(record.expires_at),
            checkpoint: record.checkpoint.clone().filter(|_| has_checkpoint),
            state,
            ..record.clone()
        };
        assert_eq!(next, Some(expected), "attempt and creation stay");
    }
}

#[test]
fn what_was_resolved_to_run_again_runs_with_the_next_attempt_and_its_checkpoint() {
    let record = unknown();
    let next = resolve(Some(&record), &resolution(&record, may_run_again(Duration::ZERO)), seconds(20)).0.unwrap();
    let outcome = acquire(Some(&next), &request(2), seconds(20)).1;
    assert_eq!(outcome, acquired(3, 2, Acquisition::Retry, Some(checkpoint("charged"))));
    let used_up = with_attempt(3, next);
    let outcome = acquire(Some(&used_up), &request(2), seconds(20)).1;
    assert_eq!(outcome, replay(ReplayKind::Failed, response(), 3, seconds(20)), "the limit is 3");
}

#[test]
fn a_crashed_run_is_fenced_off_before_it_is_resolved() {
    let record = abandoned();
    for how in [completed(), may_run_again(Duration::ZERO), Resolution::OutcomeUnknown] {
        let request = resolution(&record, how);
        let live = resolve(Some(&record), &request, after(LEASE - TICK));
        assert_eq!(live, (Some(record.clone()), ResolveOutcome::Refused(Refusal::Live)));
    }
    for how in [completed(), may_run_again(Duration::ZERO)] {
        let unfenced = resolve(Some(&record), &resolution(&record, how), after(LEASE));
        assert_eq!(unfenced, (Some(record.clone()), ResolveOutcome::Refused(Refusal::Unfenced)));
    }
    let (next, outcome) = resolve(Some(&record), &resolution(&record, Resolution::OutcomeUnknown), after(LEASE));
    assert_eq!(outcome, ResolveOutcome::Resolved);
    let next = next.unwrap();
    assert_eq!(next.checkpoint, record.checkpoint);
    let late = OwnerAction::Settle(&Settlement::Released, KEPT);
    assert_lease_lost(&next, 1, late, seconds(11));
    assert_lease_lost(&next, 1, OwnerAction::Renew(TERM), seconds(11));
    let by = Resolve { action: token(8), ..resolution(&next, completed()) };
    assert_eq!(resolve(Some(&next), &by, seconds(12)).1, ResolveOutcome::Resolved);
}

#[test]
fn a_resolution_never_shortens_how_long_a_record_is_kept() {
    let record = unknown();
    let until = record.expires_at;
    let request = Resolve { retention: Duration::ZERO, ..resolution(&record, completed()) };
    assert_eq!(resolve(Some(&record), &request, seconds(20)).0.unwrap().expires_at, until);
    let last = Timestamp::from_unix_micros(until.unix_micros() - 1);
    let next = resolve(Some(&record), &request, last).0.unwrap();
    assert_eq!(next.expires_at, last.saturating_add(Duration::from_secs(1)), "with none, the next repeat would run");
}

#[test]
fn an_action_needs_a_new_token() {
    let record = unknown();
    for action in [OwnerToken::NOBODY, record.owner] {
        let request = Resolve { action, ..resolution(&record, completed()) };
        let refused = (Some(record.clone()), ResolveOutcome::Refused(Refusal::Token));
        assert_eq!(resolve(Some(&record), &request, seconds(20)), refused);
    }
}

#[test]
fn a_backoff_can_be_ended() {
    let record = settled(&retryable(Duration::from_secs(30)));
    let (next, outcome) = resolve(Some(&record), &resolution(&record, may_run_again(Duration::ZERO)), seconds(2));
    assert_eq!(outcome, ResolveOutcome::Resolved);
    assert_eq!(acquire(next.as_ref(), &request(2), seconds(2)).1, acquired(2, 2, Acquisition::Retry, None));
}

#[test]
fn what_has_its_final_answer_stays() {
    for settlement in [Settlement::Completed(response()), Settlement::FailedTerminal(response())] {
        let record = settled(&settlement);
        for how in [completed(), may_run_again(Duration::ZERO), Resolution::OutcomeUnknown] {
            let (next, outcome) = resolve(Some(&record), &resolution(&record, how), seconds(20));
            assert_eq!((next, outcome), (Some(record.clone()), ResolveOutcome::Refused(Refusal::Final)));
        }
    }
    let record = unknown();
    let again = resolve(Some(&record), &resolution(&record, Resolution::OutcomeUnknown), seconds(20));
    assert_eq!(again, (Some(record), ResolveOutcome::Refused(Refusal::Final)));
}

#[test]
fn a_record_that_has_changed_since_it_was_seen_stays() {
    let record = unknown();
    let request = resolution(&record, completed());
    let changed = [
        with_attempt(3, record.clone()),
        Record { owner: token(2), ..record.clone() },
        Record { updated_at: seconds(2), ..record.clone() },
    ];
    for other in changed {
        assert_eq!(resolve(Some(&other), &request, seconds(20)), (Some(other), ResolveOutcome::Changed));
    }
    assert_eq!(resolve(None, &request, seconds(20)), (None, ResolveOutcome::Changed));
    let gone = resolve(Some(&record), &request, record.expires_at);
    assert_eq!(gone, (None, ResolveOutcome::Changed), "its retention is over");
}

#[test]
fn a_repeated_action_is_answered_as_before_and_another_one_finds_it_changed() {
    let record = unknown();
    for how in [completed(), may_run_again(Duration::from_secs(5))] {
        let request = resolution(&record, how);
        let next = resolve(Some(&record), &request, seconds(20)).0;
        assert_eq!(resolve(next.as_ref(), &request, seconds(22)), (next.clone(), ResolveOutcome::Resolved));
        let other = Resolve { action: token(8), ..request };
        assert_eq!(resolve(next.as_ref(), &other, seconds(22)), (next, ResolveOutcome::Changed));
    }
}
