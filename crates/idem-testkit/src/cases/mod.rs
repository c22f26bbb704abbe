//! The conformance cases: each an ordinary function that panics when the store breaks its contract.
//!
//! A case uses fresh record ids, so cases may share a store one after the other. [`conformance!`](crate::conformance!)
//! makes a test of each.

mod concurrency;
mod data;
mod isolation;
mod mismatches;
mod owners;
mod purging;
mod rows;
mod settling;

pub use concurrency::*;
pub use data::*;
pub use isolation::*;
pub use mismatches::*;
pub use owners::*;
pub use purging::*;
pub use rows::*;
pub use settling::*;

use std::time::Duration;

use idem_core::{Acquire, AcquireOutcome, Record, ReplayKind, StoredResponse, Timestamp};

use crate::subject::{Case, Subject};

/// The list of all cases; the tests of every store run them.
#[doc(hidden)]
#[macro_export]
macro_rules! __for_every_case {
    ($callback:path, $argument:tt) => {
        $callback! { $argument,
            a_new_key_is_acquired
            a_fresh_record_holds_what_was_asked
            a_repeated_acquire_is_answered_as_the_first_time
            a_repeated_takeover_is_answered_as_the_first_time
            a_live_lease_turns_others_away
            a_lease_that_is_over_is_taken_over
            a_takeover_is_a_lease_like_any_other
            a_lease_over_becomes_an_unknown_outcome
            it_runs_again_only_if_both_say_so
            a_lease_over_is_handed_to_whoever_can_find_out
            a_release_before_finding_out_does_not_forget_the_crash
            a_completed_record_is_replayed
            a_terminal_failure_is_replayed
            a_retryable_failure_backs_off
            a_retryable_failure_runs_again_at_its_time
            used_up_attempts_fail_for_good
            max_attempts_does_not_limit_takeovers
            the_attempt_grows_through_takeover_and_retry
            a_settled_record_is_forgotten_after_its_retention
            an_abandoned_record_is_forgotten_after_lease_and_retention
            nothing_is_stuck_one_lease_after_a_crash
            a_mismatch_is_refused_while_in_progress_and_after_the_lease
            a_mismatch_is_refused_once_settled
            a_mismatch_is_refused_before_and_after_a_backoff
            a_mismatch_names_the_stored_algorithm
            the_algorithm_belongs_to_the_fingerprint
            every_bit_of_the_fingerprint_counts
            the_original_is_replayed_where_the_policy_says_so
            an_unknown_outcome_is_replayed_where_the_policy_says_so
            replaying_the_original_never_runs_another_request
            renew_moves_the_lease_to_count_from_now
            a_renewed_lease_turns_others_away_for_longer
            a_renewal_can_shorten_the_lease
            a_lease_that_ran_out_still_belongs_to_its_owner
            a_checkpoint_replaces_the_one_before
            an_earlier_checkpoint_that_comes_late_changes_nothing
            an_owner_that_was_taken_over_changes_nothing
            a_stranger_changes_nothing
            an_owner_whose_failure_is_retried_changes_nothing
            an_owner_whose_outcome_became_unknown_changes_nothing
            nobody_owns_a_record_that_is_not_there
            nobody_owns_a_record_that_is_forgotten
            each_settlement_leads_to_its_state
            the_checkpoint_outlives_each_failure_but_no_success
            a_repeated_settlement_is_answered_as_the_first_time
            a_different_settlement_of_a_settled_record_is_refused
            a_retryable_failure_is_not_settled_otherwise
            a_settled_record_is_neither_renewed_nor_checkpointed
            a_release_removes_the_record
            a_release_keeps_the_attempt_and_the_checkpoint_of_an_earlier_run
            a_released_retry_stays_a_retry_under_every_contract
            a_repeated_release_is_answered_as_the_first_time
            a_repeated_release_does_not_touch_the_next_owner
            a_response_survives_byte_for_byte
            a_failures_response_survives_byte_for_byte
            an_empty_body_is_not_a_tombstone
            a_tombstone_is_not_an_empty_body
            a_body_of_a_mebibyte_survives
            every_status_survives
            many_and_large_header_fields_survive
            checkpoints_survive_byte_for_byte
            a_trace_survives
            any_text_may_be_an_origin
            unknown_fingerprint_algorithms_survive
            any_bytes_may_be_an_owner_token
            terms_beyond_all_reason_are_for_ever
            every_bit_of_the_record_id_counts
            scopes_and_keys_are_isolated
            no_verb_reaches_another_record
            an_owner_token_is_bound_to_its_record
            peek_of_an_absent_record_is_none
            peek_changes_nothing
            time_is_the_stores
            capabilities_have_a_name
            the_self_test_passes
            purge_keeps_what_is_in_progress
            purge_keeps_what_was_renewed
            purge_keeps_what_waits_for_a_takeover
            purge_keeps_what_is_settled_within_its_retention
            purge_removes_what_is_over_up_to_its_limit
            a_purged_key_is_fresh
            purge_keeps_a_key_that_is_used_again
            one_of_many_first_requests_runs
            one_of_many_takes_over
            one_of_many_retries
            one_of_many_runs_after_the_retention
            all_agree_on_an_unknown_outcome
            one_of_two_different_requests_runs
            an_acquire_that_is_sent_many_times_is_one
            many_keys_are_acquired_at_once
            a_settlement_meets_a_takeover
            a_renewal_meets_a_takeover
            one_of_many_settlements_is_applied
            checkpoints_and_renewals_do_not_undo_each_other
            purge_meets_acquires
        }
    };
}

macro_rules! named_cases {
    ((), $($case:ident)+) => {
        /// Every case with its name.
        pub const ALL: &[(&str, Case)] = &[$((stringify!($case), |subject| Box::pin($case(subject)))),+];
    };
}

crate::__for_every_case!(named_cases, ());

/// Whether two times are the same within the subject's precision.
fn is_close(subject: &Subject, left: Timestamp, right: Timestamp) -> bool {
    let apart = left.saturating_duration_since(right).max(right.saturating_duration_since(left));
    apart <= subject.precision
}

#[track_caller]
pub(crate) fn assert_time(subject: &Subject, what: &str, actual: Timestamp, expected: Timestamp) {
    assert!(is_close(subject, actual, expected), "{what} is {actual}, not {expected}");
}

#[track_caller]
fn assert_duration(subject: &Subject, what: &str, actual: Duration, expected: Duration) {
    assert!(actual.abs_diff(expected) <= subject.precision, "{what} is {actual:?}, not {expected:?}");
}

#[track_caller]
fn assert_in_progress(subject: &Subject, outcome: &AcquireOutcome, expected: Duration) {
    match outcome {
        AcquireOutcome::InProgress { lease_left, .. } => assert_duration(subject, "lease_left", *lease_left, expected),
        other => panic!("expected InProgress, got {other:?}"),
    }
}

#[track_caller]
fn assert_backoff(subject: &Subject, outcome: &AcquireOutcome, expected: Duration) {
    match outcome {
        AcquireOutcome::Backoff { retry_after } => assert_duration(subject, "retry_after", *retry_after, expected),
        other => panic!("expected Backoff, got {other:?}"),
    }
}

#[track_caller]
fn assert_replay(outcome: &AcquireOutcome, kind: ReplayKind, attempt: u32, response: &StoredResponse) {
    match outcome {
        AcquireOutcome::Replay(replay) => {
            assert_eq!(replay.kind, kind);
            assert_eq!(replay.attempt, attempt);
            assert!(replay.response == *response, "replayed {:?} instead of {response:?}", replay.response);
        }
        other => panic!("expected Replay of {kind:?}, got {other:?}"),
    }
}

#[track_caller]
fn assert_mismatch(outcome: &AcquireOutcome, stored: &Acquire) {
    let stored_algorithm = stored.fingerprint.algorithm();
    assert_eq!(*outcome, AcquireOutcome::Mismatch { stored_algorithm });
}

/// Asserts that the record is still the same, to the last bit.
async fn assert_record_is(subject: &Subject, request: &Acquire, expected: &Record) {
    let record = subject.peek(&request.id).await;
    assert!(record.as_ref() == Some(expected), "the record changed from {expected:?} to {record:?}");
}
