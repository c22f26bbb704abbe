//! The store itself.

use std::fmt::Display;
use std::num::NonZeroU32;
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use idem_core::codec::FlatRecord;
use idem_core::{
    Acquire, AcquireOutcome, Capabilities, Checkpoint, IdempotencyStore, Lease, OwnerAction, OwnerOutcome, OwnerToken,
    Purge, Record, RecordId, Settlement, SettlementListener, StoreError, StoreErrorKind, Term, TimeOffset, machine,
    planted,
};
use sqlx::postgres::{PgPoolOptions, PgRow};
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, PgConnection, PgPool, Row as _};
use tokio::time::timeout;

use crate::batch::Calls;
use crate::begin::TransactionSettings;
use crate::config::PostgresConfig;
use crate::connection::{direct, handlers_options};
use crate::error::{connect_error, store_error};
use crate::health::{self, DurabilityReport};
use crate::lane::{LaneSettings, Lanes};
use crate::literal::Sql;
use crate::migrate;
use crate::schema::Schema;
use crate::sessions::Sessions;

use crate::verb::{Answer, Placed, Presence, Row, Seen, Verb, misanswered};

/// How often a decision is made anew because somebody else changed the record meanwhile. Each time somebody got on, so
/// this many in a row are not chance.
pub(crate) const ROUNDS: u32 = 16;

/// How a transaction of the store's own begins, whatever the session's defaults are; [`session`] says the same to a session.
/// Only where somebody has said that nothing be written, nothing is.
pub(crate) const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED NOT DEFERRABLE;";

/// Connections for the store's upkeep: one that looks whether a partition is over may read for minutes, and the other is
/// there for everything else.
const UPKEEP: u32 = 2;

/// Room for the statements that a connection for verbs prepares, one for each function that it calls.
const PREPARED: usize = 16;

/// The answer while a transaction runs the operation. That has no lease: the key is free, or answered, as soon as it ends,
/// and nobody knows when that is.
pub(crate) const IN_PROGRESS: AcquireOutcome = AcquireOutcome::InProgress { retry_after: Duration::from_secs(1) };

/// Records in a Postgres database. Clones share everything.
///
/// Open it inside the tokio runtime that will use it: its connections are driven by tasks there.
#[derive(Debug, Clone)]
pub struct PostgresStore {
    pub(crate) shared: Arc<Shared>,
}

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) schema: Schema,
    pub(crate) offset: TimeOffset,
    pub(crate) prelude: String,
    /// How long a statement of the store waits for somebody else's row, in milliseconds.
    pub(crate) lock_timeout: i64,
    pub(crate) transactions: TransactionSettings,
    /// How long a statement of the store may take, client's side included.
    pub(crate) patience: Duration,
    lanes: Lanes,
    /// For handlers' transactions.
    sessions: Arc<Sessions>,
    upkeep: PgPool,
    durability: DurabilityReport,
    pub(crate) identity: [u8; 16],
}

impl PostgresStore {
    /// Connects, refuses what cannot hold records, and brings the schema up to date.
    ///
    /// # Errors
    /// [`StoreError`]: [`Unavailable`](StoreErrorKind::Unavailable) when the server cannot be reached,
    /// [`Misconfigured`](StoreErrorKind::Misconfigured) when it is a replica, too old, not in UTF-8, or has no schema, or
    /// a newer one.
    pub async fn open(config: PostgresConfig) -> Result<Self, StoreError> {
        let schema = Schema::new(&config.schema)?;
        let options = config.connect_options()?;
        let patience = config.statement_timeout + Duration::from_secs(1);
        let late = |_| StoreError::new(StoreErrorKind::Unavailable, "Postgres did not accept a connection in time");
        let connected = timeout(patience, options.connect()).await.map_err(late)?;
        let mut connection = connected.map_err(connect_error)?;
        let server = health::examine(&mut connection).await?;
        if config.migrate {
            migrate::migrate(&mut connection, &schema, config.partitioned).await?;
        } else {
            migrate::expect_current(&mut connection, &schema).await?;
        }
        let identity = migrate::identity(&mut connection, &schema).await?;
        let goodbye = connection.close().await;
        goodbye.map_err(|error| store_error("close the first connection", error))?;
        let prelude = prelude(config.statement_timeout, config.lock_timeout);
        // Whatever the URL says: what sqlx prepares and has no room to remember stays in the session.
        let for_verbs = options.clone().statement_cache_capacity(PREPARED);
        let lanes = LaneSettings {
            options: if config.pooled { for_verbs } else { direct(for_verbs) },
            calls: Calls::new(&schema, !config.pooled),
            session: (!config.pooled).then(|| session(config.statement_timeout, config.lock_timeout)),
            begin: config.pooled.then(|| format!("{BEGIN}{prelude}")),
            begin_impatient: format!("{BEGIN}{}", self::prelude(config.statement_timeout, IMPATIENT)),
            offset: config.offset.clone(),
            statement_timeout: config.statement_timeout,
        };
        let transactions = TransactionSettings::new(&config, &schema, &server);
        let (questions, most) = (transactions.prepare(), config.max_transactions);
        let for_handlers = handlers_options(options.clone(), &config, &server);
        let sessions = Sessions::new(for_handlers, config.pooled, questions, patience, most);
        let upkeep = PgPoolOptions::new().max_connections(UPKEEP).acquire_timeout(patience).connect_lazy_with(options);
        // One that cannot serve handlers is found at the start.
        sessions.soon().await?.session().await?.give_back();
        Ok(Self {
            shared: Arc::new(Shared {
                lanes: Lanes::start(&lanes, config.verb_connections),
                transactions,
                schema,
                offset: config.offset,
                prelude,
                lock_timeout: milliseconds(config.lock_timeout),
                patience,
                sessions,
                upkeep,
                durability: server.durability,
                identity,
            }),
        })
    }

    pub(crate) fn sessions(&self) -> &Arc<Sessions> {
        &self.shared.sessions
    }

    /// What an acknowledged record survives on this server, and why.
    #[must_use]
    pub fn durability(&self) -> &DurabilityReport {
        &self.shared.durability
    }

    /// Reads the record, and where `lock` is given whether a transaction runs the operation.
    pub(crate) async fn read(&self, id: RecordId, lock: Option<i64>) -> Result<Seen, StoreError> {
        self.see(Verb::Look { id, lock, confirmed: false }).await
    }

    /// [`read`](Self::read), and what is read is on every standby that commits wait for. It is how to find out whether a write
    /// of one's own was committed when nobody was told.
    ///
    /// A commit that waits for a standby is seen by nobody. One whose wait has ended otherwise, because its session was
    /// terminated or the server has crashed and come back, is seen although no standby has it: a failover would take back
    /// what was seen.
    pub(crate) async fn read_confirmed(&self, id: RecordId, lock: Option<i64>) -> Result<Seen, StoreError> {
        self.see(Verb::Look { id, lock, confirmed: true }).await.map_err(StoreError::indeterminate)
    }

    async fn see(&self, verb: Verb) -> Result<Seen, StoreError> {
        match self.shared.lanes.run(verb).await? {
            Answer::Seen(seen) => Ok(seen),
            _ => Err(misanswered()),
        }
    }

    /// Puts `next`, which was decided on `row`, in its place. `lock` is given when `next` begins a run.
    async fn place(
        &self,
        id: RecordId,
        lock: Option<i64>,
        row: &Row,
        next: Option<&Record>,
    ) -> Result<Placed, StoreError> {
        let version = row.version;
        let verb = match next {
            Some(next) => Verb::Replace { id, lock, version, record: Box::new(FlatRecord::from(next)) },
            None => Verb::Remove { id, version },
        };
        match self.shared.lanes.run(verb).await? {
            Answer::Placed(placed) => Ok(placed),
            _ => Err(misanswered()),
        }
    }

    /// Puts the end to which a record has come without a run in place; `None` if it has changed meanwhile.
    pub(crate) async fn end(
        &self,
        request: &Acquire,
        row: Option<Box<Row>>,
        next: Option<Record>,
        outcome: AcquireOutcome,
    ) -> Result<Option<AcquireOutcome>, StoreError> {
        let Some(row) = row else { return Ok(Some(outcome)) };
        let lock = self.shared.schema.lock(&request.id);
        Ok(match self.place(request.id, Some(lock), &row, next.as_ref()).await? {
            Placed::Done => Some(outcome),
            Placed::Held => Some(IN_PROGRESS),
            Placed::Changed => None,
        })
    }

    /// The answer to an acquire that an earlier try has done; `None` if that is not so any more.
    async fn acquired_before(&self, request: &Acquire) -> Result<Option<AcquireOutcome>, StoreError> {
        let Seen { now, row, .. } = self.read_confirmed(request.id, None).await?;
        let before = row.as_ref().map(|row| &row.record);
        let (next, outcome) = machine::acquire(before, request, now);
        Ok((before.is_some() && next.as_ref() == before).then_some(outcome))
    }

    /// What only an owner may do. In the common case one statement does it; when it does not apply, the state machine
    /// says why, or decides what that statement does not.
    async fn act(&self, id: RecordId, owner: OwnerToken, action: OwnerAction<'_>) -> Result<OwnerOutcome, StoreError> {
        if owner != OwnerToken::NOBODY {
            match self.shared.lanes.run(Verb::of_owner(id, owner, action)).await? {
                Answer::Applied(true) => return Ok(OwnerOutcome::Applied),
                Answer::Applied(false) => {}
                _ => return Err(misanswered()),
            }
        }
        for _ in 0..ROUNDS {
            // That nothing is left to be done may be what an earlier try has done.
            let Seen { now, row, .. } = self.read_confirmed(id, None).await?;
            let before = row.as_ref().map(|row| &row.record);
            let (next, outcome) = machine::apply(before, owner, action, now);
            let Some(row) = &row else { return Ok(outcome) };
            if next.as_ref() == machine::current(before, now) {
                return Ok(outcome);
            }
            if self.place(id, None, row, next.as_ref()).await? == Placed::Done {
                return Ok(outcome);
            }
        }
        Err(contended())
    }

    /// Runs a statement of the store's upkeep, in a task of its own: a pool's future that is dropped midway would leave the
    /// connection in the middle of it.
    pub(crate) async fn maintain(
        &self,
        what: &'static str,
        sql: Sql,
        patience: Duration,
    ) -> Result<Vec<PgRow>, StoreError> {
        let (pool, sql) = (self.shared.upkeep.clone(), sql.into_text());
        let work = tokio::spawn(async move {
            let mut connection = pool.acquire().await.map_err(connect_error)?;
            let rows = timeout(patience, sqlx::raw_sql(AssertSqlSafe(sql)).fetch_all(&mut *connection)).await;
            match rows {
                Ok(Ok(rows)) => Ok(rows),
                Ok(Err(error)) => {
                    connection.close_on_drop();
                    Err(store_error(what, error))
                }
                Err(_) => {
                    connection.close_on_drop();
                    let message = format!("could not {what} within {patience:?}");
                    Err(StoreError::new(StoreErrorKind::Timeout, message))
                }
            }
        });
        work.await.map_err(|error| {
            let message = format!("could not {what}: the runtime ended");
            StoreError::new(StoreErrorKind::Unavailable, message).with_source(error).indeterminate()
        })?
    }
}

/// Everybody else was faster, again and again.
pub(crate) fn contended() -> StoreError {
    let message = format!("a record changed {ROUNDS} times while a decision on it was made");
    StoreError::new(StoreErrorKind::Unavailable, message)
}

/// How long a verb waits for a row once its batch has waited as long as it may: others of the batch want to go on.
const IMPATIENT: Duration = Duration::from_millis(5);

/// What the store's statements are to find, whatever the session's settings are.
fn settings(statement_timeout: Duration, lock_timeout: Duration) -> [(&'static str, String); 4] {
    [
        ("statement_timeout", milliseconds(statement_timeout).to_string()),
        ("lock_timeout", milliseconds(lock_timeout).to_string()),
        ("bytea_output", "hex".to_owned()),
        ("array_nulls", "on".to_owned()),
    ]
}

/// Those settings for the transaction.
fn prelude(statement_timeout: Duration, lock_timeout: Duration) -> String {
    format!("SELECT WHERE {} IS NULL;", set_for_transaction(settings(statement_timeout, lock_timeout)))
}

/// An expression that sets all of them until the transaction ends. One statement for each would cost the server several
/// times as much.
pub(crate) fn set_for_transaction(settings: impl IntoIterator<Item = (&'static str, impl Display)>) -> String {
    let calls = settings.into_iter().map(|(name, value)| format!("set_config('{name}','{value}',TRUE)"));
    format!("({})", calls.collect::<Vec<_>>().join("||"))
}

/// What a session of the store's own is told first: those settings, and that each of its transactions is as [`BEGIN`] says.
fn session(statement_timeout: Duration, lock_timeout: Duration) -> String {
    let settings = settings(statement_timeout, lock_timeout).map(|(name, value)| format!("SET {name}={value}"));
    let transactions = "SET default_transaction_isolation='read committed';SET default_transaction_deferrable=off";
    format!("{};{transactions};", settings.join(";"))
}

pub(crate) fn milliseconds(duration: Duration) -> i64 {
    // Zero would mean no limit, and more than an i32 of them is refused.
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX).clamp(1, i64::from(i32::MAX))
}

#[async_trait]
impl IdempotencyStore for PostgresStore {
    async fn acquire(&self, request: &Acquire) -> Result<AcquireOutcome, StoreError> {
        let lock = self.shared.schema.lock(&request.id);
        for _ in 0..planted!(ROUNDS, "acquire-without-its-loop" => 1) {
            let Seen { now, presence, row } = self.see(Verb::Acquire { request: request.clone(), lock }).await?;
            let before = row.as_ref().map(|row| &row.record);
            let at = planted!(now, "application-clock-for-expiry" => planted::machines_time());
            let (next, outcome) = machine::acquire(before, request, at);
            if row.is_none() {
                match presence {
                    // The statement made the record that the state machine makes when there is none.
                    Presence::Made => return Ok(outcome),
                    Presence::Held => return Ok(IN_PROGRESS),
                    // Somebody else made it at the same moment.
                    Presence::There | Presence::Absent => continue,
                }
            }
            if next.as_ref() == before {
                match outcome {
                    AcquireOutcome::Acquired(_) => match self.acquired_before(request).await? {
                        Some(outcome) => return Ok(outcome),
                        None => continue,
                    },
                    outcome => return Ok(outcome),
                }
            }
            if let Some(outcome) = self.end(request, row, next, outcome).await? {
                return Ok(outcome);
            }
        }
        Err(contended())
    }

    async fn renew(&self, lease: &Lease, term: Term) -> Result<OwnerOutcome, StoreError> {
        self.act(lease.id, lease.owner, OwnerAction::Renew(term)).await
    }

    async fn checkpoint(&self, lease: &Lease, checkpoint: &Checkpoint) -> Result<OwnerOutcome, StoreError> {
        self.act(lease.id, lease.owner, OwnerAction::Checkpoint(checkpoint)).await
    }

    async fn settle(
        &self,
        lease: &Lease,
        settlement: &Settlement,
        retention: Duration,
    ) -> Result<OwnerOutcome, StoreError> {
        self.act(lease.id, lease.owner, OwnerAction::Settle(settlement, retention)).await
    }

    async fn peek(&self, id: &RecordId) -> Result<Option<Record>, StoreError> {
        let Seen { now, row, .. } = self.read(*id, None).await?;
        Ok(row.map(|row| row.record).filter(|record| machine::current(Some(record), now).is_some()))
    }

    fn on_settled(&self, _: Weak<dyn SettlementListener>) {
        // NOTIFY takes a lock at COMMIT that nearly halves the throughput of settlements.
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::new("postgres", self.shared.durability.level, true)
    }
}

#[async_trait]
impl Purge for PostgresStore {
    async fn purge(&self, limit: NonZeroU32) -> Result<u32, StoreError> {
        let mut sql = Sql::default();
        let most = i32::try_from(limit.get()).unwrap_or(i32::MAX);
        sql.push(BEGIN).push(&self.shared.prelude).push("SELECT ");
        sql.push(self.shared.schema.quoted()).push(".idem_purge_v1(").number(self.shared.offset.micros()).push(",");
        sql.number(most).push(");COMMIT");
        let rows = self.maintain("purge", sql, self.shared.patience).await?;
        let removed = rows.first().map(|row| row.try_get::<i32, _>(0)).transpose();
        let removed = removed.map_err(|error| store_error("purge", error))?.unwrap_or_default();
        Ok(removed.unsigned_abs())
    }
}

/// Runs a statement whose rows are read by name or number.
pub(crate) async fn rows(
    connection: &mut PgConnection,
    what: &'static str,
    sql: impl Into<String>,
) -> Result<Vec<PgRow>, StoreError> {
    sqlx::raw_sql(AssertSqlSafe(sql.into())).fetch_all(connection).await.map_err(|error| store_error(what, error))
}
