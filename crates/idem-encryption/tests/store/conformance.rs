//! Stores keep the contract through the wrapper, also if the keys rotate before each verb.

use std::any::Any;
use std::fmt;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use async_trait::async_trait;
use idem_core::{
    Acquire, AcquireOutcome, Capabilities, Checkpoint, Erase, EraseOutcome, IdempotencyStore, Inspect, Lease,
    LeaseRenewer, MemoryStore, Operate, OwnerOutcome, Record, RecordId, Repair, RepairNote, Resolve, ResolveOutcome,
    Settlement, SettlementListener, StoreError, Term, TimeOffset, TransactionalStore,
};
use idem_encryption::EncryptedStore;
use idem_postgres::PostgresTransaction;
use idem_schemas::Schema;
use idem_sqlite::SqliteTransaction;
use idem_testkit::{BusinessData, Subject, TransactionalSubject};
use sqlx::{AssertSqlSafe, Connection as _, PgConnection, Row as _};

use crate::support::{File, config, keys, memory, postgres};

/// As long as a test may take on a loaded machine.
const PRECISION: Duration = Duration::from_secs(10);

async fn in_memory() -> Subject {
    let (store, clock) = memory(config());
    let store = Arc::new(store);
    Subject::new(store.clone(), store.clone(), clock).operated_by(store.clone()).inspected_by(store).without_origins()
}

async fn on_a_file() -> Subject {
    let file = File::new().await;
    let store = Arc::new(file.encrypted(config()));
    let subject = Subject::new(store.clone(), store.clone(), file.clock.clone());
    subject.operated_by(store.clone()).inspected_by(store).keeping(file)
}

#[cfg(feature = "compression")]
async fn compressed() -> Subject {
    let (store, clock) = memory(config().with_compression());
    let store = Arc::new(store);
    Subject::new(store.clone(), store.clone(), clock).operated_by(store)
}

async fn rotating() -> Subject {
    let (store, clock) = memory(config());
    let inspect: Arc<dyn Inspect> = Arc::new(store.clone());
    let rotating = Arc::new(Rotating { store: store.clone(), rotations: AtomicU32::new(0) });
    Subject::new(rotating.clone(), Arc::new(store), clock).operated_by(rotating).inspected_by(inspect).without_origins()
}

idem_testkit::conformance!(in_memory_as_without_encryption, in_memory);
idem_testkit::conformance!(on_a_file_as_without_encryption, on_a_file);
idem_testkit::conformance!(with_other_keys_for_each_verb, rotating);
idem_testkit::resolve_conformance!(resolving_in_memory, in_memory);
idem_testkit::resolve_conformance!(resolving_on_a_file, on_a_file);
idem_testkit::resolve_conformance!(resolving_with_other_keys_for_each_verb, rotating);
idem_testkit::inspect_conformance!(inspecting_in_memory, in_memory);
idem_testkit::inspect_conformance!(inspecting_on_a_file, on_a_file);
#[cfg(feature = "compression")]
idem_testkit::conformance!(compressed_as_without_encryption, compressed);
#[cfg(feature = "compression")]
idem_testkit::resolve_conformance!(resolving_compressed, compressed);

idem_testkit::state_machine!(the_store_follows_the_model_with_other_keys_for_each_verb, rotating, 300);
idem_testkit::state_machine!(the_store_follows_the_model_on_a_file, on_a_file, 60);

/// The keys rotate before each verb, so that no repeated step has the bytes of the first one.
#[derive(Debug)]
struct Rotating {
    store: EncryptedStore<MemoryStore>,
    rotations: AtomicU32,
}

impl Rotating {
    fn rotated(&self) -> &EncryptedStore<MemoryStore> {
        let rotation = self.rotations.fetch_add(1, Ordering::Relaxed);
        self.store.rotate(keys(rotation % 3 + 1, 3));
        &self.store
    }
}

#[async_trait]
impl IdempotencyStore for Rotating {
    async fn acquire(&self, request: &Acquire) -> Result<AcquireOutcome, StoreError> {
        self.rotated().acquire(request).await
    }

    async fn renew(&self, lease: &Lease, term: Term) -> Result<OwnerOutcome, StoreError> {
        self.rotated().renew(lease, term).await
    }

    async fn checkpoint(&self, lease: &Lease, checkpoint: &Checkpoint) -> Result<OwnerOutcome, StoreError> {
        self.rotated().checkpoint(lease, checkpoint).await
    }

    async fn settle(
        &self,
        lease: &Lease,
        settlement: &Settlement,
        retention: Duration,
    ) -> Result<OwnerOutcome, StoreError> {
        self.rotated().settle(lease, settlement, retention).await
    }

    async fn peek(&self, id: &RecordId) -> Result<Option<Record>, StoreError> {
        self.rotated().peek(id).await
    }

    fn on_settled(&self, listener: Weak<dyn SettlementListener>) {
        self.store.on_settled(listener);
    }

    fn renewer(&self) -> Option<Arc<dyn LeaseRenewer>> {
        self.store.renewer()
    }

    fn capabilities(&self) -> Capabilities {
        self.store.capabilities()
    }
}

#[async_trait]
impl Operate for Rotating {
    async fn resolve(&self, request: &Resolve) -> Result<ResolveOutcome, StoreError> {
        self.rotated().resolve(request).await
    }

    async fn erase(&self, request: &Erase) -> Result<EraseOutcome, StoreError> {
        self.rotated().erase(request).await
    }

    async fn note(&self, note: &RepairNote) -> Result<(), StoreError> {
        self.store.note(note).await
    }

    async fn repairs(&self, limit: NonZeroU32) -> Result<Vec<Repair>, StoreError> {
        self.store.repairs(limit).await
    }
}

/// A file with a table of business writes, and other files.
struct FileEffects(File, Mutex<Vec<File>>);

impl fmt::Debug for FileEffects {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_tuple("FileEffects").field(&self.0.store).finish()
    }
}

#[async_trait]
impl BusinessData for FileEffects {
    async fn write(&self, transaction: &mut (dyn Any + Send)) {
        let transaction = transaction.downcast_mut::<SqliteTransaction>().unwrap();
        sqlx::raw_sql("INSERT INTO effects DEFAULT VALUES").execute(&mut **transaction).await.unwrap();
    }

    async fn count(&self) -> u64 {
        let count = sqlx::query_scalar::<_, i64>("SELECT count(*) FROM effects");
        count.fetch_one(self.0.store.pool()).await.unwrap().unsigned_abs()
    }

    async fn opened_again(&self) -> Arc<dyn TransactionalStore> {
        Arc::new(self.0.encrypted(config()))
    }

    async fn another_store(&self) -> Arc<dyn TransactionalStore> {
        let other = File::new().await;
        let store = Arc::new(other.encrypted(config()));
        self.1.lock().unwrap().push(other);
        store
    }
}

async fn transactions_on_a_file() -> TransactionalSubject {
    let file = File::new().await;
    file.sql("CREATE TABLE effects (id INTEGER PRIMARY KEY)").await;
    let (store, clock) = (Arc::new(file.encrypted(config())), file.clock.clone());
    TransactionalSubject::new(store, Arc::new(FileEffects(file, Mutex::default())), clock)
}

/// A schema with a table of business writes, and other schemas.
#[derive(Debug)]
struct SchemaEffects {
    schema: Schema,
    offset: TimeOffset,
    others: Mutex<Vec<Schema>>,
}

impl SchemaEffects {
    async fn open(&self, schema: &Schema) -> Arc<dyn TransactionalStore> {
        Arc::new(EncryptedStore::new(postgres(schema, &self.offset).await, config()))
    }
}

#[async_trait]
impl BusinessData for SchemaEffects {
    async fn write(&self, transaction: &mut (dyn Any + Send)) {
        let transaction = transaction.downcast_mut::<PostgresTransaction>().unwrap();
        let insert = format!("INSERT INTO {}.effects VALUES (1)", self.schema.name);
        sqlx::raw_sql(AssertSqlSafe(insert)).execute(&mut **transaction).await.unwrap();
    }

    async fn count(&self) -> u64 {
        let mut connection = PgConnection::connect(&idem_servers::postgres_url()).await.unwrap();
        let count = format!("SELECT count(*) FROM {}.effects", self.schema.name);
        let row = sqlx::raw_sql(AssertSqlSafe(count)).fetch_one(&mut connection).await.unwrap();
        row.get::<i64, _>(0).unsigned_abs()
    }

    async fn opened_again(&self) -> Arc<dyn TransactionalStore> {
        self.open(&self.schema).await
    }

    async fn another_store(&self) -> Arc<dyn TransactionalStore> {
        let schema = Schema::new();
        let store = self.open(&schema).await;
        self.others.lock().unwrap().push(schema);
        store
    }
}

async fn transactions_on_postgres() -> TransactionalSubject {
    let (schema, offset) = (Schema::new(), TimeOffset::default());
    let effects = SchemaEffects { schema, offset: offset.clone(), others: Mutex::default() };
    let store = effects.opened_again().await;
    let mut connection = PgConnection::connect(&idem_servers::postgres_url()).await.unwrap();
    let table = format!("CREATE TABLE {}.effects (id INTEGER)", effects.schema.name);
    sqlx::raw_sql(AssertSqlSafe(table)).execute(&mut connection).await.unwrap();
    TransactionalSubject::new(store, Arc::new(effects), Arc::new(offset)).with_precision(PRECISION)
}

idem_testkit::transactional_conformance!(transactions_on_a_file_as_without_encryption, transactions_on_a_file);
idem_testkit::transactional_conformance!(transactions_on_postgres_as_without_encryption, transactions_on_postgres);
