//! Connections for handlers' transactions: what is done so that none of them commits anything without its record.

use std::time::Duration;

use idem_core::{StoreError, StoreErrorKind};
use sqlx::postgres::PgConnectOptions;
use sqlx::{AssertSqlSafe, Connection, PgConnection, Row as _};
use tokio::time::timeout;

use crate::config::PostgresConfig;
use crate::error::{connect_error, is_out_of_transaction, is_protocol_violation, store_error};
use crate::health::Server;
use crate::sessions::Session;
use crate::store::milliseconds;

/// Rolls back a transaction that is as the handler left it; fails when somebody has ended it.
pub(crate) const UNTOUCHED: &str = "ROLLBACK TO SAVEPOINT idem;ROLLBACK";

/// Rolls back a transaction that has failed in the store's own statements.
pub(crate) const FAILED: &str = "ROLLBACK";

/// How many transactions sqlx believes to be open on a connection that serves handlers, and on one through a proxy, where
/// there is nothing else that stands against a handler who begins again and again in a transaction that has failed.
const BELIEVED_DEPTH: u32 = 16;
const BELIEVED_DEPTH_POOLED: u32 = 256;

/// How long to wait for the server to roll back; after that the connection is closed, which comes to the same.
const ROLL_BACK_WITHIN: Duration = Duration::from_secs(5);

/// Ends the transaction on a connection without a trace, by the statement that does so. If that fails the connection is closed,
/// which ends it as well.
pub(crate) async fn roll_back(mut session: Session, how: &'static str, reusable: bool) -> Result<(), StoreError> {
    let rolled_back = sqlx::raw_sql(how).execute(&mut *session);
    let late = |_| StoreError::new(StoreErrorKind::Timeout, format!("no ROLLBACK within {ROLL_BACK_WITHIN:?}"));
    let rolled_back = timeout(ROLL_BACK_WITHIN, rolled_back).await.map_err(late)?;
    rolled_back.map_err(|error| match is_out_of_transaction(&error) {
        true => out_of_transaction(error),
        false => store_error("roll back", error),
    })?;
    if reusable {
        session.give_back();
    }
    Ok(())
}

/// Prepares a new connection for handlers' transactions.
///
/// They begin and end with statements of the store's own, each of which does more than that in one round trip, and sqlx
/// knows nothing of it. So that a handler's `begin` makes a savepoint all the same, and its `commit` ends no more than
/// that, sqlx is made to believe that transactions are open on this connection, one inside the other, always.
///
/// A `begin` of the handler's that fails or is cancelled is undone by sqlx with a ROLLBACK of the innermost: deep inside,
/// that names a savepoint that is not there, and the transaction fails. At the outermost it would be ended, and what the
/// handler writes next would commit without the record; see [`handlers_options`] for what is done against that. Each such
/// begin brings sqlx one or two levels up, so a connection serves again only after a transaction that was kept.
pub(crate) async fn prepare(connection: &mut PgConnection, pooled: bool, questions: &str) -> Result<(), sqlx::Error> {
    for _ in 0..if pooled { BELIEVED_DEPTH_POOLED } else { BELIEVED_DEPTH } {
        std::mem::forget(connection.begin().await?);
    }
    sqlx::raw_sql("ROLLBACK").execute(&mut *connection).await?;
    if pooled {
        return Ok(());
    }
    expect_direct(connection).await?;
    let last = format!("{questions}SET default_transaction_read_only = on");
    sqlx::raw_sql(AssertSqlSafe(last)).execute(connection).await.map(drop)
}

/// The options of a connection whose session is to be this client's own, and an option by which to see that it is.
pub(crate) fn direct(options: PgConnectOptions) -> PgConnectOptions {
    options.options([("idem.direct", "on")])
}

/// Refuses a session that may be somebody else's next.
pub(crate) async fn expect_direct(connection: &mut PgConnection) -> Result<(), sqlx::Error> {
    let direct = sqlx::raw_sql("SELECT current_setting('idem.direct', TRUE)").fetch_one(connection).await?;
    if direct.try_get::<Option<String>, _>(0)?.as_deref() != Some("on") {
        // A proxy that ignores what it does not know.
        return Err(sqlx::Error::Configuration(NEEDS_OPTIONS.into()));
    }
    Ok(())
}

/// What to say when start-up options do not reach the server.
const NEEDS_OPTIONS: &str =
    "something between here and the server takes no start-up options; say through_transaction_pooler()";

/// The options of connections for handlers' transactions.
///
/// Outside of those transactions nothing can be written: whatever ends one before its time, nothing is committed without
/// its record after that. A transaction-pooling proxy cannot do that for one client alone, and would do it to all; so
/// the session has to be this client's own.
pub(crate) fn handlers_options(
    options: PgConnectOptions,
    config: &PostgresConfig,
    server: &Server,
) -> PgConnectOptions {
    if config.pooled {
        return options;
    }
    direct(options).options(vigilance(server.notices_closed_clients))
}

/// What is set in each of a handler's transactions: how long it may leave it alone, and [`vigilance`] where a session cannot
/// have that as options.
pub(crate) fn transaction_settings(
    config: &PostgresConfig,
    server: &Server,
) -> impl Iterator<Item = (&'static str, i64)> {
    let idle = ("idle_in_transaction_session_timeout", milliseconds(config.idle_in_transaction));
    let vigilance = config.pooled.then(|| vigilance(server.notices_closed_clients));
    std::iter::once(idle).chain(vigilance.into_iter().flatten())
}

/// Settings by which the server notices that the other end of a connection is gone.
fn vigilance(notices_closed_clients: bool) -> impl Iterator<Item = (&'static str, i64)> {
    // A machine that vanished is noticed within half a minute, as a lease would be, and not after the hours that
    // operating systems take by default.
    let keepalives = [("tcp_keepalives_idle", 10), ("tcp_keepalives_interval", 5), ("tcp_keepalives_count", 4)];
    // A process that died in the middle of a long statement: the server notices before the statement's end.
    let closed = notices_closed_clients.then_some(("client_connection_check_interval", 1000));
    keepalives.into_iter().chain(closed)
}

/// Why there is no connection with a session of its own.
pub(crate) fn no_session(error: sqlx::Error) -> StoreError {
    if matches!(error, sqlx::Error::Configuration(_)) || is_protocol_violation(&error) {
        return StoreError::new(StoreErrorKind::Misconfigured, NEEDS_OPTIONS).with_source(error);
    }
    connect_error(error)
}

pub(crate) fn out_of_transaction(error: sqlx::Error) -> StoreError {
    let message = "the handler has ended its transaction, or an error in it that it overlooked has";
    StoreError::new(StoreErrorKind::Unavailable, message).with_source(error)
}
