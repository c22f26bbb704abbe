//! Sessions of handlers' transactions from a pool of the application.
//!
//! The application's other work uses the same sessions, so nothing is kept in them. sqlx begins and ends the transaction, so that its
//! count of open transactions is right when the pool gets the connection back. That takes a round trip more at both ends.
//!
//! If a handler's `begin` fails or is cancelled, sqlx ends the whole transaction, since it counts only one. So the session takes no
//! writes outside of the transaction ([`GUARD`]) until it has ended ([`UNGUARD`]). A session of a transaction-pooling proxy
//! cannot be guarded; see [`handlers_options`](crate::connect::options::handlers_options).
//!
//! A session that is not as it was before leaves the pool and is closed.

use std::fmt;
use std::time::{Duration, Instant};

use idem_core::{StoreError, StoreErrorKind};
use sqlx::pool::PoolConnection;
use sqlx::{PgPool, Postgres};
use tokio::time::timeout_at;

use crate::error::connect_error;

/// Keeps the session from writing anything outside of a transaction that says `READ WRITE`, and remembers what was set. Send it together
/// with that `BEGIN`. It is a transaction: without one it would be undone when the handler's is rolled back.
pub(crate) const GUARD: &str = "BEGIN;\
     SELECT pg_catalog.set_config('idem.read_only', pg_catalog.current_setting('default_transaction_read_only'), FALSE);\
     SET default_transaction_read_only=on;COMMIT;";

/// Takes [`GUARD`] back. In a transaction it does so when that commits.
pub(crate) const UNGUARD: &str = "SELECT pg_catalog.set_config('default_transaction_read_only', \
     pg_catalog.current_setting('idem.read_only'), FALSE);";

/// The application's pool, and how long to wait for one of its connections.
pub(crate) struct ApplicationPool {
    pub(crate) pool: PgPool,
    pub(crate) wait: Duration,
    /// Whether a transaction pooler is known to be on the way.
    pub(crate) pooled: bool,
}

impl ApplicationPool {
    /// Whether a connection waits to be used. `PgPool::try_acquire` would take it without the pool's `before_acquire`.
    pub(crate) fn has_idle(&self) -> bool {
        self.pool.num_idle() > 0
    }

    /// One of its connections.
    pub(crate) async fn acquire(&self, deadline: Instant) -> Result<PoolConnection<Postgres>, StoreError> {
        // In a task: where a new connection takes longer than callers wait, the pool gets it, and the next caller.
        let acquiring = tokio::spawn({
            let pool = self.pool.clone();
            async move { pool.acquire().await }
        });
        let error = match timeout_at(deadline.into(), acquiring).await {
            Ok(Ok(Ok(connection))) => return Ok(connection),
            Ok(Ok(Err(error @ sqlx::Error::PoolTimedOut))) => Some(error),
            Ok(Ok(Err(error))) => return Err(connect_error(error, self.pooled)),
            Ok(Err(_)) | Err(_) => None,
        };
        let most = self.pool.options().get_max_connections();
        let (kind, why) = if self.pool.size() >= most && !self.has_idle() {
            (StoreErrorKind::Busy, "are in use")
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
