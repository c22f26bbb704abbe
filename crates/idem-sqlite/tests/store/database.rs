//! The file: its schema, its versions, its damage, its sharing.

use std::num::NonZeroU32;
use std::path::{Path, PathBuf};

use crate::support::Database;
use idem_core::{AcquireOutcome, IdempotencyStore, Purge, StoreErrorKind};
use idem_sqlite::{SqliteConfig, SqliteStore, migrations};
use idem_testkit::fixture::{KEPT, completed, repeat_of, request};
use idem_testkit::golden::{self, FUTURE_MICROS, PAST_MICROS};
use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{ConnectOptions, Connection, Row};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn twenty_processes_may_open_a_new_database_at_once() {
    // Which of them meet while the file is new is chance, so there are many files.
    for _ in 0..30 {
        let folder = tempfile::TempDir::new().unwrap();
        let url = format!("sqlite://{}", folder.path().join("records.db").display());
        let opening: Vec<_> = (0..20).map(|_| tokio::spawn(SqliteStore::open(SqliteConfig::new(&url)))).collect();
        for store in opening {
            store.await.unwrap().unwrap();
        }
        SqliteStore::open(SqliteConfig::new(&url)).await.unwrap().self_test().await.unwrap();
    }
}

#[tokio::test]
async fn migrations_have_a_table_of_their_own_and_count_from_one() {
    let database = Database::new().await;
    let rows = sqlx::query("SELECT version, name FROM idem_migrations").fetch_all(database.store.pool()).await.unwrap();
    let applied: Vec<(u32, String)> = rows.iter().map(|row| (row.get(0), row.get(1))).collect();
    let known: Vec<_> = migrations().iter().map(|step| (step.version, step.name.to_owned())).collect();
    assert_eq!(applied, known);
    assert_eq!(known[0].0, 1);
}

#[tokio::test]
async fn a_database_of_a_newer_version_is_refused() {
    let database = Database::new().await;
    let newer = "INSERT INTO idem_migrations (version, name) VALUES (99, 'future')";
    sqlx::raw_sql(newer).execute(database.store.pool()).await.unwrap();
    let url = format!("sqlite://{}", database.folder.path().join("records.db").display());
    let error = SqliteStore::open(SqliteConfig::new(url)).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Misconfigured);
    assert!(error.to_string().contains("version 99") && error.to_string().contains("upgrade"), "{error}");
}

#[tokio::test]
async fn what_is_not_a_database_is_refused() {
    let folder = tempfile::TempDir::new().unwrap();
    let path = folder.path().join("records.db");
    std::fs::write(&path, vec![b'x'; 8192]).unwrap();
    let error = SqliteStore::open(SqliteConfig::new(format!("sqlite://{}", path.display()))).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Corrupt, "{error:?}");
    let error = SqliteStore::open(SqliteConfig::new("sqlite:///no/such/folder/x.db")).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error:?}");
}

#[tokio::test]
async fn a_record_that_cannot_be_read_is_an_error_and_never_run_again() {
    let database = Database::new().await;
    let (damaged, whole) = (request(), request());
    database.store.acquire(&damaged).await.unwrap();
    database.store.acquire(&whole).await.unwrap();
    let future = "UPDATE idem_records SET format = 2 WHERE id = ?";
    sqlx::query(future).bind(damaged.id.as_bytes().as_slice()).execute(database.store.pool()).await.unwrap();
    let error = database.store.acquire(&repeat_of(&damaged)).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Corrupt);
    assert!(!error.is_retryable());
    let other = database.store.acquire(&repeat_of(&whole)).await.unwrap();
    assert!(matches!(other, AcquireOutcome::InProgress { .. }), "other records are as they were");
}

/// The database as version 1 of the schema makes it, with times and an identity that stay the same.
async fn dump(database: &Database) -> String {
    let schema = "SELECT sql || ';' FROM sqlite_master WHERE sql IS NOT NULL ORDER BY rowid";
    let migrations = "SELECT format('INSERT INTO idem_migrations (version, name) VALUES (%d, %Q);', version, name) \
        FROM idem_migrations ORDER BY version";
    let times = format!(
        "iif(lease_until IS NULL, NULL, iif(owner = zeroblob(16), {PAST_MICROS}, {FUTURE_MICROS})) AS lease_until, \
         iif(not_before IS NULL, NULL, {FUTURE_MICROS}) AS not_before"
    );
    let columns = "id, namespace, principal, operation, format, fingerprint_algorithm, fingerprint, owner, attempt, state, \
        acquisition, takeover, lease_until, not_before, checkpoint_name, checkpoint_data, status, headers, body";
    let quoted = columns.split(", ").map(|column| format!("quote({column})")).collect::<Vec<_>>().join(" || ', ' || ");
    let values = columns.replace("lease_until, not_before", &times);
    let rows = format!(
        "SELECT 'INSERT INTO idem_records VALUES (' || {quoted} || ', {PAST_MICROS}, {PAST_MICROS}, {FUTURE_MICROS});' \
         FROM (SELECT {values} FROM idem_records ORDER BY id)"
    );
    let identity = "INSERT INTO idem_identity VALUES (x'01010101010101010101010101010101');".to_owned();
    let mut lines = Vec::new();
    for query in [schema, migrations, &rows] {
        let found = sqlx::query(sqlx::AssertSqlSafe(query.to_owned())).fetch_all(database.store.pool()).await.unwrap();
        lines.extend(found.iter().map(|row| row.get::<String, _>(0)));
    }
    lines.push(identity);
    lines.join("\n") + "\n"
}

fn golden_file() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/schema-1.sql")
}

#[tokio::test]
async fn this_version_writes_records_as_schema_1_has_them() {
    let database = Database::new().await;
    golden::write(&database.store, database.clock.as_ref()).await;
    golden::expect(&golden_file(), &dump(&database).await);
}

/// Opening the store applies the migrations after schema 1.
#[tokio::test]
async fn a_database_of_schema_1_is_opened_and_its_records_are_read() {
    let folder = tempfile::TempDir::new().unwrap();
    let url = format!("sqlite://{}", folder.path().join("records.db").display());
    let options = url.parse::<SqliteConnectOptions>().unwrap().create_if_missing(true);
    let mut connection = options.connect().await.unwrap();
    let sql = std::fs::read_to_string(golden_file()).unwrap();
    sqlx::raw_sql(sqlx::AssertSqlSafe(sql)).execute(&mut connection).await.unwrap();
    connection.close().await.unwrap();
    let store = SqliteStore::open(Database::config(&folder)).await.unwrap();
    golden::check(&store).await;
}

#[tokio::test]
async fn operators_can_read_where_a_record_came_from() {
    let database = Database::new().await;
    database.store.acquire(&request()).await.unwrap();
    let row = sqlx::query("SELECT namespace, principal, operation FROM idem_records");
    let row = row.fetch_one(database.store.pool()).await.unwrap();
    let (namespace, principal, operation): (String, String, String) = (row.get(0), row.get(1), row.get(2));
    assert_eq!([namespace, principal, operation], ["idem-testkit", "acme", "POST /v1/payments"]);
}

#[tokio::test]
async fn two_stores_on_one_file_never_both_acquire() {
    let database = Database::new().await;
    let other = database.another().await;
    for _ in 0..200 {
        let request = request();
        let rival = repeat_of(&request);
        let (one, two) = tokio::join!(database.store.acquire(&request), other.acquire(&rival));
        let won = [one.unwrap(), two.unwrap()].into_iter().filter(|won| matches!(won, AcquireOutcome::Acquired(_)));
        assert_eq!(won.count(), 1);
    }
}

#[tokio::test]
async fn replays_do_not_wait_for_a_writer() {
    let database = Database::new().await;
    let request = request();
    let AcquireOutcome::Acquired(lease) = database.store.acquire(&request).await.unwrap() else { panic!() };
    database.store.settle(&lease, &completed(), KEPT).await.unwrap();
    let mut writer = database.store.pool().begin_with("BEGIN IMMEDIATE").await.unwrap();
    sqlx::raw_sql("UPDATE idem_records SET updated_at = updated_at").execute(&mut *writer).await.unwrap();
    assert!(matches!(database.store.acquire(&repeat_of(&request)).await.unwrap(), AcquireOutcome::Replay(_)));
    writer.rollback().await.unwrap();
}

#[tokio::test]
async fn health_counts_and_purge_empties() {
    let database = Database::new().await;
    for _ in 0..5 {
        let AcquireOutcome::Acquired(lease) = database.store.acquire(&request()).await.unwrap() else { panic!() };
        database.store.settle(&lease, &completed(), KEPT).await.unwrap();
    }
    assert_eq!(database.store.health().await.unwrap().records, 5);
    database.clock.advance(KEPT);
    let limit = NonZeroU32::new(3).unwrap();
    assert_eq!(database.store.purge(limit).await.unwrap(), 3);
    assert_eq!(database.store.purge(limit).await.unwrap(), 2);
    assert_eq!(database.store.health().await.unwrap().records, 0);
}
