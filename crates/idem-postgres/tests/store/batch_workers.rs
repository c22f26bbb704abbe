//! The batch workers: one that panics is replaced, and once their runtime has ended the store says so at once.

use std::fmt;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::support::{Configure as _, Schema, connection, number, sql};
use idem_core::engine::{Purger, PurgerSettings};
use idem_core::{AcquireOutcome, IdempotencyStore, OwnerOutcome, Purge, StoreErrorKind, TransactionalStore};
use idem_postgres::PostgresStore;
use idem_testkit::fixture::{KEPT, completed, request};
use tracing::field::{Field, Visit};
use tracing::span;

/// How many of the next events of the store make the application's subscriber panic, and how many have.
#[derive(Debug, Default)]
struct Panics {
    at: AtomicUsize,
    done: AtomicUsize,
}

struct Message(String);

impl Visit for Message {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "message" {
            self.0 = format!("{value:?}");
        }
    }
}

#[derive(Debug)]
struct Subscriber(Arc<Panics>);

impl tracing::Subscriber for Subscriber {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        ["idem_postgres", "idem_core::engine::purger"].iter().any(|target| metadata.target().starts_with(target))
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        let mut message = Message(String::new());
        event.record(&mut message);
        let less = |left: usize| left.checked_sub(1);
        if self.0.at.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less).is_ok() {
            self.0.done.fetch_add(1, Ordering::SeqCst);
            panic!("the subscriber panics at {:?}", message.0);
        }
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

/// With a single dispatcher, tracing asks only the thread that logs first and caches the answer; so there are two.
fn log_to(panics: &Arc<Panics>) -> (tracing::Dispatch, tracing::subscriber::DefaultGuard) {
    let second = tracing::Dispatch::new(tracing::subscriber::NoSubscriber::default());
    (second, tracing::subscriber::set_default(Subscriber(Arc::clone(panics))))
}

async fn terminate(schema: &Schema) {
    let terminate = format!(
        "SELECT count(*) FILTER (WHERE pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = '{}'",
        schema.name
    );
    number(&mut connection().await, terminate).await;
}

async fn run(store: &PostgresStore) -> Result<(), idem_core::StoreError> {
    let AcquireOutcome::Acquired(lease) = store.acquire(&request()).await? else { panic!("a new key is taken") };
    assert_eq!(store.settle(&lease, &completed(), KEPT).await?, OwnerOutcome::Applied);
    Ok(())
}

#[tokio::test]
async fn a_task_that_panics_is_replaced_as_often_as_it_does() {
    let schema = Schema::new();
    let store = PostgresStore::open(schema.config().verb_connections(NonZeroU32::new(2).unwrap())).await.unwrap();
    let panics = Arc::new(Panics::default());
    let _logging = log_to(&panics);
    for round in 1..=5 {
        run(&store).await.unwrap();
        terminate(&schema).await;
        panics.at.store(1, Ordering::SeqCst);
        // A lost connection is logged, and that panics.
        let mut asked = 0;
        while panics.done.load(Ordering::SeqCst) < round {
            if let Err(error) = run(&store).await {
                assert!(error.is_retryable() && error.is_indeterminate(), "{error:?}");
            }
            terminate(&schema).await;
            asked += 1;
            assert!(asked < 100, "nothing was logged");
        }
    }
    let working = Instant::now();
    for _ in 0..20 {
        run(&store).await.unwrap();
    }
    assert!(working.elapsed() < Duration::from_secs(20));
}

#[tokio::test]
async fn a_purger_whose_batch_panics_goes_on() {
    let schema = Schema::new();
    let store = PostgresStore::open(schema.config()).await.unwrap();
    let panics = Arc::new(Panics::default());
    let _logging = log_to(&panics);
    let mut other = connection().await;
    sql(&mut other, format!("ALTER TABLE {}.idem_records RENAME TO elsewhere", schema.name)).await;
    panics.at.store(1, Ordering::SeqCst);
    let purger =
        Purger::start_with(Arc::new(store.clone()), PurgerSettings::new().longest_pause(Duration::from_millis(20)));
    let deadline = Instant::now() + Duration::from_secs(20);
    while panics.done.load(Ordering::SeqCst) == 0 {
        assert!(Instant::now() < deadline, "nothing was logged");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    sql(&mut other, format!("ALTER TABLE {}.elsewhere RENAME TO idem_records", schema.name)).await;
    let over = format!(
        "INSERT INTO {}.idem_records (id, namespace, operation, format, fingerprint_algorithm, fingerprint, owner, attempt,
             state, status, headers, created_at, updated_at, expires_at, purge_after)
         VALUES (decode(repeat('07', 32), 'hex'), '', '', 1, 0, decode(repeat('07', 32), 'hex'),
             decode(repeat('07', 16), 'hex'), 1, 2, 200, '', 0, 0, 1, 1)",
        schema.name
    );
    sql(&mut other, over).await;
    let rows = format!("SELECT count(*) FROM {}.idem_records", schema.name);
    while number(&mut other, rows.clone()).await > 0 {
        assert!(Instant::now() < deadline, "nothing is purged any more");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    purger.stop().await;
}

#[test]
fn when_the_runtime_in_which_it_was_opened_has_ended_the_store_says_so_at_once() {
    let schema = Schema::new();
    let runtime = || tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let first = runtime();
    let store = first.block_on(async {
        let store = PostgresStore::open(schema.config()).await.unwrap();
        run(&store).await.unwrap();
        store
    });
    // A call that is under way when the runtime ends is answered too.
    let (waiting, holder) = first.block_on(async {
        let mut holder = connection().await;
        sql(&mut holder, format!("BEGIN;LOCK TABLE {}.idem_records", schema.name)).await;
        let (store, second) = (store.clone(), runtime());
        let waiting = std::thread::spawn(move || {
            second.block_on(async { tokio::time::timeout(Duration::from_secs(20), store.acquire(&request())).await })
        });
        let blocked = format!(
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND application_name = '{}'",
            schema.name
        );
        let mut watch = connection().await;
        while number(&mut watch, blocked.clone()).await == 0 {
            tokio::task::yield_now().await;
        }
        (waiting, holder)
    });
    first.shutdown_timeout(Duration::from_secs(10));
    // Until here the lock kept the call from being answered.
    drop(holder);
    let waited = waiting.join().unwrap().expect("it waits for ever").unwrap_err();
    assert!(waited.is_indeterminate(), "{waited:?}");
    let second = runtime();
    second.block_on(async {
        let asked = Instant::now();
        let errors = [
            store.acquire(&request()).await.unwrap_err(),
            store.peek(&request().id).await.unwrap_err(),
            store.begin(&request()).await.unwrap_err(),
            store.purge(NonZeroU32::MIN).await.unwrap_err(),
            store.health().await.unwrap_err(),
        ];
        assert!(asked.elapsed() < Duration::from_secs(3), "{:?}", asked.elapsed());
        for error in errors {
            assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error:?}");
            assert!(error.to_string().contains("runtime"), "{error}");
        }
        let store = PostgresStore::open(schema.config()).await.unwrap();
        run(&store).await.unwrap();
    });
}

#[test]
fn an_operation_that_keeps_its_runtime_busy_keeps_its_lease() {
    let schema = Schema::new();
    idem_testkit::renewals::a_busy_runtime_keeps_its_leases(async || {
        Arc::new(PostgresStore::open(schema.config()).await.unwrap())
    });
}
