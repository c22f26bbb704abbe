use super::*;
use crate::fingerprint::Fingerprint;
use crate::machine::{OnMismatch, Origin};
use crate::record::{OwnerToken, StoredResponse, Takeover};
use crate::{Scope, StoreErrorKind, Timestamp};

fn request(id: u8) -> Acquire {
    Acquire {
        // Ids that differ in the last byte only share a shard.
        id: RecordId::from_bytes([[0; 31].as_slice(), &[id]].concat().try_into().unwrap()),
        origin: Origin { namespace: "test".into(), scope: Scope::single_tenant("op") },
        trace: None,
        fingerprint: Fingerprint::of_bytes("op", b"body"),
        owner: OwnerToken::random(),
        term: Term { lease: Duration::from_secs(10), retention: Duration::from_secs(100) },
        takeover: Takeover::Rerun,
        max_attempts: NonZeroU32::MIN,
        on_mismatch: OnMismatch::Refuse,
    }
}

fn small_store() -> (MemoryStore, Arc<ManualClock>) {
    let clock = Arc::new(ManualClock::new(Timestamp::from_unix_micros(0)));
    (MemoryStore::with_clock(NonZeroUsize::new(2 * SHARDS).unwrap(), clock.clone()), clock)
}

#[tokio::test]
async fn a_full_store_refuses_new_keys_and_keeps_the_live_ones() {
    let (store, clock) = small_store();
    store.acquire(&request(1)).await.unwrap();
    store.acquire(&request(2)).await.unwrap();
    let error = store.acquire(&request(3)).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Capacity);
    assert!(matches!(store.acquire(&request(1)).await.unwrap(), AcquireOutcome::InProgress { .. }));
    clock.advance(Duration::from_secs(110));
    assert!(matches!(store.acquire(&request(3)).await.unwrap(), AcquireOutcome::Acquired(_)));
}

#[tokio::test]
async fn purge_keeps_to_its_limit_and_to_what_is_expired() {
    let (store, clock) = small_store();
    let AcquireOutcome::Acquired(lease) = store.acquire(&request(1)).await.unwrap() else { panic!("not acquired") };
    store.acquire(&request(2)).await.unwrap();
    let done = Settlement::Completed(StoredResponse::new(200, "ok"));
    store.settle(&lease, &done, Duration::from_secs(1)).await.unwrap();
    clock.advance(Duration::from_secs(1));
    assert_eq!(store.purge(NonZeroU32::new(10).unwrap()).await.unwrap(), 1);
    clock.advance(Duration::from_secs(109));
    assert_eq!(store.purge(NonZeroU32::MIN).await.unwrap(), 1);
    assert_eq!(store.purge(NonZeroU32::MIN).await.unwrap(), 0);
}

#[tokio::test]
async fn the_self_test_passes_and_leaves_nothing_behind() {
    let (store, _clock) = small_store();
    crate::self_test(&store).await.unwrap();
    assert!(store.shards.iter().all(|shard| shard.lock().unwrap().is_empty()));
}
