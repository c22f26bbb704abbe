//! The store itself.

use std::num::NonZeroU32;
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use idem_core::codec::decode_sequence;
use idem_core::memory::Clock;
use idem_core::{
    Acquire, AcquireOutcome, Begin, Capabilities, Checkpoint, Command, CountPage, Durability, DurableStore, Erase,
    EraseOutcome, IdempotencyStore, Inspect, Inspection, Lease, LeaseRenewer, LiveRecord, Operate, Outcome,
    OwnerAction, OwnerOutcome, Purge, Record, RecordCounts, RecordFilter, RecordId, RecordPage, RecordSummary, Repair,
    RepairNote, Resolve, ResolveOutcome, ScanPosition, SelfTestError, Settlement, SettlementListener, StoreError,
    StoreErrorKind, Term, Timestamp, TransactionSlots, TransactionalStore, machine,
};
use scopeguard::ScopeGuard;
use sqlx::sqlite::{SqliteConnectOptions, SqlitePoolOptions, SqliteSynchronous};
use sqlx::{AssertSqlSafe, ConnectOptions, Connection as _, Row, SqliteConnection, SqlitePool};
use tokio::time::Instant;

use crate::config::{SqliteConfig, in_memory};
use crate::error::{is_busy, opening_error, store_error, unreadable};
use crate::handler_connection::{ConnectionState, HandlerConnection, HandlerPool};
use crate::migrate::{expect_current, migrate};
use crate::permits::{Granted, TransactionPermits};
use crate::reader::Readers;
use crate::row::{load_origin, load_part, repair};
use crate::transaction::SqliteTransaction;
use crate::writer::{Verb, Writer, erase_for_good, misanswered, transitions};

/// Connections for the store's upkeep: purges and health checks.
const UPKEEP: u32 = 2;

/// The maximum age of a pooled connection. If a file cannot be written, SQLite opens it read-only, and the connection stays
/// so after the file is writable again.
const LIFETIME: Duration = Duration::from_secs(10);

/// How long to wait before a busy database is opened again.
const BUSY_PAUSE: Duration = Duration::from_millis(10);

/// How long other processes may keep the mode of a new file from being set by the application's pool. A pool that sets another
/// mode than the store's is refused after this time.
const MODE_PATIENCE: Duration = Duration::from_secs(1);

/// Records in a SQLite file. Clones share everything.
///
/// Open it inside the tokio runtime that will use it: its readers and its writer are tasks there. If that runtime ends, the
/// next caller restarts them on its own runtime. If the runtime exists but no thread drives it, the store does not answer.
#[derive(Debug, Clone)]
pub struct SqliteStore {
    upkeep: SqlitePool,
    transactions: HandlerPool,
    permits: TransactionPermits,
    readers: Readers,
    writer: Writer,
    clock: Arc<dyn Clock>,
    durability: Durability,
    identity: [u8; 16],
}

/// Opens the first connection. While several processes switch a new file to write-ahead mode, SQLite answers that it is busy
/// without waiting, so this tries again.
async fn connect(options: &SqliteConnectOptions, patience: Duration) -> Result<SqliteConnection, sqlx::Error> {
    let give_up_at = Instant::now() + patience;
    loop {
        match options.connect().await {
            Err(error) if is_busy(&error) && Instant::now() < give_up_at => tokio::time::sleep(BUSY_PAUSE).await,
            answer => return answer,
        }
    }
}

/// Asks a new connection with the options of the application's pool. One that the pool has already does not change the mode of
/// the file.
async fn ask_as_the_pool(pool: &SqlitePool, question: &'static str) -> Result<Option<String>, StoreError> {
    let mut connection = match connect(&pool.connect_options(), MODE_PATIENCE).await {
        // The mode cannot be changed while other connections are open.
        Err(error) if is_busy(&error) => return Err(wrong_journal("busy").with_source(error)),
        answer => answer.map_err(|error| opening_error("open the database of the application's pool", error))?,
    };
    let answer = sqlx::query(question).fetch_one(&mut connection).await.and_then(|row| row.try_get(0));
    let answer = answer.map_err(|error| opening_error("examine the application's pool", error))?;
    let closed = connection.close().await;
    closed.map_err(|error| opening_error("examine the application's pool", error))?;
    Ok(answer)
}

fn wrong_journal(mode: &str) -> StoreError {
    let message = format!(
        "the application's pool sets the journal_mode ({mode}), and readers would wait for handlers; remove that setting, or \
         choose WAL"
    );
    StoreError::new(StoreErrorKind::Misconfigured, message)
}

/// Refuses a pool of the application whose database is in memory.
async fn expect_file(pool: &SqlitePool) -> Result<(), StoreError> {
    let file = ask_as_the_pool(pool, "SELECT file FROM pragma_database_list WHERE name = 'main'").await?;
    if file.is_none_or(|file| file.is_empty()) { Err(in_memory()) } else { Ok(()) }
}

/// Refuses a pool of the application whose connections would keep less than the store promises. The file is in write-ahead
/// mode.
async fn expect_suitable(pool: &SqlitePool, config: &SqliteConfig) -> Result<(), StoreError> {
    let journal = ask_as_the_pool(pool, "SELECT journal_mode FROM pragma_journal_mode").await?;
    if journal.as_deref() != Some("wal") {
        return Err(wrong_journal(journal.as_deref().unwrap_or_default()));
    }
    let failed = |error| opening_error("use the application's pool", error);
    // A connection of the pool itself, because `after_connect` may set more than the options say.
    let mut connection = pool.acquire().await.map_err(failed)?;
    let query = "SELECT (SELECT * FROM pragma_journal_mode), (SELECT * FROM pragma_synchronous)";
    let row = sqlx::query(query).fetch_one(&mut *connection).await.map_err(failed)?;
    let (journal, synchronous): (String, i64) = (row.try_get(0).map_err(failed)?, row.try_get(1).map_err(failed)?);
    if journal != "wal" {
        return Err(wrong_journal(&journal));
    }
    expect_writable(&mut connection).await?;
    let least = if config.synchronous == SqliteSynchronous::Full { FULL } else { NORMAL };
    if synchronous < least {
        let message = format!(
            "the application's pool sets synchronous {synchronous}, so that a loss of power could lose handlers' last commits, \
             or damage the file if it is 0 (OFF); set it to 2 (FULL), the default, or accept 1 (NORMAL) by \
             dangerous_synchronous_normal()"
        );
        return Err(StoreError::new(StoreErrorKind::Misconfigured, message));
    }
    Ok(())
}

/// Refuses a pool whose connections only read, by a write that is rolled back.
async fn expect_writable(connection: &mut SqliteConnection) -> Result<(), StoreError> {
    let failed = |error| opening_error("write by a connection of the application's pool", error);
    let mut attempt = connection.begin_with("BEGIN IMMEDIATE").await.map_err(failed)?;
    let write = "UPDATE main.idem_identity SET identity = identity";
    sqlx::raw_sql(write).execute(&mut *attempt).await.map_err(failed)?;
    attempt.rollback().await.map_err(failed)
}

/// Values of `PRAGMA synchronous`.
const NORMAL: i64 = 1;
const FULL: i64 = 2;

/// The health of the database.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct SqliteHealth {
    /// The version of the SQLite library.
    pub version: String,
    /// How many records there are, expired ones included.
    pub records: u64,
    /// What a committed record survives.
    pub durability: Durability,
}

impl SqliteStore {
    /// Gives the records a new random identity, after the file was replaced by an older copy.
    ///
    /// No cache then replays what the file no longer has: entries under another identity are not valid. This store and those of other
    /// processes keep the old identity until they are opened again. Nothing checks whether other processes use the file: stop them
    /// first.
    ///
    /// # Errors
    /// [`StoreError`] when the file cannot be written.
    pub async fn renew_identity(&self) -> Result<(), StoreError> {
        let renewed =
            sqlx::raw_sql("UPDATE main.idem_identity SET identity = randomblob(16)").execute(&self.upkeep).await;
        renewed.map(drop).map_err(|error| store_error("give the records a new identity", error))
    }

    /// Opens the database, creates a missing file, and brings its schema up to date.
    ///
    /// # Errors
    /// [`StoreError`] when the file cannot be opened or holds a schema of a newer version.
    pub async fn open(config: SqliteConfig) -> Result<Self, StoreError> {
        let options = config.connect_options()?;
        if let Some(pool) = config.pool() {
            expect_file(pool).await?;
        }
        let failed = |error| opening_error("open the database", error);
        let mut connection = connect(&options, config.busy_timeout).await.map_err(failed)?;
        if config.migrate {
            migrate(&mut connection).await?;
        } else {
            expect_current(&mut connection).await?;
        }
        let identity = sqlx::query("SELECT identity FROM main.idem_identity").fetch_one(&mut connection).await;
        let identity: Vec<u8> = identity.and_then(|row| row.try_get(0)).map_err(failed)?;
        let identity = identity.try_into().map_err(|_| {
            StoreError::new(StoreErrorKind::Corrupt, "the database has no identity of 16 bytes in idem_identity")
        })?;
        let initial = ConnectionState::of(&mut connection).await.map_err(failed)?;
        connection.close().await.map_err(failed)?;
        // A file does not disconnect as a server does: testing before every use would only take time.
        let upkeep = SqlitePoolOptions::new().max_connections(UPKEEP).max_lifetime(LIFETIME).test_before_acquire(false);
        let transactions = match config.pool() {
            Some(pool) => {
                expect_suitable(pool, &config).await?;
                tracing::info!(
                    "handlers' transactions come from the application's pool: each connection loses its commit hook, and one whose \
                     transaction does not commit is closed"
                );
                pool.clone()
            }
            None => SqlitePoolOptions::new()
                .max_connections(config.max_transactions.get())
                .max_lifetime(LIFETIME)
                .test_before_acquire(false)
                .connect_lazy_with(options.clone()),
        };
        let initial = config.pool().is_none().then_some(initial);
        let wait = config.transaction_wait;
        let durability = match config.synchronous {
            SqliteSynchronous::Full | SqliteSynchronous::Extra => Durability::Power,
            SqliteSynchronous::Off | SqliteSynchronous::Normal => Durability::Crash,
        };
        Ok(Self {
            upkeep: upkeep.connect_lazy_with(options.clone()),
            transactions: HandlerPool { pool: transactions, initial, wait },
            permits: TransactionPermits::new(config.max_transactions, wait),
            readers: Readers::start(options.clone()),
            writer: Writer::start(options, Arc::clone(&config.clock)),
            clock: config.clock,
            durability,
            identity,
        })
    }

    /// The connection pool of handlers' transactions, to set up the application's own tables in the same database.
    ///
    /// Unless it is the application's, it has no connection left while as many handlers as
    /// [`max_transactions`](SqliteConfig::max_transactions) run. Use a separate pool for the application's reads, and let a
    /// handler use its transaction only.
    #[must_use]
    pub fn pool(&self) -> &SqlitePool {
        &self.transactions.pool
    }

    /// How many handlers' transactions are in use, for a gauge.
    #[must_use]
    pub fn transactions(&self) -> TransactionSlots {
        self.permits.slots()
    }

    /// Proves on a record made for it that the store keeps its promises; see [`idem_core::self_test`].
    ///
    /// # Errors
    /// [`SelfTestError`] says which promise does not hold.
    pub async fn self_test(&self) -> Result<(), SelfTestError> {
        idem_core::self_test(self).await
    }

    /// Writes `checkpoint` of the run that holds `lease` in the caller's transaction, which is open on `connection`. Both commit or
    /// neither does, as `Step::run_with_record` of the engine needs it.
    ///
    /// The connection's main database must be the store's. The transaction then has the write lock, and all writes of the store
    /// wait for it: make this the last statement before COMMIT.
    ///
    /// Begin no other transaction inside of it: if that fails or is cancelled, sqlx ends the outer one unnoticed.
    ///
    /// After `LeaseLost`, roll back. It also says that the record has this checkpoint already: then an earlier transaction of the
    /// run was committed although its COMMIT got no answer, and this one would make its writes again.
    ///
    /// # Errors
    /// [`StoreError`] when the database does not answer; roll back. The kind is
    /// [`TransactionFailed`](StoreErrorKind::TransactionFailed) if there is no transaction, because it has ended or was never begun.
    pub async fn checkpoint_within(
        &self,
        connection: &mut SqliteConnection,
        lease: &Lease,
        checkpoint: &Checkpoint,
    ) -> Result<OwnerOutcome, StoreError> {
        // A driver may have ended the caller's transaction unnoticed; without one, each statement here would be committed by itself.
        // In a transaction SQLite refuses to set this setting, and elsewhere it stays as it is.
        let setting =
            sqlx::query_scalar::<_, i64>("SELECT * FROM pragma_synchronous").fetch_one(&mut *connection).await;
        let setting = setting.map_err(|error| store_error("write a checkpoint", error))?;
        let set = format!("PRAGMA main.synchronous = {setting}");
        if sqlx::raw_sql(AssertSqlSafe(set)).execute(&mut *connection).await.is_ok() {
            let message = "there is no transaction, so that no checkpoint can be written in it; begin one again";
            return Err(StoreError::new(StoreErrorKind::TransactionFailed, message));
        }
        // Takes the write lock, so that the row cannot change between being read and being written.
        let lock = sqlx::query("UPDATE main.idem_records SET updated_at = updated_at WHERE id = ?");
        let locked = lock.bind(lease.id.as_bytes().as_slice()).execute(&mut *connection).await;
        locked.map_err(|error| store_error("write a checkpoint", error))?;
        let stored = sqlx::query_scalar("SELECT substr(checkpoint_data, 1, 4) FROM main.idem_records WHERE id = ?");
        let stored = stored.bind(lease.id.as_bytes().as_slice()).fetch_optional(&mut *connection).await;
        let stored: Option<Vec<u8>> = stored.map_err(|error| store_error("write a checkpoint", error))?.flatten();
        let stored = stored.as_deref().map(decode_sequence).transpose().map_err(unreadable)?;
        if !machine::follows(checkpoint, stored) {
            return Ok(OwnerOutcome::LeaseLost);
        }
        let command = Command::Owner(lease.owner, OwnerAction::Checkpoint(checkpoint));
        let answers = transitions(connection, "", &[(&lease.id, None, command)], self.clock.as_ref(), "").await?;
        match answers.into_iter().next().ok_or_else(misanswered)?? {
            Outcome::Owner(outcome) => Ok(outcome),
            Outcome::Acquire(_) | Outcome::Resolve(_) | Outcome::Erase(_) => Err(misanswered()),
        }
    }

    /// The next records in the order of their ids, where the part after them begins, and the time.
    async fn part(
        &self,
        what: &'static str,
        from: Option<&ScanPosition>,
        limit: NonZeroU32,
    ) -> Result<(Vec<Result<RecordSummary, StoreError>>, Option<ScanPosition>, Timestamp), StoreError> {
        let from = from.map_or(&[][..], ScanPosition::as_bytes);
        let part = load_part(&self.upkeep, from, limit.get()).await.map_err(|error| store_error(what, error))?;
        for (id, record) in &part {
            if let Err(error) = record {
                tracing::warn!(record = %id, error = error as &dyn std::error::Error, "a record cannot be read");
            }
        }
        let is_last = part.len() < limit.get() as usize;
        let next = part.last().filter(|_| !is_last).map(|(id, _)| ScanPosition::after(id));
        Ok((part.into_iter().map(|(_, record)| record).collect(), next, self.clock.now()))
    }

    /// Asks for the health of the database.
    ///
    /// # Errors
    /// [`StoreError`] when it does not answer.
    pub async fn health(&self) -> Result<SqliteHealth, StoreError> {
        let query = sqlx::query("SELECT sqlite_version(), (SELECT count(*) FROM main.idem_records)");
        let failed = |error| store_error("ask for the health of the database", error);
        let row = query.fetch_one(&self.upkeep).await.map_err(failed)?;
        let records: i64 = row.try_get(1).map_err(failed)?;
        Ok(SqliteHealth {
            version: row.try_get(0).map_err(failed)?,
            records: records.unsigned_abs(),
            durability: self.durability,
        })
    }

    /// What an acquire would answer now, and whether that changes nothing, as for most repeats. It comes from a reader, without waiting
    /// for the writer.
    async fn look(&self, request: &Acquire) -> Result<(AcquireOutcome, bool), StoreError> {
        let before = self.readers.read(request.id).await?;
        let (next, outcome) = machine::acquire(before.as_ref(), request, self.clock.now());
        Ok((outcome, next == before))
    }

    async fn change(&self, request: &Acquire) -> Result<AcquireOutcome, StoreError> {
        match self.writer.run(Verb::Acquire(request.clone())).await? {
            Outcome::Acquire(outcome) => Ok(outcome),
            Outcome::Owner(_) | Outcome::Resolve(_) | Outcome::Erase(_) => Err(misanswered()),
        }
    }
}

#[async_trait]
impl IdempotencyStore for SqliteStore {
    async fn acquire(&self, request: &Acquire) -> Result<AcquireOutcome, StoreError> {
        match self.look(request).await? {
            (outcome, true) => Ok(outcome),
            (_, false) => self.change(request).await,
        }
    }

    async fn renew(&self, lease: &Lease, term: Term) -> Result<OwnerOutcome, StoreError> {
        self.writer.renew(lease, term).await
    }

    async fn checkpoint(&self, lease: &Lease, checkpoint: &Checkpoint) -> Result<OwnerOutcome, StoreError> {
        self.writer.run_as_owner(Verb::Checkpoint(lease.id, lease.owner, checkpoint.clone())).await
    }

    async fn settle(
        &self,
        lease: &Lease,
        settlement: &Settlement,
        retention: Duration,
    ) -> Result<OwnerOutcome, StoreError> {
        self.writer.settle(lease, settlement, retention).await
    }

    async fn peek(&self, id: &RecordId) -> Result<Option<Record>, StoreError> {
        let record = self.readers.read(*id).await?;
        let now = self.clock.now();
        Ok(record.filter(|record| machine::current(Some(record), now).is_some()))
    }

    fn on_settled(&self, _: Weak<dyn SettlementListener>) {
        // SQLite does not notify other processes of changes.
    }

    fn renewer(&self) -> Option<Arc<dyn LeaseRenewer>> {
        Some(Arc::new(self.writer.another()))
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::new("sqlite", self.durability, true)
    }
}

#[async_trait]
impl Operate for SqliteStore {
    async fn resolve(&self, request: &Resolve) -> Result<ResolveOutcome, StoreError> {
        match self.writer.run(Verb::Resolve(Box::new(request.clone()))).await? {
            Outcome::Resolve(outcome) => Ok(outcome),
            Outcome::Acquire(_) | Outcome::Owner(_) | Outcome::Erase(_) => Err(misanswered()),
        }
    }

    /// The notes come first: if the process dies in between, the record still has its principal and can be found.
    ///
    /// What is erased is overwritten (`PRAGMA secure_delete`). The write-ahead log keeps earlier pages until a checkpoint has copied it
    /// and it begins anew. Free pages may keep a long checkpoint that an earlier step has replaced, until `VACUUM`.
    async fn erase(&self, request: &Erase) -> Result<EraseOutcome, StoreError> {
        if let Some(principal) = request.principal.as_deref().filter(|principal| !principal.is_empty()) {
            let record = self.peek(&request.id).await?;
            if machine::erase(record.as_ref(), request, self.clock.now()).1 == EraseOutcome::Erased {
                let query = sqlx::query("UPDATE main.idem_repairs SET reason = replace(reason, ?, ?) WHERE record = ?");
                let query = query.bind(principal).bind(RepairNote::ERASED).bind(request.id.as_bytes().as_slice());
                let erased = async {
                    let mut connection = self.upkeep.acquire().await?;
                    // The setting would make each further write dearer.
                    connection.close_on_drop();
                    erase_for_good(&mut connection).await?;
                    query.execute(&mut *connection).await
                };
                erased.await.map_err(|error| store_error("erase from the notes", error))?;
            }
        }
        match self.writer.run(Verb::Erase(request.clone())).await? {
            Outcome::Erase(outcome) => Ok(outcome),
            Outcome::Acquire(_) | Outcome::Owner(_) | Outcome::Resolve(_) => Err(misanswered()),
        }
    }

    async fn note(&self, note: &RepairNote) -> Result<(), StoreError> {
        let query = sqlx::query(
            "INSERT INTO main.idem_repairs (action, record, actor, reason, resolution, outcome, at) VALUES (?, ?, ?, ?, ?, ?, ?) \
             ON CONFLICT (action) DO UPDATE SET outcome = CASE WHEN idem_repairs.outcome IN (?, ?) \
             THEN idem_repairs.outcome ELSE coalesce(excluded.outcome, idem_repairs.outcome) END \
             WHERE (idem_repairs.record, idem_repairs.actor, idem_repairs.reason, idem_repairs.resolution) \
             = (excluded.record, excluded.actor, excluded.reason, excluded.resolution)",
        );
        let query = query.bind(note.action.as_bytes().as_slice()).bind(note.record.as_bytes().as_slice());
        let query = query.bind(&note.actor).bind(&note.reason).bind(&note.resolution).bind(&note.outcome);
        let query = RepairNote::EFFECTIVE
            .into_iter()
            .fold(query.bind(self.clock.now().unix_micros()), |query, effective| query.bind(effective));
        let noted = query.execute(&self.upkeep).await;
        match noted.map_err(|error| store_error("note a repair", error))?.rows_affected() {
            0 => Err(RepairNote::action_is_taken()),
            _ => Ok(()),
        }
    }

    async fn repairs(&self, limit: NonZeroU32) -> Result<Vec<Repair>, StoreError> {
        let query = sqlx::query(
            "SELECT action, record, actor, reason, resolution, outcome, at FROM main.idem_repairs ORDER BY rowid DESC LIMIT ?",
        );
        let repairs = query.bind(limit.get()).fetch_all(&self.upkeep).await;
        let repairs = repairs.and_then(|rows| rows.iter().map(repair).collect::<Result<_, _>>());
        repairs.map_err(|error| store_error("list repairs", error))
    }
}

#[async_trait]
impl Inspect for SqliteStore {
    /// A transaction has an ordinary lease here, so that none is reported.
    async fn inspect(&self, id: &RecordId) -> Result<Inspection, StoreError> {
        let record = self.peek(id).await?;
        let failed = |error| store_error("look where a record came from", error);
        let origin = if record.is_some() { load_origin(&self.upkeep, id).await.map_err(failed)? } else { None };
        Ok(Inspection { record, origin, runs_in_transaction: false, now: self.clock.now() })
    }

    async fn list(
        &self,
        filter: &RecordFilter,
        from: Option<&ScanPosition>,
        limit: NonZeroU32,
    ) -> Result<RecordPage, StoreError> {
        let (part, next, now) = self.part("list records", from, limit).await?;
        let (scanned, read) = (part.len() as u64, part.iter().filter(|part| part.is_ok()).count() as u64);
        let records = part.into_iter().flatten().filter(|record| filter.selects(record, now)).collect();
        let progress = Some(next.as_ref().map_or(1.0, ScanPosition::progress));
        Ok(RecordPage { records, scanned, unreadable: scanned - read, next, progress, now })
    }

    async fn count(&self, from: Option<&ScanPosition>, limit: NonZeroU32) -> Result<CountPage, StoreError> {
        let (part, next, now) = self.part("count records", from, limit).await?;
        let mut counts = RecordCounts::default();
        for record in part {
            match record {
                Ok(record) => counts.add(&record, now),
                Err(_) => counts.unreadable += 1,
            }
        }
        Ok(CountPage { counts, progress: Some(next.as_ref().map_or(1.0, ScanPosition::progress)), next, now })
    }
}

#[async_trait]
impl Purge for SqliteStore {
    async fn purge(&self, limit: NonZeroU32) -> Result<u32, StoreError> {
        // A record never expires before its lease ends (a constraint of the table), so no live lease is deleted.
        let query = sqlx::query(
            "DELETE FROM main.idem_records WHERE id IN \
             (SELECT id FROM main.idem_records WHERE expires_at <= ? ORDER BY expires_at LIMIT ?)",
        );
        let now = self.clock.now().unix_micros();
        let purged = query.bind(now).bind(limit.get()).execute(&self.upkeep).await;
        let purged = purged.map_err(|error| store_error("purge", error))?.rows_affected();
        Ok(u32::try_from(purged).unwrap_or(u32::MAX))
    }

    async fn maintain(&self, limit: NonZeroU32) -> Result<u32, StoreError> {
        self.purge(limit).await
    }
}

#[async_trait]
impl DurableStore for SqliteStore {
    async fn live_record(&self, id: &RecordId) -> Result<Option<LiveRecord>, StoreError> {
        let record = self.readers.read(*id).await?;
        Ok(record.and_then(|record| LiveRecord::at(record, self.clock.now())))
    }

    fn identity(&self) -> [u8; 16] {
        self.identity
    }

    fn may_be_copied(&self) -> bool {
        true
    }
}

#[async_trait]
impl TransactionalStore for SqliteStore {
    async fn begin(&self, request: &Acquire) -> Result<Begin, StoreError> {
        let held = match self.look(request).await? {
            (AcquireOutcome::Acquired(lease), true) => Some(lease),
            (AcquireOutcome::Acquired(_), false) => None,
            (outcome, true) => return Ok(Begin::Answered(outcome)),
            // It settles the record, and runs nothing.
            (_, false) => match self.change(request).await? {
                AcquireOutcome::Acquired(lease) => Some(lease),
                outcome => return Ok(Begin::Answered(outcome)),
            },
        };
        let is_held = held.is_some();
        let failed = |error: StoreError| if is_held { error.indeterminate() } else { error };
        // This comes before the record is changed, so that a caller who gets no transaction leaves nothing behind: an attempt that
        // never ran would count, and the key would be taken until its lease ends. The transaction holds no lock yet.
        let Granted { permit, deadline, has_waited } =
            self.permits.enter().map_err(failed)?.permit().await.map_err(failed)?;
        // Meanwhile another caller may have begun the operation: a repeat needs no connection.
        if has_waited && !is_held {
            match self.look(request).await? {
                (AcquireOutcome::Acquired(_), _) | (_, false) => {}
                (outcome, true) => return Ok(Begin::Answered(outcome)),
            }
        }
        let connection = self.transactions.begin(permit, deadline).await.map_err(failed)?;
        let connection = scopeguard::guard(connection, HandlerConnection::give_back_unused);
        // The in-progress mark commits separately: the handler's transaction must not hold the one write lock before the
        // handler writes.
        let lease = match held {
            Some(lease) => lease,
            None => match self.change(request).await? {
                AcquireOutcome::Acquired(lease) => lease,
                outcome => return Ok(Begin::Answered(outcome)),
            },
        };
        let connection = ScopeGuard::into_inner(connection);
        let (writer, clock) = (self.writer.clone(), Arc::clone(&self.clock));
        let transaction = SqliteTransaction::new(connection, writer, clock, lease.clone());
        Ok(Begin::Acquired { lease, transaction: Box::new(transaction), renew: true })
    }
}
