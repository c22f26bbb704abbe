//! What a queue keeps of its promise, whatever holds it.

use std::slice;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use idem_core::RecordId;
use idem_core::engine::Contract;
use idem_jobs::{Delivery, EnqueueError, Job, JobId, Jobs, SUSPECT_FROM, Standing};
use tokio::time::{sleep, timeout};

use crate::support::{Database, Kind, Place, engine_settings, job_settings, most, on_each, request, trace};

const HOLD: Duration = Duration::from_secs(60);
const NOW: Duration = Duration::ZERO;

on_each!(
    a_job_is_delivered_once_while_it_is_held,
    a_job_whose_worker_disappears_is_delivered_again,
    a_report_takes_back_the_count,
    a_late_report_changes_nothing,
    suspects_are_delivered_one_by_one,
    a_suspect_counts_when_it_begins,
    a_job_that_was_kept_for_its_time_is_absent,
    an_ended_job_is_found_and_never_delivered,
    jobs_are_ended_together,
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
    let expected = Job::new(id.clone(), "report".into(), Some("acme".into()), Bytes::from_static(b"\"k1\""));
    let expected = expected.trace(trace());
    assert_eq!((&delivery.job, delivery.number, delivery.lost, delivery.is_suspect), (&expected, 1, 0, false));
    assert!(delivery.age < Duration::from_secs(10));
    assert!(delivery.remaining > Duration::from_secs(50) && delivery.remaining <= Duration::from_secs(60));
    assert_eq!(claim(&place, HOLD).await, []);
    assert!(place.queue.hold(delivery, HOLD).await.unwrap());
    assert_eq!(claim(&place, HOLD).await, []);
    let found = place.queue.find(&id).await.unwrap().unwrap();
    assert_eq!((found.job, found.standing), (expected, Standing::Claimed));
    assert!(!found.times.remaining.is_zero());
}

async fn a_job_whose_worker_disappears_is_delivered_again(kind: Kind) {
    let place = Place::new(kind).await;
    enqueue(&place, "k1").await;
    for number in 1..4 {
        let [delivery] = &claim(&place, NOW).await[..] else { panic!("the job is due") };
        // The third is that of a suspect.
        assert_eq!((delivery.number, delivery.lost, delivery.is_suspect), (number, number as u32 - 1, number == 3));
        sleep(Duration::from_millis(5)).await;
    }
}

async fn a_report_takes_back_the_count(kind: Kind) {
    let place = Place::new(kind).await;
    enqueue(&place, "k1").await;
    for number in 1..4 {
        let [delivery] = &claim(&place, HOLD).await[..] else { panic!("the job is due") };
        assert_eq!((delivery.number, delivery.lost), (number, 0));
        // A report whose answer was lost is repeated.
        for _ in 0..3 {
            place.queue.put_back(delivery, NOW, delivery.lost).await.unwrap();
        }
        sleep(Duration::from_millis(5)).await;
    }
    let [delivery] = &claim(&place, HOLD).await[..] else { panic!("the job is due") };
    place.queue.put_back(delivery, HOLD, 0).await.unwrap();
    assert_eq!(claim(&place, HOLD).await, [], "it waits for the delay");
    let found = place.queue.find(&delivery.job.id).await.unwrap().unwrap();
    assert_eq!(found.standing, Standing::Waiting);
}

async fn a_late_report_changes_nothing(kind: Kind) {
    let place = Place::new(kind).await;
    enqueue(&place, "k1").await;
    let first = claim(&place, NOW).await.remove(0);
    sleep(Duration::from_millis(5)).await;
    let second = claim(&place, HOLD).await.remove(0);
    place.queue.put_back(&first, NOW, 0).await.unwrap();
    assert!(!place.queue.hold(&first, NOW).await.unwrap());
    sleep(Duration::from_millis(5)).await;
    assert_eq!(claim(&place, HOLD).await, [], "the second worker holds it");
    place.queue.put_back(&second, NOW, second.lost).await.unwrap();
    assert!(!place.queue.hold(&second, HOLD).await.unwrap(), "it was put back");
    sleep(Duration::from_millis(5)).await;
    assert_eq!(claim(&place, HOLD).await[0].lost, 1, "the first delivery stays lost");
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
    let [ordinary] = &place.queue.claim(most(100), false, HOLD).await.unwrap()[..] else { panic!("one is no suspect") };
    assert_eq!(ordinary.job.id, fresh);
    let mut seen = Vec::new();
    for _ in 0..3 {
        let [suspect] = &claim(&place, HOLD).await[..] else { panic!("one suspect at a time") };
        assert!(suspect.is_suspect);
        seen.push(suspect.clone());
    }
    assert_eq!(claim(&place, HOLD).await, []);
    seen.sort_by(|one, other| one.job.id.cmp(&other.job.id));
    seen.dedup_by(|one, other| one.job.id == other.job.id);
    assert_eq!(seen.len(), 3, "each in its turn");
}

async fn a_suspect_counts_when_it_begins(kind: Kind) {
    let place = Place::new(kind).await;
    enqueue(&place, "k1").await;
    for _ in 0..SUSPECT_FROM {
        assert_eq!(claim(&place, NOW).await.len(), 1);
        sleep(Duration::from_millis(5)).await;
    }
    // Claims whose answers are lost count for nothing.
    for _ in 0..3 {
        assert_eq!(claim(&place, NOW).await[0].lost, SUSPECT_FROM);
        sleep(Duration::from_millis(5)).await;
    }
    let begun = claim(&place, NOW).await.remove(0);
    assert!(place.queue.begin(&begun).await.unwrap());
    sleep(Duration::from_millis(5)).await;
    let next = claim(&place, HOLD).await.remove(0);
    assert_eq!(next.lost, SUSPECT_FROM + 1);
    assert!(!place.queue.begin(&begun).await.unwrap(), "it was delivered again");
    // It ran, and left nothing in its record.
    assert!(place.queue.begin(&next).await.unwrap());
    place.queue.put_back(&next, NOW, next.lost + 1).await.unwrap();
    assert!(!place.queue.begin(&next).await.unwrap(), "it was put back");
    sleep(Duration::from_millis(5)).await;
    let last = claim(&place, HOLD).await.remove(0);
    assert_eq!(last.lost, SUSPECT_FROM + 2);
    // An answer was lost, and the worker begins again.
    assert!(place.queue.begin(&last).await.unwrap() && place.queue.begin(&last).await.unwrap());
    place.queue.put_back(&last, NOW, last.lost).await.unwrap();
    sleep(Duration::from_millis(5)).await;
    let last = claim(&place, HOLD).await.remove(0);
    assert_eq!(last.lost, SUSPECT_FROM + 2, "a report takes its own delivery back");
    place.queue.put_back(&last, NOW, 0).await.unwrap();
    sleep(Duration::from_millis(5)).await;
    let cleared = place.queue.claim(most(1), false, HOLD).await.unwrap();
    assert_eq!((cleared[0].lost, cleared[0].is_suspect), (0, false));
}

async fn an_ended_job_is_found_and_never_delivered(kind: Kind) {
    let place = Place::new(kind).await;
    let (ended, parked) = (enqueue(&place, "k1").await, enqueue(&place, "k2").await);
    let deliveries = claim(&place, NOW).await;
    place.queue.end(slice::from_ref(&ended), false, HOLD).await.unwrap();
    place.queue.end(slice::from_ref(&parked), true, HOLD).await.unwrap();
    // A second end changes nothing, and neither does a report.
    place.queue.end(slice::from_ref(&parked), false, NOW).await.unwrap();
    for delivery in &deliveries {
        place.queue.put_back(delivery, NOW, 0).await.unwrap();
        assert!(!place.queue.hold(delivery, NOW).await.unwrap());
    }
    sleep(Duration::from_millis(5)).await;
    assert_eq!(claim(&place, HOLD).await, []);
    assert_eq!(place.queue.find(&ended).await.unwrap().unwrap().standing, Standing::Ended);
    assert_eq!(place.queue.find(&parked).await.unwrap().unwrap().standing, Standing::Parked);
}

async fn jobs_are_ended_together(kind: Kind) {
    let place = Arc::new(Place::new(kind).await);
    let mut ids = Vec::new();
    for key in 0..8 {
        ids.push(enqueue(&place, &key.to_string()).await);
    }
    place.queue.end(&ids[..1], true, HOLD).await.unwrap();
    place.queue.end(&[], false, HOLD).await.unwrap();
    // One has ended, one is not there, and one is named twice.
    let mut there = ids[..7].to_vec();
    there.extend([JobId::of(&RecordId::from_bytes([7; 32])), ids[3].clone()]);
    assert_eq!(place.queue.end(&there, false, HOLD).await.unwrap(), []);
    let open: Vec<_> = claim(&place, HOLD).await.into_iter().map(|delivery| delivery.job.id).collect();
    assert_eq!(open, ids[7..]);
    assert_eq!(place.queue.find(&ids[0]).await.unwrap().unwrap().standing, Standing::Parked);
    for id in &ids[1..7] {
        assert_eq!(place.queue.find(id).await.unwrap().unwrap().standing, Standing::Ended);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_that_another_session_has_locked_holds_up_no_other() {
    let place = Place::new(Kind::Postgres).await;
    let Database::Postgres(_, pool) = &place.database else { panic!("it is Postgres") };
    let mut ids = Vec::new();
    for key in 0..9 {
        ids.push(enqueue(&place, &key.to_string()).await);
    }
    ids.sort();
    let locked = &ids[4];
    let mut other = pool.begin().await.unwrap();
    let lock = format!("SELECT FROM {} WHERE id = $1 FOR UPDATE", place.table("idem_jobs"));
    sqlx::query(sqlx::AssertSqlSafe(lock)).bind(locked.as_str()).execute(&mut *other).await.unwrap();
    let ending = timeout(Duration::from_secs(10), place.queue.end(&ids, false, HOLD));
    assert_eq!(ending.await.expect("it waits for the lock").unwrap(), slice::from_ref(locked));
    for id in &ids {
        let expected = if id == locked { Standing::Waiting } else { Standing::Ended };
        assert_eq!(place.queue.find(id).await.unwrap().unwrap().standing, expected);
    }
    other.rollback().await.unwrap();
    assert_eq!(place.queue.end(&ids, false, HOLD).await.unwrap(), []);
    assert_eq!(place.queue.find(locked).await.unwrap().unwrap().standing, Standing::Ended);
}

async fn an_ended_job_is_purged_after_its_time(kind: Kind) {
    let place = Place::new(kind).await;
    let (kept, old, open) = (enqueue(&place, "k1").await, enqueue(&place, "k2").await, enqueue(&place, "k3").await);
    place.queue.end(slice::from_ref(&kept), false, HOLD).await.unwrap();
    place.queue.end(slice::from_ref(&old), false, Duration::from_millis(1)).await.unwrap();
    sleep(Duration::from_millis(20)).await;
    assert_eq!(place.queue.find(&old).await.unwrap(), None, "before anybody has purged it");
    let purged = place.queue.purge(most(10)).await.unwrap();
    assert_eq!(purged, u32::from(place.commits_both()), "Redis removes it by itself");
    assert_eq!(place.queue.find(&old).await.unwrap(), None);
    assert!(place.queue.find(&kept).await.unwrap().is_some());
    assert!(place.queue.find(&open).await.unwrap().is_some());
}

async fn a_job_that_was_kept_for_its_time_is_absent(kind: Kind) {
    let place = Arc::new(Place::new(kind).await);
    let id = enqueue(&place, "k1").await;
    assert_eq!(claim(&place, NOW).await.len(), 1);
    place.queue.end(slice::from_ref(&id), true, Duration::from_millis(1)).await.unwrap();
    sleep(Duration::from_millis(20)).await;
    // A request that runs again, after its record has ended as well.
    let there = Arc::clone(&place);
    let engine = place.engine(Contract::AtLeastOnce, engine_settings());
    let ran = engine.run(request("k2"), move |context| async move {
        let again = Job::new(id, "report".into(), Some("acme".into()), Bytes::from_static(b"2"));
        let by = context.lease().unwrap().owner;
        assert_eq!(there.queue.enqueue(&context, &again, by, HOLD).await.unwrap(), None);
        let [delivery] = &claim(&there, HOLD).await[..] else { panic!("it is a new job") };
        assert_eq!((&delivery.job, delivery.lost), (&again, 0));
        Ok::<_, std::io::Error>(())
    });
    ran.await.unwrap();
}

async fn a_request_has_one_job(kind: Kind) {
    let place = Place::new(kind).await;
    let jobs = place.jobs(Contract::Transactional, job_settings());
    let engine = place.engine(Contract::AtLeastOnce, engine_settings());
    let enqueue = |jobs: Jobs, fails: bool| {
        engine.run(request("k1"), move |context| async move {
            let payload = context.attempt();
            let first = jobs.enqueue(&context, "report", &payload).await.unwrap();
            if fails {
                // The process dies here, and the request runs again.
                return Err(std::io::Error::other("later"));
            }
            Ok((first.id.to_string(), String::new()))
        })
    };
    enqueue(jobs.clone(), true).await.unwrap_err();
    sleep(Duration::from_millis(150)).await;
    enqueue(jobs.clone(), false).await.unwrap();
    let deliveries = claim(&place, HOLD).await;
    assert_eq!(deliveries.len(), 1);
    assert_eq!(deliveries[0].job.payload, "1", "the job of the first attempt stays");

    // The rerun of a request that enqueues two jobs.
    let twice = |jobs: Jobs| {
        engine.run(request("k3"), move |context| async move {
            jobs.enqueue(&context, "report", &1).await.unwrap();
            let second = jobs.enqueue(&context, "report", &2).await;
            assert!(matches!(second, Err(EnqueueError::OtherJob { .. })), "{second:?}");
            Err::<(), _>(std::io::Error::other("500"))
        })
    };
    for _ in 0..2 {
        twice(jobs.clone()).await.unwrap_err();
        sleep(Duration::from_millis(250)).await;
    }

    let engine = place.engine(Contract::Transactional, engine_settings());
    let ran = engine.run(request("k2"), move |context| async move {
        let first = jobs.enqueue(&context, "report", &1).await.unwrap();
        assert_eq!(jobs.enqueue(&context, "report", &1).await.unwrap(), first);
        for (name, payload) in [("report", 2), ("mail", 1)] {
            match jobs.enqueue(&context, name, &payload).await {
                Err(error @ EnqueueError::OtherJob { .. }) => assert!(!error.is_retryable()),
                other => panic!("{other:?}"),
            }
        }
        Ok::<_, std::io::Error>(())
    });
    ran.await.unwrap();
}

async fn a_deadline_is_over_by_the_clock_of_the_queue(kind: Kind) {
    let place = Place::new(kind).await;
    let jobs = place.jobs(Contract::Transactional, job_settings().start_deadline(Duration::from_secs(1)));
    let id = place.request(&jobs, "k1").await.accepted.unwrap().unwrap().id;
    assert!(!place.queue.find(&id).await.unwrap().unwrap().times.remaining.is_zero());
    sleep(Duration::from_millis(1050)).await;
    let times = place.queue.find(&id).await.unwrap().unwrap().times;
    assert!(times.remaining.is_zero() && times.age > Duration::from_secs(1));
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
    place.queue.end(slice::from_ref(&unknown), false, HOLD).await.unwrap();
    assert_eq!(place.queue.find(&unknown).await.unwrap(), None, "nothing is made of nothing");
    assert_eq!(place.queue.purge(most(10)).await.unwrap(), 0);
}

/// Something else has written to the keys of the queue.
#[tokio::test]
async fn damaged_jobs_in_redis_stop_no_other() {
    let place = Place::new(Kind::Redis).await;
    let client = ::redis::Client::open(idem_servers::redis_url()).unwrap();
    let mut beside = client.get_multiplexed_async_connection().await.unwrap();
    let (key, due) = (|id: &JobId| format!("{}job:{id}", place.keys()), format!("{}due", place.keys()));
    let mut ids = Vec::new();
    for name in ["another-type", "without-a-deadline", "no-number", "without-an-entry", "whole"] {
        ids.push(enqueue(&place, name).await);
    }
    let [of_another_type, without_a_deadline, no_number, without_an_entry, whole] = &ids[..] else {
        panic!("there are five")
    };
    let mut damage = ::redis::pipe();
    damage.cmd("SET").arg(key(of_another_type)).arg("a text");
    damage.cmd("HDEL").arg(key(without_a_deadline)).arg("deadline");
    damage.cmd("HSET").arg(key(no_number)).arg("lost").arg("often");
    damage.cmd("ZREM").arg(&due).arg(without_an_entry.as_str());
    damage.cmd("ZADD").arg(&due).arg(0).arg("no id at all");
    damage.cmd("HSET").arg(format!("{}job:no id at all", place.keys()));
    for field in ["name", "principal", "payload", "deadline", "created", "delivered", "lost"] {
        damage.arg(field).arg(1);
    }
    let () = damage.query_async(&mut beside).await.unwrap();
    let claimed: Vec<JobId> = claim(&place, HOLD).await.into_iter().map(|delivery| delivery.job.id).collect();
    assert_eq!(claimed, slice::from_ref(whole));
    assert_eq!(claim(&place, HOLD).await, []);
    // The request runs again, and finds its job, which is due again.
    let records = place.keys().replace('{', "").replace("-jobs}", "*");
    let forget = async |mut beside: ::redis::aio::MultiplexedConnection| {
        let records: Vec<String> = ::redis::cmd("KEYS").arg(&records).query_async(&mut beside).await.unwrap();
        let () = ::redis::cmd("DEL").arg(&records).query_async(&mut beside).await.unwrap();
    };
    forget(beside.clone()).await;
    enqueue(&place, "without-an-entry").await;
    assert_eq!(claim(&place, HOLD).await[0].job.id, *without_an_entry);
    place.queue.end(slice::from_ref(without_an_entry), false, HOLD).await.unwrap();
    forget(beside).await;
    enqueue(&place, "without-an-entry").await;
    assert_eq!(claim(&place, HOLD).await, [], "it has ended");
}
