//! Drops every future of the store at every await; the store is whole afterwards.

use std::cell::RefCell;

use crate::support::Database;
use idem_core::{AcquireOutcome, Begin, IdempotencyStore, Lease, TransactionalStore, Writes};
use idem_testkit::drop_at_every_await;
use idem_testkit::fixture::{KEPT, checkpoint, completed, request};

async fn lease(database: &Database) -> Lease {
    match database.store.acquire(&request()).await.unwrap() {
        AcquireOutcome::Acquired(lease) => lease,
        other => panic!("{other:?}"),
    }
}

/// SQLite answers from separate threads, sometimes before it is awaited, so only many sweeps meet every await.
const SWEEPS: usize = 10;

/// Asserts that many verbs in a row take effect.
async fn is_whole(database: &Database, verbs: u32) {
    for _ in 0..verbs / 2 {
        let lease = lease(database).await;
        database.store.settle(&lease, &completed(), KEPT).await.unwrap();
        let record = database.store.peek(&lease.id).await.unwrap().unwrap();
        assert!(record.replay().is_some(), "a settlement was lost");
    }
}

#[tokio::test]
async fn verbs_dropped_at_every_await_leave_the_record_before_or_after() {
    let database = Database::new().await;
    let store = &database.store;
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
            is_whole(&database, 10).await;
        })
        .await
        .awaits;
    }
    println!("dropped at {awaits} awaits in {SWEEPS} sweeps");
    assert!(awaits >= 4 * SWEEPS, "each verb waits at least once: {awaits}");
    is_whole(&database, 1000).await;
}

#[tokio::test]
async fn transactions_dropped_at_every_await_leave_no_connection_with_open_writes() {
    transactions_are_dropped(Database::new().await).await;
}

#[tokio::test]
async fn transactions_dropped_at_every_await_leave_the_applications_pool_without_open_writes() {
    transactions_are_dropped(Database::from_pool().await).await;
}

async fn transactions_are_dropped(database: Database) {
    let store = &database.store;
    sqlx::raw_sql("CREATE TABLE effects (id BLOB PRIMARY KEY)").execute(store.pool()).await.unwrap();
    let current = RefCell::new(request());
    let make = || {
        let request = request();
        current.replace(request.clone());
        async move {
            let Begin::Acquired { mut transaction, .. } = store.begin(&request).await.unwrap() else { panic!() };
            let connection: &mut idem_sqlite::SqliteTransaction = transaction.as_any_mut().downcast_mut().unwrap();
            let write = sqlx::query("INSERT INTO effects VALUES (?)").bind(request.id.as_bytes().as_slice());
            write.execute(&mut **connection).await.unwrap();
            transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap();
        }
    };
    let mut awaits = 0;
    for _ in 0..SWEEPS {
        awaits += drop_at_every_await(make, |_| async {
            let id = current.borrow().id;
            // A commit that was under way may still end; the write and the record go together in any case.
            is_whole(&database, 10).await;
            let effect = sqlx::query("SELECT 1 FROM effects WHERE id = ?").bind(id.as_bytes().as_slice());
            let effect = effect.fetch_optional(store.pool()).await.unwrap().is_some();
            let settled = store.peek(&id).await.unwrap().is_some_and(|record| record.replay().is_some());
            assert_eq!(effect, settled, "the write and the record went apart");
        })
        .await
        .awaits;
    }
    println!("dropped at {awaits} awaits in {SWEEPS} sweeps");
    assert!(awaits >= 4 * SWEEPS, "{awaits}");
    is_whole(&database, 1000).await;
}
