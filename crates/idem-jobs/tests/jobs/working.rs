//! Workers: one effect and one result for each job, whatever happens to its workers.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use idem_core::engine::{Context, Contract, Operation};
use idem_core::{OwnerToken, ReplayKind, StoreError, StoredBody, StoredResponse};
use idem_jobs::{
    Delivery, EnqueueError, EnqueuedBefore, Job, JobError, JobId, JobQueue, JobState, Jobs, QueuedJob, Standing, Worker,
};
use idem_postgres::PostgresTransaction;
use idem_sqlite::SqliteTransaction;
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

use crate::support::{Database, Kind, Place, engine_settings, job_settings, most, on_each};

/// How long a job may take to get its result on a busy machine.
const PATIENCE: Duration = Duration::from_secs(20);

on_each!(
    a_job_runs_once_and_has_its_result,
    a_job_that_was_delivered_twice_runs_once,
    a_job_that_loses_its_worker_has_one_effect,
    a_failure_is_the_result,
    a_fault_runs_again_until_no_attempt_is_left,
    a_panic_ends_one_run_and_no_worker,
    a_job_that_kills_its_worker_every_time_is_parked,
    a_job_that_killed_fewer_workers_runs,
    a_run_that_cannot_commit_is_lost,
    a_result_is_not_overruled_by_parking,
    a_started_job_goes_on_after_its_deadline,
    an_attempt_that_says_so_is_repeated,
    steps_that_were_interrupted_are_not_forgotten,
    what_a_crash_means_is_up_to_the_contract,
    a_job_waits_for_a_worker_that_knows_its_name,
    suspects_run_one_at_a_time,
    a_stranger_leaves_a_started_job_as_it_is,
    a_run_that_loses_its_session_is_lost,
    a_handler_that_hangs_takes_no_slot_for_ever,
    a_job_does_not_start_after_its_deadline,
    a_job_that_was_claimed_before_its_deadline_does_not_start_after_it,
    a_long_run_is_held,
    a_shutdown_waits_for_the_jobs_that_run,
    a_job_of_this_process_wakes_the_worker,
);

/// A worker in a task.
struct Working {
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

impl Working {
    fn start(worker: Worker) -> Self {
        let (stop, stopped) = oneshot::channel();
        let task = tokio::spawn(worker.run_until(async {
            let _ = stopped.await;
        }));
        Self { stop, task }
    }

    async fn stop(self) {
        self.stop.send(()).unwrap();
        timeout(PATIENCE, self.task).await.unwrap().unwrap();
    }
}

fn made(text: &str) -> Result<StoredResponse, JobError> {
    Ok(StoredResponse::new(201, text.to_owned()))
}

async fn enqueue(place: &Place, jobs: &Jobs, key: &str) -> JobId {
    place.request(jobs, key).await.accepted.unwrap().unwrap().id
}

async fn ended(jobs: &Jobs, id: &JobId) -> (ReplayKind, u16, String) {
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
fn counting(jobs: &Jobs) -> (Worker, Arc<AtomicU32>) {
    let runs = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&runs);
    let worker = Worker::new(jobs.clone()).handle("report", move |_, job: Job| {
        counted.fetch_add(1, Ordering::SeqCst);
        async move { made(&format!("report {}", String::from_utf8_lossy(&job.payload))) }
    });
    (worker, runs)
}

async fn a_job_runs_once_and_has_its_result(kind: Kind) {
    let place = Place::new(kind).await;
    for contract in [Contract::Transactional, Contract::AtMostOnce, Contract::AtLeastOnce] {
        let jobs = place.jobs(contract, job_settings());
        let (worker, runs) = counting(&jobs);
        let working = Working::start(worker);
        let keys: Vec<String> = (0..20).map(|key| format!("{contract:?}-{key}")).collect();
        for key in &keys {
            let id = enqueue(&place, &jobs, key).await;
            assert_eq!(jobs.state(Some("other"), &id).await.unwrap(), None, "it is another principal's");
            assert_eq!(jobs.state(None, &id).await.unwrap(), None);
            assert_eq!(ended(&jobs, &id).await, (ReplayKind::Completed, 201, format!("report \"{key}\"")));
        }
        working.stop().await;
        assert_eq!(runs.load(Ordering::SeqCst), 20);
        assert_eq!(place.queue.claim(most(100), true, PATIENCE).await.unwrap(), [], "all jobs have ended");
    }
}

/// A queue that counts deliveries, whose claims answer late, and that may forget to hold jobs, so that another worker gets one
/// that runs.
#[derive(Debug)]
struct Watched {
    queue: Arc<dyn JobQueue>,
    late: Duration,
    forgets: bool,
    deliveries: Arc<AtomicU32>,
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

    async fn end(&self, id: &JobId, is_parked: bool, keep: Duration) -> Result<(), StoreError> {
        self.queue.end(id, is_parked, keep).await
    }

    async fn find(&self, id: &JobId) -> Result<Option<QueuedJob>, StoreError> {
        self.queue.find(id).await
    }

    async fn purge(&self, most: NonZeroU32) -> Result<u32, StoreError> {
        self.queue.purge(most).await
    }
}

async fn a_job_that_was_delivered_twice_runs_once(kind: Kind) {
    let place = Place::new(kind).await;
    let deliveries = Arc::new(AtomicU32::new(0));
    let (queue, counted) = (Arc::clone(&place.queue), Arc::clone(&deliveries));
    let queue = Arc::new(Watched { queue, late: Duration::ZERO, forgets: true, deliveries: counted });
    let jobs = Jobs::new(queue, place.engine(Contract::Transactional, engine_settings()), job_settings()).unwrap();
    let id = enqueue(&place, &jobs, "k1").await;
    let (began, go_on, runs) = (Arc::new(Notify::new()), Arc::new(Notify::new()), Arc::new(AtomicU32::new(0)));
    let worker = {
        let (began, go_on, runs) = (Arc::clone(&began), Arc::clone(&go_on), Arc::clone(&runs));
        Worker::new(jobs.clone()).handle("report", move |_, _| {
            runs.fetch_add(1, Ordering::SeqCst);
            let (began, go_on) = (Arc::clone(&began), Arc::clone(&go_on));
            async move {
                began.notify_one();
                go_on.notified().await;
                made("once")
            }
        })
    };
    let first = Working::start(worker.clone());
    timeout(PATIENCE, began.notified()).await.unwrap();
    // Both workers get it again and again, and find that it runs.
    let second = Working::start(worker);
    sleep(Duration::from_millis(2500)).await;
    go_on.notify_one();
    assert_eq!(ended(&jobs, &id).await, (ReplayKind::Completed, 201, "once".into()));
    first.stop().await;
    second.stop().await;
    assert_eq!(runs.load(Ordering::SeqCst), 1);
    assert!(deliveries.load(Ordering::SeqCst) > 1, "it was delivered while it ran");
}

/// Writes an effect in the transaction of the run.
async fn effect(context: &Context, kind: Kind, schema_table: &str, job: &Job) {
    match kind {
        Kind::Sqlite => {
            let mut transaction = context.transaction::<SqliteTransaction>().unwrap();
            let insert = sqlx::query("INSERT INTO effects (job) VALUES (?)").bind(job.id.as_str());
            insert.execute(&mut **transaction).await.unwrap();
        }
        Kind::Postgres => {
            let mut transaction = context.transaction::<PostgresTransaction>().unwrap();
            let insert = format!("INSERT INTO {schema_table} (job) VALUES ($1)");
            let insert = sqlx::query(sqlx::AssertSqlSafe(insert)).bind(job.id.as_str());
            insert.execute(&mut **transaction).await.unwrap();
        }
        Kind::Redis | Kind::RedisCluster => {}
    }
}

async fn effects(place: &Place) -> i64 {
    use sqlx::Row as _;
    let count = format!("SELECT count(*) FROM {}", place.effects_table());
    match &place.database {
        Database::Sqlite(_, pool) => sqlx::query(sqlx::AssertSqlSafe(count)).fetch_one(pool).await.unwrap().get(0),
        Database::Postgres(_, pool) => sqlx::query(sqlx::AssertSqlSafe(count)).fetch_one(pool).await.unwrap().get(0),
        Database::Redis(_) => 1,
    }
}

/// A worker whose runtime ends in the middle of a run, as if its process were killed.
async fn a_job_that_loses_its_worker_has_one_effect(kind: Kind) {
    let place = Place::new(kind).await;
    let jobs = place.jobs(Contract::Transactional, job_settings());
    let id = enqueue(&place, &jobs, "k1").await;
    let table = place.effects_table();
    lose_a_worker(&place, Contract::Transactional, Some(table.clone())).await;
    let handled = Worker::new(jobs.clone()).handle("report", move |context, job| {
        let table = table.clone();
        async move {
            effect(&context, kind, &table, &job).await;
            made("again")
        }
    });
    let working = Working::start(handled);
    assert_eq!(ended(&jobs, &id).await, (ReplayKind::Completed, 201, "again".into()));
    working.stop().await;
    assert_eq!(effects(&place).await, 1);
}

/// Runs a worker on a runtime of its own, which ends when a handler has begun, and written its effect if there is a table.
async fn lose_a_worker(place: &Place, contract: Contract, table: Option<String>) {
    let kind = place.kind;
    let (began, has_begun) = oneshot::channel();
    let began = Arc::new(std::sync::Mutex::new(Some(began)));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let worker = Worker::new(place.jobs(contract, job_settings())).handle("report", move |context, job| {
        let (began, table) = (Arc::clone(&began), table.clone());
        async move {
            if let Some(table) = table {
                effect(&context, kind, &table, &job).await;
            }
            if let Some(began) = began.lock().unwrap().take() {
                let _ = began.send(());
            }
            std::future::pending().await
        }
    });
    let lost = runtime.spawn(worker.run_until(std::future::pending()));
    timeout(PATIENCE, has_begun).await.unwrap().unwrap();
    runtime.shutdown_background();
    let _ = lost.await;
}

async fn a_failure_is_the_result(kind: Kind) {
    let place = Place::new(kind).await;
    let jobs = place.jobs(Contract::Transactional, job_settings());
    let id = enqueue(&place, &jobs, "k1").await;
    let worker = Worker::new(jobs.clone())
        .handle("report", |_, _| async { Err(JobError::Fail(StoredResponse::new(422, "no such year"))) });
    let working = Working::start(worker);
    assert_eq!(ended(&jobs, &id).await, (ReplayKind::Failed, 422, "no such year".into()));
    working.stop().await;
}

async fn a_fault_runs_again_until_no_attempt_is_left(kind: Kind) {
    let place = Place::new(kind).await;
    for contract in [Contract::Transactional, Contract::AtLeastOnce] {
        let settings = engine_settings().max_attempts(NonZeroU32::new(3).unwrap());
        let jobs = Jobs::new(Arc::clone(&place.queue), place.engine(contract, settings), job_settings()).unwrap();
        let id = enqueue(&place, &jobs, &format!("{contract:?}")).await;
        let runs = Arc::new(AtomicU32::new(0));
        let counted = Arc::clone(&runs);
        let worker = Worker::new(jobs.clone()).handle("report", move |_, _| {
            counted.fetch_add(1, Ordering::SeqCst);
            async { Err(std::io::Error::other("password=secret").into()) }
        });
        let working = Working::start(worker);
        let (kind, status, body) = ended(&jobs, &id).await;
        assert_eq!((kind, status), (ReplayKind::Failed, 500));
        assert!(!body.contains("secret"), "{body}");
        working.stop().await;
        assert_eq!(runs.load(Ordering::SeqCst), 3);
    }
}

async fn a_panic_ends_one_run_and_no_worker(kind: Kind) {
    let place = Place::new(kind).await;
    let jobs = place.jobs(Contract::Transactional, job_settings());
    let worker = Worker::new(jobs.clone()).handle("report", |context: Context, _| async move {
        assert!(context.attempt() > 1, "the first attempt panics");
        made("calm")
    });
    let working = Working::start(worker);
    let id = enqueue(&place, &jobs, "k1").await;
    assert_eq!(ended(&jobs, &id).await, (ReplayKind::Completed, 201, "calm".into()));
    working.stop().await;
}

/// Takes a job from the queue like a worker that then dies, as often as that parks it.
async fn lose(place: &Place, times: u32) {
    for _ in 0..times {
        let [delivery] = &place.queue.claim(most(1), true, Duration::ZERO).await.unwrap()[..] else {
            panic!("the job is due")
        };
        if delivery.is_suspect {
            assert!(place.queue.begin(delivery).await.unwrap());
        }
        sleep(Duration::from_millis(5)).await;
    }
}

async fn a_job_that_kills_its_worker_every_time_is_parked(kind: Kind) {
    let place = Place::new(kind).await;
    let settings = engine_settings().max_attempts(NonZeroU32::MIN);
    let engine = place.engine(Contract::Transactional, settings);
    let jobs = Jobs::new(Arc::clone(&place.queue), engine, job_settings().max_lost_deliveries(3)).unwrap();
    let id = enqueue(&place, &jobs, "k1").await;
    lose(&place, if place.commits_both() { 3 } else { 4 }).await;
    let (worker, runs) = counting(&jobs);
    let working = Working::start(worker);
    let (kind, status, body) = ended(&jobs, &id).await;
    assert_eq!((kind, status), (ReplayKind::Failed, 500));
    assert!(body.contains("job-parked"), "{body}");
    working.stop().await;
    assert_eq!(runs.load(Ordering::SeqCst), 0);
    assert_eq!(place.queue.find(&id).await.unwrap().unwrap().standing, Standing::Parked);
}

async fn a_job_that_killed_fewer_workers_runs(kind: Kind) {
    let place = Place::new(kind).await;
    let jobs = place.jobs(Contract::Transactional, job_settings().max_lost_deliveries(3));
    let id = enqueue(&place, &jobs, "k1").await;
    lose(&place, 2).await;
    // Claims whose answers were lost.
    for _ in 0..5 {
        assert_eq!(place.queue.claim(most(1), true, Duration::ZERO).await.unwrap().len(), 1);
        sleep(Duration::from_millis(5)).await;
    }
    let (worker, runs) = counting(&jobs);
    let working = Working::start(worker);
    assert_eq!(ended(&jobs, &id).await.1, 201);
    working.stop().await;
    assert_eq!(runs.load(Ordering::SeqCst), 1);
}

/// Each run loses its transaction at the end, and leaves nothing in the record.
async fn a_run_that_cannot_commit_is_lost(kind: Kind) {
    let place = Place::new(kind).await;
    if !place.commits_both() {
        // It has no transaction.
        return;
    }
    let jobs = place.jobs(Contract::Transactional, job_settings().max_lost_deliveries(3));
    let id = enqueue(&place, &jobs, "k1").await;
    let runs = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&runs);
    let worker = Worker::new(jobs.clone()).handle("report", move |context: Context, _| {
        counted.fetch_add(1, Ordering::SeqCst);
        async move {
            match kind {
                Kind::Sqlite => {
                    let mut transaction = context.transaction::<SqliteTransaction>().unwrap();
                    sqlx::raw_sql("COMMIT").execute(&mut **transaction).await.unwrap();
                }
                _ => {
                    let mut transaction = context.transaction::<PostgresTransaction>().unwrap();
                    sqlx::raw_sql("SELECT 1/0").execute(&mut **transaction).await.unwrap_err();
                }
            }
            made("never")
        }
    });
    let working = Working::start(worker);
    let (kind, _, body) = ended(&jobs, &id).await;
    assert_eq!(kind, ReplayKind::Failed);
    assert!(body.contains("job-parked"), "{body}");
    working.stop().await;
    assert_eq!(runs.load(Ordering::SeqCst), 3);
}

async fn a_result_is_not_overruled_by_parking(kind: Kind) {
    let place = Place::new(kind).await;
    let settings = engine_settings().max_attempts(NonZeroU32::MIN);
    let engine = place.engine(Contract::Transactional, settings);
    let jobs = Jobs::new(Arc::clone(&place.queue), engine.clone(), job_settings().max_lost_deliveries(2)).unwrap();
    let id = enqueue(&place, &jobs, "k1").await;
    // Another worker has run it, and could not report.
    let job = place.queue.find(&id).await.unwrap().unwrap().job;
    engine.run(operation_of(&job), |_| async { Ok::<_, std::io::Error>(7) }).await.unwrap();
    lose(&place, 4).await;
    let (worker, runs) = counting(&jobs);
    let working = Working::start(worker);
    assert_eq!(ended(&jobs, &id).await, (ReplayKind::Completed, 200, "7".into()));
    standing(&place, &id, Standing::Ended).await;
    working.stop().await;
    assert_eq!(runs.load(Ordering::SeqCst), 0);
}

/// The operation that a worker runs.
fn operation_of(job: &Job) -> Operation {
    let name = format!("job:{}", job.name);
    let fingerprint = idem_core::Fingerprint::of_bytes(&name, &job.payload);
    Operation::new(idem_core::Scope::new("acme", name), job.id.as_str().parse().unwrap(), fingerprint)
}

/// Waits until the queue says so.
async fn standing(place: &Place, id: &JobId, expected: Standing) {
    let give_up_at = Instant::now() + PATIENCE;
    while place.queue.find(id).await.unwrap().unwrap().standing != expected {
        assert!(Instant::now() < give_up_at);
        sleep(Duration::from_millis(10)).await;
    }
}

async fn a_started_job_goes_on_after_its_deadline(kind: Kind) {
    let place = Place::new(kind).await;
    let jobs = place.jobs(Contract::AtLeastOnce, job_settings().start_deadline(Duration::from_secs(1)));
    let id = enqueue(&place, &jobs, "k1").await;
    let worker = Worker::new(jobs.clone()).handle("report", |context: Context, _| async move {
        if context.attempt() == 1 {
            sleep(Duration::from_millis(700)).await;
            let why = "not yet".to_owned();
            return Err(JobError::Retry { after: Some(Duration::from_millis(500)), why });
        }
        made("late")
    });
    let working = Working::start(worker);
    assert_eq!(ended(&jobs, &id).await, (ReplayKind::Completed, 201, "late".into()));
    working.stop().await;
}

async fn an_attempt_that_says_so_is_repeated(kind: Kind) {
    let place = Place::new(kind).await;
    for contract in [Contract::Transactional, Contract::AtMostOnce, Contract::AtLeastOnce] {
        let jobs = place.jobs(contract, job_settings());
        let id = enqueue(&place, &jobs, &format!("{contract:?}")).await;
        let worker = Worker::new(jobs.clone()).handle("report", |context: Context, _| async move {
            match context.attempt() {
                1 => Err(JobError::Retry { after: None, why: "busy".into() }),
                2 => Err(JobError::Retry { after: Some(Duration::from_millis(10)), why: "busy".into() }),
                _ => made("third"),
            }
        });
        let working = Working::start(worker);
        assert_eq!(ended(&jobs, &id).await.2, "third", "{contract:?}");
        working.stop().await;
    }
}

/// The handler takes the failure of a step for a final one, but the step may run again.
async fn steps_that_were_interrupted_are_not_forgotten(kind: Kind) {
    let place = Place::new(kind).await;
    let jobs = place.jobs(Contract::AtLeastOnce, job_settings());
    let id = enqueue(&place, &jobs, "k1").await;
    let tries = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&tries);
    let worker = Worker::new(jobs.clone()).handle("report", move |context: Context, _| {
        let counted = Arc::clone(&counted);
        async move {
            let mut steps = context.steps()?;
            let charge = move |_key: String| async move {
                match counted.fetch_add(1, Ordering::SeqCst) {
                    0 => Err(std::io::Error::other("away")),
                    _ => Ok(7),
                }
            };
            match steps.step::<i32>("charge").run(charge).await {
                Ok(charged) => made(&format!("charged {charged}")),
                Err(_) => Err(JobError::Fail(StoredResponse::new(402, "no"))),
            }
        }
    });
    let working = Working::start(worker);
    assert_eq!(ended(&jobs, &id).await, (ReplayKind::Completed, 201, "charged 7".into()));
    working.stop().await;
    assert_eq!(tries.load(Ordering::SeqCst), 2);
}

async fn what_a_crash_means_is_up_to_the_contract(kind: Kind) {
    let place = Place::new(kind).await;
    for contract in [Contract::AtMostOnce, Contract::AtLeastOnce] {
        let jobs = place.jobs(contract, job_settings());
        let id = enqueue(&place, &jobs, &format!("{contract:?}")).await;
        lose_a_worker(&place, contract, None).await;
        let (worker, _) = counting(&jobs);
        let working = Working::start(worker);
        // Redis has no AtMostOnce.
        let is_unknown = contract == Contract::AtMostOnce && place.commits_both();
        let expected = if is_unknown { (ReplayKind::OutcomeUnknown, 504) } else { (ReplayKind::Completed, 201) };
        let (kind, status, _) = ended(&jobs, &id).await;
        assert_eq!((kind, status), expected, "{contract:?}");
        working.stop().await;
    }
}

async fn a_job_waits_for_a_worker_that_knows_its_name(kind: Kind) {
    let place = Place::new(kind).await;
    let jobs = place.jobs(Contract::Transactional, job_settings());
    let id = enqueue(&place, &jobs, "k1").await;
    let stranger = Working::start(Worker::new(jobs.clone()));
    let give_up_at = Instant::now() + PATIENCE;
    // When the stranger has given it back, it is not due, and nobody holds it.
    loop {
        let is_claimed = place.queue.find(&id).await.unwrap().unwrap().standing == Standing::Claimed;
        match &place.queue.claim(most(1), true, Duration::ZERO).await.unwrap()[..] {
            [mine] => place.queue.put_back(mine, Duration::ZERO, mine.lost).await.unwrap(),
            _ if is_claimed => {}
            _ => break,
        }
        assert!(Instant::now() < give_up_at);
        sleep(Duration::from_millis(20)).await;
    }
    stranger.stop().await;
    assert_eq!(jobs.state(Some("acme"), &id).await.unwrap(), Some(JobState::Waiting { failed_attempts: 0 }));
}

/// Six jobs of one worker that was lost twice.
async fn suspects_run_one_at_a_time(kind: Kind) {
    let place = Place::new(kind).await;
    let jobs = place.jobs(Contract::Transactional, job_settings());
    let mut ids = Vec::new();
    for key in 0..6 {
        ids.push(enqueue(&place, &jobs, &key.to_string()).await);
    }
    for _ in 0..2 {
        assert_eq!(place.queue.claim(most(9), true, Duration::ZERO).await.unwrap().len(), 6);
        sleep(Duration::from_millis(5)).await;
    }
    let (at_once, most_at_once) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
    let seen = Arc::clone(&most_at_once);
    let worker = Worker::new(jobs.clone()).handle("report", move |_, _| {
        let (at_once, seen) = (Arc::clone(&at_once), Arc::clone(&seen));
        async move {
            seen.fetch_max(at_once.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            sleep(Duration::from_millis(20)).await;
            at_once.fetch_sub(1, Ordering::SeqCst);
            made("innocent")
        }
    });
    let working = Working::start(worker);
    for id in &ids {
        assert_eq!(ended(&jobs, id).await.1, 201);
    }
    working.stop().await;
    assert_eq!(most_at_once.load(Ordering::SeqCst), 1, "suspects run one at a time");
}

async fn a_job_does_not_start_after_its_deadline(kind: Kind) {
    let place = Place::new(kind).await;
    let jobs = place.jobs(Contract::Transactional, job_settings().start_deadline(Duration::from_secs(1)));
    // Who asks first ends it: the worker, or a client.
    let (by_worker, by_client) = (enqueue(&place, &jobs, "k1").await, enqueue(&place, &jobs, "k2").await);
    assert_eq!(jobs.state(Some("acme"), &by_client).await.unwrap(), Some(JobState::Waiting { failed_attempts: 0 }));
    sleep(Duration::from_millis(1100)).await;
    let (kind, status, body) = ended(&jobs, &by_client).await;
    assert_eq!((kind, status), (ReplayKind::Failed, 504));
    assert!(body.contains("job-overdue"), "{body}");
    let (worker, runs) = counting(&jobs);
    let working = Working::start(worker);
    standing(&place, &by_worker, Standing::Ended).await;
    working.stop().await;
    assert_eq!(ended(&jobs, &by_worker).await.1, 504);
    assert_eq!(runs.load(Ordering::SeqCst), 0);
}

/// The claim is made in time, and its answer is late.
async fn a_job_that_was_claimed_before_its_deadline_does_not_start_after_it(kind: Kind) {
    let place = Place::new(kind).await;
    let queue = Arc::clone(&place.queue);
    let late = Duration::from_millis(1500);
    let queue = Arc::new(Watched { queue, late, forgets: false, deliveries: Arc::default() });
    let settings = job_settings()
        .start_deadline(Duration::from_secs(1))
        .queue_timeout(Duration::from_secs(5))
        .visibility_timeout(Duration::from_secs(16));
    let jobs = Jobs::new(queue, place.engine(Contract::AtLeastOnce, engine_settings()), settings).unwrap();
    let id = enqueue(&place, &jobs, "k1").await;
    let (worker, runs) = counting(&jobs);
    let working = Working::start(worker);
    standing(&place, &id, Standing::Ended).await;
    assert_eq!(ended(&jobs, &id).await.1, 504);
    working.stop().await;
    assert_eq!(runs.load(Ordering::SeqCst), 0);
}

/// Under AtLeastOnce, the worker asks the record of a job that it does not know, and does not touch it.
async fn a_stranger_leaves_a_started_job_as_it_is(kind: Kind) {
    let place = Place::new(kind).await;
    for contract in [Contract::AtMostOnce, Contract::AtLeastOnce] {
        let jobs = place.jobs(contract, job_settings().start_deadline(Duration::from_secs(1)));
        let id = enqueue(&place, &jobs, &format!("{contract:?}")).await;
        let later = Worker::new(jobs.clone()).handle("report", |context: Context, _| async move {
            match context.attempt() {
                1 => Err(JobError::Retry { after: Some(Duration::from_millis(1500)), why: "busy".into() }),
                attempt => made(&format!("attempt {attempt}")),
            }
        });
        let working = Working::start(later);
        let expected = Some(JobState::Waiting { failed_attempts: 1 });
        let give_up_at = Instant::now() + PATIENCE;
        while jobs.state(Some("acme"), &id).await.unwrap() != expected {
            assert!(Instant::now() < give_up_at);
            sleep(Duration::from_millis(5)).await;
        }
        working.stop().await;
        // The deadline passes.
        sleep(Duration::from_millis(1600)).await;
        let (queue, deliveries) = (Arc::clone(&place.queue), Arc::new(AtomicU32::new(0)));
        let queue =
            Arc::new(Watched { queue, late: Duration::ZERO, forgets: false, deliveries: Arc::clone(&deliveries) });
        let engine = place.engine(contract, engine_settings());
        let stranger = Worker::new(Jobs::new(queue, engine, job_settings()).unwrap());
        let stranger = Working::start(stranger);
        while deliveries.load(Ordering::SeqCst) == 0 {
            assert!(Instant::now() < give_up_at);
            sleep(Duration::from_millis(5)).await;
        }
        stranger.stop().await;
        assert_eq!(jobs.state(Some("acme"), &id).await.unwrap(), expected, "{contract:?}");
    }
}

/// A handler whose session the server ends, in each run.
async fn a_run_that_loses_its_session_is_lost(kind: Kind) {
    if kind != Kind::Postgres {
        // The others have no session that ends.
        return;
    }
    let place = Place::new(kind).await;
    let jobs = place.jobs(Contract::Transactional, job_settings().max_lost_deliveries(3));
    let id = enqueue(&place, &jobs, "k1").await;
    let runs = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&runs);
    let worker = Worker::new(jobs.clone()).handle("report", move |context: Context, _| {
        counted.fetch_add(1, Ordering::SeqCst);
        async move {
            let mut transaction = context.transaction::<PostgresTransaction>()?;
            sqlx::raw_sql("SELECT pg_terminate_backend(pg_backend_pid())").execute(&mut **transaction).await?;
            made("never")
        }
    });
    let working = Working::start(worker);
    let (kind, _, body) = ended(&jobs, &id).await;
    assert_eq!(kind, ReplayKind::Failed);
    assert!(body.contains("job-parked"), "{body}");
    working.stop().await;
    assert_eq!(runs.load(Ordering::SeqCst), 3);
}

/// The handler of a suspect never returns. Other suspects get their turn all the same.
async fn a_handler_that_hangs_takes_no_slot_for_ever(kind: Kind) {
    let place = Place::new(kind).await;
    let settings = engine_settings().renewal_limit(Duration::from_secs(2));
    let engine = place.engine(Contract::AtLeastOnce, settings);
    let jobs = Jobs::new(Arc::clone(&place.queue), engine, job_settings()).unwrap();
    let hanging = enqueue(&place, &jobs, "hanging").await;
    let innocent = enqueue(&place, &jobs, "innocent").await;
    for _ in 0..2 {
        assert_eq!(place.queue.claim(most(9), true, Duration::ZERO).await.unwrap().len(), 2);
        sleep(Duration::from_millis(5)).await;
    }
    let (first, hangs) = (Arc::new(Notify::new()), hanging.clone());
    let began = Arc::clone(&first);
    let worker = Worker::new(jobs.clone()).handle("report", move |_, job: Job| {
        let (began, hangs) = (Arc::clone(&began), hangs.clone());
        async move {
            if job.id == hangs {
                began.notify_one();
                std::future::pending::<()>().await;
            }
            made("innocent")
        }
    });
    let working = Working::start(worker);
    assert_eq!(ended(&jobs, &innocent).await.1, 201);
    timeout(PATIENCE, first.notified()).await.unwrap();
    assert!(matches!(jobs.state(Some("acme"), &hanging).await.unwrap(), Some(JobState::Running { .. })));
    working.stop().await;
}

async fn a_long_run_is_held(kind: Kind) {
    let place = Place::new(kind).await;
    let (queue, deliveries) = (Arc::clone(&place.queue), Arc::new(AtomicU32::new(0)));
    let watched = Watched { queue, late: Duration::ZERO, forgets: false, deliveries: Arc::clone(&deliveries) };
    let engine = place.engine(Contract::AtLeastOnce, engine_settings());
    let jobs = Jobs::new(Arc::new(watched), engine, job_settings()).unwrap();
    let id = enqueue(&place, &jobs, "k1").await;
    let worker = Worker::new(jobs.clone()).handle("report", |_, _| async {
        sleep(Duration::from_millis(2500)).await;
        made("slowly")
    });
    let working = Working::start(worker);
    assert_eq!(ended(&jobs, &id).await, (ReplayKind::Completed, 201, "slowly".into()));
    working.stop().await;
    assert_eq!(deliveries.load(Ordering::SeqCst), 1, "it runs for 2.5 s, and is hidden for 1 s at a time");
}

async fn a_shutdown_waits_for_the_jobs_that_run(kind: Kind) {
    let place = Place::new(kind).await;
    let jobs = place.jobs(Contract::Transactional, job_settings());
    let id = enqueue(&place, &jobs, "k1").await;
    let began = Arc::new(Notify::new());
    let signal = Arc::clone(&began);
    let worker = Worker::new(jobs.clone()).handle("report", move |_, _| {
        let signal = Arc::clone(&signal);
        async move {
            signal.notify_one();
            sleep(Duration::from_millis(300)).await;
            made("done")
        }
    });
    let working = Working::start(worker);
    timeout(PATIENCE, began.notified()).await.unwrap();
    working.stop().await;
    let state = jobs.state(Some("acme"), &id).await.unwrap();
    assert!(matches!(state, Some(JobState::Ended(_))), "{state:?}");
}

async fn a_job_of_this_process_wakes_the_worker(kind: Kind) {
    let place = Place::new(kind).await;
    let jobs = place.jobs(Contract::AtLeastOnce, job_settings().poll_interval(Duration::from_secs(3600)));
    let (worker, _) = counting(&jobs);
    let working = Working::start(worker);
    sleep(Duration::from_millis(100)).await;
    let id = enqueue(&place, &jobs, "k1").await;
    ended(&jobs, &id).await;
    working.stop().await;
}
