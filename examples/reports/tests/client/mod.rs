//! `idem-client` polls the `Location` of a real 202.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use idem_client::{
    Backoff, Error, ErrorKind, Event, EventKind, Observer, Operation, Profile, Report, RetryPolicy, Settings, Stop,
    client,
};
use reqwest::Response;
use serde_json::Value;
use tokio::runtime::Runtime;

use crate::{PATIENCE, Place, Program};

/// What happened to an operation, by name.
#[derive(Debug, Default)]
struct Events(Mutex<Vec<&'static str>>);

impl Observer for Events {
    fn observe(&self, event: &Event<'_>) {
        if matches!(event.kind, EventKind::Polled | EventKind::Retry { .. }) {
            self.0.lock().unwrap().push(event.kind.name());
        }
    }
}

/// A client whose answer is awaited by a thread.
struct Asking {
    events: Arc<Events>,
    thread: std::thread::JoinHandle<reqwest_middleware::Result<(Response, Value)>>,
}

impl Asking {
    fn begin(program: &Program) -> Self {
        let (events, url) = (Arc::new(Events::default()), format!("http://{}/reports", program.address));
        let observer = Arc::clone(&events);
        let thread = std::thread::spawn(move || {
            Runtime::new().unwrap().block_on(async {
                let backoff = Backoff { base: Duration::from_millis(20), cap: Duration::from_millis(200) };
                let settings = Settings::of(RetryPolicy::new(Profile::Idem).poll(true)).backoff(backoff);
                let settings = settings.retry_budget(1000, 1.0).observer(observer);
                let client = client(settings, reqwest::Client::builder()).unwrap().build();
                let request = client.post(url).header("authorization", "Bearer acme");
                let request = request.header("content-type", "application/json").body(r#"{"year":2025}"#);
                let mut response = request.with_extension(Operation::new().deadline(PATIENCE)).send().await?;
                let mut body = Vec::new();
                while let Some(chunk) = response.chunk().await? {
                    body.extend_from_slice(&chunk);
                }
                Ok((response, serde_json::from_slice(&body).unwrap_or_default()))
            })
        });
        Self { events, thread }
    }

    /// Waits until something has happened so often.
    fn await_event(&self, name: &str, times: usize) {
        let give_up_at = Instant::now() + PATIENCE;
        while self.events.0.lock().unwrap().iter().filter(|seen| **seen == name).count() < times {
            assert!(Instant::now() < give_up_at, "{name}: {:?}", self.events);
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn end(self) -> reqwest_middleware::Result<(Response, Value)> {
        self.thread.join().unwrap()
    }

    /// The answer is that of a job which has ended. Nothing but the first request has asked for it.
    fn ends_well(self) -> Report {
        let (response, state) = self.end().unwrap();
        assert_eq!((response.status().as_u16(), &state["state"]), (200, &"completed".into()), "{state}");
        assert_eq!(state["result"]["status"], 201);
        let report = Report::of(&response).unwrap().clone();
        assert_eq!(report.attempts, 1);
        report
    }
}

fn place() -> Place {
    Place::new("sqlite://reports.db")
}

#[test]
fn a_client_polls_a_job_until_it_has_ended() {
    let place = place();
    let api = place.start(&["--role", "api"]);
    let asking = Asking::begin(&api);
    // It is answered that the job waits, and asks again.
    asking.await_event("polled", 2);
    let _worker = place.start(&["--role", "worker"]);
    let report = asking.ends_well();
    assert!(report.polls > 2, "{report:?}");
}

#[test]
fn a_client_polls_a_job_across_a_restart_of_its_server() {
    let place = place();
    let api = place.start(&["--role", "api"]);
    let asking = Asking::begin(&api);
    asking.await_event("polled", 1);
    let address = api.address.clone();
    drop(api);
    asking.await_event("connect", 1);
    let _again = place.start_at(&address, &[]);
    asking.ends_well();
}

/// As behind a load balancer whose servers do not have the same store, or after the job's retention.
#[test]
fn a_poll_of_a_server_that_does_not_know_the_job_ends_no_operation() {
    let (place, elsewhere) = (place(), self::place());
    let api = place.start(&["--role", "api"]);
    let asking = Asking::begin(&api);
    asking.await_event("polled", 1);
    let address = api.address.clone();
    drop(api);
    let _other = elsewhere.start_at(&address, &["--role", "api"]);
    let error = asking.end().unwrap_err();
    let error = Error::of(&error).unwrap();
    assert_eq!(error.kind(), ErrorKind::Stopped(Stop::NotAnswered));
    assert_eq!(error.report().last_status.unwrap(), 404);
}
