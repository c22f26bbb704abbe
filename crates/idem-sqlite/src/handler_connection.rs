//! A connection with a handler's transaction.

use std::time::Duration;

use idem_core::{StoreError, StoreErrorKind};
use sqlx::pool::PoolConnection;
use sqlx::sqlite::SqliteTransactionManager;
use sqlx::{Connection as _, Row as _, Sqlite, SqliteConnection, SqlitePool};
use sqlx_core::transaction::TransactionManager as _;
use tokio::time::{Instant, timeout_at};

use crate::error::store_error;
use crate::permits::TransactionPermit;

/// How long a caller waits for a connection of the pool at least, however late it got its permit. With the default
/// `transaction_wait` the sum stays below the engine's `store_timeout` of 2 s.
const LEAST_ACQUIRE_WAIT: Duration = Duration::from_millis(500);

/// Counts the temporary tables, views and triggers of a connection, and its attached databases.
const TEMPORARY: &str = "SELECT (SELECT count(*) FROM sqlite_temp_master) \
    + (SELECT count(*) FROM pragma_database_list WHERE seq > 1)";

/// The pool of handlers' connections.
#[derive(Debug, Clone)]
pub(crate) struct HandlerPool {
    pub(crate) pool: SqlitePool,
    /// Whether it is a pool of the application, whose other work uses the same connections.
    pub(crate) is_shared: bool,
    /// How long an operation waits for a transaction.
    pub(crate) wait: Duration,
}

/// A pooled connection in a transaction. It returns to its pool by [`give_back`](Self::give_back). If it is dropped, it is
/// closed, which rolls back.
pub(crate) struct HandlerConnection {
    connection: PoolConnection<Sqlite>,
    /// [`TEMPORARY`] before the handler. The application may have made such objects in its pool's connections.
    temporary: i64,
    is_clean: bool,
    _permit: TransactionPermit,
}

impl HandlerPool {
    /// Takes a connection from the pool, by `deadline`, and begins a transaction on it.
    pub(crate) async fn begin(
        &self,
        permit: TransactionPermit,
        deadline: Instant,
    ) -> Result<HandlerConnection, StoreError> {
        let failed = |error| store_error("begin a transaction", error);
        let deadline = deadline.max(Instant::now() + LEAST_ACQUIRE_WAIT);
        let connection = timeout_at(deadline, self.pool.acquire()).await.map_err(|_| {
            let (wait, most) = (self.wait, self.pool.options().get_max_connections());
            let message = format!(
                "the pool gave no connection within {wait:?}: its {most} are in use, or a new one could not be opened"
            );
            StoreError::new(StoreErrorKind::Busy, message)
        })?;
        let connection = connection.map_err(failed)?;
        let mut begun = HandlerConnection { connection, temporary: 0, is_clean: false, _permit: permit };
        begun.begin(self.is_shared).await.map_err(failed)?;
        Ok(begun)
    }
}

impl HandlerConnection {
    async fn begin(&mut self, is_shared: bool) -> Result<(), sqlx::Error> {
        if is_shared {
            self.temporary = temporary(&mut self.connection).await?;
        }
        SqliteTransactionManager::begin(&mut self.connection, None).await?;
        sqlx::raw_sql("SAVEPOINT idem").execute(&mut *self.connection).await?;
        // Until the record is written, nothing commits on this connection, even if the handler ends the transaction.
        self.connection.lock_handle().await?.set_commit_hook(|| false);
        Ok(())
    }

    /// Commits the transaction.
    pub(crate) async fn commit(&mut self) -> Result<(), StoreError> {
        let handle = self.connection.lock_handle().await;
        handle.map_err(|error| store_error("commit", error))?.remove_commit_hook();
        let committed = SqliteTransactionManager::commit(&mut self.connection).await;
        committed.map_err(|error| store_error("commit", error).indeterminate())
    }

    /// Rolls the transaction back. If there is none, there is nothing to roll back, and the connection is closed.
    pub(crate) async fn roll_back(&mut self) {
        if let Err(error) = SqliteTransactionManager::rollback(&mut self.connection).await {
            let error = &error as &dyn std::error::Error;
            tracing::warn!(error, "a handler's transaction could not be rolled back");
        }
    }

    /// Returns the connection to its pool in a task, or closes it if something of the handler's stays on it. The transaction
    /// has ended, or its writes are to be rolled back.
    pub(crate) fn give_back(mut self) {
        tokio::spawn(async move {
            if self.clean().await.unwrap_or(false) {
                self.keep_open();
            }
        });
    }

    fn keep_open(&mut self) {
        self.is_clean = true;
    }

    /// Ends every transaction. Returns whether the connection is as before the handler.
    async fn clean(&mut self) -> Result<bool, sqlx::Error> {
        // The answer comes after a rollback that may still be queued.
        self.connection.ping().await?;
        self.connection.lock_handle().await?.remove_commit_hook();
        // Ends a transaction that the handler began by plain SQL, which sqlx does not know. Mostly there is none.
        let _ = sqlx::raw_sql("ROLLBACK").execute(&mut *self.connection).await;
        // Temporary objects would hide those of the database from the next handler's SQL. A connection that is still in a
        // transaction would open only a savepoint for its next user, and commit nothing.
        let temporary = temporary(&mut self.connection).await?;
        Ok(temporary == self.temporary && !self.connection.is_in_transaction())
    }
}

async fn temporary(connection: &mut SqliteConnection) -> Result<i64, sqlx::Error> {
    sqlx::query(TEMPORARY).fetch_one(connection).await?.try_get(0)
}

impl Drop for HandlerConnection {
    fn drop(&mut self) {
        if !self.is_clean {
            self.connection.close_on_drop();
        }
    }
}

impl std::ops::Deref for HandlerConnection {
    type Target = SqliteConnection;

    fn deref(&self) -> &SqliteConnection {
        &self.connection
    }
}

impl std::ops::DerefMut for HandlerConnection {
    fn deref_mut(&mut self) -> &mut SqliteConnection {
        &mut self.connection
    }
}
