//! What both services and the worker do: a payment, its message and its answer commit together.

use std::sync::Arc;
use std::time::Duration;

use idem_core::engine::{Context, Idempotency, Settings};
use idem_core::{HeaderField, StoredResponse};
use idem_hybrid::{HybridConfig, HybridStore};
use idem_jobs::{Job, JobError, JobSettings, Jobs, PostgresQueue, Worker};
use idem_outbox::{MessageToSend, PostgresOutbox};
use idem_postgres::{PostgresConfig, PostgresStore, PostgresTransaction};
use idem_redis::{RedisConfig, RedisFastStore};
use serde::{Deserialize, Serialize};
use serde_json::json;
use sqlx::Row as _;
use sqlx::postgres::{PgPool, PgPoolOptions};

use crate::{AnyError, Config};

/// The schema and the topic of `tests/messages`, whose relays and consumers carry the messages.
const SCHEMA: &str = "messages";
const TOPIC: &str = "orders";

/// The name of the jobs that pay.
const PAYMENT: &str = "payment";

/// Without a unique key: the records are what makes a payment once.
const TABLES: &str = "
    CREATE SCHEMA IF NOT EXISTS messages;
    CREATE TABLE IF NOT EXISTS messages.payments (
        id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY, operation TEXT NOT NULL, amount BIGINT NOT NULL
    );";

/// What a client asks for.
#[derive(Debug, Clone, Deserialize, Serialize)]
pub(crate) struct NewPayment {
    pub(crate) operation: String,
    pub(crate) amount: i64,
}

/// The final answer.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Paid {
    operation: String,
    amount: i64,
    payment: i64,
}

#[derive(Debug, Clone)]
pub(crate) struct Service {
    pub(crate) requests: Idempotency,
    pub(crate) jobs: Jobs,
    outbox: PostgresOutbox,
}

impl Service {
    pub(crate) async fn open(config: &Config) -> Result<Self, AnyError> {
        let lease = Duration::from_millis(config.lease_ms);
        let pool = PgPoolOptions::new().max_connections(4).acquire_timeout(Duration::from_secs(5));
        let pool = pool.connect(&config.postgres).await?;
        make_tables(&pool).await?;
        let durable = PostgresStore::open(PostgresConfig::new(&config.postgres).schema(SCHEMA)).await?;
        let fast = RedisFastStore::new(RedisConfig::new(&config.redis))?;
        let store = Arc::new(HybridStore::new(Arc::new(durable), Arc::new(fast), HybridConfig::new()));
        let settings = Settings::new().lease(lease).store_timeout(lease / 6).backoff(lease / 20, lease / 4);
        let requests = Idempotency::transactional(store.clone(), settings.clone());
        let runs = Idempotency::transactional(store, settings).attached_to(&requests);
        let queue = PostgresQueue::open(pool.clone(), SCHEMA).await?;
        let settings = JobSettings::new().visibility_timeout(lease).queue_timeout(lease / 4).poll_interval(lease / 30);
        let jobs = Jobs::new(Arc::new(queue), runs, settings)?;
        Ok(Self { requests, jobs, outbox: PostgresOutbox::open(pool, SCHEMA).await? })
    }

    /// Pays in the transaction of the run.
    pub(crate) async fn pay(&self, context: &Context, new: NewPayment) -> Result<Paid, AnyError> {
        let NewPayment { operation, amount } = new;
        let mut transaction = context.transaction::<PostgresTransaction>()?;
        let insert = sqlx::query("INSERT INTO messages.payments (operation, amount) VALUES ($1, $2) RETURNING id");
        let row = insert.bind(&operation).bind(amount).fetch_one(&mut **transaction).await?;
        let payment: i64 = row.try_get(0)?;
        let payload = json!({ "id": operation, "account": operation, "number": payment }).to_string();
        let message = MessageToSend::of_run(context, "paid", TOPIC, payload);
        self.outbox.publish(&mut transaction, &message).await?;
        Ok(Paid { operation, amount, payment })
    }

    /// Enqueues the payment in the transaction of the run, and returns the 202.
    pub(crate) async fn enqueue(&self, context: &Context, new: &NewPayment) -> Result<Answer, AnyError> {
        Ok(self.jobs.enqueue(context, PAYMENT, new).await?.into_http())
    }

    /// Makes the payments that were enqueued, until this process is killed.
    pub(crate) async fn work(self) -> Result<(), AnyError> {
        let worker = Worker::new(self.jobs.clone()).handle(PAYMENT, move |context, job| {
            let service = self.clone();
            async move { service.pay_later(&context, &job).await }
        });
        println!("working");
        worker.run_until(std::future::pending()).await;
        Ok(())
    }

    async fn pay_later(&self, context: &Context, job: &Job) -> Result<StoredResponse, JobError> {
        let new = serde_json::from_slice(&job.payload)?;
        let paid = self.pay(context, new).await.map_err(JobError::Fault)?;
        let json = HeaderField { name: "content-type".into(), value: "application/json".into() };
        Ok(StoredResponse { headers: [json].into(), ..StoredResponse::new(201, serde_json::to_vec(&paid)?) })
    }
}

/// An answer of `idem-jobs`.
pub(crate) type Answer = http::Response<http_body_util::Full<bytes::Bytes>>;

/// The tenant is the bearer token.
pub(crate) fn tenant(authorization: Option<&[u8]>) -> Option<String> {
    let token = std::str::from_utf8(authorization?).ok()?.strip_prefix("Bearer ")?;
    (!token.is_empty()).then(|| token.to_owned())
}

/// `IF NOT EXISTS` fails if two sessions make the same table at once, so all processes take the lock of `tests/messages`.
async fn make_tables(pool: &PgPool) -> Result<(), sqlx::Error> {
    let mut transaction = pool.begin().await?;
    sqlx::query("SELECT pg_advisory_xact_lock(1)").execute(&mut *transaction).await?;
    sqlx::raw_sql(TABLES).execute(&mut *transaction).await?;
    transaction.commit().await
}
