//! Compares answers and records, with times equal if they are within the precision.
//!
//! Each function returns the store's value. Every time in it that is close enough to the expected one is replaced by the
//! expected one, so that any difference that is left is a real one.

use std::time::Duration;

use idem_core::{AcquireOutcome, Failure, Record, State, Timestamp};

use crate::model::Answer;

fn align_time(actual: &mut Timestamp, expected: Timestamp, precision: Duration) {
    let apart = actual.saturating_duration_since(expected).max(expected.saturating_duration_since(*actual));
    if apart <= precision {
        *actual = expected;
    }
}

fn align_duration(actual: &mut Duration, expected: Duration, precision: Duration) {
    if actual.abs_diff(expected) <= precision {
        *actual = expected;
    }
}

pub(super) fn align_record(actual: Option<Record>, expected: Option<&Record>, precision: Duration) -> Option<Record> {
    let (Some(mut actual), Some(expected)) = (actual.clone(), expected) else { return actual };
    align_time(&mut actual.created_at, expected.created_at, precision);
    align_time(&mut actual.updated_at, expected.updated_at, precision);
    align_time(&mut actual.expires_at, expected.expires_at, precision);
    match (&mut actual.state, &expected.state) {
        (State::InProgress { lease_until, .. }, State::InProgress { lease_until: expected, .. }) => {
            align_time(lease_until, *expected, precision);
        }
        (
            State::Failed { failure: Failure::Retryable { not_before }, .. },
            State::Failed { failure: Failure::Retryable { not_before: expected }, .. },
        ) => align_time(not_before, *expected, precision),
        _ => {}
    }
    Some(actual)
}

pub(super) fn align_answer(actual: Answer, expected: &Answer, precision: Duration) -> Answer {
    match (actual, expected) {
        (Answer::Acquire(mut actual), Answer::Acquire(expected)) => {
            align_outcome(&mut actual, expected, precision);
            Answer::Acquire(actual)
        }
        (Answer::Peek(actual), Answer::Peek(expected)) => {
            Answer::Peek(align_record(actual, expected.as_ref(), precision))
        }
        (actual, _) => actual,
    }
}

fn align_outcome(actual: &mut AcquireOutcome, expected: &AcquireOutcome, precision: Duration) {
    match (actual, expected) {
        (
            AcquireOutcome::InProgress { lease_left, age },
            AcquireOutcome::InProgress { lease_left: expected_left, age: expected_age },
        ) => {
            align_duration(lease_left, *expected_left, precision);
            // The age is a lower bound.
            if *age <= expected_age.saturating_add(precision) {
                *age = *expected_age;
            }
        }
        (AcquireOutcome::Backoff { retry_after: actual }, AcquireOutcome::Backoff { retry_after: expected }) => {
            align_duration(actual, *expected, precision);
        }
        (AcquireOutcome::Replay(actual), AcquireOutcome::Replay(expected)) => {
            align_time(&mut actual.settled_at, expected.settled_at, precision);
        }
        _ => {}
    }
}
