//! What clients see: the 202, its repeats, and the state of the job.

use std::slice;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::BodyExt as _;
use idem_core::engine::Contract;
use idem_core::{ReplayKind, StoredResponse};
use idem_http::{Continuation as _, ResponseDirectives};
use idem_jobs::{EnqueueError, InvalidJobs, Job, JobError, JobSettings, JobState, Jobs, Worker};
use serde_json::{Value, json};
use tokio::time::sleep;

use crate::support::{Kind, Place, engine_settings, job_settings, on_each, request};
use crate::workers::Watched;

on_each!(
    a_request_that_is_rolled_back_leaves_no_job,
    a_repeat_gets_the_first_answer_and_the_final_one_if_it_asks,
    a_request_that_was_answered_otherwise_has_no_continuation,
    a_job_that_is_gone_is_an_unknown_outcome,
    the_record_of_the_request_outlives_the_job,
    a_job_is_shown_to_its_principal,
    a_job_with_a_location_is_elsewhere,
    bad_jobs_are_refused,
    a_job_whose_result_has_expired_is_gone_and_not_overdue,
    a_claimed_job_is_shown_as_running,
    jobs_that_cannot_work_are_refused,
    a_job_whose_queue_is_away_is_asked_for_again,
);

async fn body(response: http::Response<http_body_util::Full<bytes::Bytes>>) -> Value {
    let body = response.into_body().collect().await.unwrap().to_bytes();
    serde_json::from_slice(&body).unwrap()
}

/// Runs all jobs that are due, each to its end.
async fn work(jobs: &Jobs, result: fn(Job) -> Result<StoredResponse, JobError>) {
    let worker = Worker::new(jobs.clone()).handle("report", move |_, job| async move { result(job) });
    worker.run_until(sleep(Duration::from_millis(300))).await;
}

fn made(_: Job) -> Result<StoredResponse, JobError> {
    let location = idem_core::HeaderField { name: "location".into(), value: "/reports/7".into() };
    Ok(StoredResponse { headers: [location].into(), ..StoredResponse::new(201, r#"{"pages":3}"#) })
}

async fn a_request_that_is_rolled_back_leaves_no_job(kind: Kind) {
    let place = Place::new(kind).await;
    if !place.commits_both() {
        // The job is enqueued before the record is settled; a repeat finds it.
        return;
    }
    let jobs = place.jobs(Contract::Transactional, job_settings());
    let engine = place.engine(Contract::Transactional, engine_settings());
    let rolled_back = jobs.clone();
    let ran = engine.run(request("k1"), move |context| async move {
        rolled_back.enqueue(&context, "report", &1).await.unwrap();
        Err::<(), _>(std::io::Error::other("later"))
    });
    ran.await.unwrap_err();
    assert_eq!(place.queue.claim(crate::support::most(9), true, Duration::ZERO).await.unwrap(), []);
    place.request(&jobs, "k1").await.accepted.unwrap().unwrap();
    assert_eq!(place.queue.claim(crate::support::most(9), true, Duration::ZERO).await.unwrap().len(), 1);
}

async fn a_repeat_gets_the_first_answer_and_the_final_one_if_it_asks(kind: Kind) {
    let place = Place::new(kind).await;
    let jobs = place.jobs(Contract::Transactional, job_settings());
    let asked = place.request(&jobs, "k1").await;
    let first = place.request(&jobs, "k1").await.first.unwrap();
    assert_eq!(first.status, 202);
    assert_eq!(jobs.final_answer(&asked.request, &first).await.unwrap(), None, "it has not run");
    work(&jobs, made).await;
    let last = jobs.final_answer(&asked.request, &first).await.unwrap().unwrap();
    assert_eq!((last.kind, last.response.status), (ReplayKind::Completed, 201));
    assert_eq!(place.request(&jobs, "k1").await.first.unwrap(), first, "the stored answer stays");
}

async fn a_request_that_was_answered_otherwise_has_no_continuation(kind: Kind) {
    let place = Place::new(kind).await;
    let jobs = place.jobs(Contract::Transactional, job_settings());
    let asked = place.request(&jobs, "k1").await;
    let first = place.request(&jobs, "k1").await.first.unwrap();
    work(&jobs, made).await;
    for other in [StoredResponse { status: 200, ..first.clone() }, StoredResponse::new(202, "accepted")] {
        assert_eq!(jobs.final_answer(&asked.request, &other).await.unwrap(), None, "{other:?}");
    }
    let other_path = place.jobs(Contract::Transactional, job_settings().location_prefix("/other/"));
    assert_eq!(other_path.final_answer(&asked.request, &first).await.unwrap(), None);
}

async fn a_job_that_is_gone_is_an_unknown_outcome(kind: Kind) {
    let place = Place::new(kind).await;
    let jobs = place.jobs(Contract::Transactional, job_settings());
    let asked = place.request(&jobs, "k1").await;
    let first = place.request(&jobs, "k1").await.first.unwrap();
    let id = asked.accepted.unwrap().unwrap().id;
    place.queue.end(slice::from_ref(&id), false, Duration::from_millis(1)).await.unwrap();
    sleep(Duration::from_millis(20)).await;
    place.queue.purge(crate::support::most(9)).await.unwrap();
    let last = jobs.final_answer(&asked.request, &first).await.unwrap().unwrap();
    assert_eq!((last.kind, last.response.status), (ReplayKind::OutcomeUnknown, 504));
}

async fn the_record_of_the_request_outlives_the_job(kind: Kind) {
    let place = Place::new(kind).await;
    let hours = |hours: u64| Duration::from_secs(hours * 3600);
    let settings = job_settings().start_deadline(hours(2));
    let jobs = place.jobs(Contract::Transactional, settings);
    let accepted = place.request(&jobs, "k1").await.accepted.unwrap().unwrap();
    let expected = hours(2 + 24) + engine_settings().longest_lease();
    assert_eq!(accepted.retention, expected);
    let response = accepted.clone().into_http();
    assert_eq!(response.status(), 202);
    assert_eq!(response.headers()["location"], format!("/jobs/{}", accepted.id));
    assert_eq!(response.headers()["retry-after"], "2");
    let directives = response.extensions().get::<ResponseDirectives>();
    assert_eq!(directives, Some(&ResponseDirectives::new().retain_for(expected)));
    assert_eq!(body(response).await, json!({ "id": accepted.id.as_str(), "state": "waiting" }));
}

async fn a_job_is_shown_to_its_principal(kind: Kind) {
    let place = Place::new(kind).await;
    let jobs = place.jobs(Contract::Transactional, job_settings());
    let id = place.request(&jobs, "k1").await.accepted.unwrap().unwrap().id;
    for (principal, id) in [(Some("other"), id.as_str()), (None, id.as_str()), (Some("acme"), "nonsense")] {
        assert_eq!(jobs.status(principal, id).await.status(), 404, "{principal:?} {id}");
    }
    let shown = jobs.status(Some("acme"), id.as_str()).await;
    assert_eq!((shown.status().as_u16(), &shown.headers()["retry-after"]), (200, &"2".parse().unwrap()));
    assert_eq!(shown.headers()["cache-control"], "no-store");
    assert_eq!(body(shown).await, json!({ "id": id.as_str(), "state": "waiting", "attempt": 0 }));
    work(&jobs, made).await;
    let shown = jobs.status(Some("acme"), id.as_str()).await;
    assert!(shown.headers().get("retry-after").is_none());
    let result = json!({ "status": 201, "location": "/reports/7", "body": { "pages": 3 } });
    let expected = json!({ "id": id.as_str(), "state": "completed", "attempt": 1, "result": result });
    assert_eq!(body(shown).await, expected);
}

async fn a_job_with_a_location_is_elsewhere(kind: Kind) {
    let place = Place::new(kind).await;
    let jobs = place.jobs(Contract::Transactional, job_settings().see_other());
    let id = place.request(&jobs, "k1").await.accepted.unwrap().unwrap().id;
    assert_eq!(jobs.status(Some("acme"), id.as_str()).await.status(), 200);
    work(&jobs, made).await;
    let shown = jobs.status(Some("acme"), id.as_str()).await;
    assert_eq!((shown.status().as_u16(), &shown.headers()["location"]), (303, &"/reports/7".parse().unwrap()));
    let failed = place.request(&jobs, "k2").await.accepted.unwrap().unwrap().id;
    work(&jobs, |_| {
        let location = idem_core::HeaderField { name: "location".into(), value: "/reports/8".into() };
        Err(JobError::Fail(StoredResponse { headers: [location].into(), ..StoredResponse::new(409, "{}") }))
    })
    .await;
    assert_eq!(
        jobs.status(Some("acme"), failed.as_str()).await.status(),
        200,
        "a failure is no result to be found there"
    );
}

async fn bad_jobs_are_refused(kind: Kind) {
    let place = Place::new(kind).await;
    let jobs = place.jobs(Contract::Transactional, JobSettings::new());
    let engine = place.engine(Contract::Transactional, engine_settings());
    let ran = engine.run(request("k1"), move |context| async move {
        for name in ["", "two words", "ä", &"x".repeat(65)] {
            let refused = jobs.enqueue(&context, name, &1).await;
            assert!(matches!(refused, Err(EnqueueError::InvalidName { .. })), "{name} {refused:?}");
        }
        let large = jobs.enqueue(&context, "report", &"x".repeat(1024 * 1024)).await;
        assert!(matches!(large, Err(EnqueueError::PayloadTooLarge { bytes: 1_048_578 })), "{large:?}");
        let unwritable = std::collections::HashMap::from([((1, 2), 3)]);
        let refused = jobs.enqueue(&context, "report", &unwritable).await;
        assert!(matches!(refused, Err(EnqueueError::Payload(_))), "{refused:?}");
        let fits = jobs.enqueue(&context, "report", &"x".repeat(1024 * 1024 - 2)).await;
        fits.map(drop).map_err(|error| std::io::Error::other(error.to_string()))
    });
    ran.await.unwrap();
}

async fn a_job_whose_result_has_expired_is_gone_and_not_overdue(kind: Kind) {
    let place = Place::new(kind).await;
    let short = engine_settings().renewal_limit(Duration::from_secs(2)).retention(Duration::from_secs(3));
    let short = place.engine(Contract::Transactional, short);
    let settings = job_settings().start_deadline(Duration::from_secs(1));
    let jobs = Jobs::new(std::sync::Arc::clone(&place.queue), short, settings).unwrap();
    // A worker settles this one, and dies before it reports.
    let forgotten = place.request(&jobs, "k2").await.accepted.unwrap().unwrap().id;
    place.queue.claim(crate::support::most(1), true, Duration::from_millis(3300)).await.unwrap();
    // A worker still runs this one, in a transaction without a record.
    let running = place.request(&jobs, "k3").await.accepted.unwrap().unwrap().id;
    place.queue.claim(crate::support::most(1), true, Duration::from_secs(60)).await.unwrap();
    let asked = place.request(&jobs, "k1").await;
    let first = place.request(&jobs, "k1").await.first.unwrap();
    let id = asked.accepted.unwrap().unwrap().id;
    work(&jobs, made).await;
    assert!(matches!(jobs.state(Some("acme"), &id).await.unwrap(), Some(JobState::Ended(_))));
    sleep(Duration::from_millis(3500)).await;
    assert_eq!(jobs.state(Some("acme"), &running).await.unwrap(), Some(JobState::Running { attempt: 1 }));
    assert_eq!(jobs.state(Some("acme"), &id).await.unwrap(), None);
    assert_eq!(jobs.status(Some("acme"), id.as_str()).await.status(), 404);
    let last = jobs.final_answer(&asked.request, &first).await.unwrap().unwrap();
    assert_eq!((last.kind, last.response.status), (ReplayKind::OutcomeUnknown, 504));
    // Nobody knows whether it ran, so it does not run again.
    assert_eq!(jobs.state(Some("acme"), &forgotten).await.unwrap(), None);
    work(&jobs, |_| panic!("it may have run")).await;
    let standing = place.queue.find(&forgotten).await.unwrap().unwrap().standing;
    assert_eq!(standing, idem_jobs::Standing::Ended);
    assert_eq!(jobs.state(Some("acme"), &forgotten).await.unwrap(), None, "it has no result");
}

async fn a_claimed_job_is_shown_as_running(kind: Kind) {
    let place = Place::new(kind).await;
    let jobs = place.jobs(Contract::Transactional, job_settings());
    let id = place.request(&jobs, "k1").await.accepted.unwrap().unwrap().id;
    place.queue.claim(crate::support::most(1), true, Duration::from_secs(60)).await.unwrap();
    assert_eq!(jobs.state(Some("acme"), &id).await.unwrap(), Some(JobState::Running { attempt: 1 }));
}

async fn jobs_that_cannot_work_are_refused(kind: Kind) {
    let place = Place::new(kind).await;
    let open = place.engine(Contract::AtLeastOnce, engine_settings().dangerous_fail_open());
    let refused = Jobs::new(std::sync::Arc::clone(&place.queue), open, job_settings());
    assert_eq!(refused.err(), Some(InvalidJobs::FailsOpen));
    for location in ["", "/my jobs/", "/jobs/\n"] {
        let engine = place.engine(Contract::AtLeastOnce, engine_settings());
        let refused = Jobs::new(std::sync::Arc::clone(&place.queue), engine, job_settings().location_prefix(location));
        assert_eq!(refused.err(), Some(InvalidJobs::Location(location.to_owned())));
    }
    let engine = place.engine(Contract::AtLeastOnce, engine_settings());
    let slow = job_settings().queue_timeout(Duration::from_millis(334));
    let refused = Jobs::new(std::sync::Arc::clone(&place.queue), engine, slow);
    assert!(matches!(refused, Err(InvalidJobs::QueueTimeout { .. })));
    let engine = place.engine(Contract::AtLeastOnce, engine_settings().renewal_limit(Duration::from_secs(2)));
    let day = Duration::from_secs(24 * 60 * 60);
    Jobs::new(
        std::sync::Arc::clone(&place.queue),
        engine.clone(),
        job_settings().start_deadline(day - Duration::from_secs(2)),
    )
    .unwrap();
    let refused = Jobs::new(std::sync::Arc::clone(&place.queue), engine, job_settings().start_deadline(day));
    assert!(matches!(refused, Err(InvalidJobs::Retention { .. })));
}

async fn a_job_whose_queue_is_away_is_asked_for_again(kind: Kind) {
    let place = Place::new(kind).await;
    let queue = Arc::new(Watched { is_away: true, ..Watched::new(&place) });
    let jobs = Jobs::new(queue, place.engine(Contract::Transactional, engine_settings()), job_settings()).unwrap();
    let id = place.request(&jobs, "k1").await.accepted.unwrap().unwrap().id;
    let answer = jobs.status(Some("acme"), id.as_str()).await;
    assert_eq!((answer.status().as_u16(), answer.headers()["retry-after"].as_bytes()), (503, b"1".as_slice()));
}
