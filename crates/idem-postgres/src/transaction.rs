//! The transaction that a handler makes its business writes in.

use std::any::Any;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::time::Duration;

use async_trait::async_trait;
use idem_core::codec::FlatRecord;
use idem_core::{
    Acquire, Origin, OwnerOutcome, OwnerToken, Record, RecordId, Settlement, State, StoreError, StoreErrorKind,
    StoreTransaction, Writes,
};
use sqlx::pool::PoolConnection;
use sqlx::postgres::{PgConnectOptions, PgRow};
use sqlx::{AssertSqlSafe, Connection, PgConnection, PgPool, Postgres, Row as _};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

use crate::config::{Isolation, PostgresConfig};
use crate::error::{
    connect_error, is_changed, is_connection_lost, is_of_a_replica, is_out_of_transaction, store_error,
};
use crate::health::Server;
use crate::literal::{Sql, readable};
use crate::row::seen;
use crate::schema::Schema;
use crate::store::PostgresStore;
use crate::verb::{End, Presence, Seen, misanswered};

/// How long a COMMIT may take, and how long to find out how a transaction ended whose COMMIT got no answer: together less
/// than the engine waits for the end.
const COMMIT_WITHIN: Duration = Duration::from_secs(5);
const FIND_OUT_WITHIN: Duration = Duration::from_secs(4);

/// The pause between two looks at how it ended.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// Rolls back a transaction that is as the handler left it; fails when somebody has ended it.
const UNTOUCHED: &str = "ROLLBACK TO SAVEPOINT idem;ROLLBACK";

/// Rolls back a transaction that has failed in the store's own statements.
const FAILED: &str = "ROLLBACK";

/// How many transactions sqlx believes to be open on a connection that serves handlers, and on one through a proxy, where
/// there is nothing else that stands against a handler who begins again and again in a transaction that has failed.
const BELIEVED_DEPTH: u32 = 16;
const BELIEVED_DEPTH_POOLED: u32 = 256;

/// How long to wait for the server to roll back; after that the connection is closed, which comes to the same.
const ROLL_BACK_WITHIN: Duration = Duration::from_secs(5);

/// An open transaction; it dereferences to the connection, so `&mut *transaction` (or `&mut **guard`) runs queries, and
/// `begin` on it makes a savepoint.
///
/// The key is held by a lock that lives and dies with the transaction: if this process or its machine disappears, the
/// server rolls everything back and the key is free.
///
/// Do not end it yourself: that is noticed, and the settlement then fails.
pub struct PostgresTransaction {
    open: Open,
    store: PostgresStore,
    id: RecordId,
    origin: Origin,
    /// The record as the state machine would have it while the operation runs. Nobody writes it.
    record: Record,
    /// The row that it was decided on, if there was one.
    version: Option<i64>,
}

/// What every handler's transaction begins with.
#[derive(Debug)]
pub(crate) struct TransactionSettings {
    begin: String,
    /// What is done last before the handler's turn.
    last: String,
    max: u32,
    /// Whether a transaction sees everything as it was at one moment.
    pub(crate) sees_one_moment: bool,
}

impl TransactionSettings {
    pub(crate) fn new(config: &PostgresConfig, schema: &Schema, server: &Server) -> Self {
        let idle = config.idle_in_transaction.as_millis().clamp(1, i32::MAX as u128);
        // A machine that vanished is noticed within half a minute, as a lease would be, and not after the hours that
        // operating systems take by default.
        let mut begin = format!(
            "BEGIN ISOLATION LEVEL {}{} NOT DEFERRABLE;SET LOCAL idle_in_transaction_session_timeout={idle};\
             SET LOCAL tcp_keepalives_idle=10;SET LOCAL tcp_keepalives_interval=5;SET LOCAL tcp_keepalives_count=4;",
            config.isolation.sql(),
            if config.pooled { "" } else { " READ WRITE" },
        );
        if server.notices_closed_clients {
            // A process that died in the middle of a long statement: the server notices before the statement's end.
            begin.push_str("SET LOCAL client_connection_check_interval=1000;");
        }
        let unprepare = if config.pooled { ";SELECT \"idem\".idem_unprepare_v1()" } else { "" };
        Self {
            begin,
            last: schema.localise(unprepare),
            max: config.max_transactions.get(),
            sees_one_moment: config.isolation != Isolation::ReadCommitted,
        }
    }
}

/// A transaction that has begun, and what was seen in it: whether the lock was to be had, and the record.
pub(crate) struct Entered {
    pub(crate) seen: Seen,
    connection: Open,
}

/// A connection with an open transaction. Dropped as it is, it is closed, so that nothing is left for the next borrower.
struct Open {
    connection: PoolConnection<Postgres>,
    ended: bool,
    /// Whether it may serve again once its transaction has ended.
    reusable: bool,
}

impl Open {
    /// Ends the transaction without a trace, by the statement that does so.
    async fn roll_back(mut self, how: &'static str) -> Result<(), StoreError> {
        let rolled_back = sqlx::raw_sql(how).execute(&mut *self.connection);
        let late = |_| StoreError::new(StoreErrorKind::Timeout, format!("no ROLLBACK within {ROLL_BACK_WITHIN:?}"));
        let rolled_back = timeout(ROLL_BACK_WITHIN, rolled_back).await.map_err(late)?;
        rolled_back.map_err(|error| match is_out_of_transaction(&error) {
            true => out_of_transaction(error),
            false => store_error("roll back", error),
        })?;
        self.ended = self.reusable;
        Ok(())
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        if !self.ended {
            self.connection.close_on_drop();
        }
    }
}

/// Prepares a new connection for handlers' transactions.
///
/// They begin and end with statements of the store's own, each of which does more than that in one round trip, and sqlx
/// knows nothing of it. So that a handler's `begin` makes a savepoint all the same, and its `commit` ends no more than
/// that, sqlx is made to believe that transactions are open on this connection, one inside the other, always.
///
/// A `begin` of the handler's that fails or is cancelled is undone by sqlx with a ROLLBACK of the innermost: deep inside,
/// that names a savepoint that is not there, and the transaction fails. At the outermost it would be ended, and what the
/// handler writes next would commit without the record; see [`handlers_options`] for what is done against that. Each such
/// begin brings sqlx one or two levels up, so a connection serves again only after a transaction that was kept.
pub(crate) async fn prepare(connection: &mut PgConnection, pooled: bool) -> Result<(), sqlx::Error> {
    for _ in 0..if pooled { BELIEVED_DEPTH_POOLED } else { BELIEVED_DEPTH } {
        std::mem::forget(connection.begin().await?);
    }
    sqlx::raw_sql("ROLLBACK").execute(&mut *connection).await?;
    if pooled {
        return Ok(());
    }
    let direct = sqlx::raw_sql("SELECT current_setting('idem.direct', TRUE)").fetch_one(&mut *connection).await?;
    if direct.try_get::<Option<String>, _>(0)?.as_deref() != Some("on") {
        // A proxy that ignores what it does not know.
        return Err(sqlx::Error::Configuration(NEEDS_OPTIONS.into()));
    }
    sqlx::raw_sql("SET default_transaction_read_only = on").execute(connection).await.map(drop)
}

const TAKES_NO_WRITES: &str = "could not begin a transaction: default_transaction_read_only is on";

/// What to say when start-up options do not reach the server.
pub(crate) const NEEDS_OPTIONS: &str =
    "something between here and the server takes no start-up options; say through_transaction_pooler()";

/// The options of connections for handlers' transactions.
///
/// Outside of those transactions nothing can be written: whatever ends one before its time, nothing is committed without
/// its record after that. A transaction-pooling proxy cannot do that for one client alone, and would do it to all; so
/// there is an option by which to see that the session is this client's own.
pub(crate) fn handlers_options(options: PgConnectOptions, pooled: bool) -> PgConnectOptions {
    if pooled { options } else { options.options([("idem.direct", "on")]) }
}

/// Begins a transaction and tries to get the operation's lock in it.
pub(crate) async fn enter(store: &PostgresStore, id: RecordId, idle: Idle) -> Result<Entered, StoreError> {
    let store = store.clone();
    // In a task of its own: if the caller goes away, the task still ends, and whatever it opened is closed.
    let entered = tokio::spawn(async move {
        let shared = &store.shared;
        let mut sql = Sql::default();
        sql.push(&shared.transactions.begin).push("SELECT pg_try_advisory_xact_lock(");
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
    let locked: bool = lock.try_get(0).map_err(crate::error::unreadable)?;
    if record.try_get::<String, _>(0).map_err(crate::error::unreadable)? == "on" {
        return Ok(None);
    }
    let seen = seen(record, 2)?;
    Ok(Some(if locked { seen } else { Seen { presence: Presence::Held, ..seen } }))
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

impl PostgresTransaction {
    /// Everything that ends the transaction, in one message: the record is there only if the commit is.
    fn end(&self, end: Option<&End>, writes: Writes) -> String {
        let mut sql = Sql::default();
        // Fails when the handler has ended the transaction, or an error that it overlooked has: then what it wrote is
        // not what would be committed here.
        sql.push(match writes {
            Writes::Keep => "RELEASE SAVEPOINT idem;",
            Writes::Discard => "ROLLBACK TO SAVEPOINT idem;RELEASE SAVEPOINT idem;",
        });
        if let Some(end) = end {
            sql.push(&self.store.shared.prelude);
            self.write_record(&mut sql, end);
            // The application's deferred constraints are checked by the commit, in the time that the application gives
            // them.
            sql.push("SET LOCAL statement_timeout TO DEFAULT;SET LOCAL lock_timeout TO DEFAULT;");
        }
        sql.push("COMMIT");
        sql.into_text()
    }

    fn write_record(&self, sql: &mut Sql, end: &End) {
        let shared = &self.store.shared;
        let flat = FlatRecord::from(&self.record);
        let principal = self.origin.scope.principal().map(readable);
        let again = end.wait.is_some();
        sql.push("SELECT ").push(shared.schema.quoted()).push(".idem_put_v1(").number(shared.offset.micros()).push(",");
        sql.bytes(self.id.as_bytes()).push(",").number(shared.schema.lock(&self.id)).push(",");
        sql.optional_number(self.version).push(",");
        sql.bytes(&readable(&self.origin.namespace)).push(",").optional_bytes(principal.as_deref()).push(",");
        sql.bytes(&readable(self.origin.scope.operation())).push(",").number(flat.format).push("::SMALLINT,");
        sql.number(flat.fingerprint_algorithm).push(",").bytes(&flat.fingerprint).push(",").bytes(&flat.owner);
        sql.push(",").number(flat.attempt).push(",").number(end.state).push("::SMALLINT,").optional_number(end.wait);
        // What is to run again needs what it left behind.
        let name = flat.checkpoint_name.as_ref().filter(|_| again);
        sql.push(",").optional_bytes(name.map(String::as_bytes)).push(",");
        sql.optional_bytes(flat.checkpoint_data.as_deref().filter(|_| again)).push(",").number(end.status).push(",");
        sql.bytes(&end.headers).push(",").optional_bytes(end.body.as_deref()).push(",");
        sql.number(flat.created_at).push(",").number(end.retention).push(");");
    }

    /// Finds out how the transaction ended, after COMMIT got no answer. Its lock tells when it has ended, and only then
    /// the record tells how.
    async fn find_out(self, error: StoreError) -> Result<OwnerOutcome, StoreError> {
        let (store, id, owner) = (self.store.clone(), self.id, self.record.owner);
        let lock = store.shared.schema.lock(&id);
        // The server is to notice at once that nobody is there any more.
        drop(self);
        let give_up_at = Instant::now() + FIND_OUT_WITHIN;
        while Instant::now() < give_up_at {
            match store.look(id, Some(lock)).await {
                Ok(seen) if seen.presence != Presence::Held => {
                    return match seen.row {
                        Some(row) if is_settled_by(&row.record, owner) => Ok(OwnerOutcome::Applied),
                        _ => {
                            let message = "the connection was lost before COMMIT, and everything was rolled back";
                            Err(StoreError::new(StoreErrorKind::Unavailable, message).with_source(error))
                        }
                    };
                }
                Ok(_) | Err(_) => sleep(LOOK_AGAIN).await,
            }
        }
        Err(error)
    }
}

fn out_of_transaction(error: sqlx::Error) -> StoreError {
    let message = "the handler has ended its transaction, or an error in it that it overlooked has";
    StoreError::new(StoreErrorKind::Unavailable, message).with_source(error)
}

fn is_settled_by(record: &Record, owner: OwnerToken) -> bool {
    record.owner == owner && !matches!(record.state, State::InProgress { .. })
}

#[async_trait]
impl StoreTransaction for PostgresTransaction {
    async fn finish(
        self: Box<Self>,
        settlement: &Settlement,
        retention: Duration,
        writes: Writes,
    ) -> Result<OwnerOutcome, StoreError> {
        let mut transaction = *self;
        // Only after what was kept is it certain that sqlx believes the same of the connection as before.
        transaction.open.reusable = writes == Writes::Keep;
        let end = End::of(settlement, retention);
        if end.is_none() && writes == Writes::Discard {
            transaction.open.roll_back(UNTOUCHED).await?;
            return Ok(OwnerOutcome::Applied);
        }
        let sql = transaction.end(end.as_ref(), writes);
        let ending = sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut *transaction.open.connection);
        let Ok(ended) = timeout(COMMIT_WITHIN, ending).await else {
            let error = StoreError::new(StoreErrorKind::Timeout, format!("no answer to COMMIT in {COMMIT_WITHIN:?}"));
            return if end.is_none() { Err(error) } else { transaction.find_out(error).await };
        };
        match ended {
            Ok(_) => {
                transaction.open.ended = transaction.open.reusable;
                Ok(OwnerOutcome::Applied)
            }
            Err(error) if is_changed(&error) => {
                transaction.open.roll_back(FAILED).await?;
                Ok(OwnerOutcome::LeaseLost)
            }
            Err(error) if is_connection_lost(&error) => {
                let error = store_error("commit", error).indeterminate();
                // Without a record nothing is left by which to tell.
                if end.is_none() { Err(error) } else { transaction.find_out(error).await }
            }
            Err(error) if is_out_of_transaction(&error) => Err(out_of_transaction(error)),
            // Whatever the server refused, it kept nothing: a deferred constraint says so in the name of the record.
            Err(error) => match store_error("commit", error) {
                error if error.is_retryable() => Err(error),
                error => {
                    let message = "the server refused to commit, and everything was rolled back";
                    Err(StoreError::new(StoreErrorKind::Unavailable, message).with_source(error))
                }
            },
        }
    }

    fn as_any_mut(&mut self) -> &mut (dyn Any + Send) {
        self
    }
}

impl Deref for PostgresTransaction {
    type Target = PgConnection;

    fn deref(&self) -> &PgConnection {
        &self.open.connection
    }
}

impl DerefMut for PostgresTransaction {
    fn deref_mut(&mut self) -> &mut PgConnection {
        &mut self.open.connection
    }
}

impl fmt::Debug for PostgresTransaction {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("PostgresTransaction")
            .field("id", &self.id)
            .field("attempt", &self.record.attempt)
            .finish_non_exhaustive()
    }
}
