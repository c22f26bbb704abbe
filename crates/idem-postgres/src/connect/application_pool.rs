//! Takes sessions for handlers' transactions from the application's pool.
//!
//! The application's other work uses the same sessions, so the store keeps nothing in them. The transaction is begun and ended
//! by sqlx, whose count of open transactions must be right when the pool gets the connection back. That takes a round trip
//! more at both ends.
//!
//! If a handler's `begin` fails or is cancelled, sqlx ends the whole transaction, because it counts only one. So [`GUARD`]
//! keeps the session from writing outside of the transaction, until [`UNGUARD`] after its end. A session of a
//! transaction-pooling proxy cannot be guarded; see [`handlers_options`](crate::connect::options::handlers_options).
//!
//! A session that is not restored is closed and leaves the pool.

use std::fmt;
use std::time::{Duration, Instant};

use idem_core::{StoreError, StoreErrorKind};
use sqlx::pool::PoolConnection;
use sqlx::{PgPool, Postgres};
use tokio::time::timeout_at;

use crate::error::connect_error;
use crate::sql::Sql;

/// Makes the session read-only outside of transactions that say `READ WRITE`, and saves the previous setting. Send
/// [`BEGIN`](crate::sql::BEGIN) before it, and the `BEGIN` that says `READ WRITE` after it. It is a separate transaction, so that a
/// rollback by the handler does not undo it.
///
/// The `NOT DEFERRABLE` of the first fails in a transaction that the application has left open. COMMIT would keep what is written there.
pub(crate) const GUARD: &str = "SELECT pg_catalog.set_config('idem.read_only', pg_catalog.current_setting('default_transaction_read_only'), FALSE);\
     SET default_transaction_read_only=on;COMMIT;";

/// Takes [`GUARD`] back. In a transaction it does so when that commits.
///
/// It resets the setting first, so that a session without a value of its own follows the server's configuration as before. After a
/// RESET ALL of the handler's the saved value is empty.
pub(crate) const UNGUARD: &str = "SELECT pg_catalog.set_config('default_transaction_read_only', NULL, FALSE);\
     SELECT pg_catalog.set_config('default_transaction_read_only', given.saved, FALSE) \
     FROM (SELECT pg_catalog.current_setting('idem.read_only') AS saved OFFSET 0) AS given \
     WHERE given.saved OPERATOR(pg_catalog.<>) '' \
     AND given.saved OPERATOR(pg_catalog.<>) pg_catalog.current_setting('default_transaction_read_only');";

/// Sets the user and the role that the application has given to a session.
pub(crate) fn restore_role(user: &str, role: &str) -> String {
    let mut sql = Sql::default();
    for (setting, value) in [("session_authorization", user), ("role", role)] {
        sql.push("SELECT pg_catalog.set_config('").push(setting).push("',").text(value).push(",FALSE);");
    }
    sql.into_text()
}

/// The application's pool, and how long to wait for one of its connections.
pub(crate) struct ApplicationPool {
    pub(crate) pool: PgPool,
    pub(crate) wait: Duration,
    /// Whether the configuration declares a transaction pooler.
    pub(crate) pooled: bool,
}

impl ApplicationPool {
    /// Whether the pool has an idle connection. `PgPool::try_acquire` would skip the pool's `before_acquire`.
    pub(crate) fn has_idle(&self) -> bool {
        self.pool.num_idle() > 0
    }

    /// Takes a connection from the pool, by `deadline` at the latest.
    pub(crate) async fn acquire(&self, deadline: Instant) -> Result<PoolConnection<Postgres>, StoreError> {
        let most = self.pool.options().get_max_connections();
        // Before sqlx counts a connection that it makes for this caller.
        let is_full = self.pool.size() >= most;
        // In a task: if connecting takes longer than the caller waits, the pool keeps the connection for the next caller.
        let mut acquiring = tokio::spawn({
            let pool = self.pool.clone();
            async move { pool.acquire().await }
        });
        let error = match timeout_at(deadline.into(), &mut acquiring).await {
            Ok(Ok(Ok(connection))) => return Ok(connection),
            Ok(Ok(Err(error @ sqlx::Error::PoolTimedOut))) => Some(error),
            Ok(Ok(Err(error))) => return Err(connect_error(error, self.pooled)),
            // A hook of the pool has panicked, or it takes too long.
            Ok(Err(_)) | Err(_) => None,
        };
        let (kind, why) = if is_full && self.pool.size() >= most && !self.has_idle() {
            // This caller has no new connection on its way, and a caller that waits no longer must not keep a place in the queue.
            acquiring.abort();
            (StoreErrorKind::Busy, "are in use or being made")
        } else {
            (StoreErrorKind::Unavailable, "are in use, or a new one could not be made")
        };
        let message = format!("the application's pool gave no connection within {:?}: its {most} {why}", self.wait);
        let told = StoreError::new(kind, message);
        Err(error.map_or(told.clone(), |error| told.with_source(error)))
    }
}

impl fmt::Debug for ApplicationPool {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("ApplicationPool").field("wait", &self.wait).finish_non_exhaustive()
    }
}
