//! An erasure, and the copies of what it erases.

use std::num::NonZeroUsize;
use std::sync::Arc;

use idem_core::memory::{ManualClock, MemoryStore};
use idem_core::{
    Acquire, AcquireOutcome, Erase, EraseOutcome, FastEntry, FastStore as _, IdempotencyStore as _, Operate as _,
    OwnerToken, StoreErrorKind, StoredBody, Timestamp,
};
use idem_hybrid::{HybridConfig, HybridStore};
use idem_testkit::fixture::{KEPT, completed, repeat_of, request};
use idem_testkit::{Fault, FaultyStore, Verb};

use crate::support::{BrittleFast, FAILS, FINE, IS_FULL, MemoryFast, SETTLED, eventually};

struct Parts {
    store: HybridStore<FaultyStore<MemoryStore>>,
    durable: Arc<FaultyStore<MemoryStore>>,
    fast: Arc<BrittleFast>,
    request: Acquire,
    copy: FastEntry,
    by: Erase,
}

impl Parts {
    /// A settled record whose copy is in the fast store.
    async fn settled() -> Self {
        let clock = Arc::new(ManualClock::new(Timestamp::from_unix_micros(1_767_225_600_000_000)));
        let memory = MemoryStore::with_clock(NonZeroUsize::MAX, clock.clone());
        let durable = Arc::new(FaultyStore::new(Arc::new(memory)));
        let fast = Arc::new(BrittleFast::new(Arc::new(MemoryFast::new(clock))));
        let store = HybridStore::new(durable.clone(), fast.clone(), HybridConfig::new());
        let request = request();
        let AcquireOutcome::Acquired(lease) = store.acquire(&request).await.unwrap() else { panic!("new") };
        store.settle(&lease, &completed(), KEPT).await.unwrap();
        let copy = async || fast.inner.entry(&request.id).filter(|entry| entry.rank >= SETTLED);
        let copy = eventually("the copy of a settled record", copy).await;
        let seen = durable.peek(&request.id).await.unwrap().unwrap().version();
        let by = Erase { id: request.id, action: OwnerToken::random(), seen, principal: None };
        Self { store, durable, fast, request, copy, by }
    }

    /// The body that a repeat gets.
    async fn replayed(&self) -> StoredBody {
        match self.store.acquire(&repeat_of(&self.request)).await.unwrap() {
            AcquireOutcome::Replay(replay) => replay.response.body,
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn a_copy_that_was_read_before_the_erasure_does_not_come_back() {
    let parts = Parts::settled().await;
    assert_eq!(parts.store.erase(&parts.by).await.unwrap(), EraseOutcome::Erased);
    parts.fast.put(&parts.request.id, &parts.copy).await.unwrap();
    assert_eq!(parts.replayed().await, StoredBody::NotRetained);
    let kept = parts.fast.inner.entry(&parts.request.id).unwrap();
    assert!(kept.rank == u64::MAX && kept.bytes != parts.copy.bytes);
    assert_eq!(parts.store.metrics().erased_copies, 1);
}

#[tokio::test]
async fn nothing_is_erased_if_a_copy_may_stay() {
    for mode in [FAILS, IS_FULL] {
        let parts = Parts::settled().await;
        let record = parts.durable.peek(&parts.request.id).await.unwrap();
        parts.fast.is(mode);
        let error = parts.store.erase(&parts.by).await.unwrap_err();
        assert!(error.kind() == StoreErrorKind::Unavailable && error.to_string().contains("copy"), "{error}");
        assert_eq!(parts.durable.peek(&parts.request.id).await.unwrap(), record, "it can be found again");
        parts.fast.is(FINE);
        assert_eq!(parts.store.erase(&parts.by).await.unwrap(), EraseOutcome::Erased);
        assert_eq!(parts.replayed().await, StoredBody::NotRetained);
    }
}

#[tokio::test]
async fn an_erasure_that_is_refused_leaves_the_copy() {
    let parts = Parts::settled().await;
    let outdated = Erase { seen: "0".repeat(32).parse().unwrap(), ..parts.by.clone() };
    assert_eq!(parts.store.erase(&outdated).await.unwrap(), EraseOutcome::Changed);
    assert_eq!(parts.fast.inner.entry(&parts.request.id), Some(parts.copy));
}

/// Otherwise clients would get 410 for a record that keeps its answer.
#[tokio::test]
async fn an_erasure_that_the_durable_store_refuses_takes_its_tombstone_back() {
    let parts = Parts::settled().await;
    parts.durable.next(Verb::Erase, Fault::Refuse(StoreErrorKind::Misconfigured));
    assert_eq!(parts.store.erase(&parts.by).await.unwrap_err().kind(), StoreErrorKind::Misconfigured);
    assert_eq!(parts.fast.inner.entry(&parts.request.id), None);
    assert_ne!(parts.replayed().await, StoredBody::NotRetained);
    let copy = async || parts.fast.inner.entry(&parts.request.id).filter(|entry| entry.rank >= SETTLED);
    eventually("another copy", copy).await;
    assert_eq!(parts.store.erase(&parts.by).await.unwrap(), EraseOutcome::Erased);
    assert_eq!(parts.replayed().await, StoredBody::NotRetained);
}

/// What may be erased keeps its tombstone, and so does what another erasure has erased.
#[tokio::test]
async fn a_tombstone_that_the_durable_store_may_have_confirmed_stays() {
    let parts = Parts::settled().await;
    parts.durable.next(Verb::Erase, Fault::ErrorAfter);
    assert!(parts.store.erase(&parts.by).await.unwrap_err().is_indeterminate());
    assert_eq!(parts.replayed().await, StoredBody::NotRetained);
    assert!(parts.fast.inner.entry(&parts.request.id).unwrap().rank > parts.copy.rank);
    assert_eq!(parts.store.erase(&parts.by).await.unwrap(), EraseOutcome::Erased);
    let kept = parts.fast.inner.entry(&parts.request.id).unwrap();
    assert_eq!(kept.rank, u64::MAX);
    let other = Erase { action: OwnerToken::random(), ..parts.by.clone() };
    assert_eq!(parts.store.erase(&other).await.unwrap(), EraseOutcome::Changed);
    assert_eq!(parts.fast.inner.entry(&parts.request.id), Some(kept));
}
