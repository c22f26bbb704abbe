//! The transaction that a handler makes its business writes in.

use std::any::Any;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use idem_core::memory::Clock;
use idem_core::{Command, Lease, Outcome, OwnerAction, OwnerOutcome, Settlement, StoreError, StoreTransaction, Writes};
use sqlx::SqliteConnection;

use crate::error::{is_busy, is_old_snapshot, store_error, transaction_failed};
use crate::handler_connection::HandlerConnection;
use crate::writer::{Writer, misanswered, transitions};

/// An open transaction; it dereferences to the connection, so `&mut *transaction` (or `&mut **guard`) runs queries.
///
/// It takes SQLite's one write lock at the first write, so a handler that first computes or calls out does not block the
/// others. Write before you read: after another connection has written, a transaction that has read can no longer write
/// (SQLite answers `SQLITE_BUSY_SNAPSHOT`). Its operation then fails, and a repeat may run it.
///
/// Do not end it yourself: a settlement that should keep its writes then fails.
pub struct SqliteTransaction {
    connection: HandlerConnection,
    writer: Writer,
    clock: Arc<dyn Clock>,
    lease: Lease,
}

impl SqliteTransaction {
    pub(crate) fn new(connection: HandlerConnection, writer: Writer, clock: Arc<dyn Clock>, lease: Lease) -> Self {
        Self { connection, writer, clock, lease }
    }

    /// Writes the record and commits. `None` if the handler has only read, and another connection writes now or has written since:
    /// then there is nothing to keep. If it is not committed, the transaction is still open.
    async fn keep(&mut self, settlement: &Settlement, retention: Duration) -> Result<Option<OwnerOutcome>, StoreError> {
        // Fails if the handler, or an error that it ignored, has ended the transaction: a commit here would not contain all
        // its writes.
        if let Err(error) = sqlx::raw_sql("RELEASE idem").execute(&mut *self.connection).await {
            let why = "the transaction was ended before the handler was, by the handler, or by SQLite after an error such as a \
                 full disk";
            return Err(transaction_failed(why, error));
        }
        // Takes the write lock, so that the row cannot change between being read and being written.
        let lock = sqlx::query("UPDATE main.idem_records SET updated_at = updated_at WHERE id = ?");
        let locked = lock.bind(self.lease.id.as_bytes().as_slice()).execute(&mut *self.connection).await;
        match locked {
            // In write-ahead mode the first write takes the lock. So nothing of the handler's is in the main database.
            Err(error) if is_old_snapshot(&error) || is_busy(&error) => {
                if self.connection.may_have_written_elsewhere().await.map_err(|error| store_error("settle", error))? {
                    let why = "another connection writes, or has written since the transaction began to read, and the handler may have written into an attached database";
                    return Err(transaction_failed(why, error));
                }
                return Ok(None);
            }
            locked => locked.map_err(|error| store_error("settle", error))?,
        };
        let command = Command::Owner(self.lease.owner, OwnerAction::Settle(settlement, retention));
        let verbs = [(&self.lease.id, None, command)];
        let answers = transitions(&mut self.connection, "", &verbs, self.clock.as_ref(), "").await?;
        match answers.into_iter().next().ok_or_else(misanswered)?? {
            Outcome::Owner(OwnerOutcome::Applied) => {
                self.connection.commit().await?;
                Ok(Some(OwnerOutcome::Applied))
            }
            Outcome::Owner(OwnerOutcome::LeaseLost) | Outcome::Acquire(_) | Outcome::Resolve(_) | Outcome::Erase(_) => {
                Ok(Some(OwnerOutcome::LeaseLost))
            }
        }
    }
}

#[async_trait]
impl StoreTransaction for SqliteTransaction {
    async fn finish(
        mut self: Box<Self>,
        settlement: &Settlement,
        retention: Duration,
        writes: Writes,
    ) -> Result<OwnerOutcome, StoreError> {
        let kept = match writes {
            // After an error the connection is closed: it may be the reason.
            Writes::Keep => self.keep(settlement, retention).await?,
            Writes::Discard => None,
        };
        let Self { connection, writer, lease, .. } = *self;
        if kept == Some(OwnerOutcome::Applied) {
            connection.give_back();
            return Ok(OwnerOutcome::Applied);
        }
        connection.roll_back().await;
        match kept {
            Some(outcome) => Ok(outcome),
            None => writer.settle(&lease, settlement, retention).await,
        }
    }

    fn as_any_mut(&mut self) -> &mut (dyn Any + Send) {
        self
    }
}

impl Deref for SqliteTransaction {
    type Target = SqliteConnection;

    fn deref(&self) -> &SqliteConnection {
        &self.connection
    }
}

impl DerefMut for SqliteTransaction {
    fn deref_mut(&mut self) -> &mut SqliteConnection {
        &mut self.connection
    }
}

impl fmt::Debug for SqliteTransaction {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("SqliteTransaction").field("lease", &self.lease).finish_non_exhaustive()
    }
}
