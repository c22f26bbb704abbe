//! What tests of workers share.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use idem_core::engine::Context;
use idem_core::{OwnerToken, ReplayKind, StoreError, StoreErrorKind, StoredBody, StoredResponse};
use idem_jobs::{
    Delivery, EnqueueError, EnqueuedBefore, Job, JobError, JobId, JobQueue, JobState, Jobs, QueuedJob, Standing, Worker,
};
use idem_postgres::PostgresTransaction;
use idem_sqlite::SqliteTransaction;
use sqlx::AssertSqlSafe;
use tokio::sync::{Semaphore, oneshot};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

use crate::support::{Database, Kind, Place, trace};

/// How long a job may take to get its result on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// A worker in a task.
pub(crate) struct Working {
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

impl Working {
    pub(crate) fn start(worker: Worker) -> Self {
        let (stop, stopped) = oneshot::channel();
        let task = tokio::spawn(worker.run_until(async {
            let _ = stopped.await;
        }));
        Self { stop, task }
    }

    pub(crate) async fn stop(self) {
        self.stop.send(()).unwrap();
        timeout(PATIENCE, self.task).await.unwrap().unwrap();
    }
}

pub(crate) fn made(text: &str) -> Result<StoredResponse, JobError> {
    Ok(StoredResponse::new(201, text.to_owned()))
}

pub(crate) async fn enqueue(place: &Place, jobs: &Jobs, key: &str) -> JobId {
    place.request(jobs, key).await.accepted.unwrap().unwrap().id
}

pub(crate) async fn ended(jobs: &Jobs, id: &JobId) -> (ReplayKind, u16, String) {
    let give_up_at = Instant::now() + PATIENCE;
    loop {
        if let Some(JobState::Ended(replay)) = jobs.state(Some("acme"), id).await.unwrap() {
            let StoredBody::Retained(body) = replay.response.body else { panic!("the body is kept") };
            return (replay.kind, replay.response.status, String::from_utf8_lossy(&body).into_owned());
        }
        assert!(Instant::now() < give_up_at, "{id} did not end");
        sleep(Duration::from_millis(10)).await;
    }
}

/// A worker whose handler counts its runs.
pub(crate) fn counting(jobs: &Jobs) -> (Worker, Arc<AtomicU32>) {
    let runs = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&runs);
    let worker = Worker::new(jobs.clone()).handle("report", move |context, job: Job| {
        counted.fetch_add(1, Ordering::SeqCst);
        assert_eq!(context.trace(), trace(), "that of the request");
        async move { made(&format!("report {}", String::from_utf8_lossy(&job.payload))) }
    });
    (worker, runs)
}

/// A queue that tests watch and disturb.
#[derive(Debug)]
pub(crate) struct Watched {
    pub(crate) queue: Arc<dyn JobQueue>,
    /// How late the answers of claims are.
    pub(crate) late: Duration,
    /// It does not hold jobs, so that another worker gets one that runs.
    pub(crate) forgets: bool,
    /// Ends wait for a permit, and give it back.
    pub(crate) gate: Option<Arc<Semaphore>>,
    /// The second end panics, and others up to the fourth fail.
    pub(crate) fails_to_end: bool,
    /// It finds no job, as it cannot be reached.
    pub(crate) is_away: bool,
    pub(crate) deliveries: AtomicU32,
    /// How many jobs were to be ended at once, at most.
    pub(crate) most_ends: AtomicUsize,
    pub(crate) ends: AtomicU32,
}

impl Watched {
    pub(crate) fn new(place: &Place) -> Self {
        Self {
            queue: Arc::clone(&place.queue),
            late: Duration::ZERO,
            forgets: false,
            gate: None,
            fails_to_end: false,
            is_away: false,
            deliveries: AtomicU32::new(0),
            most_ends: AtomicUsize::new(0),
            ends: AtomicU32::new(0),
        }
    }
}

#[async_trait]
impl JobQueue for Watched {
    async fn enqueue(
        &self,
        run: &Context,
        job: &Job,
        by: OwnerToken,
        deadline: Duration,
    ) -> Result<Option<EnqueuedBefore>, EnqueueError> {
        self.queue.enqueue(run, job, by, deadline).await
    }

    async fn begin(&self, suspect: &Delivery) -> Result<bool, StoreError> {
        self.queue.begin(suspect).await
    }

    async fn claim(&self, most: NonZeroU32, suspect: bool, hold: Duration) -> Result<Vec<Delivery>, StoreError> {
        let claimed = self.queue.claim(most, suspect, hold).await;
        self.deliveries.fetch_add(claimed.as_ref().map_or(0, Vec::len) as u32, Ordering::SeqCst);
        sleep(self.late).await;
        claimed
    }

    async fn hold(&self, delivery: &Delivery, hold: Duration) -> Result<bool, StoreError> {
        if self.forgets { Ok(false) } else { self.queue.hold(delivery, hold).await }
    }

    async fn put_back(&self, delivery: &Delivery, delay: Duration, lost: u32) -> Result<(), StoreError> {
        self.queue.put_back(delivery, delay, lost).await
    }

    async fn end(&self, ids: &[JobId], is_parked: bool, keep: Duration) -> Result<Vec<JobId>, StoreError> {
        self.most_ends.fetch_max(ids.len(), Ordering::SeqCst);
        if let Some(gate) = &self.gate {
            drop(gate.acquire().await.unwrap());
        }
        let ends = self.ends.fetch_add(1, Ordering::SeqCst);
        assert!(!self.fails_to_end || ends != 1, "a queue with a defect");
        if self.fails_to_end && ends < 4 {
            return Err(StoreError::new(StoreErrorKind::Unavailable, "not yet"));
        }
        self.queue.end(ids, is_parked, keep).await
    }

    async fn find(&self, id: &JobId) -> Result<Option<QueuedJob>, StoreError> {
        if self.is_away {
            return Err(StoreError::new(StoreErrorKind::Unavailable, "away"));
        }
        self.queue.find(id).await
    }

    async fn purge(&self, most: NonZeroU32) -> Result<u32, StoreError> {
        self.queue.purge(most).await
    }
}

/// Writes an effect in the transaction of the run.
pub(crate) async fn effect(context: &Context, kind: Kind, schema_table: &str, job: &Job) {
    match kind {
        Kind::Sqlite => {
            let mut transaction = context.transaction::<SqliteTransaction>().unwrap();
            let insert = sqlx::query("INSERT INTO effects (job) VALUES (?)").bind(job.id.as_str());
            insert.execute(&mut **transaction).await.unwrap();
        }
        Kind::Postgres => {
            let mut transaction = context.transaction::<PostgresTransaction>().unwrap();
            let insert = format!("INSERT INTO {schema_table} (job) VALUES ($1)");
            let insert = sqlx::query(AssertSqlSafe(insert)).bind(job.id.as_str());
            insert.execute(&mut **transaction).await.unwrap();
        }
        Kind::Redis | Kind::RedisCluster => {}
    }
}

/// How many rows a table has. One in Redis, which has no tables.
pub(crate) async fn rows(place: &Place, table: &str) -> i64 {
    let count = AssertSqlSafe(format!("SELECT count(*) FROM {}", place.table(table)));
    match &place.database {
        Database::Sqlite(_, pool) => sqlx::query_scalar(count).fetch_one(pool).await.unwrap(),
        Database::Postgres(_, pool) => sqlx::query_scalar(count).fetch_one(pool).await.unwrap(),
        Database::Redis(_) => 1,
    }
}

/// Waits until the queue says so.
pub(crate) async fn standing(place: &Place, id: &JobId, expected: Standing) {
    let give_up_at = Instant::now() + PATIENCE;
    while place.queue.find(id).await.unwrap().unwrap().standing != expected {
        assert!(Instant::now() < give_up_at);
        sleep(Duration::from_millis(10)).await;
    }
}
