//! A file that cannot be written for a while: the error says why, and the store recovers without being opened again.

use std::os::unix::fs::{MetadataExt as _, PermissionsExt};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::support::Database;
use idem_core::{
    Acquire, AcquireOutcome, Begin, IdempotencyStore, Lease, OwnerOutcome, StoreError, StoreErrorKind,
    StoreTransaction, TransactionalStore, Writes,
};
use idem_sqlite::{SqliteConfig, SqliteStore, SqliteTransaction};
use idem_testkit::fixture::{KEPT, completed, request};
use sqlx::{Connection as _, SqliteConnection};
use tempfile::TempDir;

async fn lease(store: &SqliteStore, request: &Acquire) -> Lease {
    match store.acquire(request).await.unwrap() {
        AcquireOutcome::Acquired(lease) => lease,
        other => panic!("{other:?}"),
    }
}

async fn begin(store: &SqliteStore) -> Box<dyn StoreTransaction> {
    match store.begin(&request()).await.unwrap() {
        Begin::Acquired { transaction, .. } => transaction,
        other => panic!("{other:?}"),
    }
}

fn connection(transaction: &mut dyn StoreTransaction) -> &mut SqliteTransaction {
    transaction.as_any_mut().downcast_mut().unwrap()
}

fn is_an_outage(error: &StoreError, kind: StoreErrorKind, words: &str) {
    assert_eq!(error.kind(), kind, "{error:?}");
    assert!(error.is_retryable() && error.to_string().contains(words), "{error:?}");
}

async fn eventually<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let (patience, begun) = (Duration::from_secs(30), Instant::now());
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(begun.elapsed() < patience, "within {patience:?} it did not come true that {what}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn a_database_without_room_says_so_and_commits_once_there_is_room() {
    let database = Database::new().await;
    sqlx::raw_sql("CREATE TABLE effects (what BLOB)").execute(database.store.pool()).await.unwrap();
    let insert = "INSERT INTO effects VALUES (zeroblob(100000))";
    let large = idem_core::Settlement::Completed(idem_core::StoredResponse::new(200, vec![b'x'; 1 << 20]));
    for handler_writes in [true, false] {
        let mut full = begin(&database.store).await;
        sqlx::raw_sql("PRAGMA max_page_count = 1").execute(&mut **connection(&mut *full)).await.unwrap();
        if handler_writes {
            // SQLite rolls the transaction back, and the handler ignores the error.
            sqlx::raw_sql(insert).execute(&mut **connection(&mut *full)).await.unwrap_err();
            let error = full.finish(&completed(), KEPT, Writes::Keep).await.unwrap_err();
            assert_eq!(error.kind(), StoreErrorKind::TransactionFailed, "{error:?}");
            assert!(error.to_string().contains("full disk"), "{error}");
        } else {
            let error = full.finish(&large, KEPT, Writes::Keep).await.unwrap_err();
            is_an_outage(&error, StoreErrorKind::Capacity, "the disk is full");
        }
        // The pool has this one connection.
        sqlx::raw_sql("PRAGMA max_page_count = 1073741823").execute(database.store.pool()).await.unwrap();
        let mut next = begin(&database.store).await;
        sqlx::raw_sql(insert).execute(&mut **connection(&mut *next)).await.unwrap();
        assert_eq!(next.finish(&large, KEPT, Writes::Keep).await.unwrap(), OwnerOutcome::Applied);
    }
}

#[tokio::test]
async fn a_database_that_is_locked_for_too_long_says_so_and_is_written_once_it_is_free() {
    let folder = TempDir::new().unwrap();
    let url = format!("sqlite://{}", folder.path().join("records.db").display());
    let config = SqliteConfig::new(url).busy_timeout(Duration::from_millis(50));
    let store = SqliteStore::open(config).await.unwrap();
    let request = request();
    let owned = lease(&store, &request).await;
    let writer = store.pool().begin_with("BEGIN IMMEDIATE").await.unwrap();
    let error = store.renew(&owned, request.term).await.unwrap_err();
    is_an_outage(&error, StoreErrorKind::Unavailable, "locked");
    assert!(!error.is_indeterminate(), "it had not begun: {error:?}");
    writer.rollback().await.unwrap();
    assert_eq!(store.renew(&owned, request.term).await.unwrap(), OwnerOutcome::Applied);
}

/// Runs a test of this file in a separate process without superuser rights: the superuser can write read-only files.
fn in_a_process_of_its_own(test: &str, run: impl FnOnce(&Path)) {
    const FOLDER: &str = "IDEM_TEST_FOLDER";
    if let Some(folder) = std::env::var_os(FOLDER) {
        return run(Path::new(&folder));
    }
    let folder = TempDir::new().unwrap();
    // A write beyond the limit on the size of a file is an error, not a signal.
    let mut command = Command::new("sh");
    command.args(["-c", "trap '' XFSZ; exec \"$0\" \"$@\""]).arg(std::env::current_exe().unwrap());
    command.args(["--exact", &format!("outages::{test}"), "--nocapture"]).env(FOLDER, folder.path());
    if folder.path().metadata().unwrap().uid() == 0 {
        std::os::unix::fs::chown(folder.path(), Some(NOBODY), Some(NOBODY)).unwrap();
        command.uid(NOBODY).gid(NOBODY);
    }
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
}

const NOBODY: u32 = 65_534;

fn on_a_runtime(test: impl Future<Output = ()>) {
    tokio::runtime::Runtime::new().unwrap().block_on(test);
}

/// Sets whether the files of the database can be written.
fn make_writable(folder: &Path, is_writable: bool) {
    let set = |path: &Path, mode| std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
    for file in folder.read_dir().unwrap() {
        set(&file.unwrap().path(), if is_writable { 0o644 } else { 0o444 });
    }
    set(folder, if is_writable { 0o755 } else { 0o555 });
}

fn url_in(folder: &Path) -> String {
    format!("sqlite://{}", folder.join("records.db").display())
}

fn config_in(folder: &Path) -> SqliteConfig {
    SqliteConfig::new(url_in(folder))
}

#[test]
fn a_file_that_cannot_be_written_for_a_while_is_an_outage_for_as_long() {
    in_a_process_of_its_own("a_file_that_cannot_be_written_for_a_while_is_an_outage_for_as_long", |folder| {
        on_a_runtime(async {
            let (before, store) = (SqliteStore::open(config_in(folder)).await.unwrap(), open(folder).await);
            // Not on a connection of the pool, which shall open its connections later.
            let mut another = SqliteConnection::connect(&url_in(folder)).await.unwrap();
            sqlx::raw_sql("CREATE TABLE effects (id INTEGER PRIMARY KEY)").execute(&mut another).await.unwrap();
            another.close().await.unwrap();
            let running = request();
            let owned = lease(&before, &running).await;
            make_writable(folder, false);
            // The writer of this store connects now; the writer of the other store has the file open for writing.
            let error = store.renew(&owned, running.term).await.unwrap_err();
            is_an_outage(&error, StoreErrorKind::Unavailable, "cannot be");
            let transaction = begin(&before).await;
            let error = transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap_err();
            is_an_outage(&error, StoreErrorKind::Unavailable, "cannot be written");
            // Opened for reading only, it waits in the pool.
            let transaction = begin(&before).await;
            transaction.finish(&completed(), KEPT, Writes::Discard).await.unwrap();
            make_writable(folder, true);
            assert_eq!(store.renew(&owned, running.term).await.unwrap(), OwnerOutcome::Applied);
            // The connection of the transaction was opened for reading only. A handler fails on it, and settles that.
            eventually("a handler writes again", async || {
                let mut transaction = begin(&before).await;
                let connection = &mut **connection(transaction.as_mut());
                let written = sqlx::raw_sql("INSERT INTO effects DEFAULT VALUES").execute(connection).await;
                let writes = if written.is_ok() { Writes::Keep } else { Writes::Discard };
                transaction.finish(&completed(), KEPT, writes).await.unwrap();
                written.ok()
            })
            .await;
            let transaction = begin(&before).await;
            transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap();
        });
    });
}

async fn open(folder: &Path) -> SqliteStore {
    SqliteStore::open(config_in(folder)).await.unwrap()
}

#[test]
fn a_file_that_cannot_be_written_at_the_start_is_a_misconfiguration() {
    in_a_process_of_its_own("a_file_that_cannot_be_written_at_the_start_is_a_misconfiguration", |folder| {
        on_a_runtime(async {
            drop(open(folder).await);
            make_writable(folder, false);
            let error = SqliteStore::open(config_in(folder)).await.unwrap_err();
            make_writable(folder, true);
            assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{error:?}");
            assert!(error.to_string().contains("cannot be written"), "{error}");
            open(folder).await.self_test().await.unwrap();
        });
    });
}

/// Limits the size of this process's files, in bytes, until the next call.
fn limit_files_to(bytes: &str) {
    let limit = format!("--fsize={bytes}:");
    let set = Command::new("prlimit").args(["--pid", &std::process::id().to_string(), &limit]).status();
    assert!(set.expect("prlimit, of util-linux, is on PATH").success());
}

#[test]
fn a_disk_that_fails_for_a_while_is_an_outage_for_as_long() {
    in_a_process_of_its_own("a_disk_that_fails_for_a_while_is_an_outage_for_as_long", |folder| {
        on_a_runtime(async {
            let store = open(folder).await;
            let owned = lease(&store, &request()).await;
            limit_files_to("65536");
            let large = idem_core::Settlement::Completed(idem_core::StoredResponse::new(200, vec![b'x'; 1 << 20]));
            for _ in 0..2 {
                let error = store.settle(&owned, &large, KEPT).await.unwrap_err();
                is_an_outage(&error, StoreErrorKind::Unavailable, "the disk failed");
            }
            limit_files_to("unlimited");
            assert_eq!(store.settle(&owned, &large, KEPT).await.unwrap(), OwnerOutcome::Applied);
            lease(&store, &request()).await;
        });
    });
}
