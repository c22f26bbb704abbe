//! Records are isolated (law L6), time is the store's (law L9), and a store describes itself.

use std::time::Duration;

use idem_core::{Acquire, AcquireOutcome, IdempotencyKey, RecordId, RecordIdentity, Scope, Settlement, self_test};

use super::{assert_record_is, assert_time};
use crate::fixture::{LEASE, checkpoint, completed, fresh_id, request};
use crate::subject::Subject;

/// Ids that differ in any one bit are two records.
pub async fn every_bit_of_the_record_id_counts(subject: &Subject) {
    let id = *fresh_id().as_bytes();
    subject.lease(&Acquire { id: RecordId::from_bytes(id), ..request() }).await;
    for bit in 0..256 {
        let mut near = id;
        near[bit / 8] ^= 1 << (bit % 8);
        subject.lease(&Acquire { id: RecordId::from_bytes(near), ..request() }).await;
    }
}

/// The same key in other scopes, and other keys in the same scope, have separate records, whatever their bytes.
pub async fn scopes_and_keys_are_isolated(subject: &Subject) {
    let identity = RecordIdentity::new(fresh_id().to_string());
    let texts = ["", "a", "a:", ":", "a/b", "\0", "é", "'"];
    for principal in texts {
        for operation in texts {
            for key in ["a", "a:a", "\"'"] {
                let key: IdempotencyKey = key.parse().expect("these keys are valid");
                let id = identity.record_id(&Scope::new(principal, operation), &key);
                subject.lease(&Acquire { id, ..request() }).await;
            }
        }
    }
}

/// No verb on one record changes another.
pub async fn no_verb_reaches_another_record(subject: &Subject) {
    let mine = request();
    let mut next = *mine.id.as_bytes();
    next[31] ^= 1;
    let other = Acquire { id: RecordId::from_bytes(next), ..request() };
    let lease = subject.lease(&mine).await;
    subject.lease(&other).await;
    let record = subject.record(&other.id).await;
    subject.renew(&lease, mine.term).await;
    subject.checkpoint(&lease, &checkpoint("charged")).await;
    subject.settle(&lease, &completed()).await;
    assert_record_is(subject, &other, &record).await;
    let third = Acquire { id: fresh_id(), ..mine };
    let lease = subject.lease(&third).await;
    subject.settle(&lease, &Settlement::Released).await;
    assert_record_is(subject, &other, &record).await;
}

/// An owner token on two records owns each of them separately.
pub async fn an_owner_token_is_bound_to_its_record(subject: &Subject) {
    let one = request();
    let two = Acquire { id: fresh_id(), ..one.clone() };
    let lease = subject.lease(&one).await;
    subject.lease(&two).await;
    let record = subject.record(&two.id).await;
    subject.settle(&lease, &Settlement::Released).await;
    assert_eq!(subject.peek(&one.id).await, None);
    assert_record_is(subject, &two, &record).await;
}

/// Peek of an absent record finds nothing, and creates nothing.
pub async fn peek_of_an_absent_record_is_none(subject: &Subject) {
    let request = request();
    assert_eq!(subject.peek(&request.id).await, None);
    assert_eq!(subject.peek(&request.id).await, None);
    assert_eq!(subject.lease(&request).await.attempt, 1);
}

/// Peek changes nothing, not even a record whose lease is over.
pub async fn peek_changes_nothing(subject: &Subject) {
    let request = Acquire { takeover: idem_core::Takeover::Unknown, ..request() };
    subject.lease(&request).await;
    let record = subject.record(&request.id).await;
    assert_record_is(subject, &request, &record).await;
    subject.advance_to_end_of(LEASE * 2);
    assert_record_is(subject, &request, &record).await;
}

/// Law L9: records carry the store's time, and only that time decides.
pub async fn time_is_the_stores(subject: &Subject) {
    let years = Duration::from_secs(3_600 * 24 * 365 * 10);
    let before = subject.now().await;
    subject.time.advance(years);
    let after = subject.now().await;
    assert_time(subject, "the store's time", after, before.saturating_add(years));
    let request = request();
    subject.lease(&request).await;
    assert!(matches!(subject.acquire(&crate::fixture::repeat_of(&request)).await, AcquireOutcome::InProgress { .. }));
    let record = subject.record(&request.id).await;
    assert_time(subject, "created_at", record.created_at, after);
}

/// A store has a name, which identifies it in logs and metrics.
pub async fn capabilities_have_a_name(subject: &Subject) {
    let capabilities = subject.store.capabilities();
    assert!(!capabilities.name.is_empty());
    assert_eq!(capabilities, subject.store.capabilities());
}

/// The self-test that applications run at start-up passes repeatedly.
pub async fn the_self_test_passes(subject: &Subject) {
    for _ in 0..3 {
        self_test(subject.store.as_ref()).await.expect("the self-test passes");
    }
}
