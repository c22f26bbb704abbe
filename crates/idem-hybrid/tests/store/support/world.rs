//! A hybrid whose parts can fail.

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use idem_core::memory::{ManualClock, MemoryStore};
use idem_core::{
    Acquire, AcquireOutcome, FastEntry, FastRead, FastStore, IdempotencyStore as _, Lease, RecordId,
    SettlementListener, StoreError, StoreErrorKind, Timestamp,
};
use idem_hybrid::{HybridConfig, HybridStore};
use idem_testkit::fixture::{KEPT, completed, request};
use idem_testkit::{FaultyStore, Verb};

use super::{Heard, MemoryFast, SETTLED, eventually};

/// A hybrid in memory whose parts can fail.
pub struct World {
    pub store: HybridStore<FaultyStore<MemoryStore>>,
    pub durable: Arc<FaultyStore<MemoryStore>>,
    pub fast: Arc<BrittleFast>,
    pub clock: Arc<ManualClock>,
}

impl World {
    pub fn new(config: HybridConfig) -> Self {
        let clock = Arc::new(ManualClock::new(Timestamp::from_unix_micros(1_767_225_600_000_000)));
        let memory = MemoryStore::with_clock(NonZeroUsize::new(1_000).unwrap(), clock.clone());
        let durable = Arc::new(FaultyStore::new(Arc::new(memory)));
        let fast = Arc::new(BrittleFast::new(Arc::new(MemoryFast::new(clock.clone()))));
        let store = HybridStore::new(durable.clone(), fast.clone(), config);
        Self { store, durable, fast, clock }
    }

    /// A listener of the hybrid's settlements, for as long as it is kept.
    pub fn listener(&self) -> Arc<Heard> {
        let heard = Arc::new(Heard::default());
        let listener: Arc<dyn SettlementListener> = heard.clone();
        self.store.on_settled(Arc::downgrade(&listener));
        heard
    }

    pub async fn run(&self, request: &Acquire) -> Lease {
        match self.store.acquire(request).await.unwrap() {
            AcquireOutcome::Acquired(lease) => lease,
            other => panic!("{other:?}"),
        }
    }

    /// A settled operation whose copy is in the fast store.
    pub async fn settled(&self) -> Acquire {
        let request = request();
        let lease = self.run(&request).await;
        self.store.settle(&lease, &completed(), KEPT).await.unwrap();
        self.copied(&request).await;
        request
    }

    pub async fn copied(&self, request: &Acquire) {
        let copy = async || self.fast.inner.entry(&request.id).filter(|entry| entry.rank >= SETTLED);
        eventually("the copy of a settled record", copy).await;
    }

    pub fn asked(&self) -> u64 {
        self.durable.calls(Verb::Acquire)
    }
}

/// A fast store that can be made to fail or to hang.
#[derive(Debug)]
pub struct BrittleFast {
    pub inner: Arc<MemoryFast>,
    mode: AtomicU64,
}

pub const FINE: u64 = 0;
pub const FAILS: u64 = 1;
pub const HANGS: u64 = 2;
/// It answers reads, and refuses every put.
pub const IS_FULL: u64 = 3;
/// It puts entries slowly.
pub const PUTS_SLOWLY: u64 = 4;

/// A put is never answered, but its entry arrives late, even if its caller is gone.
pub const PUTS_LATE: u64 = 5;

/// How long such a put takes.
pub const SLOWLY: Duration = Duration::from_millis(50);

impl BrittleFast {
    pub fn new(inner: Arc<MemoryFast>) -> Self {
        Self { inner, mode: AtomicU64::new(FINE) }
    }

    pub fn is(&self, mode: u64) {
        self.mode.store(mode, Ordering::SeqCst);
    }

    async fn check(&self) -> Result<(), StoreError> {
        match self.mode.load(Ordering::SeqCst) {
            FINE | IS_FULL | PUTS_SLOWLY | PUTS_LATE => Ok(()),
            FAILS => Err(StoreError::new(StoreErrorKind::Unavailable, "down")),
            _ => std::future::pending().await,
        }
    }
}

#[async_trait]
impl FastStore for BrittleFast {
    async fn get(&self, id: &RecordId, claim: Option<Duration>) -> Result<FastRead, StoreError> {
        self.check().await?;
        self.inner.get(id, claim).await
    }

    async fn put(&self, id: &RecordId, entry: &FastEntry) -> Result<Timestamp, StoreError> {
        self.check().await?;
        match self.mode.load(Ordering::SeqCst) {
            IS_FULL => return Err(StoreError::new(StoreErrorKind::Capacity, "no room")),
            PUTS_SLOWLY => tokio::time::sleep(SLOWLY).await,
            PUTS_LATE => {
                let (inner, id, entry) = (Arc::clone(&self.inner), *id, entry.clone());
                tokio::spawn(async move {
                    tokio::time::sleep(SLOWLY).await;
                    inner.put(&id, &entry).await
                });
                std::future::pending::<()>().await;
            }
            _ => {}
        }
        self.inner.put(id, entry).await
    }

    async fn remove(&self, id: &RecordId, rank: u64, claim: Option<Duration>) -> Result<Timestamp, StoreError> {
        self.check().await?;
        self.inner.remove(id, rank, claim).await
    }

    fn on_settled(&self, listener: Weak<dyn SettlementListener>) {
        self.inner.on_settled(listener);
    }
}
