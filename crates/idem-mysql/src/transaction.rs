//! The transaction that a handler makes its business writes in.

use std::any::Any;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::time::Duration;

use async_trait::async_trait;
use idem_core::{
    Command, Lease, OwnerAction, OwnerOutcome, Settlement, State, StoreError, StoreErrorKind, StoreTransaction, Writes,
};
use sqlx::MySqlConnection;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use crate::error::{has_ended, is_contended, is_outdated, may_be_done, out_of_transaction, store_error};
use crate::handler_session::{EXPECT_OPEN, HandlerSession};
use crate::records::{FOR_UPDATE, Found, HANDLER_COMMIT, Records, owner_outcome};
use crate::session::Session;
use crate::sql::{BEGIN, REAL_TIME, Sql};
use crate::timeouts::{COMMIT_TIMEOUT, OUTCOME_POLL_INTERVAL, OUTCOME_TIMEOUT, VERB_TIMEOUT};

/// An open transaction for the business writes of a handler.
///
/// It dereferences to the connection, so `&mut *transaction` (or `&mut **guard`) runs queries. `begin` on it makes a
/// savepoint. Its isolation level is the session's default.
///
/// Do not end it yourself: the store notices, and the settlement fails. Statements such as `CREATE TABLE` and `TRUNCATE` end
/// it, too, and so does a deadlock. What the handler writes after that is refused by the server or rolled back, but what it has
/// committed by then stays.
///
/// An error of a statement undoes only that statement, unless it is a deadlock: return it, or the rest commits without it.
///
/// What you `SET` stays in the session, which serves other handlers next. The same holds for temporary tables, user variables and
/// `GET_LOCK`.
pub struct MySqlTransaction {
    pub(crate) session: HandlerSession,
    pub(crate) records: Records,
    pub(crate) lease: Lease,
}

/// How a transaction ended, if it was not committed.
enum Ended {
    /// The lease is lost, and the transaction is still open.
    LeaseLost,
    /// The error, after which nothing of it is committed.
    Failed(StoreError),
    /// COMMIT got no answer.
    Unknown(StoreError),
}

impl MySqlTransaction {
    /// Writes the record and commits.
    async fn keep(&mut self, settlement: &Settlement, retention: Duration) -> Result<(), Ended> {
        let tables = &self.records.tables;
        let mut sql = Sql::new(format!("{EXPECT_OPEN}{REAL_TIME}"));
        // Under the lock of the row, so that it cannot change between being read and being written.
        tables.read(&mut sql, &self.lease.id, &tables.settlement_lock);
        let late = |_| {
            let message = format!(
                "within {VERB_TIMEOUT:?} the record could not be locked, or an earlier statement of the handler did not end; nothing \
                 was committed"
            );
            Ended::Failed(StoreError::new(StoreErrorKind::Timeout, message))
        };
        let rows = timeout(VERB_TIMEOUT, self.session.run(sql)).await.map_err(late)?;
        let rows = rows.map_err(|error| Ended::Failed(failed(error)))?;
        let command = Command::Owner(self.lease.owner, OwnerAction::Settle(settlement, retention));
        let decided = Found::of(&rows, &self.records.offset);
        let decided = decided.and_then(|found| found.decide(tables, &self.lease.id, None, command));
        let (sql, outcome) = decided.map_err(Ended::Failed)?;
        // If there is nothing to write, another transaction has settled the run: its writes are committed already.
        let (Some(mut sql), OwnerOutcome::Applied) = (sql, owner_outcome(outcome).map_err(Ended::Failed)?) else {
            return Err(Ended::LeaseLost);
        };
        tables.expect_fits(&sql).map_err(Ended::Failed)?;
        sql.push(HANDLER_COMMIT);
        match self.session.run(sql).await {
            Ok(_) => Ok(()),
            Err(error) if may_be_done(&error) => Err(Ended::Unknown(store_error("commit", error).indeterminate())),
            Err(error) => Err(Ended::Failed(failed(error))),
        }
    }
}

/// The error of a transaction that the server did not commit.
fn failed(error: sqlx::Error) -> StoreError {
    if has_ended(&error) {
        return out_of_transaction(error);
    }
    if is_outdated(&error) {
        let message = "the handler read at REPEATABLE READ while innodb_snapshot_isolation is ON, and its lease was renewed \
            meanwhile; nothing was committed; set it to OFF in the sessions of the application's pool";
        return StoreError::new(StoreErrorKind::TransactionFailed, message).with_source(error);
    }
    if is_contended(&error) {
        let message =
            "the server has rolled the transaction back, because another one was in its way; a repeat may succeed";
        return StoreError::new(StoreErrorKind::Unavailable, message).with_source(error);
    }
    store_error("settle", error)
}

/// Finds out how a transaction ended whose COMMIT got no answer. It held the lock of the record's row until it ended.
async fn find_outcome(
    records: &Records,
    lease: &Lease,
    settle: OwnerAction<'_>,
    error: StoreError,
) -> Result<OwnerOutcome, StoreError> {
    let deadline = Instant::now() + OUTCOME_TIMEOUT;
    while Instant::now() < deadline {
        let Ok(Ok(found)) = timeout_at(deadline, read_after_others(records, lease)).await else {
            sleep(OUTCOME_POLL_INTERVAL).await;
            continue;
        };
        let Some(record) = found.record.filter(|record| record.owner == lease.owner) else {
            // It may have been released and acquired again, or have been taken over.
            return Err(error);
        };
        if !matches!(record.state, State::InProgress { .. }) {
            // The verb confirms that it is on the disk. It also notices that another caller has settled a run that was rolled
            // back: such a record keeps its owner.
            return match timeout_at(deadline, records.act(&lease.id, lease.owner, settle)).await {
                Ok(Ok(outcome)) => Ok(outcome),
                Ok(Err(_)) | Err(_) => Err(error),
            };
        }
        let kind = match error.kind() {
            StoreErrorKind::Timeout => StoreErrorKind::Unavailable,
            kind => kind,
        };
        let message = "the transaction ended before COMMIT, and everything was rolled back";
        return Err(StoreError::new(kind, message).with_source(error));
    }
    Err(error)
}

/// Reads the record once no other transaction holds its row.
async fn read_after_others(records: &Records, lease: &Lease) -> Result<Found, StoreError> {
    let failed = |error| store_error("find out how a transaction ended", error);
    let mut session = Session::of(&records.pool).await.map_err(failed)?;
    let mut sql = Sql::new(BEGIN);
    records.tables.read(&mut sql, &lease.id, FOR_UPDATE);
    sql.push(";ROLLBACK");
    let rows = session.run(sql).await.map_err(failed)?;
    session.give_back();
    Found::of(&rows, &records.offset)
}

#[async_trait]
impl StoreTransaction for MySqlTransaction {
    async fn finish(
        self: Box<Self>,
        settlement: &Settlement,
        retention: Duration,
        writes: Writes,
    ) -> Result<OwnerOutcome, StoreError> {
        let mut transaction = *self;
        let settle = OwnerAction::Settle(settlement, retention);
        if writes == Writes::Discard {
            let Self { session, records, lease } = transaction;
            session.roll_back().await;
            return records.act(&lease.id, lease.owner, settle).await;
        }
        let ended = timeout(COMMIT_TIMEOUT, transaction.keep(settlement, retention)).await;
        let Self { session, records, lease } = transaction;
        match ended {
            Ok(Ok(())) => {
                session.give_back();
                Ok(OwnerOutcome::Applied)
            }
            Ok(Err(Ended::LeaseLost)) => {
                session.roll_back().await;
                Ok(OwnerOutcome::LeaseLost)
            }
            Ok(Err(Ended::Failed(error))) => {
                // Rolls back: the connection may be the reason.
                drop(session);
                Err(error)
            }
            Ok(Err(Ended::Unknown(error))) => {
                drop(session);
                find_outcome(&records, &lease, settle, error).await
            }
            Err(_) => {
                drop(session);
                let error =
                    StoreError::new(StoreErrorKind::Timeout, format!("no answer to COMMIT in {COMMIT_TIMEOUT:?}"));
                find_outcome(&records, &lease, settle, error).await
            }
        }
    }

    fn as_any_mut(&mut self) -> &mut (dyn Any + Send) {
        self
    }
}

impl Deref for MySqlTransaction {
    type Target = MySqlConnection;

    fn deref(&self) -> &MySqlConnection {
        &self.session
    }
}

impl DerefMut for MySqlTransaction {
    fn deref_mut(&mut self) -> &mut MySqlConnection {
        &mut self.session
    }
}

impl fmt::Debug for MySqlTransaction {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("MySqlTransaction").field("lease", &self.lease).finish_non_exhaustive()
    }
}
