//! What a queue keeps of its promise, whatever holds it.

use std::time::Duration;

use bytes::Bytes;
use idem_core::RecordId;
use idem_core::engine::Contract;
use idem_jobs::{Delivery, EnqueueError, Job, JobId, QueuedJob, SUSPECT_FROM};
use tokio::time::sleep;

use crate::support::{Kind, Place, job_settings, most, on_each};

const HOLD: Duration = Duration::from_secs(60);
const NOW: Duration = Duration::ZERO;

on_each!(
    a_job_is_delivered_once_while_it_is_held,
    a_job_whose_worker_disappears_is_delivered_again,
    a_report_takes_back_the_count,
    a_late_report_changes_nothing,
    suspects_are_delivered_one_by_one,
    an_ended_job_is_found_and_never_delivered,
    an_ended_job_is_purged_after_its_time,
    a_request_has_one_job,
    a_deadline_is_over_by_the_clock_of_the_queue,
    many_workers_share_the_jobs,
    nothing_is_claimed_of_an_empty_queue,
);

/// Enqueues a job in a request of its own.
async fn enqueue(place: &Place, key: &str) -> JobId {
    let jobs = place.jobs(Contract::Transactional, job_settings());
    place.request(&jobs, key).await.accepted.unwrap().unwrap().id
}

async fn claim(place: &Place, hold: Duration) -> Vec<Delivery> {
    place.queue.claim(most(100), true, hold).await.unwrap()
}

async fn a_job_is_delivered_once_while_it_is_held(kind: Kind) {
    let place = Place::new(kind).await;
    let id = enqueue(&place, "k1").await;
    let [delivery] = &claim(&place, HOLD).await[..] else { panic!("one job is due") };
    let expected = Job {
        id: id.clone(),
        name: "report".into(),
        principal: Some("acme".into()),
        payload: Bytes::from_static(b"\"k1\""),
    };
    assert_eq!((&delivery.job, delivery.number, delivery.unreported), (&expected, 1, 1));
    assert!(delivery.remaining > Duration::from_secs(50) && delivery.remaining <= Duration::from_secs(60));
    assert_eq!(claim(&place, HOLD).await, []);
    assert!(place.queue.hold(delivery, HOLD).await.unwrap());
    assert_eq!(claim(&place, HOLD).await, []);
    let found = place.queue.find(&id).await.unwrap().unwrap();
    assert_eq!(found, QueuedJob { job: expected, is_overdue: false, is_parked: false });
}

async fn a_job_whose_worker_disappears_is_delivered_again(kind: Kind) {
    let place = Place::new(kind).await;
    enqueue(&place, "k1").await;
    for number in 1..4 {
        let [delivery] = &claim(&place, NOW).await[..] else { panic!("the job is due") };
        assert_eq!((delivery.number, delivery.unreported), (number, number as u32));
        sleep(Duration::from_millis(5)).await;
    }
}

async fn a_report_takes_back_the_count(kind: Kind) {
    let place = Place::new(kind).await;
    enqueue(&place, "k1").await;
    for number in 1..4 {
        let [delivery] = &claim(&place, HOLD).await[..] else { panic!("the job is due") };
        assert_eq!((delivery.number, delivery.unreported), (number, 1));
        place.queue.put_back(delivery, NOW).await.unwrap();
        sleep(Duration::from_millis(5)).await;
    }
    let [delivery] = &claim(&place, HOLD).await[..] else { panic!("the job is due") };
    place.queue.put_back(delivery, HOLD).await.unwrap();
    assert_eq!(claim(&place, HOLD).await, [], "it waits for the delay");
}

async fn a_late_report_changes_nothing(kind: Kind) {
    let place = Place::new(kind).await;
    enqueue(&place, "k1").await;
    let first = claim(&place, NOW).await.remove(0);
    sleep(Duration::from_millis(5)).await;
    let second = claim(&place, HOLD).await.remove(0);
    place.queue.put_back(&first, NOW).await.unwrap();
    assert!(!place.queue.hold(&first, NOW).await.unwrap());
    sleep(Duration::from_millis(5)).await;
    assert_eq!(claim(&place, HOLD).await, [], "the second worker holds it");
    place.queue.put_back(&second, NOW).await.unwrap();
    sleep(Duration::from_millis(5)).await;
    assert_eq!(claim(&place, HOLD).await[0].unreported, 2, "the first delivery stays unreported");
}

async fn suspects_are_delivered_one_by_one(kind: Kind) {
    let place = Place::new(kind).await;
    for key in ["k1", "k2", "k3"] {
        enqueue(&place, key).await;
    }
    for _ in 0..SUSPECT_FROM {
        assert_eq!(claim(&place, NOW).await.len(), 3);
        sleep(Duration::from_millis(5)).await;
    }
    let fresh = enqueue(&place, "k4").await;
    assert_eq!(place.queue.claim(most(100), false, NOW).await.unwrap()[0].job.id, fresh);
    sleep(Duration::from_millis(5)).await;
    let claimed = claim(&place, HOLD).await;
    let suspects: Vec<bool> = claimed.iter().map(Delivery::is_suspect).collect();
    assert_eq!((suspects.len(), suspects.iter().filter(|is| **is).count()), (2, 1), "{claimed:?}");
    // A report takes its own delivery back, and no other one.
    let mut suspect = claimed.into_iter().find(Delivery::is_suspect).unwrap();
    place.queue.put_back(&suspect, NOW).await.unwrap();
    suspect.number -= 1;
    place.queue.put_back(&suspect, NOW).await.unwrap();
    let mut ids = Vec::new();
    for _ in 0..3 {
        sleep(Duration::from_millis(5)).await;
        ids.extend(claim(&place, HOLD).await.into_iter().map(|delivery| delivery.job.id));
    }
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), 3, "each of the three in its turn");
}

async fn an_ended_job_is_found_and_never_delivered(kind: Kind) {
    let place = Place::new(kind).await;
    let (ended, parked) = (enqueue(&place, "k1").await, enqueue(&place, "k2").await);
    let deliveries = claim(&place, NOW).await;
    place.queue.end(&ended, false, HOLD).await.unwrap();
    place.queue.end(&parked, true, HOLD).await.unwrap();
    // A second end changes nothing, and neither does a report.
    place.queue.end(&parked, false, NOW).await.unwrap();
    for delivery in &deliveries {
        place.queue.put_back(delivery, NOW).await.unwrap();
        assert!(!place.queue.hold(delivery, NOW).await.unwrap());
    }
    sleep(Duration::from_millis(5)).await;
    assert_eq!(claim(&place, HOLD).await, []);
    assert!(!place.queue.find(&ended).await.unwrap().unwrap().is_parked);
    assert!(place.queue.find(&parked).await.unwrap().unwrap().is_parked);
}

async fn an_ended_job_is_purged_after_its_time(kind: Kind) {
    let place = Place::new(kind).await;
    let (kept, old, open) = (enqueue(&place, "k1").await, enqueue(&place, "k2").await, enqueue(&place, "k3").await);
    place.queue.end(&kept, false, HOLD).await.unwrap();
    place.queue.end(&old, false, Duration::from_millis(1)).await.unwrap();
    sleep(Duration::from_millis(20)).await;
    let purged = place.queue.purge(most(10)).await.unwrap();
    assert_eq!(purged, u32::from(place.commits_both()), "Redis removes it by itself");
    assert_eq!(place.queue.find(&old).await.unwrap(), None);
    assert!(place.queue.find(&kept).await.unwrap().is_some());
    assert!(place.queue.find(&open).await.unwrap().is_some());
}

async fn a_request_has_one_job(kind: Kind) {
    let place = Place::new(kind).await;
    let jobs = place.jobs(Contract::Transactional, job_settings());
    let engine = place.engine(Contract::Transactional, crate::support::engine_settings());
    let (twice, other) = (jobs.clone(), jobs.clone());
    let run = idem_core::engine::Idempotency::run;
    let ran = run(&engine, crate::support::request("k1"), move |context| async move {
        let first = twice.enqueue(&context, "report", &1).await.unwrap();
        let again = twice.enqueue(&context, "report", &2).await.unwrap();
        assert_eq!(first, again);
        match other.enqueue(&context, "mail", &1).await {
            Err(EnqueueError::OtherJob { name }) => Ok::<_, std::io::Error>(name),
            other => panic!("{other:?}"),
        }
    });
    assert_eq!(ran.await.unwrap().value, "report");
    let deliveries = claim(&place, HOLD).await;
    assert_eq!(deliveries.len(), 1);
    assert_eq!(deliveries[0].job.payload, "1", "the first payload stays");
}

async fn a_deadline_is_over_by_the_clock_of_the_queue(kind: Kind) {
    let place = Place::new(kind).await;
    let jobs = place.jobs(Contract::Transactional, job_settings().deadline(Duration::from_secs(1)));
    let id = place.request(&jobs, "k1").await.accepted.unwrap().unwrap().id;
    assert!(!place.queue.find(&id).await.unwrap().unwrap().is_overdue);
    sleep(Duration::from_millis(1050)).await;
    assert!(place.queue.find(&id).await.unwrap().unwrap().is_overdue);
    assert_eq!(claim(&place, HOLD).await[0].remaining, Duration::ZERO);
}

async fn many_workers_share_the_jobs(kind: Kind) {
    let place = Place::new(kind).await;
    for key in 0..30 {
        enqueue(&place, &key.to_string()).await;
    }
    let claims = (0..8).map(|_| async { place.queue.claim(most(3), true, HOLD).await.unwrap() });
    let mut claimed = Vec::new();
    for deliveries in futures_util::future::join_all(claims).await {
        assert!(deliveries.len() <= 3);
        claimed.extend(deliveries);
    }
    claimed.extend(claim(&place, HOLD).await);
    let mut ids: Vec<_> = claimed.iter().map(|delivery| delivery.job.id.clone()).collect();
    ids.sort();
    ids.dedup();
    assert_eq!((claimed.len(), ids.len()), (30, 30));
}

async fn nothing_is_claimed_of_an_empty_queue(kind: Kind) {
    let place = Place::new(kind).await;
    assert_eq!(claim(&place, HOLD).await, []);
    let unknown = JobId::of(&RecordId::from_bytes([7; 32]));
    assert_eq!(place.queue.find(&unknown).await.unwrap(), None);
    place.queue.end(&unknown, false, HOLD).await.unwrap();
    assert_eq!(place.queue.find(&unknown).await.unwrap(), None, "nothing is made of nothing");
    assert_eq!(place.queue.purge(most(10)).await.unwrap(), 0);
}
