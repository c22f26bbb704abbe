//! Timeouts that depend on each other. The tests check these rules.
//!
//! - [`VERB_TIMEOUT`] < [`TRANSACTION_IDLE`]: A client that still waits for its session does not lose it.
//! - [`LOCK_WAIT`] < [`VERB_TIMEOUT`]: The error of a verb that waited for a row says so.
//! - [`TRANSACTION_WAIT`] < the engine's `store_timeout` of 2 s: The error says that no transaction was free.
//! - [`COMMIT_TIMEOUT`] + [`OUTCOME_TIMEOUT`] < [`FINISH_TIMEOUT`](idem_core::FINISH_TIMEOUT): The engine still waits when the
//!   outcome of an unanswered COMMIT is known.
//! - [`TRANSACTION_WAIT`] + [`SHORTEST_CONNECT`] < the same: Also after a wait for the transaction.
//! - [`SETTLEMENT_LOCK_WAIT`] < [`VERB_TIMEOUT`] < [`COMMIT_TIMEOUT`]: The error of a settlement that waited for a lock says that
//!   nothing was committed.
//! - [`IDLE_TIMEOUT`] < [`SERVER_IDLE_TIMEOUT`]: The pool closes an idle connection before the server does.

use std::time::Duration;

/// How long a verb may take, with its connection.
pub(crate) const VERB_TIMEOUT: Duration = Duration::from_secs(3);

/// How long an acquire waits for its batch before it looks for a record that answers it. Commits may stall, as without a standby, and
/// repeats do not need one.
pub(crate) const SLOW_BATCH: Duration = Duration::from_millis(100);

/// After this time without a statement inside of a transaction, MariaDB ends a session for verbs. A batch holds the locks of many
/// records, and its client may be gone.
pub(crate) const TRANSACTION_IDLE: Duration = Duration::from_secs(4);

/// How long a statement of the store may wait for a row lock of another session. The server counts whole seconds.
pub(crate) const LOCK_WAIT: Duration = Duration::from_secs(1);

/// The default of [`transaction_wait`](crate::MySqlConfig::transaction_wait).
pub(crate) const TRANSACTION_WAIT: Duration = Duration::from_secs(1);

/// How long a handler waits for a connection at least, once it has the right to a transaction and holds its record.
pub(crate) const SHORTEST_CONNECT: Duration = Duration::from_millis(500);

/// How long a connection for a handler may take to be made.
pub(crate) const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a handler's settlement may wait for a lock of another session, before anything of it is written. MariaDB counts whole
/// seconds.
pub(crate) const SETTLEMENT_LOCK_WAIT: Duration = Duration::from_secs(2);

/// How long the last statements of a handler's transaction may take, with COMMIT.
pub(crate) const COMMIT_TIMEOUT: Duration = Duration::from_secs(5);

/// How long it may take to make a connection fit for the next handler, before it is closed.
pub(crate) const CLEAN_TIMEOUT: Duration = Duration::from_secs(3);

/// How long to search for the outcome of a transaction whose COMMIT got no answer, and the pause between two lookups.
pub(crate) const OUTCOME_TIMEOUT: Duration = Duration::from_secs(4);
pub(crate) const OUTCOME_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// How long opening a store waits for another process that migrates.
pub(crate) const MIGRATION_WAIT: Duration = Duration::from_secs(60);

/// After this time without a statement, the server ends a session of the store for verbs, and frees its row locks. Without it, a
/// machine that loses its power inside of a verb would keep its key locked for the server's `wait_timeout`, 8 h by default.
pub(crate) const SERVER_IDLE_TIMEOUT: Duration = Duration::from_secs(30);

/// The same for handlers' sessions of the store's own pool: as long as the engine lets an operation run.
pub(crate) const SERVER_HANDLER_IDLE_TIMEOUT: Duration = Duration::from_secs(600);

/// After this time without a statement, the pool closes a connection.
pub(crate) const IDLE_TIMEOUT: Duration = Duration::from_secs(15);

/// A connection that was idle for longer is tried before it is used.
pub(crate) const TRUSTED_IDLE: Duration = Duration::from_secs(1);

/// How long that may take. After a failover, a connection to a machine that is gone gets no answer at all.
pub(crate) const PING_TIMEOUT: Duration = Duration::from_millis(500);

/// The longest wait that a configuration may set: a sum with the time of day must not overflow.
pub(crate) const LONGEST_WAIT: Duration = Duration::from_secs(24 * 3600);

#[cfg(test)]
mod tests {
    use idem_core::FINISH_TIMEOUT;

    use super::*;

    #[test]
    fn the_first_to_give_up_can_say_why() {
        assert!(LOCK_WAIT < VERB_TIMEOUT && SLOW_BATCH < VERB_TIMEOUT && VERB_TIMEOUT < TRANSACTION_IDLE);
        assert!(TRANSACTION_WAIT + SHORTEST_CONNECT < Duration::from_secs(2));
        assert!(SETTLEMENT_LOCK_WAIT < VERB_TIMEOUT && VERB_TIMEOUT < COMMIT_TIMEOUT);
        assert!(COMMIT_TIMEOUT + OUTCOME_TIMEOUT < FINISH_TIMEOUT);
        assert!(TRUSTED_IDLE < IDLE_TIMEOUT && IDLE_TIMEOUT < SERVER_IDLE_TIMEOUT);
    }
}
