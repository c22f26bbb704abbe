//! Jobs: the worker beside one that is written by hand, on one queue and one server.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use idem_core::StoredResponse;
use idem_core::engine::{Idempotency, Settings};
use idem_jobs::{Delivery, JobQueue, JobSettings, Jobs, PostgresQueue, Worker};
use idem_postgres::{PostgresConfig, PostgresStore, PostgresTransaction};
use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use crate::contest::{Contestant, Sample, hold, per_second};
use crate::error::Error;
use crate::judged::Goal;
use crate::pace::Pace;
use crate::records::DAY;
use crate::report::Report;
use crate::servers;

const IN_FLIGHT: [u32; 3] = [1, 16, 64];

const HOLD: Duration = Duration::from_secs(30);

const TABLES: &str = "CREATE TABLE effects (job TEXT NOT NULL, made_at TIMESTAMPTZ NOT NULL DEFAULT now());
CREATE TABLE processed_jobs (id TEXT PRIMARY KEY, result BYTEA NOT NULL, processed_at TIMESTAMPTZ NOT NULL DEFAULT now())";

/// Jobs as requests enqueue them.
const ENQUEUE: &str = "INSERT INTO public.idem_jobs (id, name, principal, payload, enqueued_by, deadline_at)
    SELECT encode(sha256(int8send($1 + number)), 'hex'), 'effect', 'acme', '{\"amount\":1250}',
        '\\x00112233445566778899aabbccddeeff', now() + interval '1 day'
    FROM generate_series(1, $2::BIGINT) AS number";

const EFFECT: &str = "INSERT INTO effects (job) VALUES ($1)";

const RESULT: &[u8] = br#"{"state":"done"}"#;

pub(crate) async fn run(pace: Pace, report: &mut Report) -> Result<(), Error> {
    let server = servers::postgres()?;
    servers::run(&mut servers::connect(&server).await?, TABLES).await?;
    for in_flight in IN_FLIGHT {
        let contestants = Contestants::open(server.port(), pace, in_flight).await?;
        let how = if in_flight == 1 { "1 in flight".to_owned() } else { format!("{in_flight} in flight") };
        let ours = Contestant::new("idem", |_| contestants.ours(&contestants.store));
        let from_pool =
            Contestant::new("idem, the application's pool", |_| contestants.ours(&contestants.store_from_pool));
        let by_hand = Contestant::new("by hand", |_| contestants.by_hand());
        let outcome = hold(&format!("jobs on Postgres, {how}"), pace.rounds, vec![ours, from_pool, by_hand]).await?;
        let ratio = outcome.ratio("idem", "by hand", per_second);
        report.judge(&format!("Postgres jobs/s against a hand-written worker, {how}"), Goal::AtLeast(0.7), ratio);
        let ratio = outcome.ratio("idem, the application's pool", "by hand", per_second);
        report.judge(&format!("the same in the application's pool, {how}"), Goal::AtLeast(0.7), ratio);
        report.add(outcome);
    }
    Ok(())
}

struct Contestants {
    pool: PgPool,
    queue: Arc<PostgresQueue>,
    store: PostgresStore,
    /// Its transactions come from the application's pool, where it prepares no statements.
    store_from_pool: PostgresStore,
    in_flight: NonZeroU32,
    /// The jobs of a turn.
    jobs: u64,
    /// The number of the first job that was never enqueued.
    next: AtomicU64,
}

impl Contestants {
    async fn open(port: u16, pace: Pace, in_flight: u32) -> Result<Self, Error> {
        let url = format!("postgres://postgres@127.0.0.1:{port}/postgres");
        let pool = PgPoolOptions::new().max_connections(in_flight + 8).connect(&url).await?;
        let queue = Arc::new(PostgresQueue::open(pool.clone(), "public").await?);
        let in_flight = NonZeroU32::new(in_flight).unwrap_or(NonZeroU32::MIN);
        let store = PostgresStore::open(PostgresConfig::new(&url).max_transactions(in_flight)).await?;
        let from_pool = PostgresConfig::from_pool(pool.clone()).max_transactions(in_flight);
        let store_from_pool = PostgresStore::open(from_pool).await?;
        let jobs = if pace.quick { 500 } else { 3000 };
        let jobs = if in_flight == NonZeroU32::MIN { jobs / 2 } else { jobs };
        let next = AtomicU64::new(u64::from(in_flight.get()) << 32);
        Ok(Self { pool, queue, store, store_from_pool, in_flight, jobs, next })
    }

    /// Enqueues the jobs of a turn, and measures until `work` has ended all of them.
    async fn measured(&self, work: impl Future<Output = Result<(), Error>>) -> Result<Sample, Error> {
        let first = self.next.fetch_add(self.jobs, Ordering::Relaxed);
        let enqueue = sqlx::query(ENQUEUE).bind(first as i64).bind(self.jobs as i64);
        enqueue.execute(&self.pool).await?;
        sqlx::raw_sql("VACUUM ANALYZE idem_jobs").execute(&self.pool).await?;
        let began = Instant::now();
        work.await?;
        let per_second = self.jobs as f64 / began.elapsed().as_secs_f64();
        Ok(Sample { per_second, ..Sample::default() })
    }

    /// Waits until no job is left.
    async fn all_ended(&self) -> Result<(), Error> {
        loop {
            let left = "SELECT EXISTS (SELECT FROM idem_jobs WHERE keep_until IS NULL AND lost < 2)
                OR EXISTS (SELECT FROM idem_jobs WHERE keep_until IS NULL AND lost >= 2)";
            if !sqlx::query_scalar::<_, bool>(left).fetch_one(&self.pool).await? {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    async fn ours(&self, store: &PostgresStore) -> Result<Sample, Error> {
        let engine = Idempotency::transactional(Arc::new(store.clone()), Settings::new());
        let settings = JobSettings::new().concurrency(self.in_flight);
        let jobs = Jobs::new(Arc::clone(&self.queue) as Arc<dyn JobQueue>, engine, settings)?;
        let worker = Worker::new(jobs).handle("effect", |context, job| async move {
            let mut transaction = context.transaction::<PostgresTransaction>()?;
            sqlx::query(EFFECT).bind(job.id.as_str()).execute(&mut **transaction).await?;
            Ok(StoredResponse::new(200, RESULT))
        });
        self.measured(async {
            tokio::select! {
                () = worker.run_until(std::future::pending()) => Ok(()),
                ended = self.all_ended() => ended,
            }
        })
        .await
    }

    /// The same queue, and a table of processed jobs in the transaction of the effect.
    async fn by_hand(&self) -> Result<Sample, Error> {
        self.measured(async {
            tokio::select! {
                worked = self.work_by_hand() => worked,
                ended = self.all_ended() => ended,
            }
        })
        .await
    }

    async fn work_by_hand(&self) -> Result<(), Error> {
        let slots = Arc::new(Semaphore::new(self.in_flight.get() as usize));
        let mut running = JoinSet::new();
        loop {
            let mut free = vec![Arc::clone(&slots).acquire_owned().await?];
            free.extend(std::iter::from_fn(|| Arc::clone(&slots).try_acquire_owned().ok()));
            while let Some(ended) = running.try_join_next() {
                ended??;
            }
            let most = NonZeroU32::new(free.len() as u32).unwrap_or(NonZeroU32::MIN);
            let claimed = self.queue.claim(most, true, HOLD).await?;
            if claimed.is_empty() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            for (slot, delivery) in free.into_iter().zip(claimed) {
                let (pool, queue) = (self.pool.clone(), Arc::clone(&self.queue));
                running.spawn(async move {
                    let _slot = slot;
                    process(&pool, &queue, &delivery).await
                });
            }
        }
    }
}

async fn process(pool: &PgPool, queue: &PostgresQueue, delivery: &Delivery) -> Result<(), Error> {
    let id = delivery.job.id.as_str();
    let mut transaction = pool.begin().await?;
    let processed = sqlx::query("INSERT INTO processed_jobs (id, result) VALUES ($1, $2) ON CONFLICT DO NOTHING");
    if processed.bind(id).bind(RESULT).execute(&mut *transaction).await?.rows_affected() == 1 {
        sqlx::query(EFFECT).bind(id).execute(&mut *transaction).await?;
    }
    transaction.commit().await?;
    queue.end(std::slice::from_ref(&delivery.job.id), false, DAY).await?;
    Ok(())
}
