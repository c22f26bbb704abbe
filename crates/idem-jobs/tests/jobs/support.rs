//! A queue and the store beside it, of each kind.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use idem_core::engine::{Answer, Conclusion, Context, Contract, Disposition, Idempotency, Operation, Settings};
use idem_core::{Fingerprint, RecordId, Scope, StoredResponse, TraceParent, TransactionalStore, Writes};
use idem_jobs::{Accepted, EnqueueError, JobQueue, JobSettings, Jobs, PostgresQueue, RedisQueue, SqliteQueue};
use idem_postgres::{PostgresConfig, PostgresStore};
use idem_redis::{RedisConfig, RedisStore};
use idem_schemas::Schema;
use idem_sqlite::{SqliteConfig, SqliteStore};
use sqlx::postgres::PgPoolOptions;
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions};
use sqlx::{PgPool, SqlitePool};
use tempfile::TempDir;

/// The kinds of databases.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Sqlite,
    Postgres,
    Redis,
    RedisCluster,
}

/// A database with a store and a queue.
pub(crate) struct Place {
    pub(crate) kind: Kind,
    pub(crate) queue: Arc<dyn JobQueue>,
    pub(crate) database: Database,
    _folder: TempDir,
    schema: Schema,
}

pub(crate) enum Database {
    Sqlite(SqliteStore, SqlitePool),
    Postgres(PostgresStore, PgPool),
    Redis(RedisStore),
}

/// Makes a test for each kind of database.
macro_rules! on_each {
    ($($name:ident),* $(,)?) => {
        mod sqlite { $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)] async fn $name() { super::$name(crate::support::Kind::Sqlite).await } )* }
        mod postgres { $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)] async fn $name() { super::$name(crate::support::Kind::Postgres).await } )* }
        mod redis { $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)] async fn $name() { super::$name(crate::support::Kind::Redis).await } )* }
        mod redis_cluster { $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)] async fn $name() { super::$name(crate::support::Kind::RedisCluster).await } )* }
    };
}
pub(crate) use on_each;

impl Place {
    pub(crate) async fn new(kind: Kind) -> Self {
        let folder = TempDir::new().unwrap();
        let schema = Schema::new();
        let prefix = format!("{}:", schema.name);
        let (queue, database): (Arc<dyn JobQueue>, _) = match kind {
            Kind::Sqlite => {
                let file = folder.path().join("jobs.db");
                let store = SqliteStore::open(SqliteConfig::new(format!("sqlite://{}", file.display()))).await.unwrap();
                let options = SqliteConnectOptions::new().filename(&file).journal_mode(SqliteJournalMode::Wal);
                let pool = SqlitePoolOptions::new().max_connections(4).connect_with(options).await.unwrap();
                sqlx::raw_sql("CREATE TABLE effects (job TEXT NOT NULL)").execute(&pool).await.unwrap();
                (Arc::new(SqliteQueue::open(pool.clone()).await.unwrap()), Database::Sqlite(store, pool))
            }
            Kind::Postgres => {
                let url = idem_servers::postgres_url();
                let config = PostgresConfig::new(&url).schema(schema.name.as_str());
                let store = PostgresStore::open(config).await.unwrap();
                let pool = PgPoolOptions::new().max_connections(4).connect(&url).await.unwrap();
                let table = format!("CREATE TABLE \"{}\".effects (job TEXT NOT NULL)", schema.name);
                sqlx::raw_sql(sqlx::AssertSqlSafe(table)).execute(&pool).await.unwrap();
                (
                    Arc::new(PostgresQueue::open(pool.clone(), &schema.name).await.unwrap()),
                    Database::Postgres(store, pool),
                )
            }
            Kind::Redis => {
                let url = idem_servers::redis_url();
                let store = RedisStore::open(RedisConfig::new(&url).key_prefix(&prefix)).await.unwrap();
                let client = redis::Client::open(url).unwrap();
                let connection = client.get_connection_manager().await.unwrap();
                (Arc::new(RedisQueue::new(connection, &prefix)), Database::Redis(store))
            }
            Kind::RedisCluster => {
                let url = idem_servers::redis_cluster_url();
                let store = RedisStore::open(RedisConfig::new(&url).key_prefix(&prefix)).await.unwrap();
                let nodes =
                    url.strip_prefix("redis+cluster://").unwrap().split(',').map(|node| format!("redis://{node}"));
                let client = redis::cluster::ClusterClient::new(nodes).unwrap();
                let connection = client.get_async_connection().await.unwrap();
                (Arc::new(RedisQueue::new(connection, &prefix)), Database::Redis(store))
            }
        };
        Self { kind, queue, database, _folder: folder, schema }
    }

    /// What the keys of the queue in Redis begin with.
    pub(crate) fn keys(&self) -> String {
        format!("{{{}:-jobs}}", self.schema.name)
    }

    /// Whether the job commits with the record of its request.
    pub(crate) fn commits_both(&self) -> bool {
        matches!(self.kind, Kind::Sqlite | Kind::Postgres)
    }

    /// The name of a table, with its schema.
    pub(crate) fn table(&self, name: &str) -> String {
        if self.kind == Kind::Postgres { format!("\"{}\".{name}", self.schema.name) } else { name.to_owned() }
    }

    /// An engine under the contract; Redis has AtLeastOnce only.
    pub(crate) fn engine(&self, contract: Contract, settings: Settings) -> Idempotency {
        let transactional: Arc<dyn TransactionalStore> = match &self.database {
            Database::Sqlite(store, _) => Arc::new(store.clone()),
            Database::Postgres(store, _) => Arc::new(store.clone()),
            Database::Redis(store) => return Idempotency::at_least_once(Arc::new(store.clone()), settings),
        };
        match contract {
            Contract::Transactional => Idempotency::transactional(transactional, settings),
            Contract::AtMostOnce => Idempotency::at_most_once(transactional, settings),
            Contract::AtLeastOnce => Idempotency::at_least_once(transactional, settings),
        }
    }

    pub(crate) fn jobs(&self, contract: Contract, settings: JobSettings) -> Jobs {
        Jobs::new(Arc::clone(&self.queue), self.engine(contract, engine_settings()), settings).unwrap()
    }

    /// Enqueues in a request with this key, as an API does.
    pub(crate) async fn request(&self, jobs: &Jobs, key: &str) -> Requested {
        let engine = self.engine(Contract::Transactional, engine_settings());
        let operation = request(key);
        let request = engine.acquire_for(&operation).id;
        let jobs = jobs.clone();
        let payload = key.to_owned();
        let run = move |context: Context| async move {
            match jobs.enqueue(&context, "report", &payload).await {
                Ok(accepted) => {
                    let location =
                        idem_core::HeaderField { name: "location".into(), value: accepted.location.clone().into() };
                    let response =
                        StoredResponse { headers: [location].into(), ..StoredResponse::new(202, "accepted") };
                    Conclusion {
                        value: Ok(accepted),
                        disposition: Disposition::Complete { response, writes: Writes::Keep },
                        retention: None,
                    }
                }
                Err(error) => Conclusion {
                    value: Err(error),
                    disposition: Disposition::Release { writes: Writes::Discard },
                    retention: None,
                },
            }
        };
        match engine.execute(operation, run, || panic!("the request panicked")).await.unwrap() {
            Answer::Ran { value, .. } => Requested { request, accepted: Some(value), first: None },
            Answer::Replay(replay) => Requested { request, accepted: None, first: Some(replay.response) },
            other => panic!("{other:?}"),
        }
    }
}

/// What a request got.
pub(crate) struct Requested {
    pub(crate) request: RecordId,
    /// If it ran now.
    pub(crate) accepted: Option<Result<Accepted, EnqueueError>>,
    /// If it ran before.
    pub(crate) first: Option<StoredResponse>,
}

pub(crate) fn engine_settings() -> Settings {
    Settings::new().lease(Duration::from_secs(2)).backoff(Duration::from_millis(100), Duration::from_millis(200))
}

/// Short times, so that tests need not wait for long.
pub(crate) fn job_settings() -> JobSettings {
    JobSettings::new()
        .visibility_timeout(Duration::from_secs(1))
        .queue_timeout(Duration::from_millis(330))
        .poll_interval(Duration::from_millis(20))
        .start_deadline(Duration::from_secs(60))
}

pub(crate) fn request(key: &str) -> Operation {
    let scope = Scope::new("acme", "POST /reports");
    Operation::new(scope, key.parse().unwrap(), Fingerprint::of_bytes("", key.as_bytes())).trace(trace())
}

/// The trace of all requests.
pub(crate) fn trace() -> Option<TraceParent> {
    Some("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01".parse().unwrap())
}

pub(crate) fn most(count: u32) -> NonZeroU32 {
    NonZeroU32::new(count).unwrap()
}
