//! Workers: one effect and one result for each job.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use idem_core::engine::{Context, Contract};
use idem_core::{ReplayKind, StoredResponse};
use idem_jobs::{JobError, JobState, Jobs, Standing, Worker};
use tokio::sync::{Notify, Semaphore};
use tokio::time::{Instant, sleep, timeout};

use crate::support::{Kind, Place, engine_settings, job_settings, most, on_each};
use crate::workers::{PATIENCE, Watched, Working, counting, ended, enqueue, made, rows, standing};

on_each!(
    a_job_runs_once_and_has_its_result,
    a_job_that_was_delivered_twice_runs_once,
    a_failure_is_the_result,
    a_fault_runs_again_until_no_attempt_is_left,
    a_panic_ends_one_run_and_no_worker,
    an_attempt_that_says_so_is_repeated,
    steps_that_were_interrupted_are_not_forgotten,
    a_long_run_is_held,
    a_shutdown_waits_for_the_jobs_that_run,
    a_job_of_this_process_wakes_the_worker,
    jobs_that_end_meanwhile_are_ended_together,
    a_worker_ends_jobs_in_spite_of_a_queue_that_fails,
    a_worker_removes_jobs_that_were_kept_for_their_time,
);

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

async fn a_job_that_was_delivered_twice_runs_once(kind: Kind) {
    let place = Place::new(kind).await;
    let queue = Arc::new(Watched { forgets: true, ..Watched::new(&place) });
    let jobs =
        Jobs::new(Arc::clone(&queue) as _, place.engine(Contract::Transactional, engine_settings()), job_settings())
            .unwrap();
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
    assert!(queue.deliveries.load(Ordering::SeqCst) > 1, "it was delivered while it ran");
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

async fn a_long_run_is_held(kind: Kind) {
    let place = Place::new(kind).await;
    let queue = Arc::new(Watched::new(&place));
    let engine = place.engine(Contract::AtLeastOnce, engine_settings());
    let jobs = Jobs::new(Arc::clone(&queue) as _, engine, job_settings()).unwrap();
    let id = enqueue(&place, &jobs, "k1").await;
    let worker = Worker::new(jobs.clone()).handle("report", |_, _| async {
        sleep(Duration::from_millis(2500)).await;
        made("slowly")
    });
    let working = Working::start(worker);
    assert_eq!(ended(&jobs, &id).await, (ReplayKind::Completed, 201, "slowly".into()));
    working.stop().await;
    assert_eq!(queue.deliveries.load(Ordering::SeqCst), 1, "it runs for 2.5 s, and is hidden for 1 s at a time");
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

/// The worker runs one job at a time, and goes on while the queue does not end the first one.
async fn jobs_that_end_meanwhile_are_ended_together(kind: Kind) {
    let place = Place::new(kind).await;
    let gate = Arc::new(Semaphore::new(0));
    let queue = Arc::new(Watched { gate: Some(Arc::clone(&gate)), ..Watched::new(&place) });
    let settings = job_settings().concurrency(NonZeroU32::MIN).queue_timeout(PATIENCE).visibility_timeout(4 * PATIENCE);
    let engine = place.engine(Contract::Transactional, engine_settings());
    let jobs = Jobs::new(Arc::clone(&queue) as _, engine, settings).unwrap();
    let (worker, runs) = counting(&jobs);
    let working = Working::start(worker);
    let mut ids = Vec::new();
    for key in 0..10 {
        ids.push(enqueue(&place, &jobs, &key.to_string()).await);
    }
    for id in &ids {
        assert_eq!(ended(&jobs, id).await.1, 201);
        assert_eq!(place.queue.find(id).await.unwrap().unwrap().standing, Standing::Claimed);
    }
    // It does not stop before it has reported them.
    let stopped = tokio::spawn(working.stop());
    sleep(Duration::from_millis(50)).await;
    assert!(!stopped.is_finished());
    gate.add_permits(1);
    stopped.await.unwrap();
    for id in &ids {
        assert_eq!(place.queue.find(id).await.unwrap().unwrap().standing, Standing::Ended);
    }
    assert_eq!(runs.load(Ordering::SeqCst), 10);
    assert!(queue.most_ends.load(Ordering::SeqCst) > 1);
}

async fn a_worker_ends_jobs_in_spite_of_a_queue_that_fails(kind: Kind) {
    let place = Place::new(kind).await;
    let queue = Arc::new(Watched { fails_to_end: true, ..Watched::new(&place) });
    let settings = job_settings().visibility_timeout(PATIENCE);
    let jobs = Jobs::new(queue, place.engine(Contract::Transactional, engine_settings()), settings).unwrap();
    let (worker, runs) = counting(&jobs);
    let working = Working::start(worker);
    for key in ["k1", "k2"] {
        let id = enqueue(&place, &jobs, key).await;
        standing(&place, &id, Standing::Ended).await;
    }
    working.stop().await;
    assert_eq!(runs.load(Ordering::SeqCst), 2);
}

async fn a_worker_removes_jobs_that_were_kept_for_their_time(kind: Kind) {
    let place = Place::new(kind).await;
    let jobs = place.jobs(Contract::Transactional, job_settings());
    let (old, kept) = (enqueue(&place, &jobs, "k1").await, enqueue(&place, &jobs, "k2").await);
    place.queue.end(&[old], false, Duration::from_millis(1)).await.unwrap();
    place.queue.end(&[kept], false, PATIENCE).await.unwrap();
    let working = Working::start(Worker::new(jobs));
    let give_up_at = Instant::now() + PATIENCE;
    while rows(&place, "idem_jobs").await != 1 {
        assert!(Instant::now() < give_up_at);
        sleep(Duration::from_millis(10)).await;
    }
    working.stop().await;
}
