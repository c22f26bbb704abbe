//! Connections for handlers' transactions, from the store's pool or the application's.

use std::time::Duration;

use idem_core::{StoreError, StoreErrorKind};
use sqlx::mysql::{MySqlRow, MySqlTransactionManager};
use sqlx::pool::PoolConnection;
use sqlx::{MySql, MySqlConnection, MySqlPool, SqlSafeStr as _};
use sqlx_core::transaction::TransactionManager as _;
use tokio::time::{Instant, timeout_at};

use crate::error::store_error;
use crate::permits::TransactionPermit;
use crate::session::run;
use crate::sql::Sql;

/// While a handler's transaction is open, its session refuses writes in any other one: a handler that ends the transaction
/// cannot write outside of it. The savepoint is gone if the transaction was ended.
const BEGIN: &str = "ROLLBACK;SET SESSION TRANSACTION READ ONLY;START TRANSACTION READ WRITE;SAVEPOINT idem_handler";

/// Fails if the transaction that the handler was given has ended.
pub(crate) const EXPECT_OPEN: &str = "RELEASE SAVEPOINT idem_handler;";

/// Ends what is open, and makes the session usable for others. ROLLBACK does not end `LOCK TABLES`.
const CLEAN: &str = "ROLLBACK;UNLOCK TABLES;SET SESSION TRANSACTION READ WRITE";

/// A connection with an open transaction. It is closed when this is dropped, unless it was given back.
pub(crate) struct HandlerSession {
    connection: PoolConnection<MySql>,
    is_clean: bool,
    _permit: TransactionPermit,
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
            let mut session = Self { connection: Self::take(pool).await?, is_clean: false, _permit: permit };
            MySqlTransactionManager::begin(&mut session.connection, Some(BEGIN.into_sql_str())).await?;
            Ok(session)
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
            let mut connection = pool.acquire().await?;
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
            if self.clean().await.is_ok_and(|()| MySqlTransactionManager::get_transaction_depth(&self.connection) == 0)
            {
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
        match self.run(Sql::new("ROLLBACK")).await {
            Ok(_) => self.give_back(),
            // Closing the connection rolls back, too.
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                tracing::warn!(error, "a handler's transaction could not be rolled back, and its connection is closed");
            }
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
