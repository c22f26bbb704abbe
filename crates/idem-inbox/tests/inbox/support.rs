//! A database with a store and a parking, of each kind.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use idem_core::TransactionalStore;
use idem_core::engine::{Context, Contract, Idempotency, Settings};
use idem_inbox::{Consumer, Subscription};
use idem_inbox::{Decision, Inbox, InboxSettings, Message, MessageError, Parking, PostgresParking, SqliteParking};
use idem_postgres::{PostgresConfig, PostgresStore, PostgresTransaction};
use idem_schemas::Schema;
use idem_sqlite::{SqliteConfig, SqliteStore, SqliteTransaction};
use sqlx::postgres::PgPoolOptions;
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions};
use sqlx::{AssertSqlSafe, PgPool, Row as _, SqlitePool};
use tempfile::TempDir;
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::timeout;

/// How long a test waits for what has to happen.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// The kinds of databases.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Sqlite,
    Postgres,
}

/// A database with a store, a parking and a table of effects.
pub(crate) struct Place {
    pub(crate) parking: Arc<dyn Parking>,
    store: Arc<dyn TransactionalStore>,
    effects: Effects,
    _folder: TempDir,
    _schema: Schema,
}

/// The table with a row for each effect.
#[derive(Clone)]
pub(crate) enum Effects {
    Sqlite(SqlitePool),
    Postgres(PgPool, String),
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
        match kind {
            Kind::Sqlite => Self::in_sqlite().await,
            Kind::Postgres => Self::in_postgres(&idem_servers::postgres_url()).await,
        }
    }

    async fn in_sqlite() -> Self {
        let folder = TempDir::new().unwrap();
        let file = folder.path().join("inbox.db");
        let store = SqliteStore::open(SqliteConfig::new(format!("sqlite://{}", file.display()))).await.unwrap();
        let options = SqliteConnectOptions::new().filename(&file).journal_mode(SqliteJournalMode::Wal);
        let pool = SqlitePoolOptions::new().max_connections(4).connect_with(options).await.unwrap();
        sqlx::raw_sql("CREATE TABLE effects (message TEXT NOT NULL)").execute(&pool).await.unwrap();
        Self {
            parking: Arc::new(SqliteParking::open(pool.clone()).await.unwrap()),
            store: Arc::new(store),
            effects: Effects::Sqlite(pool),
            _folder: folder,
            _schema: Schema::new(),
        }
    }

    pub(crate) async fn in_postgres(url: &str) -> Self {
        let schema = Schema::new();
        let store = PostgresStore::open(PostgresConfig::new(url).schema(schema.name.as_str())).await.unwrap();
        let options = PgPoolOptions::new().max_connections(4).acquire_timeout(Duration::from_secs(2));
        let pool = options.connect(url).await.unwrap();
        let table = format!(
            "CREATE TABLE \"{0}\".effects (message TEXT NOT NULL);
            CREATE TABLE \"{0}\".once (message TEXT UNIQUE DEFERRABLE INITIALLY DEFERRED);",
            schema.name
        );
        sqlx::raw_sql(AssertSqlSafe(table)).execute(&pool).await.unwrap();
        Self {
            parking: Arc::new(PostgresParking::open(pool.clone(), &schema.name).await.unwrap()),
            store: Arc::new(store),
            effects: Effects::Postgres(pool, schema.name.clone()),
            _folder: TempDir::new().unwrap(),
            _schema: schema,
        }
    }

    pub(crate) fn engine(&self, contract: Contract, settings: Settings) -> Idempotency {
        let store = Arc::clone(&self.store);
        match contract {
            Contract::Transactional => Idempotency::transactional(store, settings),
            Contract::AtMostOnce => Idempotency::at_most_once(store, settings),
            Contract::AtLeastOnce => Idempotency::at_least_once(store, settings),
        }
    }

    pub(crate) fn inbox(&self, contract: Contract) -> Inbox {
        self.inbox_with(contract, settings())
    }

    pub(crate) fn inbox_with(&self, contract: Contract, settings: Settings) -> Inbox {
        let engine = self.engine(contract, settings);
        Inbox::new("billing", engine, Arc::clone(&self.parking), inbox_settings()).unwrap()
    }

    pub(crate) fn effects(&self) -> Effects {
        self.effects.clone()
    }
}

impl Effects {
    /// Adds a row, in the run's transaction if it has one.
    pub(crate) async fn add(&self, context: &Context, id: &str) -> Result<(), MessageError> {
        match self {
            Self::Sqlite(pool) => {
                let insert = sqlx::query("INSERT INTO effects VALUES (?1)").bind(id.to_owned());
                match context.transaction::<SqliteTransaction>() {
                    Ok(mut transaction) => insert.execute(&mut **transaction).await?,
                    Err(_) => insert.execute(pool).await?,
                }
                .rows_affected();
            }
            Self::Postgres(pool, schema) => {
                let insert = AssertSqlSafe(format!("INSERT INTO \"{schema}\".effects VALUES ($1)"));
                let insert = sqlx::query(insert).bind(id.to_owned());
                match context.transaction::<PostgresTransaction>() {
                    Ok(mut transaction) => insert.execute(&mut **transaction).await?,
                    Err(_) => insert.execute(pool).await?,
                }
                .rows_affected();
            }
        }
        Ok(())
    }

    /// All rows, in the order of their insertion on SQLite, and unordered on Postgres.
    pub(crate) async fn all(&self) -> Vec<String> {
        match self {
            Self::Sqlite(pool) => {
                let rows = sqlx::query("SELECT message FROM effects ORDER BY rowid").fetch_all(pool).await.unwrap();
                rows.iter().map(|row| row.get(0)).collect()
            }
            Self::Postgres(pool, schema) => {
                let all = AssertSqlSafe(format!("SELECT message FROM \"{schema}\".effects"));
                sqlx::query(all).fetch_all(pool).await.unwrap().iter().map(|row| row.get(0)).collect()
            }
        }
    }
}

/// Handles a message with an effect.
pub(crate) async fn handle(inbox: &Inbox, effects: &Effects, message: &Message) -> Decision {
    let effects = effects.clone();
    inbox.handle(message, |context, message| async move { effects.add(&context, &message.id).await }).await
}

pub(crate) fn settings() -> Settings {
    Settings::new()
        .lease(Duration::from_secs(2))
        .backoff(Duration::from_millis(50), Duration::from_millis(100))
        .max_attempts(NonZeroU32::new(3).unwrap())
}

pub(crate) fn inbox_settings() -> InboxSettings {
    InboxSettings::new().pause(Duration::from_millis(50))
}

pub(crate) fn message(id: &str) -> Message {
    Message::new(id, "invoices", format!("payload of {id}"))
}

/// The nth delivery of a message.
pub(crate) fn delivery(id: &str, number: u32) -> Message {
    let mut message = message(id);
    message.delivery = number;
    message
}

/// The nth delivery of a message that was published so long ago.
pub(crate) fn late(id: &str, number: u32, age: Duration) -> Message {
    let mut message = delivery(id, number);
    message.age = Some(age);
    message
}

/// A consumer that runs in the background, and adds an effect for each message.
pub(crate) struct Running {
    stop: Arc<Notify>,
    task: JoinHandle<()>,
}

impl Running {
    pub(crate) fn start<S: Subscription>(consumer: Consumer<S>, place: &Place) -> Self {
        let (stop, effects) = (Arc::new(Notify::new()), place.effects());
        let stopped = Arc::clone(&stop);
        let task = tokio::spawn(async move {
            let shutdown = async move { stopped.notified().await };
            let handler = move |context, message: Message| {
                let effects = effects.clone();
                async move { effects.add(&context, &message.id).await }
            };
            consumer.run_until(shutdown, handler).await;
        });
        Self { stop, task }
    }

    pub(crate) async fn stop(self) {
        self.stop.notify_one();
        timeout(PATIENCE, self.task).await.unwrap().unwrap();
    }
}
