//! Stores in the shared server, each in a separate schema.

use std::sync::Arc;
use std::time::Duration;

use idem_postgres::{PostgresConfig, PostgresStore, TimeOffset};
pub use idem_schemas::Schema;
use idem_testkit::{Subject, TimeControl};
use sqlx::postgres::{PgConnectOptions, PgRow};
use sqlx::{AssertSqlSafe, ConnectOptions, PgConnection};

/// As long as a test may take on a loaded machine.
pub const PRECISION: Duration = Duration::from_secs(10);

/// How stores are opened in a schema.
pub trait Configure {
    /// On the server itself. The store's sessions have the name of the schema.
    fn config(&self) -> PostgresConfig;

    /// The store's sessions have this isolation level by default.
    fn config_with_isolation(&self, isolation: &str) -> PostgresConfig;

    /// Reaches the server through `url`.
    fn config_at(&self, url: &str) -> PostgresConfig;
}

impl Configure for Schema {
    fn config(&self) -> PostgresConfig {
        let options: PgConnectOptions = idem_servers::postgres_url().parse().unwrap();
        in_schema(self, PostgresConfig::from_options(options.application_name(&self.name)))
    }

    fn config_with_isolation(&self, isolation: &str) -> PostgresConfig {
        let options: PgConnectOptions = idem_servers::postgres_url().parse().unwrap();
        let options = options.options([("default_transaction_isolation", isolation)]);
        in_schema(self, PostgresConfig::from_options(options))
    }

    fn config_at(&self, url: &str) -> PostgresConfig {
        in_schema(self, PostgresConfig::new(url))
    }
}

fn in_schema(schema: &Schema, config: PostgresConfig) -> PostgresConfig {
    config.schema(&schema.name).verb_connections(2.try_into().unwrap())
}

/// A connection outside of the store.
pub async fn connection() -> PgConnection {
    let options: PgConnectOptions = idem_servers::postgres_url().parse().unwrap();
    options.disable_statement_logging().connect().await.unwrap()
}

/// Runs statements outside of the store.
pub async fn sql(connection: &mut PgConnection, text: impl Into<String>) -> Vec<PgRow> {
    let text = text.into();
    match sqlx::raw_sql(AssertSqlSafe(text.clone())).fetch_all(connection).await {
        Ok(rows) => rows,
        Err(error) => panic!("{text}: {error}"),
    }
}

/// Runs a statement outside of the store that returns one number.
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

/// A store in a schema of this `kind`, as a subject of the conformance suite. Schemas of a `kind` have the same tables.
pub async fn subject(kind: &'static str, configure: impl FnOnce(&Schema) -> PostgresConfig) -> Subject {
    let schema = Schema::of_kind(kind);
    let offset = TimeOffset::default();
    let store = Arc::new(PostgresStore::open(configure(&schema).time_offset(offset.clone())).await.unwrap());
    let subject = Subject::new(store.clone(), store.clone(), Arc::new(Offset(offset)))
        .operated_by(store.clone())
        .inspected_by(store);
    subject.with_precision(PRECISION).keeping(schema)
}

/// Drops a COPY that has sent all, before it reads the answer. One that has read it at once is repeated.
pub async fn cancel_the_end_of(connection: &mut PgConnection, copy: &str) {
    while futures_util::poll!(&mut Box::pin(connection.copy_in_raw(copy).await.unwrap().finish())).is_ready() {}
}
