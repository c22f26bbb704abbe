//! Messages: the consumer beside one that is written by hand, on one stream of JetStream and one Postgres.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use async_nats::jetstream::consumer::{AckPolicy, PullConsumer, pull};
use async_nats::jetstream::{self, stream};
use futures_util::{StreamExt as _, future};
use idem_core::engine::{Context, Idempotency, Settings};
use idem_inbox::{Consumer, Inbox, InboxSettings, Message, NatsSubscription, Parking, PostgresParking};
use idem_postgres::{PostgresConfig, PostgresStore, PostgresTransaction};
use idem_servers::Nats;
use sha2::{Digest as _, Sha256};
use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use uuid::Uuid;

use crate::contest::{Contestant, Sample, hold, per_second};
use crate::error::Error;
use crate::judged::Goal;
use crate::pace::Pace;
use crate::report::Report;
use crate::servers;

const IN_FLIGHT: [u32; 3] = [1, 16, 64];

/// How many transactions are open at once, for each contestant: the default of the store. More of them slow each other down on two
/// processors, also by hand.
const TRANSACTIONS: u32 = 16;

/// The durable consumer of the stream. A turn ends with an empty stream, so that contestants can share it.
const CONSUMER: &str = "effects";

const TABLES: &str = "CREATE TABLE effects (message TEXT NOT NULL, made_at TIMESTAMPTZ NOT NULL DEFAULT now());
CREATE TABLE processed_messages (id TEXT PRIMARY KEY, processed_at TIMESTAMPTZ NOT NULL DEFAULT now())";

const EFFECT: &str = "INSERT INTO effects (message) VALUES ($1)";

const PROCESSED: &str = "INSERT INTO processed_messages (id) VALUES ($1) ON CONFLICT DO NOTHING";

/// What the store keeps of a message, in a table of the same columns, indexes and checks as its own.
const SAME_RECORDS: &str = "CREATE TABLE same_records (LIKE idem.idem_records INCLUDING ALL) WITH (fillfactor = 90)";

/// As the README of idem-postgres advises if all operations are Transactional.
const FILLFACTOR: &str = "ALTER TABLE idem.idem_records SET (fillfactor = 90)";

const LOCK: &str = "SELECT pg_try_advisory_xact_lock($1)";

const LOOK: &str = "SELECT fingerprint, state, status, headers, body FROM same_records WHERE id = $1";

const RECORD: &str =
    "INSERT INTO same_records (id, namespace, operation, format, fingerprint_algorithm, fingerprint, owner,
    attempt, state, status, headers, body, created_at, updated_at, expires_at, purge_after)
VALUES ($1, 'effects', 'inbox:effects', 1, 1, $2, $3, 1, 2, 200, '', '', $4, $4, $5, $5)";

/// A message of a small order.
const PAYLOAD: &str = r#"{"order":"42","amount":1250,"currency":"EUR"}"#;

pub(crate) async fn run(pace: Pace, report: &mut Report) -> Result<(), Error> {
    let database = servers::postgres()?;
    servers::run(&mut servers::connect(&database).await?, TABLES).await?;
    let broker = Nats::start()?;
    println!("{} ({}), streams in files", broker.version(), broker.origin());
    for in_flight in IN_FLIGHT {
        let contestants = Contestants::open(database.port(), &broker, pace, in_flight).await?;
        let how = if in_flight == 1 { "1 in flight".to_owned() } else { format!("{in_flight} in flight") };
        let ours = Contestant::new("idem", |_| contestants.ours(&contestants.store));
        let from_pool =
            Contestant::new("idem, the application's pool", |_| contestants.ours(&contestants.store_from_pool));
        let by_hand = Contestant::new("by hand", |_| contestants.by_hand());
        let same = Contestant::new("by hand, with the same record", |_| contestants.with_same_record());
        let all = vec![ours, from_pool, by_hand, same];
        let outcome = hold(&format!("messages of JetStream, {how}"), pace.rounds, all).await?;
        let ratio = outcome.ratio("idem", "by hand", per_second);
        report.judge(&format!("messages/s against a hand-written consumer, {how}"), Goal::AtLeast(0.7), ratio);
        let ratio = outcome.ratio("idem, the application's pool", "by hand", per_second);
        report.judge(&format!("the same messages in the application's pool, {how}"), Goal::AtLeast(0.7), ratio);
        report.add(outcome);
    }
    Ok(())
}

struct Contestants {
    /// Of the hand-written consumers.
    hand_pool: PgPool,
    context: jetstream::Context,
    stream: stream::Stream,
    store: PostgresStore,
    /// Its transactions come from the application's pool, where it prepares no statements.
    store_from_pool: PostgresStore,
    parking: Arc<dyn Parking>,
    in_flight: NonZeroU32,
    /// The messages of a turn.
    messages: u64,
    /// The number of the first message that was never published.
    next: AtomicU64,
}

impl Contestants {
    async fn open(port: u16, broker: &Nats, pace: Pace, in_flight: u32) -> Result<Self, Error> {
        let context = jetstream::new(async_nats::connect(broker.url()).await?);
        let config = stream::Config {
            name: "EFFECTS".into(),
            subjects: vec!["effects".into()],
            retention: stream::RetentionPolicy::WorkQueue,
            max_age: Duration::from_secs(60 * 60),
            ..Default::default()
        };
        let stream = context.get_or_create_stream(config).await?;
        let config =
            pull::Config { durable_name: Some(CONSUMER.into()), ack_policy: AckPolicy::Explicit, ..Default::default() };
        stream.get_or_create_consumer(CONSUMER, config).await?;
        let url = format!("postgres://postgres@127.0.0.1:{port}/postgres");
        let pool = PgPoolOptions::new().max_connections(in_flight + 8).connect(&url).await?;
        let hand_pool = PgPoolOptions::new().max_connections(in_flight.min(TRANSACTIONS)).connect(&url).await?;
        let parking = Arc::new(PostgresParking::open(pool.clone(), "public").await?);
        let in_flight = NonZeroU32::new(in_flight).unwrap_or(NonZeroU32::MIN);
        let store = PostgresStore::open(PostgresConfig::new(&url)).await?;
        let store_from_pool = PostgresStore::open(PostgresConfig::from_pool(pool.clone())).await?;
        sqlx::raw_sql(FILLFACTOR).execute(&pool).await?;
        sqlx::raw_sql("TRUNCATE idem.idem_records, processed_messages, effects").execute(&pool).await?;
        sqlx::raw_sql("DROP TABLE IF EXISTS same_records").execute(&pool).await?;
        sqlx::raw_sql(SAME_RECORDS).execute(&pool).await?;
        let messages = if pace.quick { 1000 } else { 6000 };
        let messages = if in_flight == NonZeroU32::MIN { messages / 2 } else { messages };
        let next = AtomicU64::new(u64::from(in_flight.get()) << 32);
        Ok(Self { hand_pool, context, stream, store, store_from_pool, parking, in_flight, messages, next })
    }

    /// Publishes the messages of a turn, and measures until `work` has handled all of them and the broker has been told.
    async fn measured(&self, work: impl Future<Output = Result<(), Error>>) -> Result<Sample, Error> {
        const AT_ONCE: u64 = 200;
        let first = self.next.fetch_add(self.messages, Ordering::Relaxed);
        let numbers: Vec<u64> = (first..first + self.messages).collect();
        for some in numbers.chunks(AT_ONCE as usize) {
            future::try_join_all(some.iter().map(|number| self.publish(*number))).await?;
        }
        let began = Instant::now();
        tokio::select! {
            worked = work => worked?,
            ended = self.drained() => ended?,
        }
        let per_second = self.messages as f64 / began.elapsed().as_secs_f64();
        Ok(Sample { per_second, ..Sample::default() })
    }

    async fn publish(&self, number: u64) -> Result<(), Error> {
        let mut headers = async_nats::HeaderMap::new();
        headers.insert("Nats-Msg-Id", format!("message-{number}"));
        self.context.publish_with_headers("effects", headers, PAYLOAD.into()).await?.await?;
        Ok(())
    }

    /// Waits until the stream has no message.
    async fn drained(&self) -> Result<(), Error> {
        while self.stream.get_info().await?.state.messages > 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Ok(())
    }

    async fn ours(&self, store: &PostgresStore) -> Result<Sample, Error> {
        let engine = Idempotency::transactional(Arc::new(store.clone()), Settings::new());
        let inbox = Inbox::new("effects", engine, Arc::clone(&self.parking), InboxSettings::new())?;
        let subscription = NatsSubscription::open(&self.stream, CONSUMER).await?;
        let consumer = Consumer::new(inbox, subscription)?.concurrency(self.in_flight);
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let stopped = async move {
            // The turn has ended as well if the sender is gone.
            let _ = stopped.await;
        };
        let handler = |context: Context, message: Message| async move {
            let mut transaction = context.transaction::<PostgresTransaction>()?;
            sqlx::query(EFFECT).bind(message.id).execute(&mut **transaction).await?;
            Ok(())
        };
        let mut consuming = None;
        let work = async {
            consuming = Some(tokio::spawn(consumer.run_until(stopped, handler)));
            future::pending().await
        };
        let sample = self.measured(work).await;
        drop(stop);
        if let Some(consuming) = consuming {
            consuming.await?;
        }
        sample
    }

    /// A table of processed messages in the transaction of the effect.
    async fn by_hand(&self) -> Result<Sample, Error> {
        self.measured(self.consume_by_hand(process)).await
    }

    /// What the store keeps, in the transaction of the effect, behind the same kind of lock.
    async fn with_same_record(&self) -> Result<Sample, Error> {
        self.measured(self.consume_by_hand(process_with_same_record)).await
    }

    async fn consume_by_hand<P, F>(&self, process: P) -> Result<(), Error>
    where
        P: Fn(PgPool, jetstream::Message) -> F,
        F: Future<Output = Result<(), Error>> + Send + 'static,
    {
        let consumer: PullConsumer = self.stream.get_consumer(CONSUMER).await?;
        let mut messages = consumer.messages().await?;
        let slots = Arc::new(Semaphore::new(self.in_flight.get() as usize));
        let mut running = JoinSet::new();
        while let Some(message) = messages.next().await {
            let message = message?;
            let slot = Arc::clone(&slots).acquire_owned().await?;
            while let Some(ended) = running.try_join_next() {
                ended??;
            }
            let processing = process(self.hand_pool.clone(), message);
            running.spawn(async move {
                let _slot = slot;
                processing.await
            });
        }
        Err("the stream of messages has ended".into())
    }
}

async fn process(pool: PgPool, message: jetstream::Message) -> Result<(), Error> {
    let id = id_of(&message)?;
    let mut transaction = pool.begin().await?;
    let processed = sqlx::query(PROCESSED).bind(id).execute(&mut *transaction).await?;
    if processed.rows_affected() == 1 {
        sqlx::query(EFFECT).bind(id).execute(&mut *transaction).await?;
    }
    transaction.commit().await?;
    message.ack().await
}

async fn process_with_same_record(pool: PgPool, message: jetstream::Message) -> Result<(), Error> {
    const DAY: i64 = 86_400_000_000;
    let id = id_of(&message)?;
    let (key, payload) = (Sha256::digest(id), Sha256::digest(&message.payload));
    let mut lock = [0; 8];
    lock.copy_from_slice(&key[..8]);
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?.as_micros() as i64;
    let mut transaction = pool.begin().await?;
    let lock = sqlx::query_scalar(LOCK).bind(i64::from_be_bytes(lock)).fetch_one(&mut *transaction).await?;
    let found = sqlx::query(LOOK).bind(&key[..]).fetch_optional(&mut *transaction).await?;
    if lock && found.is_none() {
        sqlx::query(EFFECT).bind(id).execute(&mut *transaction).await?;
        let record = sqlx::query(RECORD).bind(&key[..]).bind(&payload[..]).bind(Uuid::new_v4().as_bytes().as_slice());
        record.bind(now).bind(now + DAY).execute(&mut *transaction).await?;
    }
    transaction.commit().await?;
    message.ack().await
}

fn id_of(message: &jetstream::Message) -> Result<&str, Error> {
    let id = message.headers.as_ref().and_then(|headers| headers.get("Nats-Msg-Id"));
    Ok(id.ok_or("a message without an id")?.as_str())
}
