//! Encrypted stores of many kinds, each with its time.

use std::num::NonZeroUsize;
use std::sync::Arc;

use idem_core::memory::{ManualClock, MemoryStore};
use idem_core::{
    Acquire, AcquireOutcome, IdempotencyStore, Lease, OwnerOutcome, RecordId, Settlement, StoreError, StoredResponse,
    TimeOffset, Timestamp,
};
use idem_encryption::{EncryptedStore, EncryptionConfig, Keys};
use idem_postgres::{PostgresConfig, PostgresStore};
use idem_schemas::Schema;
use idem_sqlite::{SqliteConfig, SqliteStore};
use idem_testkit::fixture::KEPT;
use tempfile::TempDir;

/// The bytes of the key `id`.
pub fn key(id: u32) -> [u8; 32] {
    let mut key = [0xA5; 32];
    key[..4].copy_from_slice(&id.to_be_bytes());
    key
}

/// The keys of a process: `primary`, and those from 1 up to `all`.
pub fn keys(primary: u32, all: u32) -> Keys {
    let old = (1..=all).filter(|id| *id != primary);
    old.fold(Keys::new(primary, key(primary)), |keys, id| keys.with_old(id, key(id)).unwrap())
}

pub fn config() -> EncryptionConfig {
    EncryptionConfig::new(keys(1, 1))
}

pub fn clock() -> Arc<ManualClock> {
    Arc::new(ManualClock::new(Timestamp::from_unix_micros(1_767_225_600_000_000)))
}

/// A store in memory, and its time.
pub fn memory(config: EncryptionConfig) -> (EncryptedStore<MemoryStore>, Arc<ManualClock>) {
    let clock = clock();
    let store = MemoryStore::with_clock(NonZeroUsize::MAX, clock.clone());
    (EncryptedStore::new(Arc::new(store), config), clock)
}

/// A file in a new folder, and its time.
pub struct File {
    pub store: Arc<SqliteStore>,
    pub clock: Arc<ManualClock>,
    pub folder: TempDir,
}

impl File {
    /// It is not synced to the disk, which these tests do not need and which would take most of their time.
    pub async fn new() -> Self {
        let (folder, clock) = (TempDir::new().unwrap(), clock());
        let url = format!("sqlite://{}", folder.path().join("records.db").display());
        let config = SqliteConfig::new(url).dangerous_synchronous_normal().clock(clock.clone());
        Self { store: Arc::new(SqliteStore::open(config).await.unwrap()), clock, folder }
    }

    pub fn encrypted(&self, config: EncryptionConfig) -> EncryptedStore<SqliteStore> {
        EncryptedStore::new(Arc::clone(&self.store), config)
    }

    pub async fn sql(&self, sql: &str) {
        sqlx::raw_sql(sqlx::AssertSqlSafe(sql.to_owned())).execute(self.store.pool()).await.unwrap();
    }
}

/// A store in this schema of the server that all tests share.
pub async fn postgres(schema: &Schema, offset: &TimeOffset) -> Arc<PostgresStore> {
    let config = PostgresConfig::new(idem_servers::postgres_url()).schema(&schema.name);
    let config = config.verb_connections(2.try_into().unwrap()).time_offset(offset.clone());
    Arc::new(PostgresStore::open(config).await.unwrap())
}

/// Keys of Redis that no other test has.
pub fn fresh_prefix() -> String {
    format!("test-{}:", idem_testkit::fixture::fresh_id())
}

pub async fn lease<S: IdempotencyStore + ?Sized>(store: &S, request: &Acquire) -> Lease {
    match store.acquire(request).await.unwrap() {
        AcquireOutcome::Acquired(lease) => lease,
        other => panic!("expected Acquired, got {other:?}"),
    }
}

/// A settlement that must be applied.
pub async fn settle<S: IdempotencyStore + ?Sized>(store: &S, lease: &Lease, settlement: &Settlement) {
    assert_eq!(store.settle(lease, settlement, KEPT).await.unwrap(), OwnerOutcome::Applied, "{settlement:?}");
}

/// The answer that a repeat gets.
pub fn replayed(outcome: Result<AcquireOutcome, StoreError>) -> StoredResponse {
    match outcome {
        Ok(AcquireOutcome::Replay(replay)) => replay.response,
        other => panic!("expected Replay, got {other:?}"),
    }
}

/// The bytes of an id, as SQL.
pub fn blob(id: &RecordId) -> String {
    format!("X'{id}'")
}
