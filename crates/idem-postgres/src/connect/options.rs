//! Options and settings that keep a connection this client's own, and tell the server when this client is gone.

use sqlx::postgres::PgConnectOptions;
use sqlx::{PgConnection, Row as _};

use crate::config::PostgresConfig;
use crate::connect::server::Server;
use crate::sql::milliseconds;

/// The options of a connection whose session is to be this client's own, and an option by which to see that it is.
pub(crate) fn direct_options(options: PgConnectOptions) -> PgConnectOptions {
    options.options([("idem.direct", "on")])
}

/// Refuses a session that may be somebody else's next.
pub(crate) async fn expect_direct(connection: &mut PgConnection) -> Result<(), sqlx::Error> {
    let direct = sqlx::raw_sql("SELECT pg_catalog.current_setting('idem.direct', TRUE)").fetch_one(connection).await?;
    if direct.try_get::<Option<String>, _>(0)?.as_deref() != Some("on") {
        // A proxy that ignores what it does not know.
        return Err(sqlx::Error::Configuration(NEEDS_OPTIONS.into()));
    }
    Ok(())
}

/// What to say when start-up options do not reach the server.
pub(crate) const NEEDS_OPTIONS: &str =
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
    direct_options(options).options(disconnect_detection(server.notices_closed_clients))
}

/// What is set in each of a handler's transactions: how long it may leave it alone, and [`disconnect_detection`] where a session does
/// not have that as options.
pub(crate) fn transaction_settings(
    config: &PostgresConfig,
    server: &Server,
) -> impl Iterator<Item = (&'static str, i64)> {
    let idle = ("idle_in_transaction_session_timeout", milliseconds(config.idle_in_transaction));
    let disconnect_detection =
        (!config.has_own_sessions()).then(|| disconnect_detection(server.notices_closed_clients));
    std::iter::once(idle).chain(disconnect_detection.into_iter().flatten())
}

/// Settings by which the server notices that the other end of a connection is gone.
fn disconnect_detection(notices_closed_clients: bool) -> impl Iterator<Item = (&'static str, i64)> {
    // A machine that vanished is noticed within half a minute, as a lease would be, and not after the hours that
    // operating systems take by default.
    let keepalives = [("tcp_keepalives_idle", 10), ("tcp_keepalives_interval", 5), ("tcp_keepalives_count", 4)];
    // A process that died in the middle of a long statement: the server notices before the statement's end.
    let closed = notices_closed_clients.then_some(("client_connection_check_interval", 1000));
    keepalives.into_iter().chain(closed)
}
