//! The verbs of a store, without an engine.

use std::num::NonZeroU32;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use idem_core::{
    Acquire, AcquireOutcome, Fingerprint, HeaderField, IdempotencyStore, OnMismatch, Origin, OwnerOutcome, OwnerToken,
    RecordId, Scope, Settlement, StoredBody, StoredResponse, Takeover, Term,
};
use sha2::{Digest, Sha256};

use crate::drive::Work;
use crate::error::Error;

/// Longer than any run.
pub(crate) const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// The size of the answers that the hand-written contestants keep.
const BODY: usize = 512;

/// Cycles and replays on one store.
#[derive(Debug)]
pub(crate) struct Maker {
    pub(crate) store: Arc<dyn IdempotencyStore>,
    response: StoredResponse,
    origin: Origin,
    fingerprint: Fingerprint,
}

impl Maker {
    pub(crate) fn new(store: Arc<dyn IdempotencyStore>) -> Arc<Self> {
        let origin = Origin { namespace: "bench".into(), scope: Scope::new("tenant-4711", "POST /pay") };
        let fingerprint = Fingerprint::of_bytes("POST /pay", b"the same for all");
        Arc::new(Self { store, response: response(), origin, fingerprint })
    }

    /// The id of a record by its number, as random as other ids.
    pub(crate) fn id(number: u64) -> RecordId {
        RecordId::from_bytes(Sha256::digest(number.to_be_bytes()).into())
    }

    pub(crate) fn request(&self, number: u64) -> Acquire {
        Acquire {
            id: Self::id(number),
            origin: self.origin.clone(),
            trace: None,
            fingerprint: self.fingerprint,
            owner: OwnerToken::random(),
            term: Term { lease: Duration::from_secs(30), retention: DAY },
            takeover: Takeover::Rerun,
            max_attempts: NonZeroU32::MAX,
            on_mismatch: OnMismatch::Refuse,
        }
    }

    pub(crate) fn settlement(&self) -> Settlement {
        Settlement::Completed(self.response.clone())
    }

    /// Acquires an unused key.
    pub(crate) async fn acquire(&self, number: u64) -> Result<idem_core::Lease, Error> {
        match self.store.acquire(&self.request(number)).await? {
            AcquireOutcome::Acquired(lease) => Ok(lease),
            other => Err(format!("record {number} was not acquired: {other:?}").into()),
        }
    }

    /// Acquires a key and settles it.
    pub(crate) async fn cycle(&self, number: u64) -> Result<(), Error> {
        let lease = self.acquire(number).await?;
        match self.store.settle(&lease, &self.settlement(), DAY).await? {
            OwnerOutcome::Applied => Ok(()),
            OwnerOutcome::LeaseLost => Err(format!("the lease of record {number} was lost").into()),
        }
    }

    /// Acquires a settled key, and expects its replay.
    pub(crate) async fn replay(&self, number: u64) -> Result<(), Error> {
        match self.store.acquire(&self.request(number)).await? {
            AcquireOutcome::Replay(replay) if replay.response == self.response => Ok(()),
            other => Err(format!("record {number} was not replayed: {other:?}").into()),
        }
    }

    /// A client that makes record after record.
    pub(crate) fn cycles(self: &Arc<Self>) -> impl Fn(u64) -> Work + Clone + Send + 'static {
        let maker = Arc::clone(self);
        move |number| {
            let maker = Arc::clone(&maker);
            Box::pin(async move { maker.cycle(number).await })
        }
    }

    /// A client that asks for one settled record after another.
    pub(crate) fn replays(self: &Arc<Self>, records: u64) -> impl Fn(u64) -> Work + Clone + Send + 'static {
        let maker = Arc::clone(self);
        move |number| {
            let maker = Arc::clone(&maker);
            Box::pin(async move { maker.replay(scattered(number, records)).await })
        }
    }

    /// Makes the settled records `0..count`.
    pub(crate) async fn fill(&self, count: u64) -> Result<(), Error> {
        self.fill_by(count, 256).await
    }

    /// Like [`fill`](Self::fill), so many `at_once`.
    pub(crate) async fn fill_by(&self, count: u64, at_once: usize) -> Result<(), Error> {
        self.fill_range(0..count, at_once).await
    }

    /// Makes the settled records of these numbers, so many `at_once`.
    pub(crate) async fn fill_range(&self, numbers: Range<u64>, at_once: usize) -> Result<(), Error> {
        use futures_util::{StreamExt, TryStreamExt};
        futures_util::stream::iter(numbers)
            .map(|number| self.cycle(number))
            .buffer_unordered(at_once)
            .try_collect()
            .await
    }
}

fn response() -> StoredResponse {
    let field = |name: &'static str, value: &'static str| HeaderField {
        name: Bytes::from_static(name.as_bytes()),
        value: Bytes::from_static(value.as_bytes()),
    };
    let headers = Arc::from([field("content-type", "application/json")]);
    StoredResponse { status: 200, headers, body: StoredBody::Retained(vec![b'x'; BODY].into()), trace: None }
}

/// A scattered number below `bound`, the same in each run.
pub(crate) fn scattered(number: u64, bound: u64) -> u64 {
    // The multiplier of Knuth's MMIX; consecutive numbers go far apart.
    number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407) % bound.max(1)
}
