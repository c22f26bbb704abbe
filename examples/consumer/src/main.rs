//! Books invoices that arrive through NATS JetStream, each once. Kill it anywhere and start it again.

use std::error::Error;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use async_nats::jetstream::consumer::{AckPolicy, pull};
use async_nats::jetstream::{self, stream};
use clap::{Parser, Subcommand};
use idem_core::engine::{Context, Idempotency, Settings};
use idem_inbox::{Consumer, Inbox, InboxSettings, Message, MessageError, NatsSubscription, Parking, PostgresParking};
use idem_postgres::{PostgresConfig, PostgresStore, PostgresTransaction};
use serde::Deserialize;
use sqlx::PgPool;
use tokio::signal::unix::{SignalKind, signal};

const SUBSCRIBER: &str = "billing";
const SCHEMA: &str = "billing";
const TABLE: &str = "CREATE TABLE IF NOT EXISTS billing.bookings (invoice TEXT NOT NULL, cents BIGINT NOT NULL)";

/// Books invoices: {"cents": 1999} on the subject invoices.NUMBER.
#[derive(Debug, Parser)]
struct Config {
    #[arg(long, default_value = "nats://127.0.0.1:4222")]
    nats: String,
    #[arg(long, default_value = "postgres://postgres@127.0.0.1/postgres")]
    postgres: String,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Lists the invoices that were set aside.
    Parked,
    /// Asks the running consumers to book one of them again.
    Replay { key: String },
}

#[derive(Debug, Deserialize)]
struct Invoice {
    cents: i64,
}

type AnyError = Box<dyn Error + Send + Sync>;

#[tokio::main]
async fn main() -> Result<(), AnyError> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let config = Config::parse();
    let pool = PgPool::connect(&config.postgres).await?;
    let parking = Arc::new(PostgresParking::open(pool.clone(), SCHEMA).await?);
    match config.command {
        None => consume(&config, &pool, parking).await,
        Some(Command::Parked) => list(&*parking).await,
        Some(Command::Replay { ref key }) => {
            let is_parked = parking.request_replay(SUBSCRIBER, key).await?;
            println!("{}", if is_parked { "requested" } else { "not parked" });
            Ok(())
        }
    }
}

async fn consume(config: &Config, pool: &PgPool, parking: Arc<PostgresParking>) -> Result<(), AnyError> {
    sqlx::raw_sql(TABLE).execute(pool).await?;
    let store = PostgresStore::open(PostgresConfig::new(&config.postgres).schema(SCHEMA)).await?;
    // A message may be delivered for a week, so its record is kept for eight days.
    let settings = Settings::new().retention(Duration::from_secs(8 * 24 * 3600));
    let engine = Idempotency::transactional(Arc::new(store), settings);
    let inbox = Inbox::new(SUBSCRIBER, engine.clone(), parking, InboxSettings::new())?;

    let invoices = invoices(&config.nats).await?;
    let consumer = Consumer::new(inbox, NatsSubscription::open(&invoices, SUBSCRIBER).await?)?;
    println!("consuming");
    let mut stopped = signal(SignalKind::terminate())?;
    let shutdown = async move {
        tokio::select! {
            _ = stopped.recv() => {}
            _ = tokio::signal::ctrl_c() => {}
        }
    };
    consumer.run_until(shutdown, book).await;
    engine.shutdown(Duration::from_secs(5)).await?;
    Ok(())
}

/// The booking and the mark that the message was handled commit together.
async fn book(context: Context, message: Message) -> Result<(), MessageError> {
    let invoice: Invoice = match serde_json::from_slice(&message.payload) {
        Ok(invoice) => invoice,
        // It will never be readable, so it is parked at once.
        Err(error) => return Err(MessageError::Reject { why: error.to_string() }),
    };
    let mut transaction = context.transaction::<PostgresTransaction>()?;
    sqlx::query("INSERT INTO billing.bookings (invoice, cents) VALUES ($1, $2)")
        .bind(&message.topic)
        .bind(invoice.cents)
        .execute(&mut **transaction)
        .await?;
    Ok(())
}

/// The stream of invoices and its durable consumer, which are made if they do not exist.
async fn invoices(url: &str) -> Result<stream::Stream, AnyError> {
    let context = jetstream::new(async_nats::connect(url).await?);
    let config = stream::Config {
        name: "INVOICES".into(),
        subjects: vec!["invoices.>".into()],
        max_age: Duration::from_secs(7 * 24 * 3600),
        ..Default::default()
    };
    let stream = context.get_or_create_stream(config).await?;
    let config =
        pull::Config { durable_name: Some(SUBSCRIBER.into()), ack_policy: AckPolicy::Explicit, ..Default::default() };
    stream.get_or_create_consumer(SUBSCRIBER, config).await?;
    Ok(stream)
}

async fn list(parking: &dyn Parking) -> Result<(), AnyError> {
    const PAGE: NonZeroU32 = NonZeroU32::new(100).unwrap();
    let mut last = None;
    loop {
        let page = parking.list(SUBSCRIBER, false, last.as_ref(), PAGE).await?;
        for parked in &page {
            println!("{}\t{}\t{}", parked.message.parking_key(), parked.message.topic, parked.reason);
        }
        last = page.last().cloned();
        if last.is_none() {
            return Ok(());
        }
    }
}
