//! The transaction that a handler makes its business writes in.

use std::any::Any;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use idem_core::memory::Clock;
use idem_core::{
    Command, Lease, Outcome, OwnerAction, OwnerOutcome, Settlement, StoreError, StoreErrorKind, StoreTransaction,
    Writes,
};
use sqlx::{Sqlite, SqliteConnection, SqlitePool, Transaction};

use crate::error::{is_old_snapshot, store_error};
use crate::permits::{TransactionPermit, Waiting};
use crate::writer::{Writer, misanswered, transitions};

/// An open transaction; it dereferences to the connection, so `&mut *transaction` (or `&mut **guard`) runs queries.
///
/// It takes SQLite's one write lock at the first write, so a handler that first computes or calls out does not block the
/// others. Write before you read: after another connection has written, a transaction that has read can no longer write
/// (SQLite answers `SQLITE_BUSY_SNAPSHOT`). Its operation then fails, and a repeat may run it.
///
/// Do not end it yourself: a settlement that should keep its writes then fails.
pub struct SqliteTransaction {
    transaction: Transaction<'static, Sqlite>,
    writer: Writer,
    clock: Arc<dyn Clock>,
    lease: Lease,
    permit: TransactionPermit,
}

impl SqliteTransaction {
    pub(crate) async fn begin(
        pool: SqlitePool,
        writer: Writer,
        clock: Arc<dyn Clock>,
        lease: Lease,
        waiting: Waiting,
    ) -> Result<Self, StoreError> {
        // Waits in the caller's future: a separate task would go on waiting after its caller is gone.
        let permit = waiting.permit().await?;
        // In a separate task: a pool's `begin` that is dropped midway would hand the next borrower an open transaction. The
        // task ends in any case, and an unused transaction is rolled back.
        let begin = tokio::spawn(async move {
            let mut transaction = pool.begin().await?;
            sqlx::raw_sql("SAVEPOINT idem").execute(&mut *transaction).await?;
            // Until the record is written, nothing commits on this connection, even if the handler ends the transaction.
            transaction.lock_handle().await?.set_commit_hook(|| false);
            Ok((transaction, permit))
        });
        let begun = begin.await.map_err(|error| {
            StoreError::new(
                StoreErrorKind::Unavailable,
                "the task that begins a transaction was cancelled or has panicked",
            )
            .with_source(error)
        })?;
        let (transaction, permit) = begun.map_err(|error| store_error("begin a transaction", error))?;
        Ok(Self { transaction, writer, clock, lease, permit })
    }

    async fn discard(self, settlement: &Settlement, retention: Duration) -> Result<OwnerOutcome, StoreError> {
        let Self { transaction, writer, lease, permit, .. } = self;
        // Without a transaction there is nothing to roll back. A connection that fails here is not used again.
        if let Err(error) = transaction.rollback().await {
            tracing::warn!(
                error = &error as &dyn std::error::Error,
                "a handler's transaction could not be rolled back"
            );
        }
        drop(permit);
        writer.settle(&lease, settlement, retention).await
    }

    async fn keep(mut self, settlement: &Settlement, retention: Duration) -> Result<OwnerOutcome, StoreError> {
        // Fails if the handler, or an error that it ignored, has ended the transaction: a commit here would not contain all
        // its writes.
        if let Err(error) = sqlx::raw_sql("RELEASE idem").execute(&mut *self.transaction).await {
            let message = "could not settle: the transaction was ended before the handler was, by the handler, or by SQLite \
                 after an error such as a full disk; nothing of it is committed";
            return Err(StoreError::new(StoreErrorKind::Unavailable, message).with_source(error));
        }
        // Takes the write lock, so that the row cannot change between being read and being written.
        let lock = sqlx::query("UPDATE main.idem_records SET updated_at = updated_at WHERE id = ?");
        let locked = lock.bind(self.lease.id.as_bytes().as_slice()).execute(&mut *self.transaction).await;
        match locked {
            // The handler has only read, and another connection has written since: there is nothing to keep.
            Err(error) if is_old_snapshot(&error) => return self.discard(settlement, retention).await,
            locked => locked.map_err(|error| store_error("settle", error))?,
        };
        let command = Command::Owner(self.lease.owner, OwnerAction::Settle(settlement, retention));
        let verbs = [(&self.lease.id, None, command)];
        let answers = transitions(&mut self.transaction, "", &verbs, self.clock.as_ref(), "").await?;
        match answers.into_iter().next().ok_or_else(misanswered)?? {
            Outcome::Owner(OwnerOutcome::Applied) => {
                let handle = self.transaction.lock_handle().await;
                handle.map_err(|error| store_error("commit", error))?.remove_commit_hook();
                let committed = self.transaction.commit().await;
                committed.map_err(|error| store_error("commit", error).indeterminate())?;
                Ok(OwnerOutcome::Applied)
            }
            Outcome::Owner(OwnerOutcome::LeaseLost) | Outcome::Acquire(_) => {
                self.transaction.rollback().await.map_err(|error| store_error("roll back", error))?;
                Ok(OwnerOutcome::LeaseLost)
            }
        }
    }
}

#[async_trait]
impl StoreTransaction for SqliteTransaction {
    async fn finish(
        self: Box<Self>,
        settlement: &Settlement,
        retention: Duration,
        writes: Writes,
    ) -> Result<OwnerOutcome, StoreError> {
        match writes {
            Writes::Keep => self.keep(settlement, retention).await,
            Writes::Discard => self.discard(settlement, retention).await,
        }
    }

    fn as_any_mut(&mut self) -> &mut (dyn Any + Send) {
        self
    }
}

impl Deref for SqliteTransaction {
    type Target = SqliteConnection;

    fn deref(&self) -> &SqliteConnection {
        &self.transaction
    }
}

impl DerefMut for SqliteTransaction {
    fn deref_mut(&mut self) -> &mut SqliteConnection {
        &mut self.transaction
    }
}

impl fmt::Debug for SqliteTransaction {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("SqliteTransaction").field("lease", &self.lease).finish_non_exhaustive()
    }
}
