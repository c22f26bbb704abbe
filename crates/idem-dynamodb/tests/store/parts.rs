//! Answers that are too large for one item.

use std::num::NonZeroU32;

use idem_core::{
    AcquireOutcome, Erase, EraseOutcome, IdempotencyStore, Operate, OwnerToken, Purge, Settlement, StoreErrorKind,
    StoredBody, StoredResponse,
};
use idem_testkit::fixture::{KEPT, repeat_of, request};

use crate::support::{BOTH, PRECISION, Table};

pub fn large() -> StoredResponse {
    let body: Vec<u8> = (0..1_000_000_u32).map(|at| (at % 251) as u8).collect();
    StoredResponse { body: StoredBody::Retained(body.into()), ..StoredResponse::new(201, "") }
}

#[tokio::test]
async fn a_large_answer_is_replayed_whole_and_leaves_nothing_when_it_goes() {
    for emulator in BOTH {
        let table = Table::new(emulator).await;
        let (store, request) = (table.store().await, request());
        let AcquireOutcome::Acquired(lease) = store.acquire(&request).await.unwrap() else { panic!() };
        store.settle(&lease, &Settlement::Completed(large()), KEPT).await.unwrap();
        assert_eq!(table.items("part/").await, 4, "{emulator:?}");
        let AcquireOutcome::Replay(replay) = store.acquire(&repeat_of(&request)).await.unwrap() else { panic!() };
        assert_eq!(replay.response, large());
        table.offset.advance(KEPT + PRECISION);
        assert_eq!(store.purge(NonZeroU32::MAX).await.unwrap(), 1, "{emulator:?}: parts do not count");
        assert_eq!((table.items("part/").await, table.items("record").await), (0, 0));
    }
}

/// The service removes expired items one by one, in any order.
#[tokio::test]
async fn an_expired_answer_whose_parts_are_gone_is_no_answer() {
    for emulator in BOTH {
        let table = Table::new(emulator).await;
        let (store, request) = (table.store().await, request());
        let AcquireOutcome::Acquired(lease) = store.acquire(&request).await.unwrap() else { panic!() };
        store.settle(&lease, &Settlement::Completed(large()), KEPT).await.unwrap();
        table.remove_one("part/").await;
        let error = store.acquire(&repeat_of(&request)).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Corrupt, "{emulator:?}: {error:?}");
        assert!(error.has_existing_record(), "it must not run without protection");
        table.offset.advance(KEPT + PRECISION);
        assert_eq!(store.peek(&request.id).await.unwrap(), None);
        let AcquireOutcome::Acquired(lease) = store.acquire(&repeat_of(&request)).await.unwrap() else { panic!() };
        assert_eq!(lease.attempt, 1);
        assert_eq!(table.items("part/").await, 0, "{emulator:?}: they go with the record that they belong to");
    }
}

/// The table may have items of the application, with another idea of `expires_at`.
#[tokio::test]
async fn a_purge_removes_items_of_the_store_only() {
    let table = Table::new(BOTH[1]).await;
    let store = table.store().await;
    for (partition, sort) in [(&[7; 32][..], "payment"), (b"application", "record"), (b"application", "part/1")] {
        table.put(partition, sort).await;
    }
    assert_eq!(store.purge(NonZeroU32::MAX).await.unwrap(), 0);
    assert_eq!((table.items("payment").await, table.items("record").await, table.items("part/").await), (1, 1, 1));
}

#[tokio::test]
async fn an_erasure_removes_the_parts_of_an_answer() {
    for emulator in BOTH {
        let table = Table::new(emulator).await;
        let (store, request) = (table.store().await, request());
        let AcquireOutcome::Acquired(lease) = store.acquire(&request).await.unwrap() else { panic!() };
        store.settle(&lease, &Settlement::Completed(large()), KEPT).await.unwrap();
        let seen = store.peek(&request.id).await.unwrap().unwrap().version();
        // Of a write that broke off.
        table.put(request.id.as_bytes(), "part/0/0").await;
        let principal = request.origin.scope.principal().map(Into::into);
        let erase = Erase { id: request.id, seen, action: OwnerToken::random(), principal };
        assert_eq!(store.erase(&erase).await.unwrap(), EraseOutcome::Erased, "{emulator:?}");
        assert_eq!(table.items("part/").await, 0);
        let AcquireOutcome::Replay(replay) = store.acquire(&repeat_of(&request)).await.unwrap() else { panic!() };
        assert_eq!(replay.response.body, StoredBody::NotRetained);
    }
}
