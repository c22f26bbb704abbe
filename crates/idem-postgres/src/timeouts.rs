//! Timeouts that depend on each other. The tests check these rules, for the defaults where a timeout can be configured.
//!
//! - [`RETRY_LOCK_TIMEOUT`] < `lock_timeout`: Verbs of one batch retry one by one; together they must not wait as long again.
//! - `lock_timeout` < `statement_timeout`: The error of a statement that waited for a row says so.
//! - [`SHORT_WAIT`] < [`TRANSACTION_WAIT`] < the engine's `store_timeout` of 2 s: The error says that no transaction was free.
//! - `statement_timeout` < [`client_timeout`]: The server's error says that nothing was done. A client that gives up first
//!   cannot know.
//! - Longest [`client_timeout`] < `PARTITION_GRACE`: A statement that extends an expiring record ends before its partition is
//!   dropped.
//! - [`client_timeout`] < [`OUTCOME_TIMEOUT`]: One lookup can end before the search for the outcome of a COMMIT does.
//! - [`COMMIT_TIMEOUT`] + [`OUTCOME_TIMEOUT`] < [`FINISH_TIMEOUT`](idem_core::FINISH_TIMEOUT): The engine still waits when
//!   the outcome of an unanswered COMMIT is known.
//! - [`COMMIT_TIMEOUT`] + [`ROLLBACK_TIMEOUT`] < [`FINISH_TIMEOUT`](idem_core::FINISH_TIMEOUT): The engine still waits when a
//!   refused COMMIT was rolled back.
//! - [`BLOCKERS_QUERY_TIMEOUT`] < [`BLOCKERS_LOG_INTERVAL`]: Opening does not go on while that query runs.
//! - [`BLOCKERS_LOG_INTERVAL`] < `migration_wait`: The log names the blocking session before the error does.

use std::io;
use std::time::Duration;

use tokio::time::timeout;

/// The default of [`statement_timeout`](crate::PostgresConfig::statement_timeout).
pub(crate) const STATEMENT_TIMEOUT: Duration = Duration::from_secs(2);

/// The longest `statement_timeout` that can be configured.
pub(crate) const LONGEST_STATEMENT_TIMEOUT: Duration = Duration::from_secs(30);

/// The longest wait that a configuration may set: a sum with the time of day must not overflow.
pub(crate) const LONGEST_WAIT: Duration = Duration::from_secs(24 * 3600);

/// The default of [`lock_timeout`](crate::PostgresConfig::lock_timeout).
pub(crate) const LOCK_TIMEOUT: Duration = Duration::from_millis(500);

/// How long a verb waits for a row after its batch has waited for `lock_timeout`.
pub(crate) const RETRY_LOCK_TIMEOUT: Duration = Duration::from_millis(5);

/// The default of [`transaction_wait`](crate::PostgresConfig::transaction_wait).
pub(crate) const TRANSACTION_WAIT: Duration = Duration::from_secs(1);

/// How long a request waits for a transaction before the store looks whether it is a repeat. Where short transactions follow each other,
/// one is free sooner, and the lookup is not needed.
pub(crate) const SHORT_WAIT: Duration = Duration::from_millis(50);

/// How long a message may take on its way to the server and back.
pub(crate) const ROUND_TRIP: Duration = Duration::from_secs(1);

/// How long the client waits for a statement of the store, for each step of connecting, and for a connection for upkeep.
pub(crate) fn client_timeout(statement_timeout: Duration) -> Duration {
    statement_timeout + ROUND_TRIP
}

/// The answer to one step of connecting, or an error after `limit`.
pub(crate) async fn within<T>(
    limit: Duration,
    step: impl Future<Output = Result<T, sqlx::Error>>,
) -> Result<T, sqlx::Error> {
    let late = |_| {
        let message = format!("it did not answer within {limit:?}");
        sqlx::Error::Io(io::Error::new(io::ErrorKind::TimedOut, message))
    };
    timeout(limit, step).await.map_err(late).flatten()
}

/// How long COMMIT may take.
pub(crate) const COMMIT_TIMEOUT: Duration = Duration::from_secs(5);

/// How long to search for the outcome of a transaction whose COMMIT got no answer, and the pause between two lookups.
pub(crate) const OUTCOME_TIMEOUT: Duration = Duration::from_secs(4);
pub(crate) const OUTCOME_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// How long ROLLBACK may take. After that the connection is closed, which rolls back too.
pub(crate) const ROLLBACK_TIMEOUT: Duration = Duration::from_secs(4);

/// How long closing a handler's connection may take. It keeps its permit until then, so that the server has no more sessions
/// of this store than `max_transactions`. A statement that runs for longer outlives its permit, until the server notices. A
/// COMMIT without an answer keeps its permit for longer; see [`unanswered`](crate::connect::unanswered).
pub(crate) const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// The default of [`migration_wait`](crate::PostgresConfig::migration_wait).
pub(crate) const MIGRATION_WAIT: Duration = Duration::from_secs(60);

/// How often opening a store asks which sessions hold the lock that it waits for, and how long that question may take.
pub(crate) const BLOCKERS_LOG_INTERVAL: Duration = Duration::from_secs(5);
pub(crate) const BLOCKERS_QUERY_TIMEOUT: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests {
    use idem_core::FINISH_TIMEOUT;

    use super::*;

    /// How long a partition is kept after its last record: `grace` in `partitions.sql`, for periods that are not shorter.
    const PARTITION_GRACE: Duration = Duration::from_secs(60);

    #[test]
    fn the_server_gives_up_before_the_client() {
        assert!(RETRY_LOCK_TIMEOUT < LOCK_TIMEOUT);
        assert!(LOCK_TIMEOUT < STATEMENT_TIMEOUT);
        assert!(SHORT_WAIT < TRANSACTION_WAIT);
        assert!(STATEMENT_TIMEOUT <= LONGEST_STATEMENT_TIMEOUT);
        for statement_timeout in [Duration::ZERO, STATEMENT_TIMEOUT, LONGEST_STATEMENT_TIMEOUT] {
            assert!(statement_timeout < client_timeout(statement_timeout));
        }
    }

    #[test]
    fn a_transaction_ends_before_the_engine_stops_waiting() {
        assert!(COMMIT_TIMEOUT + OUTCOME_TIMEOUT < FINISH_TIMEOUT);
        assert!(COMMIT_TIMEOUT + ROLLBACK_TIMEOUT < FINISH_TIMEOUT);
        assert!(client_timeout(STATEMENT_TIMEOUT) + OUTCOME_POLL_INTERVAL < OUTCOME_TIMEOUT);
    }

    #[test]
    fn a_statement_ends_before_the_partition_of_its_record_is_dropped() {
        assert!(client_timeout(LONGEST_STATEMENT_TIMEOUT) < PARTITION_GRACE);
        let grace = format!("least(period, {}) INTO grace", PARTITION_GRACE.as_micros());
        assert!(include_str!("../migrations/partitions.sql").contains(&grace));
    }

    #[test]
    fn blockers_are_logged_before_the_wait_for_them_ends() {
        assert!(BLOCKERS_QUERY_TIMEOUT < BLOCKERS_LOG_INTERVAL);
        assert!(BLOCKERS_LOG_INTERVAL < MIGRATION_WAIT);
    }
}
