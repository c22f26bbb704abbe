//! The chain from a request to the effect of its message: an API with an outbox, a relay, a broker, and a consumer with an inbox.
//!
//! Each role is a process of its own, which the fault runs kill. Kill any of them anywhere and start it again.

mod api;
mod brokers;

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use clap::{Parser, ValueEnum};
use idem_core::engine::{Context, Idempotency, Settings};
use idem_inbox::{Consumer, Inbox, InboxSettings, Message, MessageError, PostgresParking, Subscription};
use idem_outbox::{PostgresOutbox, Relay};
use idem_postgres::{PostgresConfig, PostgresStore, PostgresTransaction};
use serde::{Deserialize, Serialize};
use sqlx::postgres::{PgPool, PgPoolOptions};

use self::brokers::{Broker, Repeated};

/// The schema of all tables.
const SCHEMA: &str = "messages";

/// An account whose messages are in order, and the last number that it gave out.
const TABLES: &str = "
    CREATE SCHEMA IF NOT EXISTS messages;
    CREATE TABLE IF NOT EXISTS messages.accounts (name TEXT PRIMARY KEY, last BIGINT NOT NULL);
    CREATE TABLE IF NOT EXISTS messages.orders (id TEXT NOT NULL, account TEXT NOT NULL, number BIGINT NOT NULL);
    CREATE TABLE IF NOT EXISTS messages.effects (
        place BIGSERIAL PRIMARY KEY, id TEXT NOT NULL, account TEXT NOT NULL, number BIGINT NOT NULL, record TEXT, trace TEXT
    );";

#[derive(Debug, Clone, Parser)]
struct Config {
    #[arg(long, value_enum)]
    role: Role,
    /// `nats://…`, `amqp://…`, `redis://…` or `kafka://…`.
    #[arg(long)]
    broker: String,
    #[arg(long)]
    postgres: String,
    /// How long a lease lasts, and how long a broker waits for a sign of a consumer, in milliseconds.
    #[arg(long, default_value_t = 1000)]
    lease_ms: u64,
    /// Poison kills no consumer any more.
    #[arg(long)]
    harmless: bool,
    #[arg(long, default_value = "127.0.0.1:0")]
    listen: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Role {
    Api,
    Relay,
    Consumer,
}

/// The content of a message.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Order {
    id: String,
    account: String,
    number: i64,
    /// It kills the consumer that handles it.
    #[serde(default)]
    is_poison: bool,
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let config = Config::parse();
    let pool = PgPoolOptions::new().max_connections(4).acquire_timeout(Duration::from_secs(5));
    let pool = pool.connect(&config.postgres).await?;
    make_tables(&pool).await?;
    let broker = Broker::connect(&config.broker, Duration::from_millis(config.lease_ms)).await?;
    match config.role {
        Role::Api => api::serve(&config, pool, store(&config).await?).await,
        Role::Relay => {
            let outbox = Arc::new(PostgresOutbox::open(pool, SCHEMA).await?);
            let relay = Relay::new(outbox, Arc::new(Repeated::new(broker.publisher().await?)));
            println!("relaying");
            relay.poll_interval(Duration::from_millis(20)).run_until(stopped()).await;
            Ok(())
        }
        Role::Consumer => match broker {
            Broker::Nats(context) => consume(&config, pool, brokers::nats_subscription(&context).await?).await,
            Broker::Kafka(config_of_client) => {
                let session = 2 * Duration::from_millis(config.lease_ms);
                consume(&config, pool, brokers::kafka_subscription(config_of_client, session)?).await
            }
            Broker::RabbitMq(url) => consume(&config, pool, brokers::rabbitmq_subscription(&url)).await,
            Broker::Redis(client) => {
                let idle = Duration::from_millis(config.lease_ms);
                consume(&config, pool, brokers::redis_subscription(client, idle)).await
            }
        },
    }
}

async fn store(config: &Config) -> Result<Arc<PostgresStore>, Box<dyn Error + Send + Sync>> {
    let store = PostgresConfig::new(&config.postgres).schema(SCHEMA);
    Ok(Arc::new(PostgresStore::open(store).await?))
}

fn settings(config: &Config) -> Settings {
    let lease = Duration::from_millis(config.lease_ms);
    Settings::new().lease(lease).store_timeout(lease / 6).backoff(lease / 20, lease / 4)
}

/// `IF NOT EXISTS` fails if two sessions make the same table at once.
async fn make_tables(pool: &PgPool) -> Result<(), sqlx::Error> {
    let mut transaction = pool.begin().await?;
    sqlx::query("SELECT pg_advisory_xact_lock(1)").execute(&mut *transaction).await?;
    sqlx::raw_sql(TABLES).execute(&mut *transaction).await?;
    transaction.commit().await
}

async fn consume(
    config: &Config,
    pool: PgPool,
    subscription: impl Subscription,
) -> Result<(), Box<dyn Error + Send + Sync>> {
    let engine = Idempotency::transactional(store(config).await?, settings(config));
    let parking = Arc::new(PostgresParking::open(pool, SCHEMA).await?);
    let settings = InboxSettings::new().pause(Duration::from_millis(100));
    let inbox = Inbox::new("effects", engine.clone(), parking, settings)?;
    let is_harmless = config.harmless;
    let consumer = Consumer::new(inbox, subscription)?.ordered();
    println!("consuming");
    consumer.run_until(stopped(), move |context, message| handle(context, message, is_harmless)).await;
    engine.shutdown(Duration::from_secs(5)).await?;
    Ok(())
}

async fn handle(context: Context, message: Message, is_harmless: bool) -> Result<(), MessageError> {
    let order: Order = serde_json::from_slice(&message.payload)?;
    if order.is_poison && !is_harmless {
        std::process::abort();
    }
    let record = message.header("Idem-Record").map(|record| String::from_utf8_lossy(record).into_owned());
    let mut transaction = context.transaction::<PostgresTransaction>()?;
    sqlx::query("INSERT INTO messages.effects (id, account, number, record, trace) VALUES ($1, $2, $3, $4, $5)")
        .bind(&order.id)
        .bind(&order.account)
        .bind(order.number)
        .bind(record)
        .bind(context.trace().map(|trace| trace.trace_id().to_string()))
        .execute(&mut **transaction)
        .await?;
    Ok(())
}

async fn stopped() {
    let _ = tokio::signal::ctrl_c().await;
}
