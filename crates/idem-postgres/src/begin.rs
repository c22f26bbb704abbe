//! From a request to a handler's transaction.

use async_trait::async_trait;
use idem_core::{
    Acquire, AcquireOutcome, Begin, DurableStore, Look, Record, RecordId, StoreError, StoreErrorKind,
    TransactionalStore, machine,
};
use sqlx::pool::PoolConnection;
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, PgPool, Postgres, Row as _};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::config::{Isolation, PostgresConfig};
use crate::connection::{Open, UNTOUCHED, vigilance};
use crate::error::{connect_error, is_connection_lost, is_of_a_replica, store_error, unreadable};
use crate::health::Server;
use crate::literal::Sql;
use crate::row::seen;
use crate::schema::Schema;
use crate::store::{IN_PROGRESS, PostgresStore, ROUNDS, contended, milliseconds, set_for_transaction};
use crate::transaction::PostgresTransaction;
use crate::verb::{Presence, Seen, misanswered};

const TAKES_NO_WRITES: &str = "could not begin a transaction: default_transaction_read_only is on";

/// What every handler's transaction begins with.
#[derive(Debug)]
pub(crate) struct TransactionSettings {
    /// The beginning of the statement that asks for the lock included.
    begin: String,
    /// What is done last before the handler's turn.
    last: String,
    max: u32,
    /// Whether a transaction sees everything as it was at one moment.
    pub(crate) sees_one_moment: bool,
}

impl TransactionSettings {
    pub(crate) fn new(config: &PostgresConfig, schema: &Schema, server: &Server) -> Self {
        let mut settings = vec![("idle_in_transaction_session_timeout", milliseconds(config.idle_in_transaction))];
        if config.pooled {
            // Directly they are options of the connection.
            settings.extend(vigilance(server.notices_closed_clients));
        }
        let begin = format!(
            "BEGIN ISOLATION LEVEL {}{} NOT DEFERRABLE;SELECT {},",
            config.isolation.sql(),
            if config.pooled { "" } else { " READ WRITE" },
            set_for_transaction(settings),
        );
        let unprepare = if config.pooled { ";SELECT \"idem\".idem_unprepare_v1()" } else { "" };
        Self {
            begin,
            last: schema.localise(unprepare),
            max: config.max_transactions.get(),
            sees_one_moment: config.isolation != Isolation::ReadCommitted,
        }
    }
}

#[async_trait]
impl DurableStore for PostgresStore {
    async fn look(&self, id: &RecordId) -> Result<Option<Look>, StoreError> {
        let Seen { now, row, .. } = self.read(*id, None).await?;
        Ok(row.and_then(|row| Look::at(row.record, now)))
    }

    fn identity(&self) -> [u8; 16] {
        self.shared.identity
    }
}

#[async_trait]
impl TransactionalStore for PostgresStore {
    async fn begin(&self, request: &Acquire) -> Result<Begin, StoreError> {
        for _ in 0..ROUNDS {
            let idle = match Idle::now(self.pool()) {
                Some(idle) => idle,
                // All connections may be taken by handlers that run: repeats do not wait for one of them.
                None => match self.answer_without_running(request).await? {
                    Some(outcome) => return Ok(Begin::Answered(outcome)),
                    None => Idle::soon(self.pool()).await?,
                },
            };
            let mut entered = enter(self, request.id, idle).await?;
            if self.shared.transactions.sees_one_moment && !self.is_current(request.id, &entered.seen).await? {
                let _ = entered.leave().await;
                continue;
            }
            let before = entered.seen.row.as_ref().map(|row| &row.record);
            let (next, outcome) = machine::acquire(before, request, entered.seen.now);
            let held = entered.seen.presence == Presence::Held;
            let unchanged = next.as_ref() == before;
            match (outcome, next) {
                (AcquireOutcome::Acquired(lease), Some(record)) if !held => {
                    let transaction = Box::new(entered.run(self.clone(), request, record));
                    return Ok(Begin::Acquired { lease, transaction, renew: false });
                }
                (AcquireOutcome::Acquired(_), _) => {
                    entered.leave();
                    return Ok(Begin::Answered(IN_PROGRESS));
                }
                (outcome, _) if unchanged => {
                    entered.leave();
                    return Ok(Begin::Answered(outcome));
                }
                (outcome, next) => {
                    let row = entered.seen.row.take();
                    // Before anybody can put the end of the record in place, the lock has to be given back.
                    let _ = entered.leave().await;
                    if let Some(outcome) = self.end(request, row, next, outcome).await? {
                        return Ok(Begin::Answered(outcome));
                    }
                }
            }
        }
        Err(contended())
    }
}

impl PostgresStore {
    /// The answer to a request whose operation runs or is settled; `None` if it may have to run.
    async fn answer_without_running(&self, request: &Acquire) -> Result<Option<AcquireOutcome>, StoreError> {
        let lock = self.shared.schema.lock(&request.id);
        let Seen { now, presence, row } = self.read(request.id, Some(lock)).await?;
        let before = row.as_ref().map(|row| &row.record);
        let (next, outcome) = machine::acquire(before, request, now);
        Ok(match outcome {
            AcquireOutcome::Acquired(_) if presence == Presence::Held => Some(IN_PROGRESS),
            AcquireOutcome::Acquired(_) => None,
            outcome => (next.as_ref() == before).then_some(outcome),
        })
    }

    /// Whether what was seen in a transaction is still so. One that sees everything as it was when it began may have begun
    /// before its lock was free, and what whoever held it made is then hidden from it.
    async fn is_current(&self, id: RecordId, seen: &Seen) -> Result<bool, StoreError> {
        let version = |seen: &Seen| seen.row.as_ref().map(|row| row.version);
        Ok(version(&self.read(id, None).await?) == version(seen))
    }
}

/// A transaction that has begun, and what was seen in it: whether the lock was to be had, and the record.
pub(crate) struct Entered {
    pub(crate) seen: Seen,
    connection: Open,
}

impl Entered {
    /// Ends the transaction, in which nothing was done, behind the caller's back. If that fails the connection is closed,
    /// which ends the transaction as well.
    pub(crate) fn leave(self) -> JoinHandle<Result<(), StoreError>> {
        tokio::spawn(self.connection.roll_back(UNTOUCHED))
    }

    /// Makes it the transaction of a run. `record` is what the state machine made of the one that was seen.
    pub(crate) fn run(self, store: PostgresStore, request: &Acquire, record: Record) -> PostgresTransaction {
        PostgresTransaction {
            open: self.connection,
            store,
            id: request.id,
            origin: request.origin.clone(),
            record,
            version: self.seen.row.map(|row| row.version),
        }
    }
}

/// Begins a transaction and tries to get the operation's lock in it.
pub(crate) async fn enter(store: &PostgresStore, id: RecordId, idle: Idle) -> Result<Entered, StoreError> {
    let store = store.clone();
    // In a task of its own: if the caller goes away, the task still ends, and whatever it opened is closed.
    let entered = tokio::spawn(async move {
        let shared = &store.shared;
        let mut sql = Sql::default();
        sql.push(&shared.transactions.begin).push("pg_try_advisory_xact_lock(");
        // A statement of its own: the next one sees what whoever held the lock until now has made.
        sql.number(shared.schema.lock(&id)).push(");SAVEPOINT idem;").push(&shared.prelude);
        // What the server's default is, which is hidden behind that of this session: somebody may have turned off writing.
        sql.push("SET LOCAL default_transaction_read_only TO DEFAULT;");
        sql.push("SELECT current_setting('default_transaction_read_only'), look.* FROM ").push(shared.schema.quoted());
        sql.push(".idem_look_v1(").number(shared.offset.micros()).push(",ARRAY[").bytes(id.as_bytes());
        // Takes the timeouts back, which are not the handler's, and the lock on the table, which else would be kept for as
        // long as the handler runs, and keep others from dropping a partition.
        sql.push("],ARRAY[NULL::BIGINT]) AS look;ROLLBACK TO SAVEPOINT idem").push(&shared.transactions.last);
        let sql = sql.into_text();
        let mut idle = Some(idle.0);
        // Connections may have died while nobody used them, as many as there are.
        for _ in 0..shared.transactions.max {
            match begin(&store, idle.take(), &sql).await {
                Err(BeginError::Lost(_)) => {}
                Err(BeginError::Other(error)) => return Err(error),
                Ok(entered) => return Ok(entered),
            }
        }
        begin(&store, None, &sql).await.map_err(BeginError::into_error)
    });
    entered.await.map_err(|error| {
        StoreError::new(StoreErrorKind::Unavailable, "the runtime ended while a transaction began").with_source(error)
    })?
}

/// A connection that nobody uses just now.
pub(crate) struct Idle(PoolConnection<Postgres>);

impl Idle {
    /// One at once, or none.
    pub(crate) fn now(pool: &PgPool) -> Option<Self> {
        pool.try_acquire().map(Self)
    }

    /// One, as soon as there is one.
    pub(crate) async fn soon(pool: &PgPool) -> Result<Self, StoreError> {
        // Dropping this future leaves the queue of those who wait, and nothing else.
        pool.acquire().await.map(Self).map_err(connect_error)
    }
}

enum BeginError {
    Lost(StoreError),
    Other(StoreError),
}

impl BeginError {
    fn into_error(self) -> StoreError {
        match self {
            Self::Lost(error) | Self::Other(error) => error,
        }
    }
}

async fn begin(
    store: &PostgresStore,
    idle: Option<PoolConnection<Postgres>>,
    sql: &str,
) -> Result<Entered, BeginError> {
    let connection = match idle {
        Some(connection) => connection,
        None => store.pool().acquire().await.map_err(|error| BeginError::Other(connect_error(error)))?,
    };
    let mut open = Open { connection, ended: false, reusable: true };
    let patience = store.shared.patience;
    let begun = sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).fetch_all(&mut *open.connection);
    match timeout(patience, begun).await {
        Ok(Ok(rows)) => match what_was_seen(&rows).map_err(BeginError::Other)? {
            Some(seen) => Ok(Entered { seen, connection: open }),
            None => Err(BeginError::Lost(StoreError::new(StoreErrorKind::Unavailable, TAKES_NO_WRITES))),
        },
        Ok(Err(error)) if is_connection_lost(&error) || is_of_a_replica(&error) => {
            Err(BeginError::Lost(store_error("begin a transaction", error)))
        }
        Ok(Err(error)) => Err(BeginError::Other(store_error("begin a transaction", error))),
        Err(_) => {
            let message = format!("a transaction did not begin within {patience:?}");
            Err(BeginError::Other(StoreError::new(StoreErrorKind::Timeout, message)))
        }
    }
}

/// `None` when the server shall not be written to.
fn what_was_seen(rows: &[PgRow]) -> Result<Option<Seen>, StoreError> {
    let [lock, record, ..] = rows else { return Err(misanswered()) };
    let locked: bool = lock.try_get(1).map_err(unreadable)?;
    if record.try_get::<String, _>(0).map_err(unreadable)? == "on" {
        return Ok(None);
    }
    let seen = seen(record, 2)?;
    Ok(Some(if locked { seen } else { Seen { presence: Presence::Held, ..seen } }))
}
