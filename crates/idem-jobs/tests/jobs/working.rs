//! Workers: one effect and one result for each job, whatever happens to its workers.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use idem_core::engine::{Context, Contract};
use idem_core::{ReplayKind, StoreError, StoredBody, StoredResponse};
use idem_jobs::{Delivery, EnqueueError, Job, JobError, JobId, JobQueue, JobState, Jobs, QueuedJob, Worker};
use idem_postgres::PostgresTransaction;
use idem_sqlite::SqliteTransaction;
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

use crate::support::{Database, Kind, Place, engine_settings, job_settings, most, on_each};

/// How long a job may take to get its result on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);

on_each!(
    a_job_runs_once_and_has_its_result,
    a_job_that_was_delivered_twice_runs_once,
    a_job_that_loses_its_worker_has_one_effect,
    a_failure_is_the_result,
    a_fault_runs_again_until_no_attempt_is_left,
    a_panic_ends_one_run_and_no_worker,
    a_job_that_kills_its_worker_every_time_is_parked,
    a_result_is_not_overruled_by_parking,
    a_job_does_not_start_after_its_deadline,
    a_job_that_was_claimed_before_its_deadline_does_not_start_after_it,
    a_job_without_a_handler_waits,
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
        if let Some(JobState::Ended(replay)) = jobs.state(id, Some("acme")).await.unwrap() {
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
            assert_eq!(jobs.state(&id, Some("other")).await.unwrap(), None, "it is another principal's");
            assert_eq!(jobs.state(&id, None).await.unwrap(), None);
            assert_eq!(ended(&jobs, &id).await, (ReplayKind::Completed, 201, format!("report \"{key}\"")));
        }
        working.stop().await;
        assert_eq!(runs.load(Ordering::SeqCst), 20);
        assert_eq!(place.queue.claim(most(100), true, PATIENCE).await.unwrap(), [], "all jobs have ended");
    }
}

/// A queue that forgets to hold jobs, so that another worker gets one that runs.
#[derive(Debug)]
struct Forgetful(Arc<dyn JobQueue>);

#[async_trait]
impl JobQueue for Forgetful {
    async fn enqueue(&self, run: &Context, job: &Job, deadline: Duration) -> Result<(), EnqueueError> {
        self.0.enqueue(run, job, deadline).await
    }

    async fn claim(&self, most: NonZeroU32, suspect: bool, hold: Duration) -> Result<Vec<Delivery>, StoreError> {
        self.0.claim(most, suspect, hold).await
    }

    async fn hold(&self, _: &Delivery, _: Duration) -> Result<bool, StoreError> {
        Ok(false)
    }

    async fn put_back(&self, delivery: &Delivery, delay: Duration) -> Result<(), StoreError> {
        self.0.put_back(delivery, delay).await
    }

    async fn end(&self, id: &JobId, is_parked: bool, keep: Duration) -> Result<(), StoreError> {
        self.0.end(id, is_parked, keep).await
    }

    async fn find(&self, id: &JobId) -> Result<Option<QueuedJob>, StoreError> {
        self.0.find(id).await
    }

    async fn purge(&self, most: NonZeroU32) -> Result<u32, StoreError> {
        self.0.purge(most).await
    }
}

async fn a_job_that_was_delivered_twice_runs_once(kind: Kind) {
    let place = Place::new(kind).await;
    let queue = Arc::new(Forgetful(Arc::clone(&place.queue)));
    let jobs = Jobs::new(queue, place.engine(Contract::Transactional, engine_settings()), job_settings());
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
    lose_a_worker(&place, table.clone()).await;
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

/// Runs a worker on a runtime of its own, which ends when a handler has written its effect.
async fn lose_a_worker(place: &Place, table: String) {
    let kind = place.kind;
    let (wrote, has_written) = oneshot::channel();
    let wrote = Arc::new(std::sync::Mutex::new(Some(wrote)));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    // Its own engine, so that what is lost does not count here.
    let lost = runtime.spawn({
        let jobs = place.jobs(Contract::Transactional, job_settings());
        let worker = Worker::new(jobs).handle("report", move |context, job| {
            let (wrote, table) = (Arc::clone(&wrote), table.clone());
            async move {
                effect(&context, kind, &table, &job).await;
                if let Some(wrote) = wrote.lock().unwrap().take() {
                    let _ = wrote.send(());
                }
                std::future::pending().await
            }
        });
        worker.run_until(std::future::pending())
    });
    timeout(PATIENCE, has_written).await.unwrap().unwrap();
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
        let jobs = Jobs::new(Arc::clone(&place.queue), place.engine(contract, settings), job_settings());
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

async fn a_job_that_kills_its_worker_every_time_is_parked(kind: Kind) {
    let place = Place::new(kind).await;
    let settings = engine_settings().max_attempts(NonZeroU32::MIN);
    let engine = place.engine(Contract::Transactional, settings);
    let jobs = Jobs::new(Arc::clone(&place.queue), engine, job_settings().most_unreported(2));
    let id = enqueue(&place, &jobs, "k1").await;
    let limit = if place.commits_both() { 2 } else { 3 };
    for _ in 0..limit {
        let [_] = &place.queue.claim(most(1), true, Duration::ZERO).await.unwrap()[..] else {
            panic!("the job is due")
        };
        sleep(Duration::from_millis(5)).await;
    }
    let (worker, runs) = counting(&jobs);
    let working = Working::start(worker);
    let (kind, status, body) = ended(&jobs, &id).await;
    assert_eq!((kind, status), (ReplayKind::Failed, 500));
    assert!(body.contains("job-parked"), "{body}");
    working.stop().await;
    assert_eq!(runs.load(Ordering::SeqCst), 0);
    assert!(place.queue.find(&id).await.unwrap().unwrap().is_parked);
}

async fn a_result_is_not_overruled_by_parking(kind: Kind) {
    let place = Place::new(kind).await;
    let jobs = place.jobs(Contract::Transactional, job_settings().most_unreported(0));
    let id = enqueue(&place, &jobs, "k1").await;
    let job = place.queue.claim(most(1), true, Duration::ZERO).await.unwrap().remove(0).job;
    // Another worker has run it, and could not report.
    let fingerprint = idem_core::Fingerprint::of_bytes("job:report", &job.payload);
    let scope = idem_core::Scope::new("acme", "job:report");
    let operation = idem_core::engine::Operation::new(scope, id.as_str().parse().unwrap(), fingerprint);
    let engine = place.engine(Contract::Transactional, engine_settings());
    engine.run(operation, |_| async { Ok::<_, std::io::Error>(7) }).await.unwrap();
    sleep(Duration::from_millis(5)).await;
    let (worker, runs) = counting(&jobs);
    let working = Working::start(worker);
    assert_eq!(ended(&jobs, &id).await, (ReplayKind::Completed, 200, "7".into()));
    let give_up_at = Instant::now() + PATIENCE;
    while !place.queue.claim(most(1), true, Duration::ZERO).await.unwrap().is_empty() {
        assert!(Instant::now() < give_up_at);
        sleep(Duration::from_millis(10)).await;
    }
    working.stop().await;
    assert_eq!(runs.load(Ordering::SeqCst), 0);
}

async fn a_job_does_not_start_after_its_deadline(kind: Kind) {
    let place = Place::new(kind).await;
    let jobs = place.jobs(Contract::Transactional, job_settings().deadline(Duration::from_secs(1)));
    // Who asks first ends it: the worker, or a client.
    let (by_worker, by_client) = (enqueue(&place, &jobs, "k1").await, enqueue(&place, &jobs, "k2").await);
    assert_eq!(jobs.state(&by_client, Some("acme")).await.unwrap(), Some(JobState::Waiting { attempts: 0 }));
    sleep(Duration::from_millis(1100)).await;
    let (kind, status, body) = ended(&jobs, &by_client).await;
    assert_eq!((kind, status), (ReplayKind::Failed, 504));
    assert!(body.contains("job-overdue"), "{body}");
    let (worker, runs) = counting(&jobs);
    let working = Working::start(worker);
    let give_up_at = Instant::now() + PATIENCE;
    while !place.queue.claim(most(1), true, Duration::ZERO).await.unwrap().is_empty() {
        assert!(Instant::now() < give_up_at);
        sleep(Duration::from_millis(10)).await;
    }
    working.stop().await;
    assert_eq!(ended(&jobs, &by_worker).await.1, 504);
    assert_eq!(runs.load(Ordering::SeqCst), 0);
}

/// The worker has its only slot for another job while the deadline goes by.
async fn a_job_that_was_claimed_before_its_deadline_does_not_start_after_it(kind: Kind) {
    let place = Place::new(kind).await;
    let jobs = place.jobs(Contract::AtLeastOnce, job_settings().deadline(Duration::from_secs(1)));
    let id = enqueue(&place, &jobs, "k1").await;
    // The record is taken while the worker has claimed the job.
    let job = place.queue.find(&id).await.unwrap().unwrap().job;
    let fingerprint = idem_core::Fingerprint::of_bytes("job:report", &job.payload);
    let scope = idem_core::Scope::new("acme", "job:report");
    let operation = idem_core::engine::Operation::new(scope, id.as_str().parse().unwrap(), fingerprint);
    let engine = place.engine(Contract::AtLeastOnce, engine_settings());
    let released = tokio::spawn(engine.execute(
        operation,
        |_| async {
            sleep(Duration::from_millis(1200)).await;
            idem_core::engine::Conclusion {
                value: (),
                disposition: idem_core::engine::Disposition::Release { writes: idem_core::Writes::Discard },
                retention: None,
            }
        },
        || panic!("it does not panic"),
    ));
    let (worker, runs) = counting(&jobs);
    let working = Working::start(worker);
    released.await.unwrap().unwrap();
    assert_eq!(ended(&jobs, &id).await.1, 504);
    working.stop().await;
    assert_eq!(runs.load(Ordering::SeqCst), 0);
}

async fn a_job_without_a_handler_waits(kind: Kind) {
    let place = Place::new(kind).await;
    let jobs = place.jobs(Contract::Transactional, job_settings());
    let id = enqueue(&place, &jobs, "k1").await;
    let working = Working::start(Worker::new(jobs.clone()));
    let give_up_at = Instant::now() + PATIENCE;
    let unreported = loop {
        // The worker has given it back when it is not due and nobody has lost it.
        if let [delivery] = &place.queue.claim(most(1), true, Duration::ZERO).await.unwrap()[..] {
            place.queue.put_back(delivery, Duration::ZERO).await.unwrap();
        } else {
            break 0;
        }
        assert!(Instant::now() < give_up_at);
        sleep(Duration::from_millis(10)).await;
    };
    working.stop().await;
    assert_eq!(unreported, 0);
    assert_eq!(jobs.state(&id, Some("acme")).await.unwrap(), Some(JobState::Waiting { attempts: 0 }));
}

async fn a_long_run_is_held(kind: Kind) {
    let place = Place::new(kind).await;
    let jobs = place.jobs(Contract::AtLeastOnce, job_settings());
    let id = enqueue(&place, &jobs, "k1").await;
    let deliveries = Arc::new(AtomicU32::new(0));
    let worker = Worker::new(jobs.clone()).handle("report", |_, _| async {
        sleep(Duration::from_millis(2500)).await;
        made("slowly")
    });
    let working = Working::start(worker);
    let watched = async {
        loop {
            let claimed = place.queue.claim(most(1), true, Duration::ZERO).await.unwrap();
            deliveries.fetch_add(claimed.len() as u32, Ordering::SeqCst);
            sleep(Duration::from_millis(50)).await;
        }
    };
    // Until the worker has claimed it.
    while jobs.state(&id, Some("acme")).await.unwrap() == Some(JobState::Waiting { attempts: 0 }) {
        sleep(Duration::from_millis(5)).await;
    }
    tokio::select! {
        () = watched => {}
        ended = ended(&jobs, &id) => assert_eq!(ended, (ReplayKind::Completed, 201, "slowly".into())),
    }
    working.stop().await;
    assert_eq!(deliveries.load(Ordering::SeqCst), 0, "nobody else got it within 2.5 s, at a hold of 1 s");
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
    let state = jobs.state(&id, Some("acme")).await.unwrap();
    assert!(matches!(state, Some(JobState::Ended(_))), "{state:?}");
}

async fn a_job_of_this_process_wakes_the_worker(kind: Kind) {
    let place = Place::new(kind).await;
    let jobs = place.jobs(Contract::AtLeastOnce, job_settings().poll(Duration::from_secs(3600)));
    let (worker, _) = counting(&jobs);
    let working = Working::start(worker);
    sleep(Duration::from_millis(100)).await;
    let id = enqueue(&place, &jobs, "k1").await;
    ended(&jobs, &id).await;
    working.stop().await;
}
