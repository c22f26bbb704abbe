//! The store's tasks: a task that panics or ends with its runtime is restarted, and a call that waits leaves with its caller.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::support::Database;
use idem_core::engine::{Idempotency, Operation, Settings};
use idem_core::memory::{Clock, SystemClock};
use idem_core::{
    Acquire, AcquireOutcome, Begin, Fingerprint, IdempotencyKey, IdempotencyStore, Lease, OwnerOutcome, Scope,
    StoreErrorKind, StoreTransaction, Timestamp, TransactionalStore, Writes,
};
use idem_sqlite::{SqliteConfig, SqliteStore};
use idem_testkit::fixture::{KEPT, completed, request};
use tempfile::TempDir;
use tokio::runtime::{Handle, Runtime};
use tokio::sync::Notify;

/// A timeout for a loaded machine.
const PATIENCE: Duration = Duration::from_secs(20);

/// The limit in the README.
const MOST_WAITING: usize = 1024;

async fn opened(configure: impl FnOnce(SqliteConfig) -> SqliteConfig) -> (SqliteStore, TempDir) {
    let folder = TempDir::new().unwrap();
    let url = format!("sqlite://{}", folder.path().join("records.db").display());
    let config = configure(SqliteConfig::new(url).dangerous_synchronous_normal());
    (SqliteStore::open(config).await.unwrap(), folder)
}

/// A store for one handler at a time.
async fn with_one_slot() -> (SqliteStore, TempDir) {
    opened(|config| config.max_transactions(NonZeroU32::MIN)).await
}

async fn lease(store: &SqliteStore, request: &Acquire) -> Lease {
    match store.acquire(request).await.unwrap() {
        AcquireOutcome::Acquired(lease) => lease,
        other => panic!("{other:?}"),
    }
}

async fn begin(store: &SqliteStore) -> Box<dyn StoreTransaction> {
    match tokio::time::timeout(PATIENCE, store.begin(&request())).await.unwrap().unwrap() {
        Begin::Acquired { transaction, .. } => transaction,
        other => panic!("{other:?}"),
    }
}

/// Asserts that every verb and a transaction work.
async fn is_whole(store: &SqliteStore) {
    let request = request();
    let lease = lease(store, &request).await;
    assert_eq!(store.renew(&lease, request.term).await.unwrap(), OwnerOutcome::Applied);
    assert_eq!(store.settle(&lease, &completed(), KEPT).await.unwrap(), OwnerOutcome::Applied);
    assert!(store.peek(&lease.id).await.unwrap().unwrap().replay().is_some());
    let transaction = begin(store).await;
    assert_eq!(transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap(), OwnerOutcome::Applied);
    store.health().await.unwrap();
}

fn alive_tasks() -> usize {
    Handle::current().metrics().num_alive_tasks()
}

async fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < PATIENCE, "within {PATIENCE:?} it did not come true that {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// A clock that panics once after its flag is set.
#[derive(Debug, Default)]
struct Panicking(AtomicBool);

impl Clock for Panicking {
    fn now(&self) -> Timestamp {
        assert!(!self.0.swap(false, Ordering::SeqCst), "as it was told to");
        SystemClock.now()
    }
}

#[tokio::test]
async fn a_writer_that_panics_is_an_error_at_once_and_is_started_again() {
    let clock = Arc::new(Panicking::default());
    let (store, _folder) = opened(|config| config.clock(clock.clone())).await;
    let request = request();
    let owned = lease(&store, &request).await;
    for _ in 0..3 {
        clock.0.store(true, Ordering::SeqCst);
        let error = tokio::time::timeout(PATIENCE, store.renew(&owned, request.term)).await.unwrap().unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Unavailable);
        assert!(error.is_indeterminate() && error.is_retryable(), "{error:?}");
        assert_eq!(store.renew(&owned, request.term).await.unwrap(), OwnerOutcome::Applied);
    }
    assert_eq!(store.settle(&owned, &completed(), KEPT).await.unwrap(), OwnerOutcome::Applied);
    is_whole(&store).await;
}

#[test]
fn a_store_whose_runtime_has_ended_goes_on_in_the_next() {
    let runtime = Runtime::new().unwrap();
    let database = runtime.block_on(Database::new());
    runtime.block_on(is_whole(&database.store));
    for _ in 0..2 {
        Runtime::new().unwrap().block_on(is_whole(&database.store));
    }
    // The first runtime is dropped first, so that none of its tasks is left. A verb that its last task took would rightly fail.
    drop(runtime);
    let other = Runtime::new().unwrap();
    other.block_on(is_whole(&database.store));
}

#[tokio::test]
async fn a_caller_without_a_runtime_is_told_so() {
    let opening = std::thread::spawn(|| {
        let runtime = Runtime::new().unwrap();
        let opened = runtime.block_on(opened(|config| config));
        drop(runtime);
        opened
    });
    let (store, _folder) = opening.join().unwrap();
    let asked = std::thread::spawn(move || {
        let error = futures_util::FutureExt::now_or_never(store.peek(&request().id)).unwrap().unwrap_err();
        (error, store)
    });
    let (error, store) = asked.join().unwrap();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable);
    assert!(error.to_string().contains("inside another tokio runtime"), "{error}");
    is_whole(&store).await;
}

#[tokio::test]
async fn callers_that_wait_for_a_transaction_are_limited_and_leave_nothing_behind() {
    let (store, _folder) = with_one_slot().await;
    let held = begin(&store).await;
    let before = alive_tasks();
    let burst: Vec<_> = (0..MOST_WAITING + 476)
        .map(|_| {
            let store = store.clone();
            tokio::spawn(async move {
                let request = request();
                match store.begin(&request).await {
                    Ok(begun) => panic!("there is one slot: {begun:?}"),
                    Err(error) => (error, store.peek(&request.id).await.unwrap()),
                }
            })
        })
        .collect();
    eventually("all but those who wait are turned away", || {
        burst.iter().filter(|caller| caller.is_finished()).count() == 476
    })
    .await;
    // A call that waits needs no task but its caller's.
    eventually("no task is left but those of the callers", || alive_tasks() == before + MOST_WAITING).await;
    let mut turned_away = 0;
    for caller in burst {
        if !caller.is_finished() {
            caller.abort();
            assert!(caller.await.unwrap_err().is_cancelled());
            continue;
        }
        let (error, record) = caller.await.unwrap();
        assert_eq!(error.kind(), StoreErrorKind::Busy);
        assert!(!error.is_indeterminate() && error.to_string().contains("1024 wait"), "{error:?}");
        assert_eq!(record, None, "it was turned away and left something behind");
        turned_away += 1;
    }
    assert_eq!(turned_away, 476);
    assert_eq!(alive_tasks(), before, "a task outlived its caller");
    drop(held);
    let transaction = begin(&store).await;
    assert_eq!(transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap(), OwnerOutcome::Applied);
    is_whole(&store).await;
}

#[tokio::test]
async fn a_repeat_is_answered_although_no_transaction_can_be_had() {
    let (store, _folder) = with_one_slot().await;
    let settled = request();
    let owned = lease(&store, &settled).await;
    store.settle(&owned, &completed(), KEPT).await.unwrap();
    let _held = begin(&store).await;
    let waiting: Vec<_> = (0..=MOST_WAITING)
        .map(|_| {
            let store = store.clone();
            tokio::spawn(async move { store.begin(&request()).await.is_ok() })
        })
        .collect();
    eventually("the queue is full", || waiting.iter().any(tokio::task::JoinHandle::is_finished)).await;
    let repeat = store.begin(&idem_testkit::fixture::repeat_of(&settled)).await.unwrap();
    assert!(matches!(repeat, Begin::Answered(AcquireOutcome::Replay(_))), "{repeat:?}");
    for caller in waiting {
        caller.abort();
    }
}

/// An attempt that never ran would count, and the key would be taken until its lease ends.
#[tokio::test]
async fn a_caller_that_waits_in_vain_for_a_transaction_changes_no_record() {
    let one_slot = |config: SqliteConfig| config.max_transactions(NonZeroU32::MIN);
    let (store, _folder) = opened(|config| one_slot(config).transaction_wait(Duration::from_millis(50))).await;
    let held = begin(&store).await;
    let mine = request();
    let error = store.begin(&mine).await.map(drop).unwrap_err();
    assert_eq!((error.kind(), error.is_indeterminate()), (StoreErrorKind::Busy, false));
    assert_eq!(store.peek(&mine.id).await.unwrap(), None);
    drop(held);
    assert!(matches!(store.begin(&mine).await.unwrap(), Begin::Acquired { .. }));
    is_whole(&store).await;
}

#[tokio::test]
async fn verbs_whose_callers_gave_up_while_the_writer_waited_leave_nothing_behind() {
    let (store, _folder) = opened(|config| config.busy_timeout(PATIENCE)).await;
    let (mine, other) = (request(), request());
    let owned = lease(&store, &mine).await;
    let abandoned = lease(&store, &other).await;
    let mut writer = store.pool().begin_with("BEGIN IMMEDIATE").await.unwrap();
    let before = alive_tasks();
    let settlement = completed();
    let mut burst: Vec<_> = (0..3_000).map(|_| Box::pin(store.settle(&abandoned, &settlement, KEPT))).collect();
    // More wait than fit into the queue and into one commit. After the first round the writer takes what it can.
    for _ in 0..2 {
        for caller in &mut burst {
            assert!(futures_util::poll!(caller).is_pending());
        }
        tokio::task::yield_now().await;
    }
    drop(burst);
    assert_eq!(alive_tasks(), before, "a task outlived its caller");
    sqlx::raw_sql("ROLLBACK").execute(&mut *writer).await.unwrap();
    drop(writer);
    let begun = Instant::now();
    assert_eq!(store.renew(&owned, mine.term).await.unwrap(), OwnerOutcome::Applied);
    assert!(begun.elapsed() < PATIENCE / 4, "it stood behind those who are gone: {:?}", begun.elapsed());
    is_whole(&store).await;
}

fn operation(number: usize) -> Operation {
    let key = IdempotencyKey::new(format!("payment-{number}")).unwrap();
    Operation::new(Scope::new("acme", "pay"), key, Fingerprint::of_bytes("pay", b"12.50 EUR"))
}

/// A burst of requests behind a slow handler.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_that_were_answered_as_busy_leave_no_task_and_no_place_behind() {
    let (store, _folder) = with_one_slot().await;
    // The engine waits for an acquire without an answer for as long as a lease lasts.
    let settings = Settings::new().lease(Duration::from_secs(4)).store_timeout(Duration::from_millis(500));
    let engine = Idempotency::transactional(Arc::new(store.clone()), settings);
    let (goes_on, runs) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let first = {
        let (engine, goes_on, runs) = (engine.clone(), Arc::clone(&goes_on), Arc::clone(&runs));
        tokio::spawn(async move {
            let handler = move |_| async move {
                runs.notify_one();
                goes_on.notified().await;
                Ok::<u32, String>(1)
            };
            engine.run(operation(0), handler).await
        })
    };
    runs.notified().await;
    let before = alive_tasks();
    let burst: Vec<_> = (1..=1_500)
        .map(|number| {
            let engine = engine.clone();
            tokio::spawn(async move { engine.run(operation(number), |_| async { Ok::<u32, String>(1) }).await })
        })
        .collect();
    for caller in burst {
        assert!(caller.await.unwrap().is_err(), "there is one slot");
    }
    // The engine's releases in the background take a moment; none of them waits for the handler.
    eventually("no task is left of the burst", || alive_tasks() <= before).await;
    goes_on.notify_one();
    assert_eq!(first.await.unwrap().unwrap().value, 1);
    let next = tokio::time::timeout(PATIENCE, engine.run(operation(2_000), |_| async { Ok::<u32, String>(2) }));
    assert_eq!(next.await.unwrap().unwrap().value, 2);
}

#[test]
fn an_operation_that_keeps_its_runtime_busy_keeps_its_lease() {
    let folder = TempDir::new().unwrap();
    let url = format!("sqlite://{}", folder.path().join("records.db").display());
    idem_testkit::renewals::a_busy_runtime_keeps_its_leases(async || {
        Arc::new(SqliteStore::open(SqliteConfig::new(&url).dangerous_synchronous_normal()).await.unwrap())
    });
}
