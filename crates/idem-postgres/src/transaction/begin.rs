//! Begins a handler's transaction for a request.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use idem_core::{
    Acquire, AcquireOutcome, Begin, Lease, Record, RecordId, StoreError, StoreErrorKind, Timestamp, machine,
};
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, Row as _};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::batch::row::read_lookup;
use crate::batch::verb::{Lookup, Presence, unexpected_answer};
use crate::connect::application_pool::restore_role;
use crate::connect::session::Session;
use crate::connect::sessions::{Permit, Sessions};
use crate::error::{is_connection_lost, is_lock_timeout, is_of_a_replica, is_unprepared, outage, unreadable};
use crate::records::{IN_PROGRESS, ROUNDS, Records, contended};
use crate::sql::own_rows;
use crate::transaction::handler_transaction::PostgresTransaction;
use crate::transaction::run::{PreviousRow, TransactionRun};
use crate::transaction::statements::{Mark, TransactionSettings};

const READ_ONLY_SERVER: &str =
    "could not begin a transaction: default_transaction_read_only is on; turn it off for this user and database";

const SESSION_WAS_RESET: &str =
    "could not begin a transaction: the session has lost the store's settings, as after RESET ALL or DISCARD ALL";

/// Begins transactions for handlers.
#[derive(Debug)]
pub(crate) struct Transactions {
    pub(crate) records: Arc<Records>,
    pub(crate) sessions: Arc<Sessions>,
    pub(crate) settings: Arc<TransactionSettings>,
    /// How long the first statements of a transaction may take, including the round trip.
    pub(crate) client_timeout: Duration,
}

impl Transactions {
    pub(crate) async fn begin(self: &Arc<Self>, request: &Acquire) -> Result<Begin, StoreError> {
        // The batcher looks up the outcome of a transaction whose COMMIT got no answer.
        self.records.batcher.expect_open()?;
        let deadline = self.sessions.deadline();
        for _ in 0..ROUNDS {
            let permit = match self.sessions.permit_soon(deadline).await {
                Some(permit) => permit,
                // A repeat waits neither longer for a handler's connection nor for a new one.
                None => match self.answer_without_running(request).await? {
                    Some(outcome) => return Ok(Begin::Answered(outcome)),
                    None => self.sessions.permit_by(deadline).await?,
                },
            };
            let begun = match self.begin_transaction(request.id, permit).await {
                // The connection that was idle went to another caller of the pool.
                Err(error) if error.kind() == StoreErrorKind::Busy => {
                    let answer = self.answer_without_running(request).await?;
                    return answer.map(Begin::Answered).ok_or(error);
                }
                begun => begun?,
            };
            let Some(mut begun) = begun else {
                // Another session keeps a lock of this operation for longer than the store ever does.
                let answer = self.answer_without_running(request).await?;
                return Ok(Begin::Answered(answer.unwrap_or(IN_PROGRESS)));
            };
            if self.settings.has_one_snapshot && !self.is_current(request.id, &begun.lookup).await? {
                let _ = begun.roll_back().await;
                continue;
            }
            match begun.lookup.decide(request) {
                Decision::Run(lease, record) => {
                    let transaction = Box::new(begun.into_handler_transaction(self, request, record));
                    return Ok(Begin::Acquired { lease, transaction, renew: false });
                }
                Decision::Answer(outcome) => {
                    begun.roll_back();
                    return Ok(Begin::Answered(outcome));
                }
                Decision::Replace(next, outcome) => {
                    let row = begun.lookup.row.take();
                    // The lock has to be released before the record can be replaced.
                    let _ = begun.roll_back().await;
                    if let Some(outcome) = self.records.replace_and_answer(request, row, next, outcome).await? {
                        return Ok(Begin::Answered(outcome));
                    }
                }
            }
        }
        Err(contended())
    }

    /// The answer to a request whose operation runs or is settled; `None` if it may have to run.
    pub(crate) async fn answer_without_running(&self, request: &Acquire) -> Result<Option<AcquireOutcome>, StoreError> {
        let lock = self.records.schema.lock(&request.id);
        match self.records.read(request.id, Some(lock)).await?.decide(request) {
            Decision::Run(..) | Decision::Replace(..) => Ok(None),
            Decision::Answer(outcome) => Ok(Some(outcome)),
        }
    }

    /// Whether a record that was looked up in a transaction is still the same. A transaction of one snapshot may have begun
    /// before its lock was free, and then does not see what the previous holder of the lock committed.
    pub(crate) async fn is_current(&self, id: RecordId, lookup: &Lookup) -> Result<bool, StoreError> {
        let version = |lookup: &Lookup| lookup.row.as_ref().map(|row| row.version);
        Ok(version(&self.records.read(id, None).await?) == version(lookup))
    }

    /// Begins a transaction, tries to lock the operation and looks up its record. `None` when the second lock, which lookups
    /// take for a moment, was not free within `lock_timeout`.
    async fn begin_transaction(
        self: &Arc<Self>,
        id: RecordId,
        permit: Permit,
    ) -> Result<Option<BegunTransaction>, StoreError> {
        let transactions = Arc::clone(self);
        let beginning = async move {
            let Self { records, settings, .. } = &*transactions;
            let (lock, skew) = (records.schema.lock(&id), records.offset.micros());
            let mark = Mark::random();
            let sql = BeginSql { begin: settings.sql(lock, &id, mark), read: settings.read_sql(&id, skew), skew };
            let mut permit = Some(permit);
            // Each idle connection may have died. The application's pool looks for itself.
            let retries = if settings.is_from_pool { 1 } else { settings.max_transactions };
            for _ in 0..retries {
                match transactions.try_begin_transaction(permit.take(), &sql, mark).await {
                    Err(BeginError::SessionUnusable(_)) => {}
                    begun => return settled(begun),
                }
            }
            settled(transactions.try_begin_transaction(None, &sql, mark).await)
        };
        let (sender, begun) = oneshot::channel();
        // In a separate task: if this caller gives up, the next one gets the session. Without that, no session would ever be
        // ready if connecting takes longer than callers wait.
        tokio::spawn(async move {
            if let Err(Ok(Some(unwanted))) = sender.send(beginning.await) {
                unwanted.roll_back();
            }
        });
        // Once for a session from a nearby server, once for its first statement.
        let limit = 2 * self.client_timeout;
        match timeout(limit, begun).await {
            Ok(Ok(begun)) => begun,
            Ok(Err(error)) => {
                let message =
                    "the task in which a transaction began has ended: it has panicked, or its runtime has ended";
                Err(StoreError::new(StoreErrorKind::Unavailable, message).with_source(error))
            }
            Err(_) => {
                let message =
                    format!("a transaction did not begin within {limit:?}; its session is still being made ready");
                Err(StoreError::new(StoreErrorKind::Unavailable, message))
            }
        }
    }

    async fn ask(&self, session: &mut Session, sql: &str) -> Result<Vec<PgRow>, sqlx::Error> {
        match self.settings.is_guarded {
            true => sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).fetch_all(&mut **session).await,
            false => own_rows(session, sql.to_owned()).await,
        }
    }

    async fn try_begin_transaction(
        &self,
        permit: Option<Permit>,
        sql: &BeginSql,
        mark: Mark,
    ) -> Result<BegunTransaction, BeginError> {
        let permit = match permit {
            Some(permit) => permit,
            None => self.sessions.permit().await.map_err(BeginError::Other)?,
        };
        let mut session = permit.session().await.map_err(BeginError::Other)?;
        let client_timeout = self.client_timeout;
        let counted = session.begin(&self.settings.begin, client_timeout).await;
        counted.map_err(|error| BeginError::SessionUnusable(outage("begin a transaction", error)))?;
        let begun = async {
            let begun = self.ask(&mut session, &sql.begin).await?;
            let read = if found_record(&begun) { Some(self.ask(&mut session, &sql.read).await?) } else { None };
            Ok((begun, read))
        };
        match timeout(client_timeout, begun).await {
            Ok(Ok((begun, read))) => {
                match read_begun(&begun, read.as_deref(), &self.settings, sql.skew).map_err(BeginError::Other)? {
                    Ok((lookup, reset_role)) => Ok(BegunTransaction { lookup, session, mark, reset_role }),
                    Err(why) => {
                        if self.settings.is_from_pool {
                            // The application can still read in it.
                            drop(tokio::spawn(session.roll_back_after(String::new())));
                        }
                        Err(BeginError::SessionUnusable(StoreError::new(StoreErrorKind::Unavailable, why)))
                    }
                }
            }
            Ok(Err(error)) if is_connection_lost(&error) || is_of_a_replica(&error) || is_unprepared(&error) => {
                Err(BeginError::SessionUnusable(outage("begin a transaction", error)))
            }
            Ok(Err(error)) if is_lock_timeout(&error) => {
                // The session can serve again.
                drop(tokio::spawn(session.roll_back_after(String::new())));
                Err(BeginError::LockHeld)
            }
            Ok(Err(error)) => Err(BeginError::Other(outage("begin a transaction", error))),
            Err(_) => {
                let message = format!("a transaction did not begin within {client_timeout:?}");
                Err(BeginError::Other(StoreError::new(StoreErrorKind::Timeout, message)))
            }
        }
    }
}

/// The messages that begin a transaction.
struct BeginSql {
    begin: String,
    /// Sent if there is a record.
    read: String,
    /// What is added to the server's time.
    skew: i64,
}

/// A transaction that has begun: it has tried to lock the operation, and looked up its record.
struct BegunTransaction {
    lookup: Lookup,
    session: Session,
    mark: Mark,
    reset_role: Cow<'static, str>,
}

impl BegunTransaction {
    /// Rolls back in a separate task; the caller need not wait. If that fails, the connection is closed, which rolls back
    /// too.
    fn roll_back(self) -> JoinHandle<Result<(), StoreError>> {
        tokio::spawn(self.session.roll_back_after(String::new()))
    }

    /// The transaction for the handler. `record` is what the state machine made of the record that was looked up.
    fn into_handler_transaction(
        self,
        transactions: &Transactions,
        request: &Acquire,
        record: Record,
    ) -> PostgresTransaction {
        let run = self.lookup.into_run(transactions, request, record);
        PostgresTransaction { session: self.session, mark: self.mark, run, reset_role: self.reset_role }
    }
}

/// What the state machine decides on a request, after the lookup of its record.
pub(crate) enum Decision {
    /// Run it, and write this record with its settlement.
    Run(Lease, Record),
    Answer(AcquireOutcome),
    /// Answer it after the record has been replaced by this one, or removed.
    Replace(Option<Record>, AcquireOutcome),
}

impl Lookup {
    pub(crate) fn decide(&self, request: &Acquire) -> Decision {
        let before = self.row.as_ref().map(|row| &row.record);
        let is_running = self.presence == Presence::Running;
        match machine::acquire(before, request, self.now) {
            (Some(record), AcquireOutcome::Acquired(lease)) if !is_running => Decision::Run(lease, record),
            (_, AcquireOutcome::Acquired(_)) => Decision::Answer(IN_PROGRESS),
            (next, outcome) if next.as_ref() == before => Decision::Answer(outcome),
            (next, outcome) => Decision::Replace(next, outcome),
        }
    }

    /// The run that `request` begins. `record` is what the state machine made of the record that was looked up.
    pub(crate) fn into_run(self, transactions: &Transactions, request: &Acquire, record: Record) -> TransactionRun {
        TransactionRun {
            records: Arc::clone(&transactions.records),
            settings: Arc::clone(&transactions.settings),
            id: request.id,
            origin: request.origin.clone(),
            record,
            previous: self.row.map(|row| PreviousRow {
                version: row.version,
                was_expired: machine::current(Some(&row.record), self.now).is_none(),
            }),
        }
    }
}

enum BeginError {
    /// Another session may succeed.
    SessionUnusable(StoreError),
    /// Another session held a lock of the operation for too long.
    LockHeld,
    Other(StoreError),
}

fn settled(begun: Result<BegunTransaction, BeginError>) -> Result<Option<BegunTransaction>, StoreError> {
    match begun {
        Ok(begun) => Ok(Some(begun)),
        Err(BeginError::LockHeld) => Ok(None),
        Err(BeginError::SessionUnusable(error) | BeginError::Other(error)) => Err(error),
    }
}

/// Whether the first message found a record, or its answer cannot be read.
fn found_record(rows: &[PgRow]) -> bool {
    let found: Option<Option<bool>> = rows.get(1).and_then(|row| row.try_get(1).ok());
    found.is_none_or(|found| found.unwrap_or_default())
}

/// What the transaction found, or why its session cannot be used. Either the server takes no writes, or an earlier handler has
/// changed `default_transaction_read_only`, without which a handler could write outside of its transaction.
///
/// With it comes what takes back a role that the handler takes.
fn read_begun(
    begun: &[PgRow],
    read: Option<&[PgRow]>,
    settings: &TransactionSettings,
    skew: i64,
) -> Result<Result<(Lookup, Cow<'static, str>), &'static str>, StoreError> {
    let [lock, look, ..] = begun else { return Err(unexpected_answer()) };
    let locked: bool = lock.try_get(0).map_err(unreadable)?;
    let read_only: String = lock.try_get(1).map_err(unreadable)?;
    if settings.is_guarded && read_only != "on" {
        return Ok(Err(SESSION_WAS_RESET));
    }
    let found: Option<bool> = look.try_get(1).map_err(unreadable)?;
    if found.is_none() {
        return Ok(Err(READ_ONLY_SERVER));
    }
    let reset_role = if settings.is_from_pool {
        let [user, role] = [2, 3].map(|column| lock.try_get::<String, _>(column).map_err(unreadable));
        restore_role(&user?, &role?).into()
    } else {
        "RESET SESSION AUTHORIZATION;RESET ROLE;".into()
    };
    let lookup = match read {
        Some([record, ..]) => read_lookup(record, 1)?,
        Some([]) => return Err(unexpected_answer()),
        None => {
            let now: i64 = look.try_get(0).map_err(unreadable)?;
            let now = Timestamp::from_unix_micros(now.saturating_add(skew));
            Lookup { now, presence: Presence::Absent, row: None }
        }
    };
    let lookup = if locked { lookup } else { Lookup { presence: Presence::Running, ..lookup } };
    Ok(Ok((lookup, reset_role)))
}
