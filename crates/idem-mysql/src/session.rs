//! Connections for verbs, and pools of them.

use std::time::Duration;

use sqlx::mysql::{MySqlConnectOptions, MySqlPoolOptions, MySqlRow};
use sqlx::pool::PoolConnection;
use sqlx::{AssertSqlSafe, ConnectOptions as _, Connection as _, Executor as _, MySql, MySqlConnection, MySqlPool};
use tokio::time::timeout;

use crate::error::is_connection_useless;
use crate::sql::Sql;
use crate::timeouts::{
    IDLE_TIMEOUT, LOCK_WAIT, PING_TIMEOUT, SERVER_HANDLER_IDLE_TIMEOUT, SERVER_IDLE_TIMEOUT, TRANSACTION_IDLE,
    TRUSTED_IDLE,
};

/// In the `sql_mode` of the store's sessions: a value that does not fit is an error, whatever the server's default is.
const STRICT: &str = "STRICT_ALL_TABLES,ERROR_FOR_DIVISION_BY_ZERO,NO_ENGINE_SUBSTITUTION";

/// The isolation level of verbs that only read. At READ UNCOMMITTED, which may be the server's default, a repeat would get an
/// answer that is rolled back afterwards.
const COMMITTED: &str = "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED;";

/// A connection of a pool. It is closed when this is dropped before [`give_back`](Self::give_back), so that the server rolls its
/// transaction back.
pub(crate) struct Session {
    connection: PoolConnection<MySql>,
    is_clean: bool,
}

impl Session {
    pub(crate) async fn of(pool: &MySqlPool) -> Result<Self, sqlx::Error> {
        Ok(Self { connection: pool.acquire().await?, is_clean: false })
    }

    /// Sends statements in one message, and returns the rows of all of them.
    pub(crate) async fn run(&mut self, sql: Sql) -> Result<Vec<MySqlRow>, sqlx::Error> {
        run(&mut self.connection, sql).await
    }

    /// Returns the connection to its pool. It is in no transaction.
    pub(crate) fn give_back(mut self) {
        self.is_clean = true;
    }

    /// Ends the transaction, of which nothing is to be kept. A connection that does not answer is closed.
    pub(crate) async fn roll_back(mut self) {
        if self.run(Sql::new("ROLLBACK")).await.is_ok() {
            self.give_back();
        }
    }

    /// Rolls back after this error of the server's, so that the connection can be used again; else closes it.
    pub(crate) async fn recover(self, error: &sqlx::Error) {
        if !is_connection_useless(error) {
            self.roll_back().await;
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if !self.is_clean {
            self.connection.close_on_drop();
        }
    }
}

/// Sends statements in one message, and returns the rows of all of them.
pub(crate) async fn run(connection: &mut MySqlConnection, sql: Sql) -> Result<Vec<MySqlRow>, sqlx::Error> {
    sqlx::raw_sql(AssertSqlSafe(sql.into_text())).fetch_all(connection).await
}

/// What the connections of a pool are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Use {
    /// Verbs. A statement gives up early if another session keeps a row locked, because its caller does so as well.
    Verbs {
        /// Whether the server can end a session that is idle inside of a transaction.
        is_mariadb: bool,
    },
    /// Handlers' transactions.
    Handlers {
        /// Whether the server has `innodb_snapshot_isolation`.
        isolates: bool,
    },
}

/// A pool of the store. Its connections are made when they are needed.
pub(crate) fn pool(options: MySqlConnectOptions, purpose: Use, most: u32, wait: Duration) -> MySqlPool {
    let (isolation, server_idle, more) = match purpose {
        Use::Verbs { is_mariadb } => (
            COMMITTED,
            SERVER_IDLE_TIMEOUT,
            // The server does not notice a client that has left a session which waits for a lock of the table, as of ALTER TABLE.
            format!(
                "innodb_lock_wait_timeout={0},lock_wait_timeout={0},sql_mode='{STRICT}'{1}",
                LOCK_WAIT.as_secs(),
                if is_mariadb {
                    format!(",idle_transaction_timeout={}", TRANSACTION_IDLE.as_secs())
                } else {
                    String::new()
                }
            ),
        ),
        Use::Handlers { isolates } => {
            // The mode of the server and of sqlx stays: `||` means the same as in the application's other sessions.
            let mode = format!("sql_mode=CONCAT(@@sql_mode,',{STRICT}')");
            // Its default from MariaDB 11.6 on would refuse the settlement of a handler that has read before its lease was renewed.
            let snapshots = if isolates { ",innodb_snapshot_isolation=OFF" } else { "" };
            ("", SERVER_HANDLER_IDLE_TIMEOUT, mode + snapshots)
        }
    };
    let idle = server_idle.as_secs();
    // By another `completion_type`, COMMIT would begin a transaction, or end the session.
    let settings = format!("{isolation}SET SESSION autocommit=1,completion_type=0,wait_timeout={idle},{more}");
    MySqlPoolOptions::new()
        .max_connections(most)
        .acquire_timeout(wait)
        .idle_timeout(IDLE_TIMEOUT)
        // Asking the server before each use would cost every verb a round trip.
        .test_before_acquire(false)
        .before_acquire(|connection, meta| {
            Box::pin(async move {
                let is_trusted = meta.idle_for < TRUSTED_IDLE;
                Ok(is_trusted || timeout(PING_TIMEOUT, connection.ping()).await.is_ok_and(|answer| answer.is_ok()))
            })
        })
        .after_connect(move |connection, _| {
            let settings = settings.clone();
            Box::pin(async move { connection.execute(AssertSqlSafe(settings)).await.map(drop) })
        })
        // Its log of statements would contain stored answers.
        .connect_lazy_with(options.disable_statement_logging())
}
