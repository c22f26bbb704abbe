//! A start-up check that a store keeps its promises.

use std::num::NonZeroU32;
use std::time::Duration;

use super::{IdempotencyStore, StoreError};
use crate::fingerprint::Fingerprint;
use crate::machine::{Acquire, AcquireOutcome, Lease, OnMismatch, Origin, OwnerOutcome, Settlement, Term};
use crate::record::{OwnerToken, StoredResponse, Takeover};
use crate::record_id::RecordId;
use crate::scope::Scope;

/// Long enough for the test to finish on a slow network, short enough not to linger when it is interrupted.
const TERM: Term = Term { lease: Duration::from_secs(10), retention: Duration::from_secs(10) };

/// What [`self_test`] found wrong.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SelfTestError {
    /// The store could not answer.
    #[error("the store could not answer the self-test")]
    Store(#[from] StoreError),
    /// The store does not keep a promise that everything else rests on.
    #[error("this store is not safe to use: {0}")]
    Broken(&'static str),
}

/// Proves on a new record that acquire is atomic, expiry is set and a stale owner is refused.
///
/// Run it at start-up: a driver that ignores an option, a proxy that rewrites statements or a cache put in front by
/// mistake gives no error later, only no protection. It leaves nothing behind when it succeeds, and a record that
/// expires within seconds when it does not.
///
/// # Errors
/// [`SelfTestError`] says which promise does not hold, or that the store could not answer.
pub async fn self_test(store: &dyn IdempotencyStore) -> Result<(), SelfTestError> {
    let request = probe();
    let rival = Acquire { owner: OwnerToken::random(), ..request.clone() };
    let lease = match store.acquire(&request).await? {
        AcquireOutcome::Acquired(lease) => lease,
        _ => return Err(SelfTestError::Broken("the acquire of a new key was refused")),
    };
    expect(
        matches!(store.acquire(&rival).await?, AcquireOutcome::InProgress { .. }),
        "a second acquire was not turned away, so two requests would run at once",
    )?;
    let expires = store.peek(&request.id).await?.map(|record| (record.updated_at, record.expires_at));
    expect(
        expires.is_some_and(|(updated_at, expires_at)| updated_at < expires_at),
        "the record has no expiry, so the key would be stuck for ever",
    )?;
    let stale = Lease { owner: rival.owner, ..lease.clone() };
    let response = Settlement::Completed(StoredResponse::new(200, "stale"));
    expect(
        store.settle(&stale, &response, TERM.retention).await? == OwnerOutcome::LeaseLost,
        "a settlement by a caller that does not own the record was accepted",
    )?;
    expect(
        store.settle(&lease, &Settlement::Released, TERM.retention).await? == OwnerOutcome::Applied,
        "the owner could not release its own record",
    )?;
    expect(store.peek(&request.id).await?.is_none(), "a released record is still there")
}

fn expect(holds: bool, promise: &'static str) -> Result<(), SelfTestError> {
    if holds { Ok(()) } else { Err(SelfTestError::Broken(promise)) }
}

/// An acquire of a new record: its id is random.
fn probe() -> Acquire {
    let mut id = [0; 32];
    id[..16].copy_from_slice(OwnerToken::random().as_bytes());
    id[16..].copy_from_slice(OwnerToken::random().as_bytes());
    Acquire {
        id: RecordId::from_bytes(id),
        origin: Origin { namespace: "idem self-test".into(), scope: Scope::single_tenant("idem self-test") },
        trace: None,
        fingerprint: Fingerprint::of_bytes("idem self-test", &id),
        owner: OwnerToken::random(),
        term: TERM,
        takeover: Takeover::Rerun,
        max_attempts: NonZeroU32::MIN,
        on_mismatch: OnMismatch::Refuse,
    }
}
