//! A fast store with just one entry, in front of a durable store that does not answer.

use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use idem_core::{
    Acquire, AcquireOutcome, Capabilities, Checkpoint, Durability, DurableStore, FastEntry, FastRead, FastStore,
    IdempotencyStore, Lease, LeaseRenewer, LiveRecord, OwnerOutcome, Record, RecordId, Settlement, SettlementListener,
    StoreError, StoreErrorKind, Term, Timestamp,
};
use idem_hybrid::{HybridConfig, HybridStore};

use super::IDENTITY;

thread_local! {
    /// A runtime, because hybrid stores use its clock.
    static RUNTIME: std::io::Result<tokio::runtime::Runtime> =
        tokio::runtime::Builder::new_current_thread().enable_time().build();
}

/// The answer of a hybrid store from the entry alone; `None` if it leaves the decision to the durable store.
pub(super) fn asked(entry: &Bytes, now: Timestamp, request: &Acquire) -> Option<AcquireOutcome> {
    // There is no claim of another client to wait for, because the entry is there at once.
    let config = HybridConfig::new().patience(Duration::from_millis(1));
    let store = HybridStore::new(Arc::new(Silent), Arc::new(One { entry: entry.clone(), now }), config);
    RUNTIME.with(|runtime| match runtime {
        Ok(runtime) => runtime.block_on(store.acquire(request)).ok(),
        Err(error) => panic!("no runtime: {error}"),
    })
}

#[derive(Debug)]
struct One {
    entry: Bytes,
    now: Timestamp,
}

#[async_trait]
impl FastStore for One {
    async fn get(&self, _: &RecordId, _: Option<Duration>) -> Result<FastRead, StoreError> {
        Ok(FastRead { now: self.now, bytes: Some(self.entry.clone()) })
    }

    async fn put(&self, _: &RecordId, _: &FastEntry) -> Result<Timestamp, StoreError> {
        panic!("nobody runs, and nothing was settled")
    }

    async fn remove(&self, _: &RecordId, _: u64, _: Option<Duration>) -> Result<Timestamp, StoreError> {
        Ok(self.now)
    }

    fn on_settled(&self, _: Weak<dyn SettlementListener>) {}
}

#[derive(Debug)]
struct Silent;

fn silence<T>() -> Result<T, StoreError> {
    Err(StoreError::new(StoreErrorKind::Unavailable, "it does not answer"))
}

#[async_trait]
impl IdempotencyStore for Silent {
    async fn acquire(&self, _: &Acquire) -> Result<AcquireOutcome, StoreError> {
        silence()
    }

    async fn renew(&self, _: &Lease, _: Term) -> Result<OwnerOutcome, StoreError> {
        silence()
    }

    async fn checkpoint(&self, _: &Lease, _: &Checkpoint) -> Result<OwnerOutcome, StoreError> {
        silence()
    }

    async fn settle(&self, _: &Lease, _: &Settlement, _: Duration) -> Result<OwnerOutcome, StoreError> {
        silence()
    }

    async fn peek(&self, _: &RecordId) -> Result<Option<Record>, StoreError> {
        silence()
    }

    fn on_settled(&self, _: Weak<dyn SettlementListener>) {}

    fn renewer(&self) -> Option<Arc<dyn LeaseRenewer>> {
        None
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::new("silent", Durability::Power, true)
    }
}

#[async_trait]
impl DurableStore for Silent {
    async fn live_record(&self, _: &RecordId) -> Result<Option<LiveRecord>, StoreError> {
        silence()
    }

    fn identity(&self) -> [u8; 16] {
        IDENTITY
    }

    fn may_be_copied(&self) -> bool {
        true
    }
}
