//! Connections for handlers' transactions, from the store's pool or the application's.

use std::time::Duration;

use idem_core::{StoreError, StoreErrorKind};
use sqlx::mysql::{MySqlRow, MySqlTransactionManager};
use sqlx::pool::PoolConnection;
use sqlx::{MySql, MySqlConnection, MySqlPool, SqlSafeStr as _};
use sqlx_core::transaction::TransactionManager as _;
use tokio::time::{Instant, timeout, timeout_at};

use crate::error::{is_connection_useless, store_error};
use crate::permits::TransactionPermit;
use crate::session::run;
use crate::sql::Sql;
use crate::timeouts::CLEAN_TIMEOUT;

/// While a handler's transaction is open, its session refuses writes in any other one: a handler that ends the transaction
/// cannot write outside of it. After a deadlock the server forgets that for one write, which would commit by itself if `autocommit`
/// were on. The savepoint is gone if the transaction was ended. By another `completion_type`, COMMIT and ROLLBACK would begin a
/// transaction, or end the session.
const BEGIN: &str = "ROLLBACK AND NO CHAIN NO RELEASE;SET @idem_autocommit=@@autocommit;\
    SET SESSION completion_type=0,autocommit=0;SET SESSION TRANSACTION READ ONLY;\
    START TRANSACTION READ WRITE;SAVEPOINT idem_handler";

/// Fails if the transaction that the handler was given has ended.
pub(crate) const EXPECT_OPEN: &str = "RELEASE SAVEPOINT idem_handler;";

/// Ends what is open, and makes the session usable for others. ROLLBACK does not end `LOCK TABLES`. With `autocommit` off, later
/// writes of the application would not be committed.
const CLEAN: &str = "ROLLBACK AND NO CHAIN NO RELEASE;UNLOCK TABLES;SET SESSION completion_type=0;\
    SET SESSION autocommit=@idem_autocommit;\
    SET SESSION TRANSACTION READ WRITE";

/// A connection with an open transaction. It is closed when this is dropped, unless it was given back.
pub(crate) struct HandlerSession {
    connection: PoolConnection<MySql>,
    is_clean: bool,
    permit: Option<TransactionPermit>,
}

impl HandlerSession {
    /// Takes a connection of `pool` and begins a transaction on it, by the deadline.
    pub(crate) async fn begin(
        pool: &MySqlPool,
        permit: TransactionPermit,
        deadline: Instant,
        wait: Duration,
    ) -> Result<Self, StoreError> {
        let begun = timeout_at(deadline, async {
            // Each idle connection may have died.
            let mut rounds = pool.size();
            loop {
                let mut session = Self { connection: Self::take(pool).await?, is_clean: false, permit: None };
                match MySqlTransactionManager::begin(&mut session.connection, Some(BEGIN.into_sql_str())).await {
                    Ok(()) => {
                        session.permit = Some(permit);
                        return Ok(session);
                    }
                    Err(error) if is_connection_useless(&error) && rounds > 0 => rounds -= 1,
                    Err(error) => return Err(error),
                }
            }
        });
        match begun.await {
            Ok(Ok(session)) => Ok(session),
            Err(_) | Ok(Err(sqlx::Error::PoolTimedOut)) => {
                let message = format!("no connection for a transaction was free, or could be made, within {wait:?}");
                Err(StoreError::new(StoreErrorKind::Busy, message))
            }
            Ok(Err(error)) => Err(store_error("begin a transaction", error)),
        }
    }

    /// Takes a connection that is in no transaction. The application can leave one open that sqlx counts; `begin` would then
    /// only make a savepoint in it.
    async fn take(pool: &MySqlPool) -> Result<PoolConnection<MySql>, sqlx::Error> {
        loop {
            // In a separate task: if this caller gives up, the next one gets the connection. Without that, none would ever be ready
            // if connecting takes longer than callers wait.
            let pool = pool.clone();
            let taken = tokio::spawn(async move { pool.acquire().await }).await;
            let mut connection = taken.map_err(|error| sqlx::Error::Io(std::io::Error::other(error)))??;
            if MySqlTransactionManager::get_transaction_depth(&connection) == 0 {
                return Ok(connection);
            }
            tracing::warn!("a connection of the application's pool was in a transaction, and is closed");
            connection.close_on_drop();
        }
    }

    /// Sends statements in one message, and returns the rows of all of them.
    pub(crate) async fn run(&mut self, sql: Sql) -> Result<Vec<MySqlRow>, sqlx::Error> {
        run(&mut self.connection, sql).await
    }

    /// Ends what is open, and returns the connection to its pool in a task, or closes it if that fails.
    pub(crate) fn give_back(mut self) {
        tokio::spawn(async move {
            let cleaned = timeout(CLEAN_TIMEOUT, self.clean()).await;
            let is_outside = MySqlTransactionManager::get_transaction_depth(&self.connection) == 0;
            if is_outside && matches!(cleaned, Ok(Ok(()))) {
                self.keep_open();
            }
        });
    }

    fn keep_open(&mut self) {
        self.is_clean = true;
    }

    async fn clean(&mut self) -> Result<(), sqlx::Error> {
        self.run(Sql::new(CLEAN)).await?;
        // Lets sqlx know. It sends another ROLLBACK, which finds nothing.
        MySqlTransactionManager::rollback(&mut self.connection).await
    }

    /// Rolls the transaction back, and returns the connection to its pool.
    pub(crate) async fn roll_back(mut self) {
        // Closing the connection rolls back, too.
        match timeout(CLEAN_TIMEOUT, self.run(Sql::new("ROLLBACK AND NO CHAIN NO RELEASE"))).await {
            Ok(Ok(_)) => self.give_back(),
            Ok(Err(error)) => {
                let error = &error as &dyn std::error::Error;
                tracing::warn!(error, "a handler's transaction could not be rolled back, and its connection is closed");
            }
            Err(_) => tracing::warn!("ROLLBACK of a handler's transaction got no answer, and its connection is closed"),
        }
    }
}

impl Drop for HandlerSession {
    fn drop(&mut self) {
        if !self.is_clean {
            self.connection.close_on_drop();
        }
    }
}

impl std::ops::Deref for HandlerSession {
    type Target = MySqlConnection;

    fn deref(&self) -> &MySqlConnection {
        &self.connection
    }
}

impl std::ops::DerefMut for HandlerSession {
    fn deref_mut(&mut self) -> &mut MySqlConnection {
        &mut self.connection
    }
}
