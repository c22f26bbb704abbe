//! Purge removes expired records and keeps all others (law L10).

use idem_core::{Acquire, Term};

use super::{assert_in_progress, assert_record_is};
use crate::fixture::{BACKOFF, KEPT, LEASE, RETENTION, completed, failed, repeat_of, request, retryable};
use crate::subject::{Purging, Subject};

/// A record under a live lease stays, however short its retention.
pub async fn purge_keeps_what_is_in_progress(subject: &Subject) {
    let term = Term { lease: LEASE, retention: std::time::Duration::ZERO };
    let request = Acquire { term, ..request() };
    subject.lease(&request).await;
    let record = subject.record(&request.id).await;
    let left = subject.advance_to_just_before(LEASE);
    subject.drain().await;
    assert_record_is(subject, &request, &record).await;
    assert_in_progress(subject, &subject.acquire(&repeat_of(&request)).await, left);
}

/// Purge goes by the renewed lease, not by the first one.
pub async fn purge_keeps_what_was_renewed(subject: &Subject) {
    let request = request();
    let lease = subject.lease(&request).await;
    subject.advance_to_just_before(LEASE + RETENTION);
    subject.renew(&lease, request.term).await;
    let record = subject.record(&request.id).await;
    subject.advance_to_just_before(LEASE);
    subject.drain().await;
    assert_record_is(subject, &request, &record).await;
}

/// An abandoned record stays while its retention lasts: its key is not fresh, but waits for a takeover.
pub async fn purge_keeps_what_waits_for_a_takeover(subject: &Subject) {
    let request = request();
    subject.lease(&request).await;
    let record = subject.record(&request.id).await;
    subject.advance_to_just_before(LEASE + RETENTION);
    subject.drain().await;
    assert_record_is(subject, &request, &record).await;
    assert_eq!(subject.lease(&repeat_of(&request)).await.attempt, 2);
}

/// A settled record stays while its retention lasts.
pub async fn purge_keeps_what_is_settled_within_its_retention(subject: &Subject) {
    for settlement in [completed(), failed(), retryable()] {
        let request = request();
        let lease = subject.lease(&request).await;
        subject.settle(&lease, &settlement).await;
        let record = subject.record(&request.id).await;
        subject.advance_to_just_before(KEPT);
        subject.drain().await;
        assert_record_is(subject, &request, &record).await;
    }
}

/// Purge removes expired records, keeps to its limit, and counts what it removed. If the server purges without a call, it
/// holds no expired records.
pub async fn purge_removes_what_is_over_up_to_its_limit(subject: &Subject) {
    subject.drain().await;
    let left_before = remaining(subject).await;
    let living = request();
    for _ in 0..3 {
        let lease = subject.lease(&request()).await;
        subject.settle(&lease, &completed()).await;
    }
    subject.lease(&request()).await;
    subject.advance_to_end_of(KEPT);
    subject.lease(&living).await;
    let record = subject.record(&living.id).await;
    match remaining(subject).await {
        Some(left) => assert_eq!(left, left_before.unwrap_or_default() + 1, "the server holds what is over"),
        None => {
            assert_eq!(subject.purge(3).await, 3);
            assert_eq!(subject.purge(3).await, 1);
            assert_eq!(subject.purge(3).await, 0);
        }
    }
    assert_record_is(subject, &living, &record).await;
}

/// How many records the server holds, if it purges without a call.
async fn remaining(subject: &Subject) -> Option<u64> {
    match &subject.purging {
        Purging::OfItsOwn(remaining) => Some(remaining.remaining().await),
        Purging::Called(_) => None,
    }
}

/// A purged key is free, as is a key whose record is over.
pub async fn a_purged_key_is_fresh(subject: &Subject) {
    let request = request();
    let lease = subject.lease(&request).await;
    subject.settle(&lease, &completed()).await;
    subject.advance_to_end_of(KEPT);
    subject.drain().await;
    assert_eq!(subject.peek(&request.id).await, None);
    assert_eq!(subject.lease(&repeat_of(&request)).await.attempt, 1);
}

/// The retention of the next owner counts: a key that is used again is not purged at its former expiry.
pub async fn purge_keeps_a_key_that_is_used_again(subject: &Subject) {
    let first = request();
    let lease = subject.lease(&first).await;
    subject.settle(&lease, &retryable()).await;
    subject.advance_to_end_of(BACKOFF);
    let second = repeat_of(&first);
    let lease = subject.lease(&second).await;
    let term = Term { lease: KEPT * 2, retention: RETENTION };
    subject.renew(&lease, term).await;
    let record = subject.record(&first.id).await;
    subject.advance_to_end_of(KEPT);
    subject.drain().await;
    assert_record_is(subject, &second, &record).await;
}
