//! Jobs that wait for too long.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use idem_core::ReplayKind;
use idem_core::engine::{Context, Contract};
use idem_jobs::{JobError, JobState, Jobs, Standing, Worker};
use tokio::time::{Instant, sleep};

use crate::support::{Kind, Place, engine_settings, job_settings, most, on_each};
use crate::workers::{PATIENCE, Watched, Working, counting, ended, enqueue, made, standing};

on_each!(
    a_started_job_goes_on_after_its_deadline,
    a_job_does_not_start_after_its_deadline,
    a_job_that_was_claimed_before_its_deadline_does_not_start_after_it,
    a_stranger_leaves_a_started_job_as_it_is,
    a_job_waits_for_a_worker_that_knows_its_name,
);

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
    let queue = Arc::new(Watched { late: Duration::from_millis(1500), ..Watched::new(&place) });
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
        let queue = Arc::new(Watched::new(&place));
        let engine = place.engine(contract, engine_settings());
        let stranger = Worker::new(Jobs::new(Arc::clone(&queue) as _, engine, job_settings()).unwrap());
        let stranger = Working::start(stranger);
        while queue.deliveries.load(Ordering::SeqCst) == 0 {
            assert!(Instant::now() < give_up_at);
            sleep(Duration::from_millis(5)).await;
        }
        stranger.stop().await;
        assert_eq!(jobs.state(Some("acme"), &id).await.unwrap(), expected, "{contract:?}");
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
