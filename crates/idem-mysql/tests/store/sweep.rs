//! Drops every future of the store at every await; the store is whole afterwards.

use std::cell::RefCell;

use idem_core::{AcquireOutcome, Begin, IdempotencyStore as _, TransactionalStore as _, Writes};
use idem_mysql::{MySqlConfig, MySqlStore, MySqlTransaction};
use idem_testkit::drop_at_every_await;
use idem_testkit::fixture::{KEPT, checkpoint, completed, request};

use crate::support::{Database, number, sql};

/// The server answers from another process, sometimes before it is awaited, so only many sweeps meet every await.
const SWEEPS: usize = 12;

/// Asserts that many verbs in a row take effect.
async fn is_whole(store: &MySqlStore, verbs: u32) {
    for _ in 0..verbs / 2 {
        let AcquireOutcome::Acquired(lease) = store.acquire(&request()).await.unwrap() else { panic!() };
        store.settle(&lease, &completed(), KEPT).await.unwrap();
        let record = store.peek(&lease.id).await.unwrap().unwrap();
        assert!(record.replay().is_some(), "a settlement was lost");
    }
}

#[tokio::test]
async fn verbs_dropped_at_every_await_leave_the_record_before_or_after() {
    let database = Database::new().await;
    let store = &database.store().await;
    let current = RefCell::new(request());
    let make = || {
        let request = request();
        current.replace(request.clone());
        async move {
            let AcquireOutcome::Acquired(lease) = store.acquire(&request).await.unwrap() else { panic!() };
            store.renew(&lease, request.term).await.unwrap();
            store.checkpoint(&lease, &checkpoint("charged")).await.unwrap();
            store.settle(&lease, &completed(), KEPT).await.unwrap();
        }
    };
    let mut awaits = 0;
    for _ in 0..SWEEPS {
        awaits += drop_at_every_await(make, |_| async {
            // Repeated with the same token, each verb does what it would have done.
            let request = current.borrow().clone();
            match store.acquire(&request).await.unwrap() {
                AcquireOutcome::Acquired(lease) => {
                    store.settle(&lease, &completed(), KEPT).await.unwrap();
                }
                AcquireOutcome::Replay(_) => {}
                other => panic!("{other:?}"),
            }
            is_whole(store, 4).await;
        })
        .await
        .awaits;
    }
    println!("dropped at {awaits} awaits in {SWEEPS} sweeps");
    assert!(awaits >= 2 * SWEEPS, "verbs wait for the server: {awaits}");
    is_whole(store, 40).await;
}

#[tokio::test]
async fn transactions_dropped_at_every_await_leave_no_connection_with_open_writes() {
    let database = Database::new().await;
    transactions_are_dropped(&database, database.config()).await;
}

#[tokio::test]
async fn transactions_dropped_at_every_await_leave_the_applications_pool_without_open_writes() {
    let database = Database::new().await;
    let config = MySqlConfig::from_pool(database.pool());
    transactions_are_dropped(&database, config).await;
}

async fn transactions_are_dropped(database: &Database, config: MySqlConfig) {
    let store = &MySqlStore::open(config).await.unwrap();
    sql(&mut database.connection().await, "CREATE TABLE effects (id BINARY(32) PRIMARY KEY)").await;
    let current = RefCell::new(String::new());
    let make = || {
        let request = request();
        let id: String = request.id.as_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
        current.replace(id.clone());
        async move {
            let Begin::Acquired { mut transaction, .. } = store.begin(&request).await.unwrap() else { panic!() };
            let connection = transaction.as_any_mut().downcast_mut::<MySqlTransaction>().unwrap();
            sql(connection, format!("INSERT INTO effects VALUES (x'{id}')")).await;
            transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap();
        }
    };
    let mut awaits = 0;
    for _ in 0..SWEEPS {
        awaits += drop_at_every_await(make, |_| async {
            let id = current.borrow().clone();
            is_whole(store, 4).await;
            let mut connection = database.connection().await;
            // Locking reads wait for a commit that is under way.
            let effect =
                number(&mut connection, format!("SELECT COUNT(*) FROM effects WHERE id = x'{id}' FOR UPDATE")).await;
            let settled = format!("SELECT COUNT(*) FROM idem_records WHERE id = x'{id}' AND state = 2 FOR UPDATE");
            assert_eq!(effect, number(&mut connection, settled).await, "the write and the record went apart");
        })
        .await
        .awaits;
    }
    println!("dropped at {awaits} awaits in {SWEEPS} sweeps");
    assert!(awaits >= 2 * SWEEPS, "{awaits}");
    is_whole(store, 40).await;
}
