//! Prepares connections for handlers' transactions, and rolls back on them.

use std::time::Duration;

use sqlx::postgres::PgTransactionManager;
use sqlx::{AssertSqlSafe, Connection, PgConnection};
use sqlx_core::transaction::TransactionManager as _;

use crate::connect::options::expect_direct;
use crate::error::{is_connection_lost, may_be_the_handlers};
use crate::sql::{Echo, own_rows};
use crate::timeouts::within;

/// Rolls back a transaction in any state.
pub(crate) const ROLLBACK: &str = "ROLLBACK";

/// How many open transactions sqlx must count on a connection for handlers, and on one through a proxy. Through a proxy, nothing
/// else protects against a handler that calls `begin` again and again in a failed transaction.
const REQUIRED_DEPTH: usize = 16;
const REQUIRED_DEPTH_POOLED: usize = 256;

/// The least transaction depth that sqlx must count on a connection for handlers; see [`prepare`].
pub(crate) fn required_depth(pooled: bool) -> usize {
    if pooled { REQUIRED_DEPTH_POOLED } else { REQUIRED_DEPTH }
}

/// The transaction depth that sqlx counts.
pub(crate) fn depth(connection: &PgConnection) -> usize {
    PgTransactionManager::get_transaction_depth(connection)
}

/// Prepares a new connection for handlers' transactions, and raises sqlx's count of open transactions.
///
/// The store begins and ends transactions with its own messages, each of which does more in the same round trip. They
/// cannot be sent by sqlx's `Connection::begin_with`, which discards the rows of the answer. But a handler's `begin` must make
/// a savepoint, and its `commit` must release only that. So sqlx's count is raised once, by nested `begin`s whose transactions
/// are forgotten. There is no other way to raise it.
///
/// If a handler's `begin` fails or is cancelled, sqlx queues up to two ROLLBACKs and lowers its count by as many. At a high
/// count they name savepoints that do not exist, and the transaction fails. At a count of one, sqlx would end the
/// transaction, and the handler's next writes would commit without the record.
/// [`handlers_options`](crate::connect::options::handlers_options) says what prevents that. A session whose count has become
/// too low is closed.
///
/// Each round trip may take `limit`.
pub(crate) async fn prepare(
    connection: &mut PgConnection,
    pooled: bool,
    prepare_sql: &str,
    limit: Duration,
) -> Result<(), sqlx::Error> {
    while depth(connection) < required_depth(pooled) {
        std::mem::forget(within(limit, connection.begin()).await?);
    }
    within(limit, sqlx::raw_sql(ROLLBACK).execute(&mut *connection)).await?;
    if pooled {
        return Ok(());
    }
    within(limit, expect_direct(connection)).await?;
    let last = format!("{prepare_sql}SET default_transaction_read_only = on");
    within(limit, sqlx::raw_sql(AssertSqlSafe(last)).execute(connection)).await.map(drop)
}

/// Sends statements that begin with a rollback, so that they may be sent again. They ask for `echo`.
///
/// The handler may have left the error of a statement unread: of a query that it cancelled, or of the ROLLBACK that sqlx
/// queued for a failed `begin` (see [`prepare`]). Then sqlx returns that error in place of sending the next statement. So
/// after an error all pending answers are read, and the statements are sent once more.
pub(crate) async fn roll_back_by(
    connection: &mut PgConnection,
    statements: &str,
    echo: Echo,
) -> Result<(), sqlx::Error> {
    match sqlx::raw_sql(AssertSqlSafe(statements.to_owned())).fetch_all(&mut *connection).await {
        Ok(rows) => echo.expect_in(&rows),
        Err(error) if may_be_the_handlers(&error) => {
            skip_errors(connection).await?;
            // With another number, as the answer to the first message may still come.
            own_rows(connection, statements.to_owned()).await.map(drop)
        }
        Err(error) => Err(error),
    }
}

/// Reads the pending errors of statements that a handler did not await; see [`roll_back_by`].
pub(crate) async fn skip_errors(connection: &mut PgConnection) -> Result<(), sqlx::Error> {
    // Each round reads one error, and their number is finite.
    while let Err(error) = connection.ping().await {
        if is_connection_lost(&error) {
            return Err(error);
        }
    }
    Ok(())
}
