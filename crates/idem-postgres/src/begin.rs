//! From a request to a handler's transaction.

use async_trait::async_trait;
use idem_core::{
    Acquire, AcquireOutcome, Begin, DurableStore, Look, Record, RecordId, StoreError, StoreErrorKind,
    TransactionalStore, machine,
};
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, Row as _};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::config::{Isolation, PostgresConfig};
use crate::connection::{UNTOUCHED, roll_back, transaction_settings};
use crate::error::{is_connection_lost, is_of_a_replica, is_unprepared, store_error, unreadable};
use crate::health::Server;
use crate::literal::Sql;
use crate::row::seen;
use crate::schema::Schema;
use crate::sessions::{Place, Session};
use crate::store::{IN_PROGRESS, PostgresStore, ROUNDS, contended, milliseconds, set_for_transaction};
use crate::transaction::PostgresTransaction;
use crate::verb::{Presence, Seen, misanswered};

const TAKES_NO_WRITES: &str = "could not begin a transaction: default_transaction_read_only is on";

/// What every handler's transaction begins with.
#[derive(Debug)]
pub(crate) struct TransactionSettings {
    begin: String,
    lock: Question,
    look: Question,
    /// What is done last before the handler's turn.
    last: String,
    max: u32,
    /// Whether a transaction sees everything as it was at one moment.
    pub(crate) sees_one_moment: bool,
}

impl TransactionSettings {
    pub(crate) fn new(config: &PostgresConfig, schema: &Schema, server: &Server) -> Self {
        let begin = format!(
            "BEGIN ISOLATION LEVEL {}{} NOT DEFERRABLE;",
            config.isolation.sql(),
            if config.pooled { "" } else { " READ WRITE" },
        );
        let unprepare = if config.pooled { ";SELECT \"idem\".idem_unprepare_v1()" } else { "" };
        let [lock, look] = Question::both(config, schema, server);
        Self {
            begin,
            lock,
            look,
            last: schema.localise(unprepare),
            max: config.max_transactions.get(),
            sees_one_moment: config.isolation != Isolation::ReadCommitted,
        }
    }

    /// What a session of this client's own is told at its beginning.
    pub(crate) fn prepare(&self) -> String {
        self.lock.prepare() + &self.look.prepare()
    }

    /// Begins a transaction, tries to get the lock of an operation, and looks at its record.
    fn sql(&self, lock: i64, id: &RecordId, skew: i64) -> String {
        let mut sql = Sql::default();
        sql.push(&self.begin);
        // A statement of its own: the next one sees what whoever held the lock until now has made.
        self.lock.ask(&mut sql, |arguments| {
            arguments.number(lock);
        });
        sql.push("SAVEPOINT idem;");
        self.look.ask(&mut sql, |arguments| {
            arguments.number(skew).push(",ARRAY[").bytes(id.as_bytes()).push("],ARRAY[NULL::BIGINT]");
        });
        // Takes back the settings, which are not the handler's, and the lock on the table, which else would be kept for as
        // long as the handler runs, and keep others from dropping a partition.
        sql.push("ROLLBACK TO SAVEPOINT idem").push(&self.last);
        sql.into_text()
    }
}

/// What is asked at the beginning of each transaction. A session that is this client's own keeps it prepared: to parse and plan
/// it costs the server more than to answer it.
#[derive(Debug)]
struct Question {
    name: &'static str,
    types: &'static str,
    before_arguments: String,
    after_arguments: String,
    is_prepared: bool,
}

impl Question {
    /// For the lock of an operation, and for what there is of its record.
    fn both(config: &PostgresConfig, schema: &Schema, server: &Server) -> [Self; 2] {
        let is_prepared = !config.pooled;
        let question = |name, types, before: &str, after: String| Self {
            name,
            types,
            before_arguments: schema.localise(before),
            after_arguments: after,
            is_prepared,
        };
        // Whatever an earlier handler has set, so that no transaction keeps its key for ever.
        let settings = set_for_transaction(transaction_settings(config, server));
        let lock = question("idem_lock", "BIGINT", "SELECT pg_try_advisory_xact_lock(", format!("),{settings}"));
        // What the server's default is, which is hidden behind that of the session: somebody may have turned off writing. And
        // first of all how long to wait, and how to write bytes.
        let settings = set_for_transaction([
            ("lock_timeout", milliseconds(config.lock_timeout).to_string()),
            ("bytea_output", "hex".to_owned()),
        ]);
        let before = format!(
            "SELECT first.read_only, look.* FROM (
                SELECT {settings} AS done, set_config('default_transaction_read_only', NULL, TRUE) AS read_only OFFSET 0
            ) AS first CROSS JOIN LATERAL (SELECT * FROM \"idem\".idem_look_v1("
        );
        let after = ") WHERE first.done IS NOT NULL OFFSET 0) AS look".to_owned();
        [lock, question("idem_look", "BIGINT, BYTEA[], BIGINT[]", &before, after)]
    }

    /// Makes a session know it.
    fn prepare(&self) -> String {
        let Self { name, types, before_arguments, after_arguments, .. } = self;
        let count = types.split(',').count();
        let places = (1..=count).map(|place| format!("${place}")).collect::<Vec<_>>().join(",");
        format!("PREPARE {name}({types}) AS {before_arguments}{places}{after_arguments};")
    }

    fn ask(&self, sql: &mut Sql, arguments: impl FnOnce(&mut Sql)) {
        if self.is_prepared {
            sql.push("EXECUTE ").push(self.name).push("(");
            arguments(sql);
            sql.push(");");
        } else {
            sql.push(&self.before_arguments);
            arguments(sql);
            sql.push(&self.after_arguments).push(";");
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
            let place = match self.sessions().now() {
                Some(place) => place,
                // Repeats wait neither for a handler to give its connection back nor for a new one.
                None => match self.answer_without_running(request).await? {
                    Some(outcome) => return Ok(Begin::Answered(outcome)),
                    None => self.sessions().soon().await?,
                },
            };
            let mut entered = enter(self, request.id, place).await?;
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
    session: Session,
}

impl Entered {
    /// Ends the transaction, in which nothing was done, behind the caller's back. If that fails the connection is closed,
    /// which ends the transaction as well.
    pub(crate) fn leave(self) -> JoinHandle<Result<(), StoreError>> {
        tokio::spawn(roll_back(self.session, UNTOUCHED, true))
    }

    /// Makes it the transaction of a run. `record` is what the state machine made of the one that was seen.
    pub(crate) fn run(self, store: PostgresStore, request: &Acquire, record: Record) -> PostgresTransaction {
        PostgresTransaction {
            session: self.session,
            store,
            id: request.id,
            origin: request.origin.clone(),
            record,
            version: self.seen.row.map(|row| row.version),
        }
    }
}

/// Begins a transaction and tries to get the operation's lock in it.
pub(crate) async fn enter(store: &PostgresStore, id: RecordId, place: Place) -> Result<Entered, StoreError> {
    let store = store.clone();
    // In a task of its own: if the caller goes away, the task still ends, and whatever it opened is closed.
    let entered = tokio::spawn(async move {
        let shared = &store.shared;
        let lock = shared.schema.lock(&id);
        let sql = shared.transactions.sql(lock, &id, shared.offset.micros());
        let mut place = Some(place);
        // Connections may have died while nobody used them, as many as there are.
        for _ in 0..shared.transactions.max {
            match begin(&store, place.take(), &sql).await {
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

async fn begin(store: &PostgresStore, place: Option<Place>, sql: &str) -> Result<Entered, BeginError> {
    let place = match place {
        Some(place) => place,
        None => store.sessions().soon().await.map_err(BeginError::Other)?,
    };
    let mut session = place.session().await.map_err(BeginError::Other)?;
    let patience = store.shared.patience;
    let begun = sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).fetch_all(&mut *session);
    match timeout(patience, begun).await {
        Ok(Ok(rows)) => match what_was_seen(&rows).map_err(BeginError::Other)? {
            Some(seen) => Ok(Entered { seen, session }),
            None => Err(BeginError::Lost(StoreError::new(StoreErrorKind::Unavailable, TAKES_NO_WRITES))),
        },
        Ok(Err(error)) if is_connection_lost(&error) || is_of_a_replica(&error) || is_unprepared(&error) => {
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
    let locked: bool = lock.try_get(0).map_err(unreadable)?;
    if record.try_get::<String, _>(0).map_err(unreadable)? == "on" {
        return Ok(None);
    }
    let seen = seen(record, 2)?;
    Ok(Some(if locked { seen } else { Seen { presence: Presence::Held, ..seen } }))
}
