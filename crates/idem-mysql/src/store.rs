//! The store: how it opens, and the traits of the core that it implements.

use std::fmt;
use std::num::NonZeroU32;
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use idem_core::{
    Acquire, AcquireOutcome, Begin, Capabilities, Checkpoint, Command, CountPage, DurableStore, Erase, EraseOutcome,
    IdempotencyStore, Inspect, Inspection, Lease, LeaseRenewer, LiveRecord, MissingPrivilege, Operate, Outcome,
    OwnerAction, OwnerOutcome, Purge, Record, RecordCounts, RecordFilter, RecordId, RecordPage, Repair, RepairNote,
    Resolve, ResolveOutcome, ScanPosition, SelfTestError, Settlement, SettlementListener, State, StoreError,
    StoreErrorKind, Term, TransactionSlots, TransactionalStore, machine,
};
use sqlx::mysql::MySqlConnectOptions;
use sqlx::{ConnectOptions as _, Connection as _, MySqlConnection, MySqlPool, Row as _};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::{Instant, timeout};

use crate::batch::{Batched, Batcher, MOST_RUNNING, Seen, Verb};
use crate::config::{MySqlConfig, Source};
use crate::error::{opening_error, store_error, unreadable};
use crate::handler_session::HandlerSession;
use crate::migrate::{migrate, place};
use crate::permits::TransactionPermits;
use crate::records::{Found, Look, Records, Tables, misanswered, owner_outcome};
use crate::server::{
    DurabilityReport, MySqlHealth, OTHER_ENGINES, SESSION_SETTINGS, SETTINGS, SelfTestReport, Settings,
};
use crate::session::{Use, pool, run};
use crate::sql::Sql;
use crate::timeouts::{CONNECT_TIMEOUT, MIGRATION_WAIT, SHORTEST_CONNECT, SLOW_BATCH, VERB_TIMEOUT};
use crate::transaction::MySqlTransaction;

/// A store that keeps records in a database of MariaDB. Clones share everything.
///
/// Open it inside the tokio runtime that will use it, and keep that runtime running: it drives the connections.
#[derive(Clone)]
pub struct MySqlStore {
    records: Records,
    batcher: Batcher,
    looks: Arc<Semaphore>,
    handlers: MySqlPool,
    permits: TransactionPermits,
    transaction_wait: Duration,
    options: Arc<MySqlConnectOptions>,
    durability: Arc<DurabilityReport>,
    identity: [u8; 16],
    is_mariadb: bool,
}

impl MySqlStore {
    /// Connects, checks the server, and brings the schema up to date.
    ///
    /// # Errors
    /// [`StoreError`] of these kinds:
    ///
    /// - [`Unavailable`](StoreErrorKind::Unavailable): The server cannot be reached, or has no connection left.
    /// - [`Misconfigured`](StoreErrorKind::Misconfigured): The server is a replica or too old; it does not let this user in;
    ///   it lacks the tables, or has newer ones; or the user lacks a privilege.
    /// - [`Timeout`](StoreErrorKind::Timeout): The server fell silent, or another process migrates for more than a minute.
    ///
    /// Verbs of an open store never answer `Misconfigured`: an operator may restore a privilege, and the store then works again.
    pub async fn open(config: MySqlConfig) -> Result<Self, StoreError> {
        let source = config.source()?;
        let options = match &source {
            Source::Options(options) => options.as_ref().clone(),
            Source::Pool(pool) => pool.connect_options().as_ref().clone(),
        };
        let connected = answered(VERB_TIMEOUT, options.connect()).await?;
        let mut connection = connected.map_err(|error| opening_error("connect to the server", error))?;
        let failed = |error| opening_error("ask for the settings of the server", error);
        let rows = answered(VERB_TIMEOUT, run(&mut connection, Sql::new(SETTINGS))).await?.map_err(failed)?;
        let settings = Settings::of(&rows).map_err(failed)?;
        settings.expect_suitable()?;
        if config.migrate {
            answered(2 * MIGRATION_WAIT, migrate(&mut connection, &options)).await??;
        }
        let (database, identity) = answered(VERB_TIMEOUT, place(&mut connection)).await??;
        // It has nothing open; closing it only says goodbye.
        let _ = answered(VERB_TIMEOUT, connection.close()).await;
        let durability = settings.durability();
        tracing::info!("{durability}");
        let handlers = match source {
            Source::Pool(pool) => pool,
            Source::Options(_) => {
                let isolates = settings.has_snapshot_isolation();
                pool(options.clone(), Use::Handlers { isolates }, config.max_transactions.get(), CONNECT_TIMEOUT)
            }
        };
        // Batches have separate connections, because verbs that wait for a locked row use up those of verbs that are alone.
        let batches = MOST_RUNNING.min(config.verb_connections.get());
        let alone = config.verb_connections.get().saturating_sub(batches).max(1);
        let purpose = Use::Verbs { is_mariadb: settings.is_mariadb() };
        let [batch_pool, verbs] = [batches, alone].map(|most| pool(options.clone(), purpose, most, VERB_TIMEOUT));
        let tables = Arc::new(Tables::new(database, &settings));
        let records = Records { pool: verbs, tables, offset: config.offset };
        Ok(Self {
            looks: Arc::new(Semaphore::new(LOOKS)),
            batcher: Batcher::new(Records { pool: batch_pool, ..records.clone() }, batches as usize),
            records,
            handlers,
            permits: TransactionPermits::new(config.max_transactions, config.transaction_wait),
            transaction_wait: config.transaction_wait,
            options: Arc::new(options),
            durability: Arc::new(durability),
            identity,
            is_mariadb: settings.is_mariadb(),
        })
    }

    /// The connection pool of handlers' transactions, to set up the application's own tables in the same database.
    ///
    /// Unless it is the application's, it has no connection left while as many handlers as
    /// [`max_transactions`](MySqlConfig::max_transactions) run. Use a separate pool for the application's reads.
    #[must_use]
    pub fn pool(&self) -> &MySqlPool {
        &self.handlers
    }

    /// How many handlers' transactions are in use, for a gauge.
    #[must_use]
    pub fn transactions(&self) -> TransactionSlots {
        self.permits.slots()
    }

    /// What an acknowledged record survives on this server, and why, when the store was opened.
    #[must_use]
    pub fn durability(&self) -> &DurabilityReport {
        &self.durability
    }

    /// Tests the store, and reports its durability and what is weaker than it should be.
    ///
    /// The test runs [`idem_core::self_test`], on a record that it makes. The report looks at the settings for durability, at
    /// the settings of handlers' sessions, at `max_allowed_packet`, and at tables of the database that no transaction protects. Run it at start-up, and log the report.
    ///
    /// # Errors
    /// [`SelfTestError`] says which promise does not hold.
    pub async fn self_test(&self) -> Result<SelfTestReport, SelfTestError> {
        idem_core::self_test(self).await?;
        let settings = self.records.settings().await?;
        let failed = |error| store_error("look at the sessions of handlers", error);
        let look = async {
            let mut connection = self.handlers.acquire().await.map_err(failed)?;
            let rows = run(&mut connection, Sql::new(SESSION_SETTINGS)).await.map_err(failed)?;
            let session = Settings::of(&rows).map_err(unreadable)?;
            let mut sql = Sql::new(OTHER_ENGINES);
            sql.text(&self.records.tables.database);
            let tables = run(&mut connection, sql).await.map_err(failed)?;
            let tables: i64 = tables.first().ok_or_else(misanswered)?.try_get(0).map_err(unreadable)?;
            Ok::<_, StoreError>((session, tables))
        };
        let (session, tables) = answered(VERB_TIMEOUT, look).await??;
        Ok(SelfTestReport { durability: settings.durability(), warnings: settings.warnings(&session, tables) })
    }

    /// The privileges on tables of the store that its user lacks.
    ///
    /// What needs one of them fails. `idem_repairs` is for tools of operators: an application can do without. Without `SELECT` on the
    /// other two tables the store does not open. The user is that of the store's own sessions: a pool of the application may have another.
    ///
    /// # Errors
    /// [`StoreError`] when the server does not answer.
    pub async fn missing_privileges(&self) -> Result<Vec<MissingPrivilege>, StoreError> {
        self.records.missing_privileges().await
    }

    /// Gives the records a new random identity, after the database was restored from an older backup.
    ///
    /// No cache then replays what the database no longer has: entries under another identity are not valid. This store and those of
    /// other processes keep the old identity until they are opened again. Nothing checks whether other processes use the database:
    /// stop them first. It needs the privilege `UPDATE` on `idem_identity`.
    ///
    /// # Errors
    /// [`StoreError`] when the database cannot be written.
    pub async fn renew_identity(&self) -> Result<(), StoreError> {
        self.records.renew_identity().await
    }

    /// Asks for the health of the server.
    ///
    /// # Errors
    /// [`StoreError`] when it does not answer.
    pub async fn health(&self) -> Result<MySqlHealth, StoreError> {
        self.records.health().await
    }

    /// Settles the run that holds `lease` in the caller's transaction, which is open on `connection`. Both commit or neither
    /// does.
    ///
    /// The connection may come from any pool that leads to the store's server, and have any isolation level. With
    /// `innodb_snapshot_isolation`, which is on by default from MariaDB 11.6.2 on, a transaction at `REPEATABLE READ` or above whose
    /// snapshot is older than the last renewal gets `Unavailable`: roll back and repeat it, or turn that off. Make this the last
    /// statement before COMMIT: until then, renewals and other requests that change the record wait. Renew the lease while the
    /// transaction is open, as an engine does. The real time of the session is set (`SET timestamp = DEFAULT`). If the connection
    /// logs statements, the log contains the answer.
    ///
    /// After `LeaseLost`, roll back. It also says that the run is settled already: then an earlier transaction of the run was
    /// committed although its COMMIT got no answer, and this one would make its writes again.
    ///
    /// If COMMIT gets no answer, [`peek`](IdempotencyStore::peek) says how it ended, once the server has ended that session.
    ///
    /// It is not for the transaction that the contract Transactional gives a handler: the engine settles that run itself.
    ///
    /// # Errors
    /// [`StoreError`] when the database does not answer; roll back. The kind is
    /// [`TransactionFailed`](StoreErrorKind::TransactionFailed) if there is no transaction, because it has ended or was never
    /// begun; also if it is READ ONLY, or the session has `autocommit` off. It is
    /// [`Misconfigured`](StoreErrorKind::Misconfigured) on another server than the store's.
    ///
    /// # Cancellation safety
    /// Roll the transaction back if the future is dropped.
    pub async fn settle_within(
        &self,
        connection: &mut MySqlConnection,
        lease: &Lease,
        settlement: &Settlement,
        retention: Duration,
    ) -> Result<OwnerOutcome, StoreError> {
        let action = OwnerAction::Settle(settlement, retention);
        self.records.act_within(&self.identity, connection, lease, action).await
    }

    /// Writes `checkpoint` of the run that holds `lease` in the caller's transaction, as
    /// [`settle_within`](Self::settle_within) settles one. `Step::run_with_record` of the engine needs it.
    ///
    /// # Errors
    /// As [`settle_within`](Self::settle_within).
    ///
    /// # Cancellation safety
    /// Roll the transaction back if the future is dropped.
    pub async fn checkpoint_within(
        &self,
        connection: &mut MySqlConnection,
        lease: &Lease,
        checkpoint: &Checkpoint,
    ) -> Result<OwnerOutcome, StoreError> {
        self.records.act_within(&self.identity, connection, lease, OwnerAction::Checkpoint(checkpoint)).await
    }

    /// Runs a verb of an owner in a batch, or alone if that does not do it.
    async fn own(&self, lease: &Lease, verb: Verb) -> Result<OwnerOutcome, StoreError> {
        let own = async {
            match self.batcher.submit(lease.id, verb.clone()).answer().await {
                Batched::Done(outcome) => owner_outcome(outcome),
                Batched::Alone { seen, .. } => {
                    let done = self.records.transition(&lease.id, None, verb.command()).await;
                    owner_outcome(done.map_err(|error| seen.flag(error))?)
                }
            }
        };
        answered(VERB_TIMEOUT, own).await?
    }

    /// Acquires in a batch. Returns `None` if that needs its own transaction. `seen` is for later errors.
    ///
    /// If the batch is slow, as when commits stall, a record that answers the request is looked for meanwhile.
    async fn acquire_batched(&self, request: &Acquire, seen: &mut Seen) -> Result<Option<AcquireOutcome>, StoreError> {
        let mut ticket = self.batcher.submit(request.id, Verb::Acquire(request.clone()));
        let batched = match timeout(SLOW_BATCH, ticket.answer()).await {
            Ok(batched) => batched,
            Err(_) => {
                // Few at once: a batch may also be slow because the server is busy.
                let look = self.looks.clone().try_acquire_owned().ok().map(|permit| self.look_apart(request, permit));
                let looked = async {
                    match look {
                        Some(look) => look.await.unwrap_or(None),
                        None => None,
                    }
                };
                let looked = tokio::select! {
                    batched = ticket.answer() => Either::Batched(batched),
                    looked = looked => Either::Looked(looked),
                };
                match looked {
                    Either::Batched(batched) => batched,
                    // Unless the batch makes a record for this caller now.
                    Either::Looked(Some(Look::Answered(outcome))) if ticket.take_back() => return Ok(Some(outcome)),
                    Either::Looked(looked) => {
                        seen.has_other_run |= match looked {
                            Some(Look::Open { has_other_run }) => has_other_run,
                            Some(Look::Answered(_)) => true,
                            None => false,
                        };
                        ticket.answer().await
                    }
                }
            }
        };
        match batched {
            Batched::Done(Outcome::Acquire(outcome)) => Ok(Some(outcome)),
            Batched::Done(Outcome::Owner(_) | Outcome::Resolve(_) | Outcome::Erase(_)) => Err(misanswered()),
            // A late INSERT may make a lease for this caller after all. The engine repeats the acquire, and watches for that.
            Batched::Alone { seen: batch, error } if batch.may_be_done => {
                let unanswered =
                    || StoreError::new(StoreErrorKind::Unavailable, "a batch of verbs ended without an answer");
                Err(seen.and(batch).flag(error.unwrap_or_else(unanswered)))
            }
            Batched::Alone { seen: batch, .. } => {
                *seen = seen.and(batch);
                Ok(None)
            }
        }
    }

    /// Looks for a record in a task, which gives its connection back also if the caller does not wait.
    fn look_apart(&self, request: &Acquire, permit: OwnedSemaphorePermit) -> oneshot::Receiver<Option<Look>> {
        let (answer, looked) = oneshot::channel();
        let (records, request) = (self.records.clone(), request.clone());
        self.batcher.runtime().spawn(async move {
            let found = records.look(&request).await.ok();
            drop(permit);
            // A caller that has its answer from the batch does not wait.
            let _ = answer.send(found);
        });
        looked
    }

    async fn acquire_within(&self, request: &Acquire, seen: &mut Seen) -> Result<AcquireOutcome, StoreError> {
        if let Some(outcome) = self.acquire_batched(request, seen).await? {
            return Ok(outcome);
        }
        match self.records.look(request).await? {
            Look::Answered(outcome) => return Ok(outcome),
            Look::Open { has_other_run } => seen.has_other_run |= has_other_run,
        }
        self.records.acquire(request).await
    }

    /// The record. A settled one is confirmed to be on the disk, because the caller may acknowledge or copy it.
    async fn confirmed(&self, id: &RecordId) -> Result<Found, StoreError> {
        let found = self.records.read(id).await?;
        let is_settled = |record: &Record| !matches!(record.state, State::InProgress { .. });
        if found.record.as_ref().is_some_and(is_settled) { self.records.read_confirmed(id).await } else { Ok(found) }
    }
}

/// Which came first.
enum Either {
    Batched(Batched),
    /// `None` if it could not look.
    Looked(Option<Look>),
}

/// The most looks beside slow batches at once. They leave connections to verbs that run alone.
const LOOKS: usize = 4;

/// Omits the connect options, which contain a password.
impl fmt::Debug for MySqlStore {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("MySqlStore")
            .field("database", &self.records.tables.database)
            .field("transactions", &self.permits.slots())
            .field("durability", &self.durability)
            .finish_non_exhaustive()
    }
}

/// The answer of the server, or an error after `limit`.
async fn answered<T>(limit: Duration, work: impl Future<Output = T>) -> Result<T, StoreError> {
    timeout(limit, work).await.map_err(|_| {
        let message = format!("the server did not answer within {limit:?}");
        StoreError::new(StoreErrorKind::Timeout, message)
    })
}

/// The record, unless it has expired.
fn current(found: Found) -> Option<Record> {
    found.record.filter(|record| machine::current(Some(record), found.now).is_some())
}

/// Renews leases on a separate connection, which is made when it is first used.
#[derive(Debug)]
struct Renewer(Records);

#[async_trait]
impl LeaseRenewer for Renewer {
    async fn renew(&self, lease: &Lease, term: Term) -> Result<OwnerOutcome, StoreError> {
        self.0.act(&lease.id, lease.owner, OwnerAction::Renew(term)).await
    }
}

#[async_trait]
impl IdempotencyStore for MySqlStore {
    async fn acquire(&self, request: &Acquire) -> Result<AcquireOutcome, StoreError> {
        let mut seen = Seen::default();
        let acquired = answered(VERB_TIMEOUT, self.acquire_within(request, &mut seen)).await;
        acquired.flatten().map_err(|error| seen.flag(error))
    }

    async fn renew(&self, lease: &Lease, term: Term) -> Result<OwnerOutcome, StoreError> {
        self.own(lease, Verb::Renew(lease.owner, term)).await
    }

    async fn checkpoint(&self, lease: &Lease, checkpoint: &Checkpoint) -> Result<OwnerOutcome, StoreError> {
        self.own(lease, Verb::Checkpoint(lease.owner, checkpoint.clone())).await
    }

    async fn settle(
        &self,
        lease: &Lease,
        settlement: &Settlement,
        retention: Duration,
    ) -> Result<OwnerOutcome, StoreError> {
        self.own(lease, Verb::Settle(lease.owner, settlement.clone(), retention)).await
    }

    async fn peek(&self, id: &RecordId) -> Result<Option<Record>, StoreError> {
        Ok(current(self.confirmed(id).await?))
    }

    fn on_settled(&self, _: Weak<dyn SettlementListener>) {
        // The server does not notify clients of changes.
    }

    fn renewer(&self) -> Option<Arc<dyn LeaseRenewer>> {
        let purpose = Use::Verbs { is_mariadb: self.is_mariadb };
        let pool = pool(self.options.as_ref().clone(), purpose, 1, VERB_TIMEOUT);
        Some(Arc::new(Renewer(Records { pool, ..self.records.clone() })))
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::new("mysql", self.durability.durability, true)
    }
}

#[async_trait]
impl Operate for MySqlStore {
    async fn resolve(&self, request: &Resolve) -> Result<ResolveOutcome, StoreError> {
        match self.records.transition(&request.id, None, Command::Resolve(request)).await? {
            Outcome::Resolve(outcome) => Ok(outcome),
            Outcome::Acquire(_) | Outcome::Owner(_) | Outcome::Erase(_) => Err(misanswered()),
        }
    }

    async fn erase(&self, request: &Erase) -> Result<EraseOutcome, StoreError> {
        match self.records.transition(&request.id, None, Command::Erase(request)).await? {
            Outcome::Erase(outcome) => Ok(outcome),
            Outcome::Acquire(_) | Outcome::Owner(_) | Outcome::Resolve(_) => Err(misanswered()),
        }
    }

    async fn note(&self, note: &RepairNote) -> Result<(), StoreError> {
        self.records.note(note).await
    }

    async fn repairs(&self, limit: NonZeroU32) -> Result<Vec<Repair>, StoreError> {
        self.records.repairs(limit).await
    }
}

#[async_trait]
impl Inspect for MySqlStore {
    /// A transaction has an ordinary lease here, so that none is reported.
    async fn inspect(&self, id: &RecordId) -> Result<Inspection, StoreError> {
        let found = self.records.read(id).await?;
        let now = found.now;
        let record = current(found);
        let origin = if record.is_some() { self.records.origin(id).await? } else { None };
        Ok(Inspection { record, origin, runs_in_transaction: false, now })
    }

    async fn list(
        &self,
        filter: &RecordFilter,
        from: Option<&ScanPosition>,
        limit: NonZeroU32,
    ) -> Result<RecordPage, StoreError> {
        let part = self.records.part("list records", from, limit).await?;
        let (now, next) = (part.now, part.next);
        let scanned = part.records.len() as u64;
        let read = part.records.iter().filter(|record| record.is_ok()).count() as u64;
        let records = part.records.into_iter().flatten().filter(|record| filter.selects(record, now)).collect();
        let progress = Some(next.as_ref().map_or(1.0, ScanPosition::progress));
        Ok(RecordPage { records, scanned, unreadable: scanned - read, next, progress, now })
    }

    async fn count(&self, from: Option<&ScanPosition>, limit: NonZeroU32) -> Result<CountPage, StoreError> {
        let part = self.records.part("count records", from, limit).await?;
        let (now, next) = (part.now, part.next);
        let mut counts = RecordCounts::default();
        for record in part.records {
            match record {
                Ok(record) => counts.add(&record, now),
                Err(_) => counts.unreadable += 1,
            }
        }
        Ok(CountPage { counts, progress: Some(next.as_ref().map_or(1.0, ScanPosition::progress)), next, now })
    }
}

#[async_trait]
impl Purge for MySqlStore {
    async fn purge(&self, limit: NonZeroU32) -> Result<u32, StoreError> {
        self.records.purge(limit).await
    }

    async fn maintain(&self, limit: NonZeroU32) -> Result<u32, StoreError> {
        self.purge(limit).await
    }
}

#[async_trait]
impl DurableStore for MySqlStore {
    async fn live_record(&self, id: &RecordId) -> Result<Option<LiveRecord>, StoreError> {
        let found = self.confirmed(id).await?;
        Ok(found.record.and_then(|record| LiveRecord::at(record, found.now)))
    }

    fn identity(&self) -> [u8; 16] {
        self.identity
    }

    fn may_be_copied(&self) -> bool {
        true
    }
}

#[async_trait]
impl TransactionalStore for MySqlStore {
    async fn begin(&self, request: &Acquire) -> Result<Begin, StoreError> {
        if let Look::Answered(outcome) = self.records.look(request).await? {
            return Ok(Begin::Answered(outcome));
        }
        // This comes before the record is changed, so that a caller who gets no transaction leaves nothing behind: an attempt that
        // never ran would count.
        let (permit, deadline) = self.permits.enter()?.permit().await?;
        // The in-progress mark commits separately, under a lease: a repeat reads it and is answered at once. If it were part
        // of the handler's transaction, the repeat would wait for its row lock.
        let mut seen = Seen::default();
        let acquired = match answered(VERB_TIMEOUT, self.acquire_batched(request, &mut seen)).await.flatten() {
            Ok(Some(outcome)) => Ok(outcome),
            Ok(None) => self.records.acquire(request).await,
            Err(error) => Err(error),
        };
        let acquired = acquired.map_err(|error| seen.flag(error))?;
        let lease = match acquired {
            AcquireOutcome::Acquired(lease) => lease,
            outcome => return Ok(Begin::Answered(outcome)),
        };
        // From here on, the record is held.
        let session = HandlerSession::begin(
            &self.handlers,
            permit,
            deadline.max(Instant::now() + SHORTEST_CONNECT),
            self.transaction_wait,
        );
        let session = session.await.map_err(StoreError::indeterminate)?;
        let transaction = MySqlTransaction { session, records: self.records.clone(), lease: lease.clone() };
        Ok(Begin::Acquired { lease, transaction: Box::new(transaction), renew: true })
    }
}
