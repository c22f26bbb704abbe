//! The Postgres server of a check, and queries to it outside the store.

use idem_servers::Postgres;
use sqlx::postgres::{PgConnectOptions, PgRow};
use sqlx::{AssertSqlSafe, ConnectOptions, PgConnection, Row};

use crate::Error;

/// The settings that a reader of the results must know.
const SETTINGS: &str = "'fsync', 'synchronous_commit', 'full_page_writes', 'wal_sync_method', 'shared_buffers', \
     'max_wal_size', 'checkpoint_timeout', 'max_connections', 'autovacuum', 'autovacuum_naptime', \
     'autovacuum_vacuum_scale_factor', 'autovacuum_vacuum_cost_delay'";

/// The server, and a connection that the store does not use.
#[derive(Debug)]
pub(crate) struct Database {
    server: Postgres,
    connection: PgConnection,
}

impl Database {
    /// Starts a server with `settings` besides the defaults, and prints its version and settings.
    pub(crate) async fn start(settings: &[&str]) -> Result<Self, Error> {
        let server = Postgres::start_with(settings)?;
        let options = server.url().parse::<PgConnectOptions>()?;
        let connection = options.disable_statement_logging().application_name("idem-long").connect().await?;
        let mut database = Self { server, connection };
        println!("{} ({})", database.version(), database.server.origin());
        let shown = format!(
            "SELECT string_agg(name || '=' || current_setting(name), ', ' ORDER BY name)
            FROM pg_settings WHERE name IN ({SETTINGS})"
        );
        println!("{}", database.text(&shown).await?);
        Ok(database)
    }

    /// Restarts the server and connects again. With `by_force` it is killed, as in a crash.
    pub(crate) async fn restart(self, by_force: bool) -> Result<Self, Error> {
        let Self { mut server, .. } = self;
        // This blocks until the server is up, and must not delay other tasks on the runtime.
        let server = tokio::task::spawn_blocking(move || {
            if by_force { server.kill() } else { server.stop() }?;
            server.start_again()?;
            Ok::<_, idem_servers::Error>(server)
        });
        let server = server.await??;
        let options = server.url().parse::<PgConnectOptions>()?;
        let connection = options.disable_statement_logging().application_name("idem-long").connect().await?;
        Ok(Self { server, connection })
    }

    pub(crate) fn version(&self) -> &str {
        self.server.version()
    }

    pub(crate) fn url(&self) -> String {
        self.server.url()
    }

    /// Options for sessions that `name` identifies.
    pub(crate) fn options(&self, name: &str) -> Result<PgConnectOptions, Error> {
        Ok(self.server.url().parse::<PgConnectOptions>()?.disable_statement_logging().application_name(name))
    }

    pub(crate) async fn rows(&mut self, sql: &str) -> Result<Vec<PgRow>, Error> {
        let rows = sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).fetch_all(&mut self.connection).await;
        rows.map_err(|error| format!("{sql}: {error}").into())
    }

    /// Runs statements that return no rows.
    pub(crate) async fn run(&mut self, sql: &str) -> Result<(), Error> {
        self.rows(sql).await.map(drop)
    }

    pub(crate) async fn number(&mut self, sql: &str) -> Result<i64, Error> {
        let rows = self.rows(sql).await?;
        let row = rows.first().ok_or_else(|| format!("{sql}: no row"))?;
        Ok(row.try_get(0)?)
    }

    pub(crate) async fn text(&mut self, sql: &str) -> Result<String, Error> {
        let rows = self.rows(sql).await?;
        let row = rows.first().ok_or_else(|| format!("{sql}: no row"))?;
        Ok(row.try_get(0)?)
    }
}
