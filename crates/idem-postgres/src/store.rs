//! The store: how it opens, and the traits of the core that it implements.

use std::num::NonZeroU32;
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use idem_core::{
    Acquire, AcquireOutcome, Begin, Capabilities, Checkpoint, CountPage, DurableStore, Erase, EraseOutcome,
    IdempotencyStore, Inspect, Inspection, Lease, LeaseRenewer, LiveRecord, MissingPrivilege, Operate, OwnerAction,
    OwnerOutcome, Purge, Record, RecordFilter, RecordId, RecordPage, Repair, RepairNote, Resolve, ResolveOutcome,
    ScanPosition, SelfTestError, Settlement, SettlementListener, State, StoreError, StoreErrorKind, Term,
    TransactionSlots, TransactionalStore, machine,
};
use sqlx::{ConnectOptions, Connection, PgConnection};
use tokio::time::timeout;

use crate::batch::batcher::{Batcher, BatcherSettings};
use crate::batch::verb::Lookup;
use crate::config::PostgresConfig;
use crate::connect::blockers;
use crate::connect::options::handlers_options;
use crate::connect::server::{self, DurabilityReport};
use crate::connect::sessions::Sessions;
use crate::connect::settings::local_settings;
use crate::connect::unanswered::UnansweredWrites;
use crate::error::{open_error, store_error};
use crate::records::{ROUNDS, Records, contended};
use crate::schema::migrate;
use crate::schema::name::Schema;
use crate::sql::rows;
use crate::timeouts::{client_timeout, within};
use crate::transaction::begin::Transactions;
use crate::transaction::guard::Guard;
use crate::transaction::join::Join;
use crate::transaction::statements::TransactionSettings;
use crate::upkeep::health::{PostgresHealth, SelfTestReport, weaknesses};
use crate::upkeep::identity::ServerHistory;
use crate::upkeep::pool::Upkeep;

/// A store that keeps records in a Postgres database. Clones share everything.
///
/// Open it inside the tokio runtime that will use it, and keep that runtime running: tasks there drive its connections. If
/// that runtime ends, every call answers [`Unavailable`] at once, in any runtime; open the store again. If that runtime
/// exists and is not driven, such as a single-threaded one after its `block_on`, verbs wait until the caller's timeout.
///
/// [`Unavailable`]: idem_core::StoreErrorKind::Unavailable
#[derive(Debug, Clone)]
pub struct PostgresStore {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    records: Arc<Records>,
    transactions: Arc<Transactions>,
    upkeep: Upkeep,
    durability: DurabilityReport,
}

/// How often the first connection is made, if a pooler gives it the answer to another client's statement.
const OPENING_TRIES: u32 = 3;

impl PostgresStore {
    /// Connects, checks the server, and brings the schema up to date.
    ///
    /// # Errors
    /// [`StoreError`] of these kinds:
    ///
    /// - [`Unavailable`]: The server cannot be reached or falls silent, or a proxy in front of it refuses or is full.
    /// - [`Misconfigured`]: The server is a replica, too old, or not in UTF-8; it does not let this user in; or it has no
    ///   schema, or a newer one.
    /// - [`Timeout`]: Another session holds a lock on the store's tables for longer than
    ///   [`migration_wait`](PostgresConfig::migration_wait).
    ///
    /// Verbs of an open store never answer `Misconfigured`: an operator may restore a password or a privilege, and the store
    /// then works again.
    ///
    /// [`Unavailable`]: idem_core::StoreErrorKind::Unavailable
    /// [`Misconfigured`]: idem_core::StoreErrorKind::Misconfigured
    /// [`Timeout`]: idem_core::StoreErrorKind::Timeout
    pub async fn open(config: PostgresConfig) -> Result<Self, StoreError> {
        let schema = Schema::new(&config.schema)?;
        let source = config.connect_source()?;
        let options = source.options();
        let client_timeout = client_timeout(config.statement_timeout);
        let wait = config.migration_wait;
        let mut tries = OPENING_TRIES;
        let (mut connection, backend_pid) = loop {
            let connected = within(client_timeout, options.connect()).await;
            let mut connection = connected.map_err(|error| open_error(error, config.pooled))?;
            tries -= 1;
            match within(client_timeout, migrate::begin(&mut connection, wait)).await {
                Ok(backend_pid) => break (connection, backend_pid),
                // A pooler's mistake: see `own_rows`.
                Err(sqlx::Error::Protocol(_)) if tries > 0 => {}
                Err(error) => return Err(store_error("begin to open the store", error)),
            }
        };
        let server = answered(client_timeout, server::examine(&mut connection)).await?;
        // Another session may hold a lock of a table, and the server's error then comes first.
        let locked = wait + client_timeout;
        let identity = async {
            if !config.migrate {
                answered(locked, migrate::expect_current(&mut connection, &schema)).await?;
            } else if !answered(locked, migrate::is_current(&mut connection, &schema, config.partitioned)).await? {
                migrate::migrate(&mut connection, &schema, config.partitioned, wait).await?;
            }
            answered(locked, migrate::identity(&mut connection, &schema)).await
        };
        let (identity, database) = blockers::log_while_waiting(&options, backend_pid, wait, identity).await?;
        let schema = schema.identified(identity, database);
        // After a migration it may have much to write.
        answered(wait.max(client_timeout), rows(&mut connection, "open the store", "COMMIT")).await?;
        let goodbye = within(client_timeout, connection.close()).await;
        goodbye.map_err(|error| store_error("close the first connection", error))?;
        let local_settings = local_settings(config.statement_timeout, config.lock_timeout);
        let unanswered = Arc::new(UnansweredWrites::new(source.clone(), client_timeout));
        let batcher = BatcherSettings::new(&config, source.clone(), Arc::clone(&unanswered), &schema);
        let settings = Arc::new(TransactionSettings::new(&config, &schema, &server));
        let for_handlers = handlers_options(options.clone(), &config, &server);
        let pool = source.pool().cloned();
        let sessions = Sessions::new(for_handlers, pool, &config, settings.prepare(), client_timeout, unanswered);
        // A server that cannot serve handlers is refused here.
        sessions.open_first(&options).await?;
        let batcher = Batcher::start(batcher, config.verb_connections);
        let records = Arc::new(Records { batcher, schema, offset: config.offset });
        let transactions = Transactions { records: Arc::clone(&records), sessions, settings, client_timeout };
        for weakness in weaknesses(source.pool().is_some(), config.pooled) {
            tracing::info!("{weakness}");
        }
        let upkeep = Upkeep::new(&source, config.pooled, Arc::clone(&records), local_settings, client_timeout);
        let transactions = Arc::new(transactions);
        Ok(Self { shared: Arc::new(Shared { records, transactions, upkeep, durability: server.durability }) })
    }

    /// What an acknowledged record survives on this server, and why.
    #[must_use]
    pub fn durability(&self) -> &DurabilityReport {
        &self.shared.durability
    }

    /// Acquires an operation inside a transaction that the caller opened.
    ///
    /// The caller's business writes and the record then commit together. [`JoinedRun::settle`](crate::JoinedRun::settle)
    /// writes the record. The transaction may come from any pool, and have any isolation level.
    ///
    /// `connection` must lead to this store's database, and its role needs the privileges for working with the store (see the
    /// README). An engine makes `request`: [`Idempotency::acquire_for`](idem_core::engine::Idempotency::acquire_for). One
    /// transaction may join several operations. If it joins the same operation twice, the second join gets an answer: that
    /// the operation is in progress, or what the first join has settled.
    ///
    /// The caller is responsible for what the store's own transactions guarantee:
    ///
    /// - Settle the run, or roll back. If the transaction commits without that, its writes stay and the key is free.
    /// - Answer the client after COMMIT. Until then other callers are answered that the operation is in progress.
    /// - The key is taken until the transaction ends. Set `idle_in_transaction_session_timeout`, TCP keepalives and
    ///   `client_connection_check_interval`, so that it ends when this process or its machine is gone, also in a statement that
    ///   waits.
    /// - Writes after the end of the transaction commit without a record, because the store does not control the connection.
    ///   `settle` detects that the transaction has ended.
    /// - The transaction is inside of a savepoint until `settle`. What must come before any savepoint, such as
    ///   `SET TRANSACTION ISOLATION LEVEL`, comes before the join.
    /// - The session's settings stay as they are. Its `statement_timeout` holds for the record as well. If its statements are
    ///   logged, the log contains stored answers.
    ///
    /// # Errors
    /// [`StoreError`] as from `begin`. The kind is [`TransactionFailed`](idem_core::StoreErrorKind::TransactionFailed) when
    /// there is no transaction, or one that is read-only or has failed. It is
    /// [`Misconfigured`](idem_core::StoreErrorKind::Misconfigured) in another database than the store's. At isolation levels with one snapshot,
    /// [`Unavailable`](idem_core::StoreErrorKind::Unavailable) also says that the record has changed since the snapshot.
    /// After an error, roll the transaction back and begin again.
    ///
    /// # Cancellation safety
    /// Roll the transaction back if the future is dropped. The key is free then.
    pub async fn join(&self, connection: &mut PgConnection, request: &Acquire) -> Result<Join, StoreError> {
        self.shared.transactions.join(connection, request).await
    }

    /// The guard of the run that holds `lease`.
    #[must_use]
    pub fn guard(&self, lease: &Lease) -> Guard {
        Guard::new(&self.shared.records, lease)
    }

    /// The statement that settles a run in a transaction of any driver: `SELECT "idem".idem_settle_run_v1($1, …, $8)`.
    ///
    /// It is for handlers whose business writes do not use sqlx 0.9. The handler runs under a lease, and executes this
    /// statement in the transaction of its writes. Writes and answer then commit together. `examples/drivers` has complete
    /// programs for tokio-postgres and diesel-async.
    ///
    /// | | parameter | type | value |
    /// |---|---|---|---|
    /// | `$1` | record | `BYTEA` | [`lease.id.as_bytes()`](idem_core::RecordId::as_bytes), where `lease` is [`context.lease()`](idem_core::engine::Context::lease) |
    /// | `$2` | owner | `BYTEA` | [`lease.owner.as_bytes()`](idem_core::OwnerToken::as_bytes) |
    /// | `$3` | kind | `TEXT` | `completed`, or `failed` for a failure that must not run again |
    /// | `$4` | status | `INTEGER` | the status of the answer; [`Idempotency::run`](idem_core::engine::Idempotency::run) stores values with 200 |
    /// | `$5` | header names | `TEXT[]` | may be empty; the fields that repeats get too, so no cookies, and no `content-length` |
    /// | `$6` | header values | `TEXT[]` | one for each name |
    /// | `$7` | body | `BYTEA` | the answer, from `run` as JSON; `NULL` if it is not kept |
    /// | `$8` | retention | `BIGINT` | how long repeats get the answer, in seconds, from 1 |
    ///
    /// The function is part of the schema. A later version adds functions with another suffix, and keeps this one.
    ///
    /// # Guarantees
    /// - If the transaction commits, every repeat gets this answer. If it rolls back, the run is not settled.
    /// - If another run owns the record, or another transaction has settled it, the statement fails with SQLSTATE `IDM03`. Its
    ///   transaction can then only roll back. Call it outside of savepoints and of blocks with `EXCEPTION`, which would keep the
    ///   rest of the transaction.
    /// - Until the transaction ends, no other run of the operation begins. Renewals and other requests for the record wait for
    ///   `lock_timeout`. So make this the last statement before COMMIT. One exception: after a deployment that makes the
    ///   operation Transactional, a run can begin when the lease is over. It cannot commit.
    /// - After a lost answer to COMMIT, return an error. If the transaction has committed, the caller gets the settled answer as
    ///   a replay. A second transaction would meet `IDM03`.
    /// - The engine settles the run again, and that changes nothing. If the handler returns another answer, the caller gets the
    ///   settled one as a replay. Only if the store cannot be asked for 5 s, the caller gets the handler's. Return soon after
    ///   COMMIT: a renewal finds the record settled, and reports a lost lease.
    /// - Wrong arguments fail with SQLSTATE `22023` and advice.
    /// - If the transaction has written nothing before, the statement fails with SQLSTATE `25P01`. Drivers can end a transaction
    ///   unnoticed, as sqlx does when a nested `begin` is cancelled. The answer would then be stored without its effect. A run
    ///   without writes needs no transaction: return its answer.
    /// - If the transaction is idle for 10 s after that, the server ends it, unless it has an
    ///   `idle_in_transaction_session_timeout` already. Otherwise a process that has vanished would keep the key.
    ///
    /// # Contract
    /// Use AtLeastOnce: after a crash before COMMIT the operation runs again when its lease is over, or when the
    /// server has ended the transaction, and nothing is left of the
    /// first run. Under AtMostOnce, repeats learn after such a crash that the outcome is unknown. The Transactional contract
    /// settles in its own transaction, and does not go together with this statement.
    ///
    /// The driver's role needs the [privileges](crate#failures-and-operation) of the store. At REPEATABLE READ and SERIALIZABLE a
    /// renewal during the transaction makes the statement fail with SQLSTATE `40001`: use READ COMMITTED, or run the transaction
    /// again.
    #[must_use]
    pub fn settle_run_sql(&self) -> String {
        format!("SELECT {}.idem_settle_run_v1($1, $2, $3, $4, $5, $6, $7, $8)", self.shared.records.schema.quoted())
    }

    /// Tests the store, and reports its durability and the schemas that are open to other roles.
    ///
    /// The test runs [`idem_core::self_test`], on a record that it makes. The report says what an acknowledged record
    /// survives. Run it at start-up, and log the report. The store also logs a warning for each open schema.
    ///
    /// # Errors
    /// [`SelfTestError`] says which promise does not hold.
    pub async fn self_test(&self) -> Result<SelfTestReport, SelfTestError> {
        idem_core::self_test(self).await?;
        Ok(self.shared.upkeep.self_test_report().await?)
    }

    /// The privileges on tables and functions of the store that its role lacks.
    ///
    /// What needs one of them fails. `idem_repairs` is for tools of operators: an application can do without. Privileges on single columns
    /// of other tables do not count, and all functions but `idem_settle_run_v1` do, as SECURITY.md grants them. Partitions are not
    /// considered, because the owner of the tables makes them. With [`from_pool`](crate::PostgresConfig::from_pool), the role is that of the
    /// pool's sessions. The store's own sessions do not run the pool's `after_connect`, and may have another one.
    ///
    /// # Errors
    /// [`StoreError`] when the server does not answer, or when the role may not use the schema, or lacks a table of it.
    pub async fn missing_privileges(&self) -> Result<Vec<MissingPrivilege>, StoreError> {
        self.shared.upkeep.missing_privileges().await
    }

    /// The history of the server, and the one that was remembered, to notice a restore or a promotion.
    ///
    /// It does not notice a restore to the same cluster and timeline, such as a dump that replaces the tables, nor a snapshot of the disk.
    ///
    /// # Errors
    /// [`StoreError`] when the server does not answer, or does not permit it.
    pub async fn history(&self) -> Result<ServerHistory, StoreError> {
        self.shared.upkeep.history().await
    }

    /// Remembers the history of the server.
    ///
    /// # Errors
    /// [`StoreError`] when the server does not answer, or the role may not update `idem_identity`.
    pub async fn remember_history(&self) -> Result<(), StoreError> {
        self.shared.upkeep.remember_history().await
    }

    /// Gives the records a new random identity, after a restore that may have lost records, and remembers the history.
    ///
    /// No cache then replays what the server no longer has: entries under another identity are not valid. This store keeps the old
    /// identity, so open a new one. All other processes must have stopped, because locks of operations follow from the identity.
    ///
    /// It counts the other sessions and gives the identity in one transaction, which no process that opens its store passes by. A process
    /// without a session at that moment is not seen, nor one whose sessions a pooler keeps.
    ///
    /// # Errors
    /// [`StoreErrorKind::Busy`] while sessions with another `application_name` use the database. [`StoreError`] when the server does
    /// not answer, or the role may not update `idem_identity`.
    pub async fn renew_identity(&self) -> Result<(), StoreError> {
        self.shared.upkeep.renew_identity().await
    }

    /// How many handlers' transactions are in use, for a gauge. It does not ask the server.
    #[must_use]
    pub fn transactions(&self) -> TransactionSlots {
        self.shared.transactions.sessions.slots()
    }

    /// Asks the server for its version, its durability and the approximate number of records.
    ///
    /// # Errors
    /// [`StoreError`] when it does not answer.
    pub async fn health(&self) -> Result<PostgresHealth, StoreError> {
        self.shared.upkeep.health().await
    }
}

/// The answer to one step of opening.
async fn answered<T>(limit: Duration, step: impl Future<Output = Result<T, StoreError>>) -> Result<T, StoreError> {
    timeout(limit, step).await.unwrap_or_else(|_| {
        let message = format!("could not open the store: the server did not answer within {limit:?}");
        Err(StoreError::new(StoreErrorKind::Unavailable, message))
    })
}

#[async_trait]
impl IdempotencyStore for PostgresStore {
    async fn acquire(&self, request: &Acquire) -> Result<AcquireOutcome, StoreError> {
        self.shared.records.acquire(request).await
    }

    async fn renew(&self, lease: &Lease, term: Term) -> Result<OwnerOutcome, StoreError> {
        self.shared.records.renew(lease, term).await
    }

    async fn checkpoint(&self, lease: &Lease, checkpoint: &Checkpoint) -> Result<OwnerOutcome, StoreError> {
        self.shared.records.apply(lease.id, lease.owner, OwnerAction::Checkpoint(checkpoint)).await
    }

    async fn settle(
        &self,
        lease: &Lease,
        settlement: &Settlement,
        retention: Duration,
    ) -> Result<OwnerOutcome, StoreError> {
        self.shared.records.apply(lease.id, lease.owner, OwnerAction::Settle(settlement, retention)).await
    }

    /// A settled record is confirmed to be on every standby that commits wait for, because the caller may acknowledge it.
    async fn peek(&self, id: &RecordId) -> Result<Option<Record>, StoreError> {
        let current = |Lookup { now, row, .. }: Lookup| {
            row.map(|row| row.record).filter(|record| machine::current(Some(record), now).is_some())
        };
        let found = current(self.shared.records.read(*id, None).await?);
        if found.as_ref().is_none_or(|record| matches!(record.state, State::InProgress { .. })) {
            return Ok(found);
        }
        Ok(current(self.shared.records.read_confirmed(*id, None).await?))
    }

    fn on_settled(&self, _: Weak<dyn SettlementListener>) {
        // NOTIFY takes a lock at COMMIT that nearly halves the throughput of settlements.
    }

    fn renewer(&self) -> Option<Arc<dyn LeaseRenewer>> {
        Some(Arc::new(self.shared.records.on_current_runtime()))
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::new("postgres", self.shared.durability.level, true)
    }
}

#[async_trait]
impl Operate for PostgresStore {
    async fn resolve(&self, request: &Resolve) -> Result<ResolveOutcome, StoreError> {
        self.shared.records.resolve(request).await
    }

    async fn erase(&self, request: &Erase) -> Result<EraseOutcome, StoreError> {
        for _ in 0..ROUNDS {
            // An earlier try may have done it.
            let Lookup { now, row, .. } = self.shared.records.read_confirmed(request.id, None).await?;
            let before = row.as_ref().map(|row| &row.record);
            let (next, outcome) = machine::erase(before, request, now);
            let (Some(row), Some(next)) = (&row, &next) else { return Ok(outcome) };
            if *next == row.record || self.shared.upkeep.erase(request, row.version, next).await? {
                return Ok(outcome);
            }
        }
        Err(contended())
    }

    async fn note(&self, note: &RepairNote) -> Result<(), StoreError> {
        self.shared.upkeep.note(note).await
    }

    async fn repairs(&self, limit: NonZeroU32) -> Result<Vec<Repair>, StoreError> {
        self.shared.upkeep.repairs(limit).await
    }
}

#[async_trait]
impl Inspect for PostgresStore {
    async fn inspect(&self, id: &RecordId) -> Result<Inspection, StoreError> {
        self.shared.upkeep.inspect(id).await
    }

    async fn list(
        &self,
        filter: &RecordFilter,
        from: Option<&ScanPosition>,
        limit: NonZeroU32,
    ) -> Result<RecordPage, StoreError> {
        self.shared.upkeep.list(filter, from, limit).await
    }

    async fn count(&self, from: Option<&ScanPosition>, limit: NonZeroU32) -> Result<CountPage, StoreError> {
        self.shared.upkeep.count(from, limit).await
    }
}

#[async_trait]
impl Purge for PostgresStore {
    async fn purge(&self, limit: NonZeroU32) -> Result<u32, StoreError> {
        self.shared.upkeep.purge(limit).await
    }

    async fn maintain(&self, limit: NonZeroU32) -> Result<u32, StoreError> {
        match self.shared.upkeep.maintain_partitions(limit).await? {
            Some(removed) => Ok(removed),
            None => self.purge(limit).await,
        }
    }
}

#[async_trait]
impl DurableStore for PostgresStore {
    async fn live_record(&self, id: &RecordId) -> Result<Option<LiveRecord>, StoreError> {
        let Lookup { now, row, .. } = self.shared.records.read(*id, None).await?;
        Ok(row.and_then(|row| LiveRecord::at(row.record, now)))
    }

    fn identity(&self) -> [u8; 16] {
        self.shared.records.schema.identity()
    }

    fn may_be_copied(&self) -> bool {
        true
    }
}

#[async_trait]
impl TransactionalStore for PostgresStore {
    async fn begin(&self, request: &Acquire) -> Result<Begin, StoreError> {
        self.shared.transactions.begin(request).await
    }
}
