//! Reports the sessions whose locks keep a store from opening.

use std::time::Duration;

use idem_core::{StoreError, StoreErrorKind};
use sqlx::postgres::PgConnectOptions;
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, Row as _};
use tokio::time::timeout;

use crate::timeouts::{BLOCKERS_LOG_INTERVAL, BLOCKERS_QUERY_TIMEOUT};

/// Runs `work` in the session `backend_pid`. Logs which sessions it waits for. If it has waited for `migration_wait`, its
/// error names them.
pub(crate) async fn log_while_waiting<T>(
    options: &PgConnectOptions,
    backend_pid: i32,
    migration_wait: Duration,
    work: impl Future<Output = Result<T, StoreError>>,
) -> Result<T, StoreError> {
    let mut work = std::pin::pin!(work);
    let mut blockers = String::new();
    loop {
        match timeout(BLOCKERS_LOG_INTERVAL.min(migration_wait / 3), &mut work).await {
            Ok(Err(error)) if error.kind() == StoreErrorKind::Timeout => {
                let whom = if blockers.is_empty() { "another session" } else { blockers.as_str() };
                let message = format!(
                    "could not open the store: {whom} held a lock for longer than migration_wait, {migration_wait:?}"
                );
                return Err(StoreError::new(StoreErrorKind::Timeout, message).with_source(error));
            }
            Ok(done) => return done,
            Err(_) => {
                let now = timeout(BLOCKERS_QUERY_TIMEOUT, blockers_of(options, backend_pid)).await;
                if let Ok(Ok(now)) = now
                    && !now.is_empty()
                    && now != blockers
                {
                    tracing::warn!(blockers = %now, "opening the store waits for the lock of another session");
                    blockers = now;
                }
            }
        }
    }
}

/// Describes the blocking sessions. Roles without privileges do not see when the transactions of other roles began.
async fn blockers_of(options: &PgConnectOptions, backend_pid: i32) -> Result<String, sqlx::Error> {
    let mut connection = options.connect().await?;
    let question = format!(
        "SELECT blocker.pid::pg_catalog.text, activity.usename::pg_catalog.text, activity.application_name, \
         activity.xact_start::pg_catalog.text FROM pg_catalog.unnest(pg_catalog.pg_blocking_pids({backend_pid})) \
         AS blocker (pid) LEFT JOIN pg_catalog.pg_stat_activity AS activity \
         ON activity.pid OPERATOR(pg_catalog.=) blocker.pid"
    );
    let found = sqlx::raw_sql(AssertSqlSafe(question)).fetch_all(&mut connection).await?;
    let mut blockers = Vec::new();
    for row in found {
        let text = |column: usize| row.try_get::<Option<String>, _>(column).map(Option::unwrap_or_default);
        let (pid, role, application, since) = (text(0)?, text(1)?, text(2)?, text(3)?);
        let since = if since.is_empty() { since } else { format!(", in a transaction since {since}") };
        blockers.push(format!("process {pid} of the role {role:?} (application_name {application:?}{since})"));
    }
    connection.close().await?;
    Ok(blockers.join(" and "))
}
