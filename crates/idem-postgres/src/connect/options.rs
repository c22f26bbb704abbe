//! Connect options and settings for exclusive sessions, and for a server that detects that its client is gone.

use sqlx::postgres::PgConnectOptions;
use sqlx::{PgConnection, Row as _};

use crate::config::PostgresConfig;
use crate::connect::server::Server;
use crate::sql::milliseconds;

/// The connect options of an exclusive session. `idem.direct` shows that start-up options reach the server.
pub(crate) fn direct_options(options: PgConnectOptions) -> PgConnectOptions {
    options.options([("idem.direct", "on")])
}

/// Refuses a session that a proxy may give to another client next.
pub(crate) async fn expect_direct(connection: &mut PgConnection) -> Result<(), sqlx::Error> {
    let direct = sqlx::raw_sql("SELECT pg_catalog.current_setting('idem.direct', TRUE)").fetch_one(connection).await?;
    if direct.try_get::<Option<String>, _>(0)?.as_deref() != Some("on") {
        // A proxy ignores start-up options that it does not know.
        return Err(sqlx::Error::Configuration(NEEDS_OPTIONS.into()));
    }
    Ok(())
}

/// The message when start-up options do not reach the server.
pub(crate) const NEEDS_OPTIONS: &str =
    "a proxy between this process and Postgres ignores start-up options; call through_transaction_pooler()";

/// The connect options for handlers' transactions.
///
/// Their sessions take no writes outside of those transactions. If a transaction ends early, nothing is committed without its
/// record after that. A transaction-pooling proxy cannot make one client's session read-only without all others, so the
/// session must be exclusive. Through a declared pooler the options stay as they are.
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

/// The settings of each handler's transaction: how long it may be idle, and [`disconnect_detection`] unless the session's
/// connect options have that.
pub(crate) fn transaction_settings(
    config: &PostgresConfig,
    server: &Server,
) -> impl Iterator<Item = (&'static str, i64)> {
    let idle = ("idle_in_transaction_session_timeout", milliseconds(config.idle_in_transaction));
    let disconnect_detection =
        (!config.has_own_sessions()).then(|| disconnect_detection(server.notices_closed_clients));
    std::iter::once(idle).chain(disconnect_detection.into_iter().flatten())
}

/// Settings by which the server detects that its client is gone.
fn disconnect_detection(notices_closed_clients: bool) -> impl Iterator<Item = (&'static str, i64)> {
    // Keepalives detect a vanished machine within half a minute. The defaults of operating systems take hours.
    let keepalives = [("tcp_keepalives_idle", 10), ("tcp_keepalives_interval", 5), ("tcp_keepalives_count", 4)];
    // If a process dies in the middle of a long statement, the server notices before the statement's end.
    let closed = notices_closed_clients.then_some(("client_connection_check_interval", 1000));
    keepalives.into_iter().chain(closed)
}
