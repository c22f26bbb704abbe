//! Stores on a server that all tests share, each in a separate database.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use idem_core::TimeOffset;
use idem_mysql::{MySqlConfig, MySqlStore};
use idem_servers::MariaDb;
use idem_testkit::{Subject, TimeControl};
use sqlx::mysql::MySqlPoolOptions;
use sqlx::{AssertSqlSafe, Connection, MySqlConnection, MySqlPool, Row};

/// As long as a test may take on a loaded machine.
pub const PRECISION: Duration = Duration::from_secs(10);

/// The server that the tests of this process share. It ends with the process.
pub fn server() -> &'static MariaDb {
    static SERVER: OnceLock<MariaDb> = OnceLock::new();
    SERVER.get_or_init(|| MariaDb::start_unsynced(&[]).unwrap())
}

/// A separate database.
pub struct Database {
    pub name: String,
    pub offset: TimeOffset,
    pub server: &'static MariaDb,
}

impl Database {
    pub async fn new() -> Self {
        Self::on(server()).await
    }

    pub async fn on(server: &'static MariaDb) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        // Not `test_…`: every user may do everything there.
        let name = format!("idem_{}", COUNT.fetch_add(1, Ordering::Relaxed));
        let mut connection = MySqlConnection::connect(&server.url()).await.unwrap();
        sql(&mut connection, format!("CREATE DATABASE {name}")).await;
        connection.close().await.unwrap();
        Self { name, offset: TimeOffset::default(), server }
    }

    pub fn url(&self) -> String {
        self.server.url_of("root", &self.name)
    }

    /// Few connections, because many tests run at once.
    pub fn config(&self) -> MySqlConfig {
        let few = 4.try_into().unwrap();
        MySqlConfig::new(self.url()).verb_connections(few).time_offset(self.offset.clone())
    }

    pub async fn store(&self) -> MySqlStore {
        MySqlStore::open(self.config()).await.unwrap()
    }

    pub fn pool(&self) -> MySqlPool {
        MySqlPoolOptions::new().max_connections(10).connect_lazy(&self.url()).unwrap()
    }

    /// A connection outside of the store.
    pub async fn connection(&self) -> MySqlConnection {
        MySqlConnection::connect(&self.url()).await.unwrap()
    }
}

/// Runs statements outside of the store.
pub async fn sql(connection: &mut MySqlConnection, text: impl Into<String>) {
    let text = text.into();
    if let Err(error) = sqlx::raw_sql(AssertSqlSafe(text.clone())).execute(connection).await {
        panic!("{text}: {error}");
    }
}

/// Runs a statement outside of the store that returns one number.
pub async fn number(connection: &mut MySqlConnection, text: impl Into<String>) -> i64 {
    let text = text.into();
    sqlx::raw_sql(AssertSqlSafe(text)).fetch_one(connection).await.unwrap().get(0)
}

#[derive(Debug)]
pub struct Offset(pub TimeOffset);

impl TimeControl for Offset {
    fn advance(&self, by: Duration) {
        self.0.advance(by);
    }
}

/// A new store, as a subject of the conformance suite.
pub async fn subject() -> Subject {
    let database = Database::new().await;
    let store = Arc::new(database.store().await);
    let subject = Subject::new(store.clone(), store.clone(), Arc::new(Offset(database.offset.clone())));
    subject.operated_by(store.clone()).inspected_by(store).with_precision(PRECISION)
}
