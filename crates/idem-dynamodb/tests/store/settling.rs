//! Settlements together with items of the application.

use aws_sdk_dynamodb::types::{AttributeValue, Put, TransactWriteItem};
use idem_core::{Acquire, AcquireOutcome, IdempotencyStore, OwnerOutcome, Settlement, StoreErrorKind};
use idem_dynamodb::DynamoStore;
use idem_testkit::fixture::{KEPT, LEASE, checkpoint, completed, repeat_of, request};

use crate::parts::large;
use crate::support::{BOTH, PRECISION, Table};

/// A payment of the application, in the same table, which must not be there before.
pub fn payment(table: &Table, number: &str) -> TransactWriteItem {
    let put = Put::builder()
        .table_name(&table.name)
        .item("pk", AttributeValue::B(b"payments".to_vec().into()))
        .item("sk", AttributeValue::S(format!("payment/{number}")))
        .condition_expression("attribute_not_exists(pk)");
    TransactWriteItem::builder().put(put.build().unwrap()).build()
}

async fn settle(
    store: &DynamoStore,
    request: &Acquire,
    items: Vec<TransactWriteItem>,
) -> Result<OwnerOutcome, idem_core::StoreError> {
    let AcquireOutcome::Acquired(lease) = store.acquire(request).await.unwrap() else { panic!() };
    store.settle_with(&lease, &completed(), KEPT, items).await
}

#[tokio::test]
async fn the_items_are_written_with_the_answer_and_only_once() {
    for emulator in BOTH {
        let table = Table::new(emulator).await;
        let (store, request) = (table.store().await, request());
        let AcquireOutcome::Acquired(lease) = store.acquire(&request).await.unwrap() else { panic!() };
        let items = || vec![payment(&table, "1"), payment(&table, "2")];
        let first = store.settle_with(&lease, &completed(), KEPT, items()).await.unwrap();
        assert_eq!((first, table.items("payment/").await), (OwnerOutcome::Applied, 2), "{emulator:?}");
        let again = store.settle_with(&lease, &completed(), KEPT, items()).await.unwrap();
        assert_eq!(again, OwnerOutcome::LeaseLost, "another settlement would have met the items");
        assert!(matches!(store.acquire(&repeat_of(&request)).await.unwrap(), AcquireOutcome::Replay(_)));
    }
}

/// After a release the operation runs again, and would write them again.
#[tokio::test]
async fn no_items_are_written_with_a_release() {
    let table = Table::new(BOTH[1]).await;
    let (store, request) = (table.store().await, request());
    let AcquireOutcome::Acquired(first) = store.acquire(&request).await.unwrap() else { panic!() };
    // A release keeps the record of a run that has a checkpoint.
    store.checkpoint(&first, &checkpoint("charged")).await.unwrap();
    let error = store.settle_with(&first, &Settlement::Released, KEPT, vec![payment(&table, "1")]).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::TransactionFailed);
    assert_eq!(table.items("payment/").await, 0);
}

#[tokio::test]
async fn a_large_answer_is_settled_with_items() {
    for emulator in BOTH {
        let table = Table::new(emulator).await;
        let (store, request) = (table.store().await, request());
        let AcquireOutcome::Acquired(lease) = store.acquire(&request).await.unwrap() else { panic!() };
        let settlement = Settlement::Completed(large());
        store.settle_with(&lease, &settlement, KEPT, vec![payment(&table, "1")]).await.unwrap();
        let AcquireOutcome::Replay(replay) = store.acquire(&repeat_of(&request)).await.unwrap() else { panic!() };
        assert_eq!((replay.response, table.items("payment/").await), (large(), 1), "{emulator:?}");
    }
}

#[tokio::test]
async fn an_item_that_is_refused_leaves_the_operation_open() {
    for emulator in BOTH {
        let table = Table::new(emulator).await;
        let store = table.store().await;
        settle(&store, &request(), vec![payment(&table, "1")]).await.unwrap();
        let request = request();
        let error = settle(&store, &request, vec![payment(&table, "2"), payment(&table, "1")]).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::TransactionFailed, "{emulator:?}: {error:?}");
        assert!(error.to_string().contains("None, None, ConditionalCheckFailed"), "{error}");
        assert_eq!(table.items("payment/").await, 1);
        let AcquireOutcome::Acquired(lease) = store.acquire(&request).await.unwrap() else { panic!("it is held") };
        assert_eq!(store.settle(&lease, &Settlement::Released, KEPT).await.unwrap(), OwnerOutcome::Applied);
    }
}

#[tokio::test]
async fn an_owner_that_was_taken_over_writes_no_items() {
    for emulator in BOTH {
        let table = Table::new(emulator).await;
        let (store, request) = (table.store().await, request());
        let AcquireOutcome::Acquired(stale) = store.acquire(&request).await.unwrap() else { panic!() };
        table.offset.advance(LEASE + PRECISION);
        settle(&store, &repeat_of(&request), vec![payment(&table, "1")]).await.unwrap();
        let late = store.settle_with(&stale, &completed(), KEPT, vec![payment(&table, "2")]).await.unwrap();
        assert_eq!((late, table.items("payment/").await), (OwnerOutcome::LeaseLost, 1), "{emulator:?}");
    }
}

#[tokio::test]
async fn too_many_items_are_refused_before_anything_is_sent() {
    let table = Table::new(BOTH[1]).await;
    let store = table.store().await;
    let items = (0..100).map(|number| payment(&table, &number.to_string())).collect();
    let error = settle(&store, &request(), items).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::TransactionFailed);
    assert_eq!(table.items("payment/").await, 0);
}
