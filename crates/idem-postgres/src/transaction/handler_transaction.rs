//! The transaction that a handler makes its business writes in.

use std::any::Any;
use std::borrow::Cow;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::time::Duration;

use async_trait::async_trait;
use idem_core::{OwnerOutcome, Settlement, StoreError, StoreErrorKind, StoreTransaction, Writes};
use sqlx::PgConnection;
use tokio::time::timeout;

use crate::batch::verb::FlatSettlement;
use crate::connect::session::Session;
use crate::error::{
    has_ended, is_changed, is_deallocated, is_out_of_step, is_out_of_transaction, is_shadowed, left_unread,
    may_be_done, out_of_transaction, outage,
};
use crate::sql::{Echo, Sql};
use crate::timeouts::COMMIT_TIMEOUT;
use crate::transaction::run::TransactionRun;
use crate::transaction::statements::{Connection, Mark};

/// An open transaction for the business writes of a handler.
///
/// It dereferences to the connection, so `&mut *transaction` (or `&mut **guard`) runs queries. `begin` on it makes a
/// savepoint.
///
/// An advisory lock of the transaction holds the key. If this process or its machine disappears, the server rolls everything
/// back and the key is free.
///
/// Do not end it yourself, and do not deallocate statements that you have not prepared: the store notices, and the settlement fails.
///
/// What you `SET` without `LOCAL` and commit stays in the session, which serves other handlers next. The same holds for
/// prepared statements, `LISTEN`, temporary tables and session-level advisory locks. `SET LOCAL` and `pg_advisory_xact_lock`
/// leave nothing behind. The role is reset before the record is written, so deferred triggers run as the store's user.
pub struct PostgresTransaction {
    pub(crate) session: Session,
    pub(crate) mark: Mark,
    pub(crate) run: TransactionRun,
    /// Takes back a role that the handler has taken.
    pub(crate) reset_role: Cow<'static, str>,
}

impl PostgresTransaction {
    /// All statements before COMMIT, in one message: the record is there only if the commit is. They ask for `echo`.
    fn end_sql(&self, settlement: Option<&FlatSettlement>, writes: Writes, echo: Echo) -> String {
        let mut sql = Sql::default();
        let savepoint = &self.run.settings.savepoint;
        match writes {
            // RELEASE fails if the handler has ended the transaction or has overlooked an error: its writes would not be part
            // of this commit. RELEASE also ends a READ ONLY of the handler's.
            Writes::Keep => {
                sql.push("RELEASE SAVEPOINT ").push(savepoint).push(";").push(&self.reset_role);
            }
            Writes::Discard => {
                sql.push("ROLLBACK TO SAVEPOINT ").push(savepoint).push(";");
            }
        }
        match settlement {
            Some(settlement) => {
                let mark = (writes == Writes::Discard).then_some(self.mark);
                self.run.write_record(&mut sql, Connection::Store, settlement, mark, echo);
            }
            None => {
                sql.push("SELECT ").push(&echo.sql()).push(";");
            }
        }
        sql.into_text()
    }
}

/// Looks up how a transaction ended whose COMMIT got no answer.
async fn find_outcome(
    run: &TransactionRun,
    error: StoreError,
    was_left_unread: bool,
) -> Result<OwnerOutcome, StoreError> {
    match run.find_committed().await {
        Some(true) => Ok(OwnerOutcome::Applied),
        Some(false) if was_left_unread => Err(left_unread(error)),
        Some(false) => {
            let message = "the connection was lost before COMMIT, and everything was rolled back";
            Err(StoreError::new(StoreErrorKind::Unavailable, message).with_source(error))
        }
        None => Err(error),
    }
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
        let settlement = FlatSettlement::of(settlement, retention);
        if settlement.is_none() && writes == Writes::Discard {
            // Fails if the handler has ended it.
            let first = format!("ROLLBACK TO SAVEPOINT {};", transaction.run.settings.savepoint);
            transaction.session.roll_back_after(first).await?;
            return Ok(OwnerOutcome::Applied);
        }
        let echo = Echo::random();
        let sql = transaction.end_sql(settlement.as_ref(), writes, echo);
        let ending = transaction.session.commit_after(sql, echo, writes);
        let Ok(ended) = timeout(COMMIT_TIMEOUT, ending).await else {
            let Self { session, run, .. } = transaction;
            session.close_when_answered();
            let error = StoreError::new(StoreErrorKind::Timeout, format!("no answer to COMMIT in {COMMIT_TIMEOUT:?}"));
            return if settlement.is_none() { Err(error) } else { find_outcome(&run, error, false).await };
        };
        match ended {
            Ok(()) => {
                transaction.session.give_back();
                Ok(OwnerOutcome::Applied)
            }
            Err(error) if may_be_done(&error) => {
                // Behind a pooler it may be the pooler's doing.
                let was_left_unread = is_out_of_step(&error) && transaction.run.settings.is_guarded;
                let error = outage("commit", error).indeterminate();
                let Self { session, run, .. } = transaction;
                session.close_now();
                // Without a record the store cannot find out whether it was committed.
                if settlement.is_none() { Err(error) } else { find_outcome(&run, error, was_left_unread).await }
            }
            // The handler has ended the transaction. What it has set in its session since stays there, so the session is closed.
            Err(error) if has_ended(&error) => Err(out_of_transaction(error)),
            // The session is closed: it could begin other transactions, and end none.
            Err(error) if transaction.run.settings.is_prepared && is_deallocated(&error) => {
                let message =
                    "the handler has deallocated a statement that the store had prepared; everything was rolled back";
                Err(StoreError::new(StoreErrorKind::TransactionFailed, message).with_source(error))
            }
            // The server refused a statement, or COMMIT. It keeps nothing, and the session can serve again.
            Err(error) => {
                let rolled_back = transaction.session.roll_back_after(String::new()).await;
                match rolled_back {
                    // It says why: the error may be the answer to an earlier statement.
                    Err(why) if why.kind() == StoreErrorKind::TransactionFailed => Err(why),
                    rolled_back if is_changed(&error) => rolled_back.map(|()| OwnerOutcome::LeaseLost),
                    _ => Err(refused(error)),
                }
            }
        }
    }

    fn as_any_mut(&mut self) -> &mut (dyn Any + Send) {
        self
    }
}

/// The error for a transaction that the server refused to commit.
fn refused(error: sqlx::Error) -> StoreError {
    if is_out_of_transaction(&error) {
        return out_of_transaction(error);
    }
    if is_shadowed(&error) {
        let message = "the handler has made a savepoint with the name of the store's; everything was rolled back";
        return StoreError::new(StoreErrorKind::TransactionFailed, message).with_source(error);
    }
    // A deferred constraint of the handler's fails here too, although the record is not at fault.
    match outage("commit", error) {
        error if error.is_retryable() => error,
        error => {
            let message = "the server refused to commit, and everything was rolled back";
            StoreError::new(StoreErrorKind::TransactionFailed, message).with_source(error)
        }
    }
}

impl Deref for PostgresTransaction {
    type Target = PgConnection;

    fn deref(&self) -> &PgConnection {
        &self.session
    }
}

impl DerefMut for PostgresTransaction {
    fn deref_mut(&mut self) -> &mut PgConnection {
        &mut self.session
    }
}

impl fmt::Debug for PostgresTransaction {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("PostgresTransaction")
            .field("id", &self.run.id)
            .field("attempt", &self.run.record.attempt)
            .finish_non_exhaustive()
    }
}
