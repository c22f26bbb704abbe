//! What goes in comes out, byte for byte (law L2).

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use idem_core::{
    Acquire, AcquireOutcome, Algorithm, Checkpoint, Fingerprint, HeaderField, Origin, OwnerOutcome, ReplayKind, Scope,
    Settlement, State, StoredBody, StoredResponse, Term,
};

use super::assert_replay;
use crate::fixture::{BACKOFF, KEPT, repeat_of, request};
use crate::subject::Subject;

/// Settles with `response`, and expects exactly that from peek and from every replay until the retention is over.
async fn assert_survives(subject: &Subject, response: StoredResponse) {
    let request = request();
    let lease = subject.lease(&request).await;
    let settlement = Settlement::Completed(response.clone());
    assert_eq!(subject.settle(&lease, &settlement).await, OwnerOutcome::Applied);
    assert_eq!(subject.settle(&lease, &settlement).await, OwnerOutcome::Applied, "the same bytes again");
    for _ in 0..2 {
        assert_replay(&subject.acquire(&repeat_of(&request)).await, ReplayKind::Completed, 1, &response);
        let state = subject.record(&request.id).await.state;
        assert!(state == State::Completed { response: response.clone() }, "peek shows {state:?}");
        subject.advance_to_just_before(KEPT / 2);
    }
}

/// Statuses, repeated header names, their order, values of any bytes, and a body of any bytes survive.
pub async fn a_response_survives_byte_for_byte(subject: &Subject) {
    assert_survives(subject, crate::fixture::response()).await;
}

/// Failures keep their responses, as successes do.
pub async fn a_failures_response_survives_byte_for_byte(subject: &Subject) {
    let response = crate::fixture::response();
    let request = request();
    let lease = subject.lease(&request).await;
    subject.settle(&lease, &Settlement::FailedTerminal(response.clone())).await;
    assert_replay(&subject.acquire(&repeat_of(&request)).await, ReplayKind::Failed, 1, &response);
    let once = Acquire { max_attempts: std::num::NonZeroU32::MIN, ..crate::fixture::request() };
    let lease = subject.lease(&once).await;
    let retryable = Settlement::FailedRetryable { response: response.clone(), retry_after: BACKOFF };
    subject.settle(&lease, &retryable).await;
    subject.advance_to_end_of(BACKOFF);
    assert_replay(&subject.acquire(&repeat_of(&once)).await, ReplayKind::Failed, 1, &response);
}

/// An empty body is a body, not the absence of one.
pub async fn an_empty_body_is_not_a_tombstone(subject: &Subject) {
    assert_survives(subject, StoredResponse::new(204, Bytes::new())).await;
}

/// A tombstone keeps status and header fields, and stays a tombstone.
pub async fn a_tombstone_is_not_an_empty_body(subject: &Subject) {
    assert_survives(subject, StoredResponse { body: StoredBody::NotRetained, ..crate::fixture::response() }).await;
}

/// A response keeps the trace of its run.
pub async fn a_trace_survives(subject: &Subject) {
    let trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01".parse().ok();
    assert!(trace.is_some());
    assert_survives(subject, StoredResponse { trace, ..crate::fixture::response() }).await;
    assert_survives(subject, StoredResponse { trace, ..StoredResponse::new(204, "") }).await;
}

/// The largest body that is stored by default, 1 MiB, survives. Its bytes do not compress to nothing.
pub async fn a_body_of_a_mebibyte_survives(subject: &Subject) {
    let body: Vec<u8> = (0..1 << 20).map(|at: u32| at.wrapping_mul(2_654_435_761).to_be_bytes()[1]).collect();
    assert_survives(subject, StoredResponse::new(200, body)).await;
}

/// Every status survives, because operations without HTTP use any status.
pub async fn every_status_survives(subject: &Subject) {
    for status in [0, 1, 99, 599, 32_768, u16::MAX] {
        assert_survives(subject, StoredResponse::new(status, "")).await;
    }
}

/// Many header fields survive, and so do large values.
pub async fn many_and_large_header_fields_survive(subject: &Subject) {
    let field =
        |at: usize| HeaderField { name: format!("x-{}", at % 10).into(), value: vec![0xA0 + at as u8; at * 40].into() };
    let headers: Arc<[HeaderField]> = (0..90).map(field).collect();
    assert_survives(subject, StoredResponse { headers, ..StoredResponse::new(200, "ok") }).await;
}

/// Names and data of checkpoints survive, even if they are no text, or empty.
pub async fn checkpoints_survive_byte_for_byte(subject: &Subject) {
    let lease = subject.lease(&request()).await;
    let all: Vec<u8> = (0..=u8::MAX).collect();
    let pairs: [(&str, Bytes); 5] = [
        ("charged", all.into()),
        ("charged", Bytes::new()),
        ("", "no name".into()),
        ("naïve \u{1F4B6} 'quoted' \"twice\" \\", "x".into()),
        (&"long ".repeat(50), vec![0; 64 * 1024].into()),
    ];
    for (sequence, (name, data)) in (1..).zip(pairs) {
        let checkpoint = Checkpoint { sequence, name: name.into(), data };
        assert_eq!(subject.checkpoint(&lease, &checkpoint).await, OwnerOutcome::Applied);
        assert_eq!(subject.record(&lease.id).await.checkpoint, Some(checkpoint));
    }
}

/// Any text may be an origin: it is for operators to read, and makes no verb fail.
pub async fn any_text_may_be_an_origin(subject: &Subject) {
    let long = "é".repeat(5_000);
    for text in ["", "\0", "a\0b", "'; DROP TABLE records; --", "\"\\\u{7f}\u{202e}", "\u{1F4B6}{tag}", &long] {
        let scopes = [Scope::new(text, text), Scope::single_tenant(text)];
        for scope in scopes {
            let request = Acquire { origin: Origin { namespace: text.into(), scope }, ..request() };
            let lease = subject.lease(&request).await;
            assert_eq!(subject.lease(&request).await, lease);
            assert!(matches!(subject.acquire(&repeat_of(&request)).await, AcquireOutcome::InProgress { .. }));
        }
    }
}

/// A fingerprint by an algorithm that this library does not know survives and is recognised.
pub async fn unknown_fingerprint_algorithms_survive(subject: &Subject) {
    for number in [0, 9, u16::MAX] {
        let fingerprint = Fingerprint::from_parts(Algorithm::from_number(number), [0x80; 32]);
        let request = Acquire { fingerprint, ..request() };
        subject.lease(&request).await;
        assert_eq!(subject.record(&request.id).await.fingerprint, fingerprint);
        assert!(matches!(subject.acquire(&repeat_of(&request)).await, AcquireOutcome::InProgress { .. }));
    }
}

/// Owner tokens are 16 bytes of any value but that of [`OwnerToken::NOBODY`](idem_core::OwnerToken::NOBODY).
pub async fn any_bytes_may_be_an_owner_token(subject: &Subject) {
    for byte in [1, 0x27, 0x80, u8::MAX] {
        let owner = idem_core::OwnerToken::from_bytes([byte; 16]);
        let lease = subject.lease(&Acquire { owner, ..request() }).await;
        assert_eq!(subject.record(&lease.id).await.owner, owner);
        assert_eq!(subject.settle(&lease, &crate::fixture::completed()).await, OwnerOutcome::Applied);
    }
}

/// Arithmetic saturates: very large terms never end.
pub async fn terms_beyond_all_reason_are_for_ever(subject: &Subject) {
    for endless in [Duration::from_secs(1 << 40), Duration::MAX] {
        let term = Term { lease: endless, retention: endless };
        let request = Acquire { term, ..request() };
        let lease = subject.lease(&request).await;
        assert_eq!(subject.renew(&lease, term).await, OwnerOutcome::Applied);
        assert!(matches!(subject.acquire(&repeat_of(&request)).await, AcquireOutcome::InProgress { .. }));
        let settled = subject.store.settle(&lease, &crate::fixture::completed(), endless).await;
        assert_eq!(settled.expect("settle: the store could not answer"), OwnerOutcome::Applied);
        subject.time.advance(Duration::from_secs(3_600 * 24 * 365));
        let response = crate::fixture::response();
        assert_replay(&subject.acquire(&repeat_of(&request)).await, ReplayKind::Completed, 1, &response);
    }
}
