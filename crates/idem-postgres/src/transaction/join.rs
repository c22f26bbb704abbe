//! A run in a transaction that the caller opened.

use std::fmt;
use std::time::Duration;

use idem_core::machine::SHORTEST_RETENTION;
use idem_core::{Acquire, AcquireOutcome, Lease, RecordId, Settlement, StoreError, StoreErrorKind};
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, PgConnection, Row as _};
use tokio::time::{Instant, timeout};

use crate::batch::row::read_lookup;
use crate::batch::verb::{FlatSettlement, Lookup, Presence, unexpected_answer};
use crate::error::{
    is_changed, is_lock_timeout, is_not_joined, is_out_of_step, is_out_of_transaction, outage, store_error, unreadable,
};
use crate::records::{IN_PROGRESS, ROUNDS, contended};
use crate::sql::{Echo, Sql, own_rows};
use crate::timeouts::COMMIT_TIMEOUT;
use crate::transaction::begin::{Decision, Transactions};
use crate::transaction::run::TransactionRun;
use crate::transaction::statements::{Connection, TransactionSettings};

/// The answer to [`PostgresStore::join`](crate::PostgresStore::join).
#[derive(Debug)]
#[expect(clippy::exhaustive_enums, reason = "callers must handle every outcome")]
pub enum Join {
    /// Run it inside this transaction, and settle it there.
    Acquired(JoinedRun),
    /// It must not run. The outcome is never `Acquired`. The transaction goes on, and holds nothing of the operation.
    Answered(AcquireOutcome),
}

/// The right to execute an operation inside a transaction that the caller opened. It ends with that transaction.
///
/// If the transaction commits without [`settle`](Self::settle), its writes stay and the key is free: a repeat makes them again. So
/// settle it, or roll back. Dropping it does nothing.
#[must_use = "a transaction that commits without `settle` keeps its writes and no record of them"]
pub struct JoinedRun {
    lease: Lease,
    run: Box<TransactionRun>,
}

impl JoinedRun {
    /// The attempt and the checkpoint of the run. Nothing has to be renewed.
    #[must_use]
    pub fn lease(&self) -> &Lease {
        &self.lease
    }

    /// Writes the settled record into the transaction. Other sessions see it after the caller's COMMIT.
    ///
    /// Call it last, on the connection of the `join` and at the same nesting of savepoints. Then commit, and answer the
    /// client after that. If COMMIT gets no answer from the server, the ticket says how it ended. The transaction's current
    /// role writes the record.
    ///
    /// If a later statement in the transaction fails, COMMIT rolls back, and sqlx reports that as a success. If the caller
    /// may have overlooked such an error, ask the ticket before you answer.
    ///
    /// `retention` is how long repeats get the answer, at least 1 s.
    ///
    /// # Errors
    /// [`StoreError`] when the record cannot be written. The transaction can only be rolled back then. Some kinds:
    ///
    /// - [`TransactionFailed`]: The transaction of the `join` has ended, a statement in it has failed, or its record belongs
    ///   to another run.
    /// - [`Misconfigured`]: The settlement is [`Settlement::Released`], of which no record is kept. Roll back instead.
    ///
    /// # Cancellation safety
    /// Roll the transaction back if the future is dropped.
    ///
    /// [`TransactionFailed`]: StoreErrorKind::TransactionFailed
    /// [`Misconfigured`]: StoreErrorKind::Misconfigured
    pub async fn settle(
        self,
        connection: &mut PgConnection,
        settlement: &Settlement,
        retention: Duration,
    ) -> Result<CommitTicket, StoreError> {
        let retention = retention.max(SHORTEST_RETENTION);
        let Some(settlement) = FlatSettlement::of(settlement, retention) else {
            let message = "a release leaves no record to commit; roll the joined transaction back instead";
            return Err(StoreError::new(StoreErrorKind::Misconfigured, message));
        };
        let mut sql = Sql::default();
        // Fails if the transaction of the `join` has ended or has gone back to before it, or one of its statements has failed.
        let lock = self.run.records.schema.lock(&self.run.id);
        sql.push(&TransactionSettings::expect_joined(lock));
        sql.push("RELEASE SAVEPOINT ").push(TransactionSettings::join_savepoint()).push(";");
        let known_until = Instant::now().checked_add(retention);
        let echo = Echo::random();
        self.run.write_record(&mut sql, Connection::Caller, &settlement, None, echo);
        let sql = AssertSqlSafe(sql.into_text());
        let writing = async { echo.expect_in(&sqlx::raw_sql(sql).fetch_all(connection).await?) };
        match timeout(COMMIT_TIMEOUT, writing).await {
            Ok(Ok(())) => Ok(CommitTicket { run: self.run, known_until }),
            // Behind a pooler it may be the pooler's doing.
            Ok(Err(error)) if is_out_of_step(&error) && self.run.settings.is_guarded => {
                let message = "an answer was left unread in the transaction, as of a dropped COPY; roll it back";
                Err(StoreError::new(StoreErrorKind::TransactionFailed, message).with_source(error))
            }
            Ok(Err(error)) if is_changed(&error) => {
                let message = "another run has settled the operation of this transaction; roll it back";
                Err(StoreError::new(StoreErrorKind::TransactionFailed, message).with_source(error))
            }
            Ok(Err(error)) if is_out_of_transaction(&error) || is_not_joined(&error) => {
                let message = "the transaction that was joined has ended, a statement in it has failed, or `settle` is not at the nesting of \
                     savepoints of `join`; roll it back";
                Err(StoreError::new(StoreErrorKind::TransactionFailed, message).with_source(error))
            }
            Ok(Err(error)) => Err(outage("write a record in a joined transaction", error)),
            Err(_) => {
                let message =
                    format!("the record was not written within {COMMIT_TIMEOUT:?}; roll the transaction back");
                Err(StoreError::new(StoreErrorKind::Timeout, message))
            }
        }
    }
}

impl fmt::Debug for JoinedRun {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("JoinedRun").field("lease", &self.lease).finish_non_exhaustive()
    }
}

/// Finds out how a joined transaction ended whose COMMIT got no answer.
pub struct CommitTicket {
    run: Box<TransactionRun>,
    /// From then on a record that is not there may have been purged.
    known_until: Option<Instant>,
}

impl CommitTicket {
    /// Whether the transaction was committed, and is on every standby that commits wait for.
    ///
    /// It asks on a connection of the store, and waits up to 4 s for the transaction to end. First close or drop the
    /// connection on which COMMIT failed.
    ///
    /// # Errors
    /// [`StoreError`] of the kind [`Timeout`](StoreErrorKind::Timeout) when the transaction has not ended by then, the server
    /// cannot be asked, or the record may have been purged since. Answer the client that the outcome is not known; its repeat gets
    /// the outcome.
    ///
    /// # Cancellation safety
    /// It only reads. Ask again.
    pub async fn is_committed(&self) -> Result<bool, StoreError> {
        let committed = self.run.find_committed().await;
        let is_kept = self.known_until.is_none_or(|until| Instant::now() < until);
        committed.filter(|committed| *committed || is_kept).ok_or_else(|| {
            let message =
                "it is not known how the joined transaction ended: it goes on, the server cannot be asked, or its record has expired";
            StoreError::new(StoreErrorKind::Timeout, message)
        })
    }
}

impl fmt::Debug for CommitTicket {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("CommitTicket").field("id", &self.run.id).finish_non_exhaustive()
    }
}

impl Transactions {
    pub(crate) async fn join(&self, connection: &mut PgConnection, request: &Acquire) -> Result<Join, StoreError> {
        self.records.batcher.expect_open()?;
        for _ in 0..ROUNDS {
            let Some(mut found) = self.look_inside(connection, request.id).await? else {
                // Another session keeps a lock of this operation for longer than the store ever does.
                self.leave(connection).await?;
                let answer = self.answer_without_running(request).await?;
                return Ok(Join::Answered(answer.unwrap_or(IN_PROGRESS)));
            };
            if found.has_old_snapshot && !self.is_current(request.id, &found.lookup).await? {
                self.leave(connection).await?;
                return match self.answer_without_running(request).await? {
                    Some(outcome) => Ok(Join::Answered(outcome)),
                    None => {
                        let message = "the record has changed since the transaction took its snapshot; begin it again";
                        Err(StoreError::new(StoreErrorKind::Unavailable, message))
                    }
                };
            }
            match found.lookup.decide(request) {
                Decision::Run(lease, record) => {
                    let run = Box::new(found.lookup.into_run(self, request, record));
                    return Ok(Join::Acquired(JoinedRun { lease, run }));
                }
                Decision::Answer(outcome) => {
                    self.leave(connection).await?;
                    return Ok(Join::Answered(outcome));
                }
                Decision::Replace(next, outcome) => {
                    let row = found.lookup.row.take();
                    // The lock has to be released before the record can be replaced.
                    self.leave(connection).await?;
                    if let Some(outcome) = self.records.replace_and_answer(request, row, next, outcome).await? {
                        return Ok(Join::Answered(outcome));
                    }
                }
            }
        }
        Err(contended())
    }

    /// Makes a savepoint, tries to lock the operation, and looks up its record. `None` when the second lock, which lookups
    /// take for a moment, was not free within `lock_timeout`.
    async fn look_inside(&self, connection: &mut PgConnection, id: RecordId) -> Result<Option<Found>, StoreError> {
        let sql = self.settings.join_sql(self.records.schema.lock(&id), &id, self.records.offset.micros());
        let looking = own_rows(connection, sql);
        match timeout(2 * self.client_timeout, looking).await {
            Ok(Ok(rows)) => Found::read(&rows, &self.records.schema.place()).map(Some),
            Ok(Err(error)) if is_lock_timeout(&error) => Ok(None),
            Ok(Err(error)) if is_out_of_transaction(&error) => {
                let message = "there is no transaction to join, or one of its statements has failed; begin one first";
                Err(StoreError::new(StoreErrorKind::TransactionFailed, message).with_source(error))
            }
            // A missing schema too: the connection leads to another database.
            Ok(Err(error)) => Err(store_error("join a transaction", error)),
            Err(_) => {
                let message = "the server did not answer in a joined transaction; roll it back";
                Err(StoreError::new(StoreErrorKind::Timeout, message))
            }
        }
    }

    /// Gives back the lock of the operation: the transaction is then as it was before it was joined.
    async fn leave(&self, connection: &mut PgConnection) -> Result<(), StoreError> {
        let savepoint = TransactionSettings::join_savepoint();
        let leave = format!("ROLLBACK TO SAVEPOINT {savepoint};RELEASE SAVEPOINT {savepoint}");
        let leaving = own_rows(connection, leave);
        match timeout(self.client_timeout, leaving).await {
            Ok(left) => left.map(drop).map_err(|error| outage("leave a joined transaction", error)),
            Err(_) => {
                let message = "the server did not answer in a joined transaction; roll it back";
                Err(StoreError::new(StoreErrorKind::Timeout, message))
            }
        }
    }
}

/// What a joined transaction sees of an operation.
struct Found {
    lookup: Lookup,
    /// Its snapshot may be older than the lock, and then does not show what the previous holder of the lock has committed.
    has_old_snapshot: bool,
}

impl Found {
    fn read(rows: &[PgRow], place: &[u8]) -> Result<Self, StoreError> {
        let [lock, record, ..] = rows else { return Err(unexpected_answer()) };
        let is_locked: bool = lock.try_get(0).map_err(unreadable)?;
        let is_joined: bool = lock.try_get(1).map_err(unreadable)?;
        let is_read_only: bool = lock.try_get(2).map_err(unreadable)?;
        let has_one_snapshot: bool = lock.try_get(3).map_err(unreadable)?;
        if is_read_only {
            let message = "the transaction to join is read-only, so that no record can be written in it";
            return Err(StoreError::new(StoreErrorKind::TransactionFailed, message));
        }
        let there: Option<Vec<u8>> = record.try_get(0).map_err(unreadable)?;
        if there.as_deref() != Some(place) {
            let message = "the transaction to join is in another database than the store";
            return Err(StoreError::new(StoreErrorKind::Misconfigured, message));
        }
        let mut lookup = read_lookup(record, 1)?;
        if !is_locked || is_joined {
            lookup.presence = Presence::Running;
        }
        Ok(Self { lookup, has_old_snapshot: has_one_snapshot && !is_joined })
    }
}
