//! Makes records with the verbs of the store, without an engine.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use idem_core::{
    Acquire, AcquireOutcome, Fingerprint, HeaderField, IdempotencyStore, OnMismatch, Origin, OwnerOutcome, OwnerToken,
    RecordId, Scope, Settlement, StoredBody, StoredResponse, Takeover, Term,
};
use idem_postgres::PostgresStore;
use sha2::{Digest, Sha256};

use crate::Error;

/// Longer than any check takes.
pub(crate) const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// Makes the records of a check.
#[derive(Debug, Clone)]
pub(crate) struct Maker {
    pub(crate) store: PostgresStore,
    pub(crate) retention: Duration,
    response: StoredResponse,
    origin: Origin,
}

impl Maker {
    /// Makes records whose answers have two header fields and a body of `body_bytes` bytes.
    pub(crate) fn new(store: PostgresStore, retention: Duration, body_bytes: usize) -> Self {
        let scope = Scope::new("tenant-4711", "POST /v1/payments");
        Self {
            store,
            retention,
            response: response(body_bytes, ""),
            origin: Origin { namespace: "long".into(), scope },
        }
    }

    /// A hash, as random as the ids of real records.
    pub(crate) fn id(number: u64) -> RecordId {
        RecordId::from_bytes(Sha256::digest(number.to_string()).into())
    }

    pub(crate) fn request(&self, number: u64) -> Acquire {
        Acquire {
            id: Self::id(number),
            origin: self.origin.clone(),
            trace: None,
            fingerprint: Fingerprint::of_bytes("POST /v1/payments", b"the same for all, so that a row can be copied"),
            owner: OwnerToken::random(),
            term: Term { lease: Duration::from_secs(30), retention: self.retention },
            takeover: Takeover::Rerun,
            max_attempts: NonZeroU32::MAX,
            on_mismatch: OnMismatch::Refuse,
        }
    }

    /// Makes a record, and settles it after `meanwhile`.
    pub(crate) async fn make(&self, number: u64, meanwhile: Duration) -> Result<(), Error> {
        let AcquireOutcome::Acquired(lease) = self.store.acquire(&self.request(number)).await? else {
            return Err(format!("record {number} was there already").into());
        };
        if !meanwhile.is_zero() {
            tokio::time::sleep(meanwhile).await;
        }
        let settlement = Settlement::Completed(self.response.clone());
        match self.store.settle(&lease, &settlement, self.retention).await? {
            OwnerOutcome::Applied => Ok(()),
            OwnerOutcome::LeaseLost => Err(format!("the lease of record {number} was lost").into()),
        }
    }

    /// Requests a settled record, which must be replayed.
    pub(crate) async fn replay(&self, number: u64) -> Result<(), Error> {
        match self.store.acquire(&self.request(number)).await? {
            AcquireOutcome::Replay(replay) if replay.response == self.response => Ok(()),
            other => Err(format!("record {number} was not replayed: {other:?}").into()),
        }
    }
}

/// Does `work` for every number, `at_once` of them concurrently.
pub(crate) async fn each<F, W>(
    numbers: impl Iterator<Item = u64>,
    at_once: usize,
    work: impl Fn(u64) -> W,
) -> Result<(), F>
where
    W: Future<Output = Result<(), F>>,
{
    let mut running = futures_util::stream::iter(numbers.map(work)).buffer_unordered(at_once);
    while let Some(done) = running.next().await {
        done?;
    }
    Ok(())
}

/// An answer with two header fields and a body of `bytes` bytes that begins with `begin`, if that fits.
pub(crate) fn response(bytes: usize, begin: &str) -> StoredResponse {
    let field = |name: &'static str, value: &'static str| HeaderField {
        name: Bytes::from_static(name.as_bytes()),
        value: Bytes::from_static(value.as_bytes()),
    };
    let headers: Arc<[HeaderField]> = Arc::from([
        field("content-type", "application/json"),
        field("location", "/v1/payments/0197f3c2-7d1e-7a50-9f2b-3c1d5e6f7a8b"),
    ]);
    let text = begin.bytes().chain(br#"{"status":"succeeded","amount":"12.50"}"#.iter().copied().cycle());
    StoredResponse { status: 201, headers, body: StoredBody::Retained(text.take(bytes).collect()), trace: None }
}
