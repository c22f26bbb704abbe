//! Stores in schemas of their own, in the server that the tests are given.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::expect_used,
    clippy::unwrap_used,
    reason = "each test binary uses its part, and fails by panicking"
)]

use std::sync::Arc;
use std::time::Duration;

use idem_postgres::{PostgresConfig, PostgresStore, TimeOffset};
use idem_testkit::{Subject, TimeControl};
use sqlx::postgres::{PgConnectOptions, PgRow};
use sqlx::{AssertSqlSafe, ConnectOptions, PgConnection};

/// As long as a test may take on a loaded machine.
const PRECISION: Duration = Duration::from_secs(10);

/// A schema that is dropped with the test, unless the test fails.
#[derive(Debug)]
pub struct Schema {
    pub name: String,
}

impl Schema {
    pub fn new() -> Self {
        Self { name: format!("test_{}", uuid::Uuid::new_v4().simple()) }
    }

    /// How a store in this schema is configured, on the server itself. Its sessions have the name of the schema.
    pub fn config(&self) -> PostgresConfig {
        let options: PgConnectOptions = idem_servers::postgres_url().parse().unwrap();
        self.of(options.application_name(&self.name))
    }

    /// A store whose sessions' transactions have this isolation unless they say otherwise.
    pub fn config_with_isolation(&self, isolation: &str) -> PostgresConfig {
        let options: PgConnectOptions = idem_servers::postgres_url().parse().unwrap();
        let options = options.options([("default_transaction_isolation", isolation)]);
        self.of(options)
    }

    fn of(&self, options: PgConnectOptions) -> PostgresConfig {
        PostgresConfig::from_options(options).schema(&self.name).verb_connections(2.try_into().unwrap())
    }

    /// A store that reaches the server by another way.
    pub fn config_at(&self, url: &str) -> PostgresConfig {
        PostgresConfig::new(url).schema(&self.name).verb_connections(2.try_into().unwrap())
    }
}

impl Drop for Schema {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        let drop_schema = format!("SET lock_timeout='2s';DROP SCHEMA IF EXISTS \"{}\" CASCADE", self.name);
        let work = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let mut connection = connection().await;
                // What is in the way of it does not make the test wrong; the server goes away with its tests.
                let _ = sqlx::raw_sql(AssertSqlSafe(drop_schema)).execute(&mut connection).await;
            });
        });
        work.join().unwrap();
    }
}

/// A connection beside the store's.
pub async fn connection() -> PgConnection {
    let options: PgConnectOptions = idem_servers::postgres_url().parse().unwrap();
    options.disable_statement_logging().connect().await.unwrap()
}

/// Runs statements beside the store.
pub async fn sql(connection: &mut PgConnection, text: impl Into<String>) -> Vec<PgRow> {
    let text = text.into();
    match sqlx::raw_sql(AssertSqlSafe(text.clone())).fetch_all(connection).await {
        Ok(rows) => rows,
        Err(error) => panic!("{text}: {error}"),
    }
}

/// One number beside the store.
pub async fn number(connection: &mut PgConnection, text: impl Into<String>) -> i64 {
    let rows = sql(connection, text).await;
    sqlx::Row::try_get(rows.first().expect("a row"), 0).unwrap()
}

#[derive(Debug)]
pub struct Offset(pub TimeOffset);

impl TimeControl for Offset {
    fn advance(&self, by: Duration) {
        self.0.advance(by);
    }
}

/// The store that `configure` makes of a schema's, as the conformance suite takes it.
pub async fn subject(configure: impl FnOnce(&Schema) -> PostgresConfig) -> Subject {
    let schema = Schema::new();
    let offset = TimeOffset::default();
    let store = Arc::new(PostgresStore::open(configure(&schema).time_offset(offset.clone())).await.unwrap());
    Subject::new(store.clone(), store, Arc::new(Offset(offset))).with_precision(PRECISION).keeping(schema)
}
