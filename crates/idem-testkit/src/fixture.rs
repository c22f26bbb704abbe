//! Requests and responses for tests, each on a fresh record.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use idem_core::{
    Acquire, Algorithm, Checkpoint, Fingerprint, HeaderField, OnMismatch, Origin, OwnerToken, RecordId, Scope,
    Settlement, StoredBody, StoredResponse, Takeover, Term,
};

/// The lease of [`request`], so long that a test on a real clock reaches its end only by moving the time.
pub const LEASE: Duration = Duration::from_secs(600);

/// The retention of [`request`]. It differs from the lease, so that tests find a store that confuses the two.
pub const RETENTION: Duration = Duration::from_secs(3_600);

/// The retention after a settlement; unlike [`RETENTION`] for the same reason.
pub const KEPT: Duration = Duration::from_secs(7_200);

/// The backoff of [`retryable`].
pub const BACKOFF: Duration = Duration::from_secs(60);

/// An id that no other record has, so that tests can share a store.
#[must_use]
pub fn fresh_id() -> RecordId {
    let mut id = [0; 32];
    id[..16].copy_from_slice(OwnerToken::random().as_bytes());
    id[16..].copy_from_slice(OwnerToken::random().as_bytes());
    RecordId::from_bytes(id)
}

/// A first acquire of a fresh record: takeover re-runs, three attempts, a mismatch is refused.
#[must_use]
pub fn request() -> Acquire {
    Acquire {
        id: fresh_id(),
        origin: Origin { namespace: "idem-testkit".into(), scope: Scope::new("acme", "POST /v1/payments") },
        trace: None,
        fingerprint: Fingerprint::of_bytes("pay", b"10 EUR"),
        owner: OwnerToken::random(),
        term: Term { lease: LEASE, retention: RETENTION },
        takeover: Takeover::Rerun,
        max_attempts: NonZeroU32::MIN.saturating_add(2),
        on_mismatch: OnMismatch::Refuse,
    }
}

/// The same request again, from another owner.
#[must_use]
pub fn repeat_of(request: &Acquire) -> Acquire {
    Acquire { owner: OwnerToken::random(), ..request.clone() }
}

/// Another request under the same key, with a fingerprint of another algorithm.
#[must_use]
pub fn mismatch_of(request: &Acquire) -> Acquire {
    let fingerprint = Fingerprint::from_parts(Algorithm::from_number(2), [0xFE; 32]);
    Acquire { fingerprint, ..repeat_of(request) }
}

/// A response with what a store easily loses: repeated names, order, bytes that are not UTF-8, NUL, an empty value.
#[must_use]
pub fn response() -> StoredResponse {
    let field = |name: &'static str, value: &'static [u8]| HeaderField { name: name.into(), value: value.into() };
    let headers = Arc::from([
        field("x-trace", b"b"),
        field("link", b"</1>; rel=\"next\""),
        field("x-trace", b"a"),
        field("x-bytes", b"\xFF\xFE\x00\x80'\\"),
        field("x-empty", b""),
    ]);
    let body: Vec<u8> = (0..=u8::MAX).collect();
    StoredResponse { status: 201, headers, body: StoredBody::Retained(body.into()), trace: None }
}

/// The settlement that completes with [`response`].
#[must_use]
pub fn completed() -> Settlement {
    Settlement::Completed(response())
}

/// The settlement of a terminal failure.
#[must_use]
pub fn failed() -> Settlement {
    Settlement::FailedTerminal(StoredResponse::new(422, "no such account"))
}

/// The settlement that may be retried after [`BACKOFF`].
#[must_use]
pub fn retryable() -> Settlement {
    Settlement::FailedRetryable { response: StoredResponse::new(503, "try later"), retry_after: BACKOFF }
}

/// The first checkpoint of an operation, called `name`, with data that is no text.
#[must_use]
pub fn checkpoint(name: &str) -> Checkpoint {
    Checkpoint { sequence: 1, name: name.into(), data: b"\x00\xFFch_1"[..].into() }
}
