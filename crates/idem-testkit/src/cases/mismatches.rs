//! Requests with a different fingerprint (law L4).

use idem_core::{Acquire, OnMismatch, ReplayKind, Settlement, StoredResponse, Takeover};

use super::{assert_mismatch, assert_record_is, assert_replay};
use crate::fixture::{BACKOFF, LEASE, completed, failed, mismatch_of, repeat_of, request, response, retryable};
use crate::subject::Subject;

fn lenient(request: &Acquire) -> Acquire {
    Acquire { on_mismatch: OnMismatch::ReplayOriginal, ..mismatch_of(request) }
}

/// A running operation is not taken over by another request, not even after its lease, not even by its own token.
pub async fn a_mismatch_is_refused_while_in_progress_and_after_the_lease(subject: &Subject) {
    let request = request();
    subject.lease(&request).await;
    let record = subject.record(&request.id).await;
    let own_token = Acquire { owner: request.owner, ..mismatch_of(&request) };
    for _ in 0..2 {
        assert_mismatch(&subject.acquire(&mismatch_of(&request)).await, &request);
        assert_mismatch(&subject.acquire(&own_token).await, &request);
        let strict = Acquire { takeover: Takeover::Unknown, ..mismatch_of(&request) };
        assert_mismatch(&subject.acquire(&strict).await, &request);
        subject.advance_to_end_of(LEASE);
    }
    assert_record_is(subject, &request, &record).await;
}

/// No settled answer reaches another request.
pub async fn a_mismatch_is_refused_once_settled(subject: &Subject) {
    for settlement in [completed(), failed()] {
        let request = request();
        let lease = subject.lease(&request).await;
        subject.settle(&lease, &settlement).await;
        let record = subject.record(&request.id).await;
        assert_mismatch(&subject.acquire(&mismatch_of(&request)).await, &request);
        assert_record_is(subject, &request, &record).await;
    }
}

/// A retryable failure is not retried with another request, neither during its backoff nor after it nor at its end.
pub async fn a_mismatch_is_refused_before_and_after_a_backoff(subject: &Subject) {
    let request = request();
    let lease = subject.lease(&request).await;
    subject.settle(&lease, &retryable()).await;
    let record = subject.record(&request.id).await;
    for _ in 0..2 {
        assert_mismatch(&subject.acquire(&mismatch_of(&request)).await, &request);
        let once = Acquire { max_attempts: std::num::NonZeroU32::MIN, ..mismatch_of(&request) };
        assert_mismatch(&subject.acquire(&once).await, &request);
        subject.advance_to_end_of(BACKOFF);
    }
    assert_record_is(subject, &request, &record).await;
}

/// The mismatch names the algorithm of the stored fingerprint, whichever was sent.
pub async fn a_mismatch_names_the_stored_algorithm(subject: &Subject) {
    let first = mismatch_of(&request());
    subject.lease(&first).await;
    let second = Acquire { fingerprint: request().fingerprint, ..repeat_of(&first) };
    assert_mismatch(&subject.acquire(&second).await, &first);
}

/// The same digest by another algorithm is another fingerprint.
pub async fn the_algorithm_belongs_to_the_fingerprint(subject: &Subject) {
    let first = request();
    subject.lease(&first).await;
    let algorithm = idem_core::Algorithm::from_number(2);
    let fingerprint = idem_core::Fingerprint::from_parts(algorithm, *first.fingerprint.digest());
    assert_mismatch(&subject.acquire(&Acquire { fingerprint, ..repeat_of(&first) }).await, &first);
}

/// Fingerprints that differ in their last bit only are different.
pub async fn every_bit_of_the_fingerprint_counts(subject: &Subject) {
    let first = request();
    subject.lease(&first).await;
    let mut digest = *first.fingerprint.digest();
    digest[31] ^= 1;
    let fingerprint = idem_core::Fingerprint::from_parts(first.fingerprint.algorithm(), digest);
    assert_mismatch(&subject.acquire(&Acquire { fingerprint, ..repeat_of(&first) }).await, &first);
}

/// If the policy says so, another request gets the settled answer.
pub async fn the_original_is_replayed_where_the_policy_says_so(subject: &Subject) {
    let Settlement::FailedTerminal(refusal) = failed() else { unreachable!() };
    let settlements = [(completed(), ReplayKind::Completed, response()), (failed(), ReplayKind::Failed, refusal)];
    for (settlement, kind, response) in settlements {
        let request = request();
        let lease = subject.lease(&request).await;
        subject.settle(&lease, &settlement).await;
        let record = subject.record(&request.id).await;
        assert_replay(&subject.acquire(&lenient(&request)).await, kind, 1, &response);
        assert_record_is(subject, &request, &record).await;
    }
}

/// If the policy says so, another request gets an unknown outcome, which is an answer too.
pub async fn an_unknown_outcome_is_replayed_where_the_policy_says_so(subject: &Subject) {
    let request = Acquire { takeover: Takeover::Unknown, ..request() };
    subject.lease(&request).await;
    subject.advance_to_end_of(LEASE);
    subject.acquire(&repeat_of(&request)).await;
    let unknown = StoredResponse::outcome_unknown();
    assert_replay(&subject.acquire(&lenient(&request)).await, ReplayKind::OutcomeUnknown, 1, &unknown);
    assert_mismatch(&subject.acquire(&mismatch_of(&request)).await, &request);
}

/// That policy never runs anything: before there is an answer, another request is a mismatch.
pub async fn replaying_the_original_never_runs_another_request(subject: &Subject) {
    let request = request();
    let lease = subject.lease(&request).await;
    for _ in 0..2 {
        assert_mismatch(&subject.acquire(&lenient(&request)).await, &request);
        subject.advance_to_end_of(LEASE);
    }
    subject.settle(&lease, &retryable()).await;
    let record = subject.record(&request.id).await;
    for _ in 0..2 {
        assert_mismatch(&subject.acquire(&lenient(&request)).await, &request);
        subject.advance_to_end_of(BACKOFF);
    }
    assert_record_is(subject, &request, &record).await;
}
