//! A store whose sessions have a unique name, and a table for the business writes of its handlers.

use std::time::{Duration, Instant};

use idem_core::{
    Acquire, AcquireOutcome, Begin, IdempotencyStore, Lease, OwnerOutcome, RecordId, Scope, StoreError,
    StoreTransaction, TransactionalStore, Writes,
};
use idem_postgres::{PostgresConfig, PostgresStore, PostgresTransaction, TimeOffset};
use idem_servers::PgBouncer;
use idem_testkit::fixture::{KEPT, completed, request};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions, PgRow};
use sqlx::{AssertSqlSafe, ConnectOptions, PgConnection, PgPool};

use crate::support::{self, Schema};

/// Longer than anything takes on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(20);

/// The operation of requests that run in transactions.
const TRANSACTIONAL: &str = "transactional";

pub struct World {
    pub store: PostgresStore,
    pub offset: TimeOffset,
    /// The `application_name` of the store's sessions, which also is the schema.
    pub name: String,
    /// The URL for SQL outside of the store.
    url: String,
    _schema: Option<Schema>,
    pooler: Option<PgBouncer>,
    pool: Option<PgPool>,
}

impl World {
    /// On the server that all tests share.
    pub async fn shared() -> Self {
        let url = idem_servers::postgres_url();
        Self::new(&url, &url, Some(Schema::new()), None, |config| config).await
    }

    /// On the same server, through a separate PgBouncer with two connections.
    pub async fn pooled() -> Self {
        let url = idem_servers::postgres_url();
        let pooler = PgBouncer::start(&url, 2).unwrap();
        let through = pooler.url().to_owned();
        let configure = PostgresConfig::through_transaction_pooler;
        Self::new(&through, &url, Some(Schema::new()), Some(pooler), configure).await
    }

    /// On the same server, with handlers' transactions from an application's pool.
    pub async fn from_pool() -> Self {
        // It need not be on this machine.
        Self::from_pool_at(&idem_servers::postgres_url()).await
    }

    /// The same, reaching the server through `port` of this machine.
    pub async fn from_pool_through(port: u16) -> Self {
        Self::from_pool_at(&at_port(port)).await
    }

    async fn from_pool_at(url: &str) -> Self {
        let (schema, two) = (Schema::new(), 2.try_into().unwrap());
        let pool = pool(url, &schema.name);
        let config = PostgresConfig::from_pool(pool.clone()).schema(&schema.name).max_transactions(two);
        let mut world =
            Self::opened(schema.name.clone(), config, &idem_servers::postgres_url(), Some(schema), None).await;
        world.pool = Some(pool);
        world
    }

    /// The pool of the application.
    pub fn pool(&self) -> &PgPool {
        self.pool.as_ref().expect("a pool")
    }

    /// Reaches the shared server through `port`.
    pub async fn shared_through(port: u16, configure: impl FnOnce(PostgresConfig) -> PostgresConfig) -> Self {
        Self::new(&at_port(port), &idem_servers::postgres_url(), Some(Schema::new()), None, configure).await
    }

    /// On a private server at `beside`, which the store reaches through `url`.
    pub async fn private(url: &str, beside: &str) -> Self {
        Self::private_with(url, beside, |config| config).await
    }

    pub async fn private_with(
        url: &str,
        beside: &str,
        configure: impl FnOnce(PostgresConfig) -> PostgresConfig,
    ) -> Self {
        Self::new(url, beside, None, None, configure).await
    }

    async fn new(
        url: &str,
        beside: &str,
        schema: Option<Schema>,
        pooler: Option<PgBouncer>,
        configure: impl FnOnce(PostgresConfig) -> PostgresConfig,
    ) -> Self {
        let name = schema
            .as_ref()
            .map_or_else(|| format!("test_{}", uuid::Uuid::new_v4().simple()), |schema| schema.name.clone());
        Self::opened(name.clone(), configure(config(url, &name)), beside, schema, pooler).await
    }

    async fn opened(
        name: String,
        config: PostgresConfig,
        beside: &str,
        schema: Option<Schema>,
        pooler: Option<PgBouncer>,
    ) -> Self {
        let offset = TimeOffset::default();
        let store = PostgresStore::open(config.time_offset(offset.clone())).await.unwrap();
        let world = Self { store, offset, name, url: beside.to_owned(), _schema: schema, pooler, pool: None };
        let table = format!("CREATE TABLE {}.effects (number BIGSERIAL PRIMARY KEY, id BYTEA NOT NULL)", world.name);
        support::sql(&mut world.beside().await, table).await;
        world
    }

    /// Where the store's PgBouncer listens.
    pub fn pooler_url(&self) -> &str {
        self.pooler.as_ref().expect("a pooler").url()
    }

    /// Sends SQL outside of the store to `url` from now on.
    pub fn lead_beside_to(&mut self, url: &str) {
        url.clone_into(&mut self.url);
    }

    /// A connection outside of the store.
    pub async fn beside(&self) -> PgConnection {
        connect(&self.url).await.unwrap()
    }

    /// Runs SQL that returns one number. `$` stands for the schema.
    pub async fn number(&self, sql: &str) -> i64 {
        support::number(&mut self.beside().await, sql.replace('$', &self.name)).await
    }

    pub async fn lease(&self, request: &Acquire) -> Result<Lease, StoreError> {
        match self.store.acquire(request).await? {
            AcquireOutcome::Acquired(lease) => Ok(lease),
            other => panic!("{other:?}"),
        }
    }

    pub async fn settle(&self, lease: &Lease) -> Result<(), StoreError> {
        assert_eq!(self.store.settle(lease, &completed(), KEPT).await?, OwnerOutcome::Applied, "a settlement was lost");
        Ok(())
    }

    /// A whole run under a lease.
    pub async fn run(&self) -> Result<RecordId, StoreError> {
        let lease = self.lease(&request()).await?;
        self.settle(&lease).await?;
        Ok(lease.id)
    }

    pub async fn begin(&self, request: &Acquire) -> Result<Box<dyn StoreTransaction>, StoreError> {
        match self.store.begin(request).await? {
            Begin::Acquired { transaction, .. } => Ok(transaction),
            other => panic!("{other:?}"),
        }
    }

    /// Begins as soon as the transaction that runs the operation has ended.
    pub async fn begin_when_free(&self, request: &Acquire) -> Box<dyn StoreTransaction> {
        eventually("the key is free", async || match self.store.begin(request).await.unwrap() {
            Begin::Acquired { transaction, .. } => Some(transaction),
            Begin::Answered(AcquireOutcome::InProgress { .. }) => None,
            other => panic!("{other:?}"),
        })
        .await
    }

    /// An id as an SQL literal.
    pub fn literal(id: &RecordId) -> String {
        let hex: String = id.as_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
        format!("'\\x{hex}'::BYTEA")
    }

    /// The business write of a handler.
    pub async fn write(&self, transaction: &mut dyn StoreTransaction, id: &RecordId) -> Result<(), sqlx::Error> {
        let insert = AssertSqlSafe(format!("INSERT INTO {}.effects (id) VALUES ($1)", self.name));
        let insert = sqlx::query(insert).bind(id.as_bytes().as_slice());
        insert.execute(&mut **handlers(transaction)).await.map(drop)
    }

    /// A whole run in a transaction. `Err` is the error that the caller gets.
    pub async fn transact(&self) -> Result<RecordId, String> {
        let request = transactional();
        let mut transaction = self.begin(&request).await.map_err(|error| error.to_string())?;
        self.write(&mut *transaction, &request.id).await.map_err(|error| error.to_string())?;
        let finished = transaction.finish(&completed(), KEPT, Writes::Keep).await;
        assert_eq!(finished.map_err(|error| error.to_string())?, OwnerOutcome::Applied);
        Ok(request.id)
    }

    /// Every business write has its record, and every record of a transaction has its one business write.
    pub async fn writes_and_records_agree(&self) {
        let apart = format!(
            "SELECT count(*) FROM $.effects FULL JOIN (SELECT id FROM $.idem_records \
             WHERE operation = '{TRANSACTIONAL}' AND state = 2) AS settled USING (id) \
             WHERE effects.id IS NULL OR settled.id IS NULL"
        );
        assert_eq!(self.number(&apart).await, 0, "a write and its record went apart");
        let twice = "SELECT count(*) - count(DISTINCT id) FROM $.effects";
        assert_eq!(self.number(twice).await, 0, "an operation was done twice");
    }

    /// Waits until no session of the store is in a transaction, and none holds an advisory lock.
    pub async fn quiet(&self) {
        let mut beside = self.beside().await;
        let open = format!(
            "SELECT (SELECT count(*) FROM pg_stat_activity WHERE application_name = '{0}' \
             AND state IS DISTINCT FROM 'idle' AND backend_type = 'client backend') \
             + (SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid) \
             WHERE application_name = '{0}' AND locktype = 'advisory')",
            self.name
        );
        eventually("nothing is open", async || (support::number(&mut beside, &open).await == 0).then_some(())).await;
    }

    /// A thousand verbs, a part of them in transactions, all of which must have taken effect.
    pub async fn is_whole(&self) {
        const TASKS: i64 = 10;
        const LEASED: i64 = 35;
        const TRANSACTIONS: i64 = 15;
        let settled = "SELECT count(*) FROM $.idem_records WHERE state = 2";
        let effects = "SELECT count(*) FROM $.effects";
        let before = (self.number(settled).await, self.number(effects).await);
        // On a busy machine, ten tasks would wait for two transactions for longer than the store lets them.
        let turns = tokio::sync::Semaphore::new(2);
        let task = async || {
            for number in 0..LEASED {
                self.run().await.unwrap();
                if number < TRANSACTIONS {
                    let _turn = turns.acquire().await.unwrap();
                    self.transact().await.unwrap();
                }
            }
        };
        join_all((0..TASKS).map(|_| task())).await;
        let after = (self.number(settled).await, self.number(effects).await);
        let expected = (before.0 + TASKS * (LEASED + TRANSACTIONS), before.1 + TASKS * TRANSACTIONS);
        assert_eq!(after, expected, "not every verb took effect");
        self.writes_and_records_agree().await;
        self.quiet().await;
    }
}

/// The configuration of a store whose sessions are called `name`.
pub fn config(url: &str, name: &str) -> PostgresConfig {
    let options: PgConnectOptions = url.parse().unwrap();
    let two = 2.try_into().unwrap();
    PostgresConfig::from_options(options.application_name(name))
        .schema(name)
        .verb_connections(two)
        .max_transactions(two)
}

/// A pool of three connections, as an application has it. Its sessions are called `name`.
pub fn pool(url: &str, name: &str) -> PgPool {
    let options: PgConnectOptions = url.parse().unwrap();
    PgPoolOptions::new().max_connections(3).connect_lazy_with(options.application_name(name))
}

/// Where the server that all tests share listens.
pub fn port_of_shared() -> u16 {
    let options: PgConnectOptions = idem_servers::postgres_url().parse().unwrap();
    options.get_port()
}

pub fn at_port(port: u16) -> String {
    format!("postgres://postgres@127.0.0.1:{port}/postgres")
}

pub async fn connect(url: &str) -> Result<PgConnection, sqlx::Error> {
    url.parse::<PgConnectOptions>()?.disable_statement_logging().connect().await
}

/// A request of an operation that runs in a transaction.
pub fn transactional() -> Acquire {
    let mut request = request();
    request.origin.scope = Scope::new("acme", TRANSACTIONAL);
    request
}

pub fn handlers(transaction: &mut dyn StoreTransaction) -> &mut PostgresTransaction {
    transaction.as_any_mut().downcast_mut().unwrap()
}

/// Polls until `ask` returns an answer.
pub async fn eventually<T>(what: &str, mut ask: impl AsyncFnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(answer) = ask().await {
            return answer;
        }
        assert!(start.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Drives all futures at once, on this task.
pub async fn join_all<F: Future>(futures: impl IntoIterator<Item = F>) -> Vec<F::Output> {
    let mut futures: Vec<_> = futures.into_iter().map(|future| (Box::pin(future), None)).collect();
    std::future::poll_fn(|context| {
        for (future, output) in &mut futures {
            if output.is_none()
                && let std::task::Poll::Ready(ready) = future.as_mut().poll(context)
            {
                *output = Some(ready);
            }
        }
        if futures.iter().all(|(_, output)| output.is_some()) {
            std::task::Poll::Ready(())
        } else {
            std::task::Poll::Pending
        }
    })
    .await;
    futures.into_iter().filter_map(|(_, output)| output).collect()
}

/// Runs SQL outside of the store, and returns its rows.
pub async fn sql(connection: &mut PgConnection, text: impl Into<String>) -> Vec<PgRow> {
    support::sql(connection, text).await
}
