//! Workers and runs that are lost.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use idem_core::ReplayKind;
use idem_core::engine::{Context, Contract, Operation};
use idem_jobs::{Job, JobState, Jobs, Standing, Worker};
use idem_postgres::PostgresTransaction;
use idem_sqlite::SqliteTransaction;
use tokio::sync::{Notify, oneshot};
use tokio::time::{sleep, timeout};

use crate::support::{Kind, Place, engine_settings, job_settings, most, on_each};
use crate::workers::{PATIENCE, Working, counting, effect, ended, enqueue, made, rows, standing};

on_each!(
    a_job_that_loses_its_worker_has_one_effect,
    a_job_that_kills_its_worker_every_time_is_parked,
    a_job_that_killed_fewer_workers_runs,
    a_run_that_cannot_commit_is_lost,
    a_run_that_loses_its_session_is_lost,
    a_result_is_not_overruled_by_parking,
    what_a_crash_means_is_up_to_the_contract,
    suspects_run_one_at_a_time,
    deliveries_that_never_began_park_no_job,
    a_handler_that_hangs_takes_no_slot_for_ever,
);

/// A worker whose runtime ends in the middle of a run, as if its process were killed.
async fn a_job_that_loses_its_worker_has_one_effect(kind: Kind) {
    let place = Place::new(kind).await;
    let jobs = place.jobs(Contract::Transactional, job_settings());
    let id = enqueue(&place, &jobs, "k1").await;
    let table = place.table("effects");
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
    assert_eq!(rows(&place, "effects").await, 1);
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

async fn a_result_is_not_overruled_by_parking(kind: Kind) {
    let place = Place::new(kind).await;
    let settings = engine_settings().max_attempts(NonZeroU32::MIN);
    let engine = place.engine(Contract::Transactional, settings);
    let jobs = Jobs::new(Arc::clone(&place.queue), engine.clone(), job_settings().max_lost_deliveries(3)).unwrap();
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

/// Six jobs of one worker that was lost twice. Two workers of one process get them.
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
    let working = [Working::start(worker.clone()), Working::start(worker)];
    for id in &ids {
        assert_eq!(ended(&jobs, id).await.1, 201);
    }
    for working in working {
        working.stop().await;
    }
    assert_eq!(most_at_once.load(Ordering::SeqCst), 1, "suspects run one at a time");
}

/// Claims whose answer came too late count as lost, though nothing ran.
async fn deliveries_that_never_began_park_no_job(kind: Kind) {
    let place = Place::new(kind).await;
    let jobs = place.jobs(Contract::Transactional, job_settings().max_lost_deliveries(0));
    let id = enqueue(&place, &jobs, "k1").await;
    lose(&place, 2).await;
    let (worker, runs) = counting(&jobs);
    let working = Working::start(worker);
    assert_eq!(ended(&jobs, &id).await.1, 201);
    working.stop().await;
    assert_eq!(runs.load(Ordering::SeqCst), 1);
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
