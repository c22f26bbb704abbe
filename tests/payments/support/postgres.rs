//! Two private schemas of a server in the shared Postgres, and queries about what happens in them.

use std::sync::Mutex;

use sqlx::{AssertSqlSafe, Connection, PgConnection, Row};
use tokio::runtime::Runtime;
use uuid::Uuid;

/// A blocking connection.
pub(crate) struct Sql {
    runtime: Runtime,
    connection: Mutex<PgConnection>,
}

impl Sql {
    pub(crate) fn connect() -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let connection = runtime.block_on(PgConnection::connect(&idem_servers::postgres_url())).unwrap();
        Self { runtime, connection: Mutex::new(connection) }
    }

    /// Runs statements.
    pub(crate) fn run(&self, statements: String) {
        self.try_run(statements).unwrap();
    }

    fn try_run(&self, statements: String) -> Result<(), sqlx::Error> {
        let mut connection = self.connection.lock().unwrap();
        self.runtime.block_on(sqlx::raw_sql(AssertSqlSafe(statements)).execute(&mut *connection))?;
        Ok(())
    }

    /// The number that a query returns.
    pub(crate) fn number(&self, query: String) -> i64 {
        let mut connection = self.connection.lock().unwrap();
        let row = self.runtime.block_on(sqlx::query(AssertSqlSafe(query)).fetch_one(&mut *connection)).unwrap();
        row.get(0)
    }

    /// The strings that a query returns.
    pub(crate) fn strings(&self, query: String) -> Vec<String> {
        let mut connection = self.connection.lock().unwrap();
        let rows = self.runtime.block_on(sqlx::query(AssertSqlSafe(query)).fetch_all(&mut *connection)).unwrap();
        rows.iter().map(|row| row.get(0)).collect()
    }
}

/// The schemas of one server; dropped with it.
pub(crate) struct Schemas {
    pub(crate) payments: String,
    pub(crate) idem: String,
    pub(crate) sql: Sql,
}

impl Schemas {
    pub(crate) fn new() -> Self {
        let unique = Uuid::new_v4().simple();
        Self { payments: format!("test_payments_{unique}"), idem: format!("test_idem_{unique}"), sql: Sql::connect() }
    }

    /// The arguments that put a server here. An application name identifies its connections.
    pub(crate) fn arguments(&self, url: &str) -> Vec<String> {
        let separator = if url.contains('?') { '&' } else { '?' };
        let store = format!("{url}{separator}application_name={}", self.idem);
        let arguments = ["--store", &store, "--schema", &self.payments, "--idem-schema", &self.idem];
        arguments.map(str::to_owned).to_vec()
    }

    /// The number of records; a transactional run has none before it commits.
    pub(crate) fn records(&self) -> u64 {
        let records = self.sql.number(format!("SELECT count(*) FROM {}.idem_records", self.idem));
        u64::try_from(records).unwrap()
    }

    /// The number of handlers in an idle transaction. A lock that the transaction holds marks their operations as running.
    pub(crate) fn transactions(&self) -> i64 {
        self.sql.number(format!(
            "SELECT count(DISTINCT pid) FROM pg_stat_activity JOIN pg_locks USING (pid)
             WHERE application_name = '{}' AND state = 'idle in transaction' AND locktype = 'advisory' AND granted",
            self.idem
        ))
    }

    /// How many of those have moved money.
    pub(crate) fn transactions_with_effect(&self) -> i64 {
        self.sql.number(format!(
            "SELECT count(DISTINCT pid) FROM pg_stat_activity JOIN pg_locks USING (pid)
             WHERE application_name = '{}' AND state = 'idle in transaction'
               AND relation = '{}.ledger'::regclass AND mode = 'RowExclusiveLock' AND granted",
            self.idem, self.payments
        ))
    }

    /// Removes both schemas with their contents.
    pub(crate) fn remove(&self) -> Result<(), sqlx::Error> {
        // Sessions of a killed server may take a moment to notice that.
        self.sql.try_run(format!(
            "SET lock_timeout = '20s'; DROP SCHEMA IF EXISTS {} CASCADE; DROP SCHEMA IF EXISTS {} CASCADE",
            self.payments, self.idem
        ))
    }
}

impl Drop for Schemas {
    fn drop(&mut self) {
        if let Err(error) = self.remove() {
            eprintln!("the schemas of a test remain: {error}");
        }
    }
}
