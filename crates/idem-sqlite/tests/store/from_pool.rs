//! A store whose handlers' transactions come from a pool of the application.

use std::sync::Arc;
use std::time::Duration;

use idem_core::engine::{Answer, Conclusion, Context, Disposition, ExecuteError, Idempotency, Operation, Settings};
use idem_core::{
    AcquireOutcome, Begin, Fingerprint, IdempotencyStore as _, OwnerOutcome, Scope, StoreErrorKind, StoreTransaction,
    StoredResponse, TransactionalStore as _, Writes,
};
use idem_sqlite::{SqliteConfig, SqliteStore, SqliteTransaction, TransactionSlots};
use idem_testkit::fixture::{KEPT, completed, repeat_of, request};
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous};
use sqlx::{Connection as _, Executor as _, SqlitePool};
use tempfile::TempDir;

struct World {
    _folder: TempDir,
    pool: SqlitePool,
    store: SqliteStore,
}

/// The application's pool. Its connections have an attached database and a temporary table of the application.
fn pool(
    folder: &TempDir,
    connections: u32,
    configure: impl FnOnce(SqliteConnectOptions) -> SqliteConnectOptions,
) -> SqlitePool {
    let file = folder.path().join("shop.db");
    let options = configure(SqliteConnectOptions::new().filename(file).create_if_missing(true));
    let pool = SqlitePoolOptions::new().max_connections(connections).after_connect(|connection, _| {
        Box::pin(async move {
            connection
                .execute("ATTACH ':memory:' AS scratch; CREATE TEMP TABLE application (id INTEGER)")
                .await
                .map(drop)
        })
    });
    pool.connect_lazy_with(options)
}

async fn world(connections: u32) -> World {
    let folder = tempfile::tempdir().unwrap();
    let pool = pool(&folder, connections, |options| options);
    sqlx::raw_sql("CREATE TABLE effects (id INTEGER PRIMARY KEY)").execute(&pool).await.unwrap();
    let store = SqliteStore::open(SqliteConfig::from_pool(pool.clone())).await.unwrap();
    World { _folder: folder, pool, store }
}

impl World {
    async fn begin(&self, request: &idem_core::Acquire) -> Box<dyn StoreTransaction> {
        match self.store.begin(request).await.unwrap() {
            Begin::Acquired { transaction, .. } => transaction,
            other => panic!("not acquired: {other:?}"),
        }
    }

    async fn effects(&self) -> i64 {
        sqlx::query_scalar("SELECT count(*) FROM effects").fetch_one(&self.pool).await.unwrap()
    }

    /// Waits until the pool's connections are idle again.
    async fn settle_down(&self) {
        let is_idle = || self.pool.num_idle() == self.pool.size() as usize && self.store.transactions().in_use == 0;
        eventually("all connections are given back", is_idle).await;
    }
}

/// Looks again and again until it is so; fails the test if it never is.
async fn eventually(what: &str, is_so: impl Fn() -> bool) {
    for _ in 0..10_000 {
        if is_so() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    panic!("never came: {what}");
}

fn connection(transaction: &mut Box<dyn StoreTransaction>) -> &mut sqlx::SqliteConnection {
    let transaction: &mut SqliteTransaction = transaction.as_any_mut().downcast_mut().unwrap();
    transaction
}

const INSERT: &str = "INSERT INTO effects DEFAULT VALUES";

#[tokio::test]
async fn writes_and_record_commit_together_on_a_connection_of_the_pool() {
    let world = world(2).await;
    for (writes, expected) in [(Writes::Keep, 1), (Writes::Discard, 1)] {
        let request = request();
        let mut transaction = world.begin(&request).await;
        assert_eq!(world.store.transactions(), slots(1, 1, 0));
        connection(&mut transaction).execute(INSERT).await.unwrap();
        assert_eq!(transaction.finish(&completed(), KEPT, writes).await.unwrap(), OwnerOutcome::Applied);
        assert!(matches!(world.store.acquire(&repeat_of(&request)).await.unwrap(), AcquireOutcome::Replay(_)));
        assert_eq!(world.effects().await, expected);
    }
    world.settle_down().await;
    assert!(world.pool.size() <= 2);
}

fn slots(most: u32, in_use: u32, waiting: u32) -> TransactionSlots {
    TransactionSlots { most, in_use, waiting }
}

/// The application's other work commits on the same connections, however a handler has ended.
#[tokio::test]
async fn the_pool_gets_its_connections_back_as_they_were() {
    let world = world(2).await;
    let ends = [
        "",
        "COMMIT",
        "ROLLBACK",
        "CREATE TEMP TABLE left_behind (id INTEGER)",
        "ROLLBACK; ATTACH ':memory:' AS left_behind",
        "PRAGMA query_only = ON",
        "PRAGMA busy_timeout = 0",
        "ROLLBACK; PRAGMA synchronous = OFF",
    ];
    let mut expected = 0;
    for end in ends {
        for writes in [Some(Writes::Keep), Some(Writes::Discard), None] {
            let mut transaction = world.begin(&request()).await;
            connection(&mut transaction).execute(INSERT).await.unwrap();
            let _ = connection(&mut transaction).execute(end).await;
            match writes {
                Some(writes) => {
                    let is_kept = transaction.finish(&completed(), KEPT, writes).await.is_ok();
                    expected += i64::from(is_kept && writes == Writes::Keep);
                }
                None => drop(transaction),
            }
            // On every connection, and without a wait for the one that the handler had.
            for _ in 0..3 {
                let mut work = world.pool.begin().await.unwrap();
                work.execute(INSERT).await.unwrap();
                work.commit().await.unwrap();
                expected += 1;
                let state = "SELECT (SELECT count(*) FROM sqlite_temp_master), (SELECT count(*) FROM pragma_database_list), \
                     (SELECT * FROM pragma_busy_timeout), (SELECT * FROM pragma_synchronous)";
                let state: (i64, i64, i64, i64) = sqlx::query_as(state).fetch_one(&world.pool).await.unwrap();
                assert_eq!(state, (1, 3, 5000, 2), "{end} {writes:?}: the application's, and no other");
            }
            world.settle_down().await;
            assert_eq!(world.effects().await, expected, "{end} {writes:?}");
        }
    }
}

#[tokio::test]
async fn a_connection_that_was_clean_is_used_again() {
    let world = world(2).await;
    let mut before = world.pool.acquire().await.unwrap();
    before.execute("PRAGMA application_id").await.unwrap();
    drop(before);
    world.settle_down().await;
    let size = world.pool.size();
    for _ in 0..20 {
        let mut transaction = world.begin(&request()).await;
        connection(&mut transaction).execute("CREATE TEMP TABLE IF NOT EXISTS application (id INTEGER)").await.unwrap();
        transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap();
        world.settle_down().await;
        assert_eq!(world.pool.size(), size, "it was closed");
    }
}

/// The handler may have failed because of the connection, such as one that was opened while the file could not be written.
#[tokio::test]
async fn a_connection_whose_handler_failed_is_closed() {
    let world = world(2).await;
    for writes in [Writes::Keep, Writes::Discard] {
        let transaction = world.begin(&request()).await;
        let during = world.pool.size();
        transaction.finish(&completed(), KEPT, writes).await.unwrap();
        world.settle_down().await;
        assert_eq!(during - world.pool.size(), u32::from(writes == Writes::Discard), "{writes:?}");
    }
}

#[tokio::test]
async fn a_nested_transaction_of_the_handler_is_a_savepoint() {
    let world = world(2).await;
    let mut transaction = world.begin(&request()).await;
    let mut nested = connection(&mut transaction).begin().await.unwrap();
    nested.execute(INSERT).await.unwrap();
    nested.rollback().await.unwrap();
    connection(&mut transaction).execute(INSERT).await.unwrap();
    transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap();
    assert_eq!(world.effects().await, 1);
}

#[tokio::test]
async fn a_pool_that_keeps_less_than_the_store_promises_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let open = async |configure: fn(SqliteConnectOptions) -> SqliteConnectOptions, accept: bool| {
        let config = SqliteConfig::from_pool(pool(&folder, 5, configure));
        let config = if accept { config.dangerous_synchronous_normal() } else { config };
        SqliteStore::open(config).await
    };
    let refused = |opened: Result<SqliteStore, idem_core::StoreError>| {
        let error = opened.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{error}");
        error.to_string()
    };
    let normal = |options: SqliteConnectOptions| options.synchronous(SqliteSynchronous::Normal);
    let off = |options: SqliteConnectOptions| options.synchronous(SqliteSynchronous::Off);
    assert!(refused(open(normal, false).await).contains("sets synchronous 1"));
    assert!(refused(open(off, true).await).contains("sets synchronous 0"));
    open(normal, true).await.unwrap().self_test().await.unwrap();
    open(|options| options, false).await.unwrap().self_test().await.unwrap();
    open(|options| options.synchronous(SqliteSynchronous::Extra), false).await.unwrap();
    let delete = |options: SqliteConnectOptions| options.journal_mode(SqliteJournalMode::Delete);
    assert!(refused(open(delete, false).await).contains("journal_mode"));
    // Also if the pool has connections already, which stay in write-ahead mode.
    let used = pool(&folder, 5, delete);
    used.execute("CREATE TABLE IF NOT EXISTS used (id INTEGER)").await.unwrap();
    let _open = SqliteStore::open(SqliteConfig::from_pool(pool(&folder, 5, |options| options))).await;
    assert!(refused(SqliteStore::open(SqliteConfig::from_pool(used)).await).contains("journal_mode"));
    for url in ["sqlite::memory:", "sqlite://x.db?mode=memory"] {
        let pool = SqlitePoolOptions::new().max_connections(5).connect_lazy(url).unwrap();
        assert!(refused(SqliteStore::open(SqliteConfig::from_pool(pool)).await).contains("in memory"), "{url}");
    }
}

/// A transaction that has read and then meets another's commit cannot get the write lock. Its writes into an attached database
/// would be rolled back.
#[tokio::test]
async fn a_write_into_an_attached_database_is_not_lost_in_silence() {
    let world = world(2).await;
    let written = request();
    let mut transaction = world.begin(&written).await;
    let attached =
        "SELECT count(*) FROM effects; CREATE TABLE scratch.audit (id INTEGER); INSERT INTO scratch.audit VALUES (1)";
    connection(&mut transaction).execute(attached).await.unwrap();
    world.store.acquire(&request()).await.unwrap();
    let error = transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::TransactionFailed);
    assert!(error.to_string().contains("an attached database"), "{error}");
    let outcome = world.store.acquire(&repeat_of(&written)).await.unwrap();
    assert!(!matches!(outcome, AcquireOutcome::Replay(_)), "{outcome:?}");
    world.settle_down().await;
}

/// A handler that only reads is settled even if another transaction has written since.
#[tokio::test]
async fn a_handler_that_has_only_read_is_settled() {
    let folder = tempfile::tempdir().unwrap();
    let file = SqliteConnectOptions::new().filename(folder.path().join("shop.db")).create_if_missing(true);
    let pool = SqlitePoolOptions::new().max_connections(2).connect_lazy_with(file);
    let store = SqliteStore::open(SqliteConfig::from_pool(pool)).await.unwrap();
    let reads = request();
    let Begin::Acquired { mut transaction, .. } = store.begin(&reads).await.unwrap() else { panic!() };
    connection(&mut transaction).execute("SELECT count(*) FROM idem_records").await.unwrap();
    store.acquire(&request()).await.unwrap();
    assert_eq!(transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap(), OwnerOutcome::Applied);
    assert!(matches!(store.acquire(&repeat_of(&reads)).await.unwrap(), AcquireOutcome::Replay(_)));
}

/// A transaction that has read gets the write lock at once or not at all, however long `busy_timeout` is.
#[tokio::test]
async fn a_handler_that_has_only_read_is_settled_while_another_writes() {
    let folder = tempfile::tempdir().unwrap();
    let file = SqliteConnectOptions::new().filename(folder.path().join("shop.db")).create_if_missing(true);
    let pool = SqlitePoolOptions::new().max_connections(3).connect_lazy_with(file);
    let store = SqliteStore::open(SqliteConfig::from_pool(pool.clone())).await.unwrap();
    let reads = request();
    let Begin::Acquired { mut transaction, .. } = store.begin(&reads).await.unwrap() else { panic!() };
    connection(&mut transaction).execute("SELECT count(*) FROM idem_records").await.unwrap();
    let writer = pool.begin_with("BEGIN IMMEDIATE").await.unwrap();
    let finishing = tokio::spawn(async move { transaction.finish(&completed(), KEPT, Writes::Keep).await });
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(!finishing.is_finished(), "it waits for the other one");
    writer.rollback().await.unwrap();
    assert_eq!(finishing.await.unwrap().unwrap(), OwnerOutcome::Applied);
    assert!(matches!(store.acquire(&repeat_of(&reads)).await.unwrap(), AcquireOutcome::Replay(_)));
}

/// The handler attaches the database itself.
#[tokio::test]
async fn a_write_into_a_database_that_the_handler_attached_is_not_lost_in_silence() {
    let folder = tempfile::tempdir().unwrap();
    let file = SqliteConnectOptions::new().filename(folder.path().join("shop.db")).create_if_missing(true);
    let pool = SqlitePoolOptions::new().max_connections(2).connect_lazy_with(file);
    let store = SqliteStore::open(SqliteConfig::from_pool(pool)).await.unwrap();
    let written = request();
    let Begin::Acquired { mut transaction, .. } = store.begin(&written).await.unwrap() else { panic!() };
    let attached = "ATTACH ':memory:' AS audit; SELECT count(*) FROM idem_records; CREATE TABLE audit.log (id INTEGER); \
        INSERT INTO audit.log VALUES (1)";
    connection(&mut transaction).execute(attached).await.unwrap();
    store.acquire(&request()).await.unwrap();
    let error = transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::TransactionFailed, "{error:?}");
    let outcome = store.acquire(&repeat_of(&written)).await.unwrap();
    assert!(!matches!(outcome, AcquireOutcome::Replay(_)), "{outcome:?}");
}

#[tokio::test]
async fn a_connection_that_cannot_write_as_the_application_left_it_is_not_used() {
    for left in ["BEGIN", "PRAGMA query_only = ON"] {
        let world = world(2).await;
        let (mut one, other) = (world.pool.acquire().await.unwrap(), world.pool.acquire().await.unwrap());
        one.execute(left).await.unwrap();
        drop(one);
        eventually("it is given back", || world.pool.num_idle() == 1).await;
        let request = request();
        let mut transaction = world.begin(&request).await;
        connection(&mut transaction).execute(INSERT).await.unwrap();
        assert_eq!(transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap(), OwnerOutcome::Applied);
        drop(other);
        world.settle_down().await;
        assert_eq!(world.effects().await, 1, "{left}");
    }
}

/// sqlx counts a transaction that SQLite has ended as open, and opens savepoints in it from then on.
#[tokio::test]
async fn a_connection_that_the_application_left_in_a_transaction_is_not_used() {
    let world = world(2).await;
    let mut ended = world.pool.begin().await.unwrap();
    ended.execute("ROLLBACK").await.unwrap();
    drop(ended);
    world.settle_down().await;
    // The pool has no other connection to give.
    let (one, other) = (world.pool.acquire().await.unwrap(), world.pool.acquire().await.unwrap());
    let (left, clean) = if one.is_in_transaction() { (one, other) } else { (other, one) };
    assert!(left.is_in_transaction() && !clean.is_in_transaction());
    drop(left);
    let is_back = || world.pool.num_idle() == 1;
    eventually("it is given back", is_back).await;
    // Dropped before its first statement, as by a client that is gone. SQLite is then in a transaction, too.
    drop(world.pool.begin().await.unwrap());
    eventually("it is given back again", is_back).await;
    let request = request();
    let mut transaction = world.begin(&request).await;
    drop(clean);
    connection(&mut transaction).execute(INSERT).await.unwrap();
    assert_eq!(transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap(), OwnerOutcome::Applied);
    world.settle_down().await;
    assert_eq!(world.effects().await, 1, "it is committed, as the settlement has said");
    assert!(matches!(world.store.acquire(&repeat_of(&request)).await.unwrap(), AcquireOutcome::Replay(_)));
}

#[tokio::test]
async fn a_deferred_constraint_fails_the_transaction_and_frees_the_key() {
    let world = world(2).await;
    let tables = "CREATE TABLE orders (id INTEGER PRIMARY KEY); \
         CREATE TABLE items (of INTEGER REFERENCES orders (id) DEFERRABLE INITIALLY DEFERRED)";
    sqlx::raw_sql(tables).execute(&world.pool).await.unwrap();
    let mut transaction = world.begin(&request()).await;
    connection(&mut transaction).execute("INSERT INTO items VALUES (4711)").await.unwrap();
    let error = transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap_err();
    assert_eq!((error.kind(), error.is_indeterminate()), (StoreErrorKind::TransactionFailed, false), "{error:?}");
    assert!(error.to_string().contains("a deferred constraint"), "{error}");
}

#[tokio::test]
async fn the_longest_times_are_taken() {
    let folder = tempfile::tempdir().unwrap();
    let pool = pool(&folder, 2, |options| options);
    let config = SqliteConfig::from_pool(pool).transaction_wait(Duration::MAX).busy_timeout(Duration::MAX);
    let store = SqliteStore::open(config).await.unwrap();
    store.self_test().await.unwrap();
    let Begin::Acquired { transaction, .. } = store.begin(&request()).await.unwrap() else { panic!() };
    assert_eq!(transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap(), OwnerOutcome::Applied);
}

#[tokio::test]
async fn a_pool_that_cannot_write_is_refused() {
    let world = world(2).await;
    let file = SqliteConnectOptions::new().filename(world._folder.path().join("shop.db"));
    let refused = async |pool: SqlitePool, words: &str| {
        let error = SqliteStore::open(SqliteConfig::from_pool(pool)).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{error:?}");
        assert!(error.to_string().contains(words), "{error}");
    };
    let lazy = || SqlitePoolOptions::new().max_connections(5);
    let set = |pragma: &'static str| {
        lazy().after_connect(move |connection, _| Box::pin(async move { connection.execute(pragma).await.map(drop) }))
    };
    refused(lazy().connect_lazy_with(file.clone().read_only(true)), "cannot be written").await;
    refused(set("PRAGMA query_only = ON").connect_lazy_with(file.clone()), "cannot be written").await;
}

/// With a shared cache a connection meets the locks of others without waiting for them.
#[tokio::test]
async fn a_pool_with_a_shared_cache_does_not_turn_new_keys_away() {
    let folder = tempfile::tempdir().unwrap();
    let pool = pool(&folder, 3, |options| options.shared_cache(true));
    sqlx::raw_sql("CREATE TABLE effects (id INTEGER PRIMARY KEY)").execute(&pool).await.unwrap();
    let store = SqliteStore::open(SqliteConfig::from_pool(pool.clone())).await.unwrap();
    let Begin::Acquired { mut transaction, .. } = store.begin(&request()).await.unwrap() else { panic!() };
    connection(&mut transaction).execute(INSERT).await.unwrap();
    let waiting = store.clone();
    let mut next = tokio::spawn(async move { waiting.acquire(&request()).await });
    let early = tokio::time::timeout(Duration::from_millis(100), &mut next).await;
    assert!(early.is_err(), "it waits for the write lock: {early:?}");
    assert_eq!(transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap(), OwnerOutcome::Applied);
    let outcome = next.await.unwrap().unwrap();
    assert!(matches!(outcome, AcquireOutcome::Acquired(_)), "{outcome:?}");
}

/// Processes that start together switch a new file to write-ahead mode, as the options of their pools say.
#[tokio::test(flavor = "multi_thread")]
async fn stores_that_open_a_new_file_together_wait_for_each_other() {
    for _ in 0..5 {
        let folder = tempfile::tempdir().unwrap();
        let opening: Vec<_> = (0..20)
            .map(|_| {
                let pool = pool(&folder, 2, |options| options.journal_mode(SqliteJournalMode::Wal));
                tokio::spawn(SqliteStore::open(SqliteConfig::from_pool(pool)))
            })
            .collect();
        for opened in opening {
            opened.await.unwrap().unwrap();
        }
    }
}

/// It found its key free before it waited for a transaction. It needs no connection for its answer.
#[tokio::test(flavor = "multi_thread")]
async fn a_repeat_that_waited_is_answered_without_a_connection() {
    let folder = tempfile::tempdir().unwrap();
    let pool = pool(&folder, 3, |options| options);
    let config = SqliteConfig::from_pool(pool.clone()).transaction_wait(Duration::from_secs(30));
    let store = Arc::new(SqliteStore::open(config).await.unwrap());
    let _applications = pool.acquire().await.unwrap();
    let mut running = Vec::new();
    for _ in 0..2 {
        let Begin::Acquired { transaction, .. } = store.begin(&request()).await.unwrap() else { panic!("a new key") };
        running.push(transaction);
    }
    let mine = request();
    let repeat = {
        let (store, repeat) = (Arc::clone(&store), repeat_of(&mine));
        tokio::spawn(async move { store.begin(&repeat).await.unwrap() })
    };
    eventually("it waits", || store.transactions() == slots(2, 2, 1)).await;
    let AcquireOutcome::Acquired(lease) = store.acquire(&mine).await.unwrap() else { panic!("nobody has begun it") };
    store.settle(&lease, &completed(), KEPT).await.unwrap();
    // The application waits for the connection that becomes free.
    let mut waiting = Box::pin(pool.acquire());
    assert!(futures_util::poll!(&mut waiting).is_pending());
    drop(running.pop());
    let answered = repeat.await.unwrap();
    assert!(matches!(answered, Begin::Answered(AcquireOutcome::Replay(_))), "{answered:?}");
    waiting.await.unwrap();
}

/// 40 slow requests on the 4 transactions of a pool of 5.
#[tokio::test(flavor = "multi_thread")]
async fn requests_that_get_no_transaction_are_told_so_in_time() {
    let folder = tempfile::tempdir().unwrap();
    let pool = pool(&folder, 5, |options| options);
    let config = SqliteConfig::from_pool(pool).transaction_wait(Duration::from_millis(200));
    let store = Arc::new(SqliteStore::open(config).await.unwrap());
    assert_eq!(store.transactions(), slots(4, 0, 0));
    let engine = Idempotency::transactional(Arc::<SqliteStore>::clone(&store), Settings::new());
    let release = Arc::new(tokio::sync::Semaphore::new(0));
    let requests: Vec<_> = (0..40)
        .map(|number: u32| {
            let (engine, release) = (engine.clone(), Arc::clone(&release));
            let fingerprint = Fingerprint::of_bytes("pay", b"1250");
            let operation =
                Operation::new(Scope::new("acme", "pay"), format!("order-{number}").parse().unwrap(), fingerprint);
            tokio::spawn(async move {
                let run = async move |_: Context| {
                    release.acquire().await.unwrap().forget();
                    Conclusion {
                        value: (),
                        disposition: Disposition::Complete {
                            response: StoredResponse::new(200, "null"),
                            writes: Writes::Keep,
                        },
                        retention: None,
                    }
                };
                engine.execute(operation, run, || panic!("it does not panic")).await
            })
        })
        .collect();
    eventually("36 wait", || store.transactions() == slots(4, 4, 36)).await;
    eventually("none waits any more", || store.transactions().waiting == 0).await;
    release.add_permits(40);
    let mut refused = 0;
    for request in requests {
        match request.await.unwrap() {
            Ok(Answer::Ran { .. }) => {}
            Err(ExecuteError::Busy(error)) => {
                refused += 1;
                let message = "no transaction was free within 200ms: handlers have all 4 that max_transactions allows";
                assert_eq!(error.to_string(), message);
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(refused, 36);
    // They left nothing behind: each key is free at once.
    for number in 0..40 {
        let fingerprint = Fingerprint::of_bytes("pay", b"1250");
        let operation =
            Operation::new(Scope::new("acme", "pay"), format!("order-{number}").parse().unwrap(), fingerprint);
        let answer = engine.run(operation, async |_| Ok::<_, String>(())).await;
        assert!(answer.is_ok(), "{number}: {answer:?}");
    }
}
