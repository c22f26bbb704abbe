//! A connection with a handler's transaction.

use std::time::Duration;

use idem_core::{StoreError, StoreErrorKind};
use sqlx::pool::PoolConnection;
use sqlx::sqlite::SqliteTransactionManager;
use sqlx::{Connection as _, Row as _, Sqlite, SqliteConnection, SqlitePool};
use sqlx_core::transaction::TransactionManager as _;
use tokio::time::{Instant, timeout_at};

use crate::error::{is_constraint, is_refused, store_error, transaction_failed};
use crate::permits::TransactionPermit;

/// How long a caller waits for a connection of the pool at least, however late it got its permit. With the default
/// `transaction_wait` the sum stays below the engine's `store_timeout` of 2 s, unless the write of the in-progress mark waits too.
const LEAST_ACQUIRE_WAIT: Duration = Duration::from_millis(500);

/// Asks for a [`ConnectionState`].
const STATE: &str = "SELECT (SELECT count(*) FROM sqlite_temp_master), \
    (SELECT count(*) FROM pragma_database_list WHERE seq > 1), \
    (SELECT * FROM pragma_query_only), (SELECT * FROM pragma_busy_timeout)";

/// The pool of handlers' connections.
#[derive(Debug, Clone)]
pub(crate) struct HandlerPool {
    pub(crate) pool: SqlitePool,
    /// How the connections of the store's own pool are. `None` for a pool of the application, whose connections are as the
    /// application wants them. Its other work uses the same connections.
    pub(crate) initial: Option<ConnectionState>,
    /// How long an operation waits for a transaction.
    pub(crate) wait: Duration,
}

/// A pooled connection in a transaction. It returns to its pool by [`give_back`](Self::give_back). If it is dropped, it is
/// closed, which rolls back.
pub(crate) struct HandlerConnection {
    connection: PoolConnection<Sqlite>,
    /// Before the handler.
    state: ConnectionState,
    is_shared: bool,
    is_clean: bool,
    /// Held until the connection is given back or closed.
    permit: Option<TransactionPermit>,
}

/// What a handler can change on its connection, and its next user would notice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ConnectionState {
    /// Temporary tables, views and triggers, which hide those of the database.
    temporary_objects: i64,
    attached_databases: i64,
    query_only: i64,
    busy_timeout: i64,
}

impl ConnectionState {
    pub(crate) async fn of(connection: &mut SqliteConnection) -> Result<Self, sqlx::Error> {
        let row = sqlx::query(STATE).fetch_one(connection).await?;
        Ok(Self {
            temporary_objects: row.try_get(0)?,
            attached_databases: row.try_get(1)?,
            query_only: row.try_get(2)?,
            busy_timeout: row.try_get(3)?,
        })
    }
}

impl HandlerPool {
    /// Takes a connection from the pool, by `deadline`, and begins a transaction on it.
    pub(crate) async fn begin(
        &self,
        permit: TransactionPermit,
        deadline: Instant,
    ) -> Result<HandlerConnection, StoreError> {
        let deadline = deadline.max(Instant::now() + LEAST_ACQUIRE_WAIT);
        let begun = timeout_at(deadline, self.begun()).await.map_err(|_| {
            let (wait, most) = (self.wait, self.pool.options().get_max_connections());
            let message = format!(
                "the pool gave no connection within {wait:?}: its {most} are in use, or a new one could not be opened"
            );
            StoreError::new(StoreErrorKind::Busy, message)
        })?;
        let mut begun = begun.map_err(|error| store_error("begin a transaction", error))?;
        begun.permit = Some(permit);
        Ok(begun)
    }

    /// A connection with a transaction. If the application has left one of its connections so that nothing can be written, it is
    /// closed, and the next one serves.
    ///
    /// # Cancellation safety
    /// A connection on which a transaction may have begun is closed.
    async fn begun(&self) -> Result<HandlerConnection, sqlx::Error> {
        loop {
            let mut connection = self.acquire().await?;
            let state = match self.initial {
                Some(state) => state,
                None => ConnectionState::of(&mut connection).await?,
            };
            let is_shared = self.initial.is_none();
            let mut begun = HandlerConnection { connection, state, is_shared, is_clean: false, permit: None };
            if is_shared && state.query_only != 0 {
                tracing::warn!("a connection of the application's pool was left read-only, and is closed");
            } else if begun.begin().await? {
                return Ok(begun);
            } else if is_shared {
                tracing::warn!("a connection of the application's pool was left in a transaction, and is closed");
            } else {
                return Err(sqlx::Error::BeginFailed);
            }
        }
    }

    /// Takes a connection that is in no transaction. The application can leave one open: if SQLite has ended a transaction after
    /// an error, sqlx counts it as open until a rollback succeeds. There, `begin` would open only a savepoint, and `commit`
    /// would commit nothing.
    async fn acquire(&self) -> Result<PoolConnection<Sqlite>, sqlx::Error> {
        loop {
            let mut connection = self.pool.acquire().await?;
            if !connection.is_in_transaction() {
                return Ok(connection);
            }
            tracing::warn!("a connection of the application's pool was in a transaction, and is closed");
            connection.close_on_drop();
        }
    }
}

impl HandlerConnection {
    /// Begins a transaction. False if SQLite refuses that: by plain SQL, one was begun before.
    async fn begin(&mut self) -> Result<bool, sqlx::Error> {
        match SqliteTransactionManager::begin(&mut self.connection, None).await {
            Err(error) if is_refused(&error) => return Ok(false),
            begun => begun?,
        }
        sqlx::raw_sql("SAVEPOINT idem").execute(&mut *self.connection).await?;
        // Until the record is written, nothing commits on this connection, even if the handler ends the transaction.
        self.connection.lock_handle().await?.set_commit_hook(|| false);
        Ok(true)
    }

    /// Whether the transaction, which did not get the write lock, may still have written: into an attached database. The handler may
    /// have attached it.
    pub(crate) async fn may_have_written_elsewhere(&mut self) -> Result<bool, sqlx::Error> {
        let attached = "SELECT count(*) FROM pragma_database_list WHERE seq > 1";
        Ok(sqlx::query_scalar::<_, i64>(attached).fetch_one(&mut *self.connection).await? > 0)
    }

    /// Commits the transaction.
    pub(crate) async fn commit(&mut self) -> Result<(), StoreError> {
        let handle = self.connection.lock_handle().await;
        handle.map_err(|error| store_error("commit", error))?.remove_commit_hook();
        let committed = SqliteTransactionManager::commit(&mut self.connection).await;
        committed.map_err(|error| match is_constraint(&error) {
            // A deferred one, which SQLite checks here.
            true => transaction_failed("a deferred constraint refuses what the handler wrote", error),
            false => store_error("commit", error).indeterminate(),
        })
    }

    /// Rolls the transaction back, and gives the connection back to the store's own pool.
    ///
    /// A connection of the application's is closed: whether the handler failed because of it is not known. One that was opened
    /// while the file could not be written stays read-only.
    pub(crate) async fn roll_back(mut self) {
        if let Err(error) = SqliteTransactionManager::rollback(&mut self.connection).await {
            let error = &error as &dyn std::error::Error;
            tracing::warn!(error, "a handler's transaction could not be rolled back");
        }
        if !self.is_shared {
            self.give_back();
        }
    }

    /// Returns a connection that no handler has used to its pool, in a task.
    pub(crate) fn give_back_unused(mut self) {
        tokio::spawn(async move {
            let is_over = SqliteTransactionManager::rollback(&mut self.connection).await.is_ok();
            if is_over && self.clean().await.unwrap_or(false) {
                self.keep_open();
            }
        });
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
        // A connection that is still in a transaction would open only a savepoint for its next user, and commit nothing.
        let state = ConnectionState::of(&mut self.connection).await?;
        Ok(state == self.state && !self.connection.is_in_transaction())
    }
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
