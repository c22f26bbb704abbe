//! A database with an outbox, of each kind, and a publisher that remembers.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use idem_outbox::{MessageToSend, Outbox, OutboxError, PostgresOutbox, Publisher, PublisherError, Relay, SqliteOutbox};
use idem_schemas::Schema;
use sqlx::postgres::PgPoolOptions;
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions};
use sqlx::{PgPool, Postgres, Sqlite, SqlitePool, Transaction};
use tempfile::TempDir;
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// The kinds of databases.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Sqlite,
    Postgres,
}

/// A database with an outbox.
pub(crate) struct Place {
    pub(crate) outbox: Arc<dyn Outbox>,
    database: Database,
    _folder: TempDir,
    _schema: Schema,
}

enum Database {
    Sqlite(SqliteOutbox, SqlitePool),
    Postgres(PostgresOutbox, PgPool),
}

/// A transaction of the application.
pub(crate) enum Business {
    Sqlite(SqliteOutbox, Transaction<'static, Sqlite>),
    Postgres(PostgresOutbox, Transaction<'static, Postgres>),
}

/// Makes a test for each kind of database.
macro_rules! on_each {
    ($($name:ident),* $(,)?) => {
        mod sqlite { $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)] async fn $name() { super::$name(crate::support::Kind::Sqlite).await } )* }
        mod postgres { $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)] async fn $name() { super::$name(crate::support::Kind::Postgres).await } )* }
    };
}
pub(crate) use on_each;

impl Place {
    pub(crate) async fn new(kind: Kind) -> Self {
        let (folder, schema) = (TempDir::new().unwrap(), Schema::new());
        let (outbox, database): (Arc<dyn Outbox>, _) = match kind {
            Kind::Sqlite => {
                let options = SqliteConnectOptions::new().filename(folder.path().join("outbox.db"));
                let options = options.create_if_missing(true).journal_mode(SqliteJournalMode::Wal);
                let pool = SqlitePoolOptions::new().max_connections(4).connect_with(options).await.unwrap();
                let outbox = SqliteOutbox::open(pool.clone()).await.unwrap();
                (Arc::new(outbox.clone()), Database::Sqlite(outbox, pool))
            }
            Kind::Postgres => {
                let pool = PgPoolOptions::new().max_connections(8);
                let pool = pool.connect(&idem_servers::postgres_url()).await.unwrap();
                let outbox = PostgresOutbox::open(pool.clone(), &schema.name).await.unwrap();
                (Arc::new(outbox.clone()), Database::Postgres(outbox, pool))
            }
        };
        Self { outbox, database, _folder: folder, _schema: schema }
    }

    pub(crate) async fn begin(&self) -> Business {
        match &self.database {
            Database::Sqlite(outbox, pool) => Business::Sqlite(outbox.clone(), pool.begin().await.unwrap()),
            Database::Postgres(outbox, pool) => Business::Postgres(outbox.clone(), pool.begin().await.unwrap()),
        }
    }

    /// Publishes in a transaction of its own.
    pub(crate) async fn publish(&self, message: &MessageToSend) {
        let mut business = self.begin().await;
        business.publish(message).await.unwrap();
        business.commit().await;
    }

    pub(crate) fn relay(&self, publisher: &Arc<Recorder>) -> Running {
        Running::start(Relay::new(Arc::clone(&self.outbox), Arc::clone(publisher) as Arc<dyn Publisher>))
    }

    pub(crate) async fn drained(&self) {
        let drained = async {
            while self.outbox.backlog().await.unwrap().messages > 0 {
                sleep(Duration::from_millis(10)).await;
            }
        };
        timeout(PATIENCE, drained).await.unwrap();
    }
}

impl Business {
    pub(crate) async fn publish(&mut self, message: &MessageToSend) -> Result<(), OutboxError> {
        match self {
            Self::Sqlite(outbox, transaction) => outbox.publish(transaction, message).await,
            Self::Postgres(outbox, transaction) => outbox.publish(transaction, message).await,
        }
    }

    pub(crate) async fn commit(self) {
        match self {
            Self::Sqlite(_, transaction) => transaction.commit().await.unwrap(),
            Self::Postgres(_, transaction) => transaction.commit().await.unwrap(),
        }
    }

    pub(crate) async fn roll_back(self) {
        match self {
            Self::Sqlite(_, transaction) => transaction.rollback().await.unwrap(),
            Self::Postgres(_, transaction) => transaction.rollback().await.unwrap(),
        }
    }
}

/// A relay in the background.
pub(crate) struct Running {
    stop: Arc<Notify>,
    task: JoinHandle<()>,
}

impl Running {
    pub(crate) fn start(relay: Relay) -> Self {
        let stop = Arc::new(Notify::new());
        let stopped = Arc::clone(&stop);
        let relay = relay.poll_interval(Duration::from_millis(10));
        Self { stop, task: tokio::spawn(relay.run_until(async move { stopped.notified().await })) }
    }

    pub(crate) async fn stop(self) {
        self.stop.notify_one();
        timeout(PATIENCE, self.task).await.unwrap().unwrap();
    }

    /// Ends it as a crash does.
    pub(crate) async fn abort(self) {
        self.task.abort();
        let _ = self.task.await;
    }
}

/// A broker that remembers what it got, and refuses what it is told to.
#[derive(Debug, Default)]
pub(crate) struct Recorder {
    sent: Mutex<Vec<MessageToSend>>,
    refused: Mutex<HashSet<String>>,
    panics: Mutex<HashSet<String>>,
}

impl Recorder {
    pub(crate) fn ids(&self) -> Vec<String> {
        self.sent.lock().unwrap().iter().map(|message| message.id.clone()).collect()
    }

    pub(crate) fn sent(&self) -> Vec<MessageToSend> {
        self.sent.lock().unwrap().clone()
    }

    pub(crate) fn refuse(&self, id: &str) {
        self.refused.lock().unwrap().insert(id.to_owned());
    }

    pub(crate) fn panic_on(&self, id: &str) {
        self.panics.lock().unwrap().insert(id.to_owned());
    }

    pub(crate) fn refuse_no_more(&self) {
        self.refused.lock().unwrap().clear();
    }
}

#[async_trait]
impl Publisher for Recorder {
    async fn publish(&self, message: &MessageToSend) -> Result<(), PublisherError> {
        if self.refused.lock().unwrap().contains(&message.id) {
            return Err("refused".into());
        }
        let panics = self.panics.lock().unwrap().contains(&message.id);
        assert!(!panics, "on purpose");
        tokio::task::yield_now().await;
        self.sent.lock().unwrap().push(message.clone());
        Ok(())
    }
}

/// A message with this id.
pub(crate) fn message(id: &str) -> MessageToSend {
    let mut message = MessageToSend::new("invoices.paid", format!("payload of {id}"));
    message.id = id.to_owned();
    message
}
