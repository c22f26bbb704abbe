//! The schema, its versions and its migrations.

use std::path::{Path, PathBuf};

use idem_core::{AcquireOutcome, IdempotencyStore as _, StoreErrorKind};
use idem_mysql::{MySqlStore, migrations};
use idem_testkit::fixture::{repeat_of, request};
use idem_testkit::golden::{self, FUTURE_MICROS, PAST_MICROS};
use sqlx::{AssertSqlSafe, Row as _};

use crate::support::{Database, Offset, number, sql};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn eight_processes_may_open_a_new_database_at_once() {
    for _ in 0..3 {
        let database = Database::new().await;
        let opening: Vec<_> = (0..8).map(|_| tokio::spawn(MySqlStore::open(database.config()))).collect();
        for store in opening {
            store.await.unwrap().unwrap();
        }
        database.store().await.self_test().await.unwrap();
        let applied = "SELECT COUNT(*) FROM idem_migrations WHERE version > 0";
        assert_eq!(number(&mut database.connection().await, applied).await, 1);
    }
}

/// The server commits each of its statements by itself, so a crash may come after any of them.
#[tokio::test]
async fn a_migration_that_was_cut_off_goes_on() {
    let statements: Vec<&str> = migrations()[0].sql.split_inclusive(";\n").collect();
    assert!(statements.len() >= 4);
    for done in 1..=statements.len() {
        let database = Database::new().await;
        let mut connection = database.connection().await;
        sql(&mut connection, statements[..done].concat()).await;
        database.store().await.self_test().await.unwrap();
        assert_eq!(number(&mut connection, "SELECT COUNT(*) FROM idem_identity").await, 1);
    }
}

#[tokio::test]
async fn a_database_of_a_newer_version_is_refused() {
    let database = Database::new().await;
    database.store().await;
    sql(&mut database.connection().await, "INSERT INTO idem_migrations VALUES (99, 'future', NOW())").await;
    let error = MySqlStore::open(database.config()).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Misconfigured);
    assert!(error.to_string().contains("version 99") && error.to_string().contains("upgrade"), "{error}");
}

#[tokio::test]
async fn another_tool_may_apply_the_migrations() {
    let database = Database::new().await;
    sql(&mut database.connection().await, migrations()[0].sql).await;
    let store = MySqlStore::open(database.config().without_migrating()).await.unwrap();
    store.self_test().await.unwrap();
}

#[tokio::test]
async fn a_record_that_cannot_be_read_is_an_error_and_never_run_again() {
    let database = Database::new().await;
    let store = database.store().await;
    let (damaged, whole) = (request(), request());
    store.acquire(&damaged).await.unwrap();
    let id: String = damaged.id.as_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    sql(&mut database.connection().await, format!("UPDATE idem_records SET format = 2 WHERE id = x'{id}'")).await;
    store.acquire(&whole).await.unwrap();
    let error = store.acquire(&repeat_of(&damaged)).await.unwrap_err();
    assert_eq!((error.kind(), error.is_retryable()), (StoreErrorKind::Corrupt, false));
    let other = store.acquire(&repeat_of(&whole)).await.unwrap();
    assert!(matches!(other, AcquireOutcome::InProgress { .. }), "other records are as they were");
}

/// Whatever the records hold, the table refuses it if a purge could then remove a live lease.
#[tokio::test]
async fn a_record_that_expires_before_its_lease_is_refused_by_the_table() {
    let database = Database::new().await;
    database.store().await.acquire(&request()).await.unwrap();
    let update = "UPDATE idem_records SET expires_at = lease_until - 1";
    let refused = sqlx::raw_sql(update).execute(&mut database.connection().await).await;
    assert!(refused.unwrap_err().to_string().contains("CONSTRAINT"));
}

const COLUMNS: [&str; 18] = [
    "id",
    "namespace",
    "principal",
    "operation",
    "format",
    "fingerprint_algorithm",
    "fingerprint",
    "owner",
    "attempt",
    "state",
    "acquisition",
    "takeover",
    "checkpoint_name",
    "checkpoint_data",
    "status",
    "headers",
    "body",
    "created_at",
];

/// The records as version 1 of the schema has them, with times that stay the same.
async fn dump(database: &Database) -> String {
    let values = COLUMNS.map(|column| match column {
        "id" | "fingerprint" | "owner" | "checkpoint_data" | "headers" | "body" => {
            format!("IFNULL(CONCAT('x''', LOWER(HEX({column})), ''''), 'NULL')")
        }
        "created_at" => format!("'{PAST_MICROS}, {PAST_MICROS}, {FUTURE_MICROS}'"),
        column => format!("IFNULL(QUOTE({column}), 'NULL')"),
    });
    let lease =
        format!("IF(lease_until IS NULL, 'NULL', IF(owner = REPEAT(x'00', 16), {PAST_MICROS}, {FUTURE_MICROS}))");
    let backoff = format!("IF(not_before IS NULL, 'NULL', {FUTURE_MICROS})");
    let rows = format!(
        "SELECT CONCAT('INSERT INTO idem_records ({}, updated_at, expires_at, lease_until, not_before) VALUES (', \
         CONCAT_WS(', ', {}, {lease}, {backoff}), ');') FROM idem_records ORDER BY id",
        COLUMNS.join(", "),
        values.join(", "),
    );
    let found = sqlx::raw_sql(AssertSqlSafe(rows)).fetch_all(&mut database.connection().await).await.unwrap();
    let lines: Vec<String> = found.iter().map(|row| row.get(0)).collect();
    lines.join("\n") + "\n"
}

fn golden_file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

#[tokio::test]
async fn this_version_writes_records_as_schema_1_has_them() {
    let database = Database::new().await;
    golden::write(&database.store().await, &Offset(database.offset.clone())).await;
    golden::expect(&golden_file("records-1.sql"), &dump(&database).await);
}

#[tokio::test]
async fn a_database_of_schema_1_is_opened_and_its_records_are_read() {
    let database = Database::new().await;
    let mut connection = database.connection().await;
    sql(&mut connection, std::fs::read_to_string(golden_file("schema-1.sql")).unwrap()).await;
    sql(&mut connection, std::fs::read_to_string(golden_file("records-1.sql")).unwrap()).await;
    golden::check(&database.store().await).await;
}

/// A released migration never changes. A later schema is another migration.
#[test]
fn the_first_migration_is_that_of_schema_1() {
    golden::expect(&golden_file("schema-1.sql"), migrations()[0].sql);
}
