//! The file: its schema, its versions, its damage, its sharing.
#![allow(clippy::unwrap_used, reason = "a test says what it expects by failing")]

mod support;

use std::num::NonZeroU32;

use idem_core::{AcquireOutcome, IdempotencyStore, Purge, StoreErrorKind};
use idem_sqlite::{SqliteConfig, SqliteStore, migrations};
use idem_testkit::fixture::{KEPT, completed, repeat_of, request};
use sqlx::Row;
use support::Database;

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

/// Golden: a row as version 0.1 writes it, read for ever.
#[tokio::test]
async fn a_row_of_version_0_1_is_read() {
    let database = Database::new().await;
    sqlx::raw_sql(
        "INSERT INTO idem_records VALUES \
         (x'0000000000000000000000000000000000000000000000000000000000000001', 'app', 'acme', 'POST /v1/payments', 1, 1, \
         zeroblob(32), zeroblob(16), 2, 2, NULL, NULL, NULL, NULL, NULL, NULL, 201, \
         x'000000086c6f636174696f6e000000042f702f31', x'00ff', 10, 20, 9223372036854775807)",
    )
    .execute(database.store.pool())
    .await
    .unwrap();
    let mut id = [0; 32];
    id[31] = 1;
    let record = database.store.peek(&idem_core::RecordId::from_bytes(id)).await.unwrap().unwrap();
    let replay = record.replay().unwrap();
    assert_eq!((record.attempt, replay.response.status), (2, 201));
    assert_eq!(replay.response.headers[0].value, "/p/1");
    assert_eq!(replay.response.body, idem_core::StoredBody::Retained(vec![0, 255].into()));
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
