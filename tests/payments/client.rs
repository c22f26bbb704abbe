//! `idem-client` against the service, and through a network that fails.

mod page;
mod rows;
mod storm;

use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use idem_client::{
    Backoff, Error, ErrorKind, Event, EventKind, Observer, Operation, Profile, Report, Settings, Stop, client,
};
use idem_core::IdempotencyKey;
use idem_proxy::Proxy;
use reqwest_middleware::{ClientWithMiddleware, RequestBuilder};
use tokio::runtime::Runtime;

use crate::support::{Contract, Request, Server, eventually};
use storm::Storm;

/// What happened to the operations of a client, by name.
#[derive(Debug, Default)]
struct Events(Mutex<Vec<&'static str>>);

impl Observer for Events {
    fn observe(&self, event: &Event<'_>) {
        if matches!(event.kind, EventKind::Retry { .. }) {
            self.0.lock().unwrap().push(event.kind.name());
        }
    }
}

/// One client, and the reasons of its retries.
struct Payer {
    client: ClientWithMiddleware,
    events: Arc<Events>,
    runtime: Runtime,
}

impl Payer {
    fn new(settings: Settings) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let events = Arc::new(Events::default());
        let backoff = Backoff { base: Duration::from_millis(5), cap: Duration::from_millis(50) };
        let settings =
            settings.backoff(backoff).wait(Duration::ZERO).observer(Arc::clone(&events) as Arc<dyn Observer>);
        let client = runtime.block_on(async { client(settings, reqwest::Client::builder()).unwrap().build() });
        Self { client, events, runtime }
    }

    fn pay(&self, server: &Server, key: &str, amount: u32, simulate: &str) -> RequestBuilder {
        let request =
            payment(&self.client, &format!("http://{}", server.address), amount).header("x-simulate", simulate);
        let operation = Operation::with_key(IdempotencyKey::new(key).unwrap());
        request.with_extension(operation.deadline(Duration::from_secs(20)))
    }

    /// The status of the final answer, and whether it is a replay.
    fn answer(&self, request: RequestBuilder) -> (u16, bool) {
        let response = self.runtime.block_on(request.send()).unwrap();
        (response.status().as_u16(), Report::of(&response).unwrap().replayed)
    }

    /// Why there is no final answer.
    fn stop(&self, request: RequestBuilder) -> ErrorKind {
        Error::of(&self.runtime.block_on(request.send()).unwrap_err()).unwrap().kind()
    }

    /// The reasons of the retries since the last call, without repetitions.
    fn reasons(&self) -> Vec<&'static str> {
        let mut reasons = std::mem::take(&mut *self.events.0.lock().unwrap());
        reasons.dedup();
        reasons
    }
}

fn payment(client: &ClientWithMiddleware, origin: &str, amount: u32) -> RequestBuilder {
    client
        .post(format!("{origin}/v1/payments"))
        .header("authorization", "Bearer acme")
        .header("content-type", "application/json")
        .body(format!(r#"{{"amount": {amount}, "currency": "EUR", "recipient": "alice"}}"#))
}

#[test]
fn the_rows_of_the_table_are_what_the_service_answers() {
    let server = Server::start(Contract::AtLeastOnce, &["--backoff-ms", "1", "--body-limit", "2000"]);
    let payer = Payer::new(Settings::new(Profile::Idem));
    let pay = |key, amount, simulate| payer.pay(&server, key, amount, simulate);
    // Final.
    assert_eq!(payer.answer(pay("k-1", 1, "")), (201, false));
    assert_eq!(payer.answer(pay("k-1", 1, "")), (201, true));
    assert_eq!(payer.answer(pay("k-1", 2, "")), (422, false));
    assert_eq!(payer.answer(pay("k-own", 1, "status-before=409")), (409, false));
    assert_eq!(payer.answer(pay("k-own", 1, "status-before=409")), (409, true));
    assert_eq!(payer.answer(pay("k-tombstone", 1, "do-not-retain-body")), (201, false));
    assert_eq!(payer.answer(pay("k-tombstone", 1, "do-not-retain-body")), (410, true));
    assert_eq!(payer.answer(pay("k-large", 1, "").body("x".repeat(3000))), (413, false));
    let anonymous = payer.client.post(format!("http://{}/v1/payments", server.address)).body("{}");
    assert_eq!(payer.answer(anonymous), (401, false));
    assert_eq!(payer.reasons(), [""; 0]);
    // Again, until the deadline: each attempt simulates the same.
    let short = |request: RequestBuilder| {
        let key = Operation::with_key(IdempotencyKey::new("k-again").unwrap());
        request.with_extension(key.deadline(Duration::from_millis(300)))
    };
    for (status, reason) in [("408", "request-timeout"), ("425", "too-early"), ("429", "too-many-requests")] {
        let fresh = Server::start(Contract::Transactional, &[]);
        let request = payer.pay(&fresh, "k", 1, &format!("status-before={status}"));
        assert_eq!(payer.stop(short(request)), ErrorKind::DeadlineExceeded);
        assert_eq!(payer.reasons(), [reason]);
    }
    // A server error, and then the backoff of the failed run.
    assert_eq!(payer.stop(short(pay("k", 1, "status-before=502"))), ErrorKind::DeadlineExceeded);
    assert_eq!(payer.reasons()[0], "server-error");
}

#[test]
fn a_duplicate_waits_for_the_run_of_another_request() {
    let server = Server::start(Contract::AtMostOnce, &[]);
    let [first, second] = [(); 2].map(|()| Payer::new(Settings::new(Profile::Idem)));
    let seen = Arc::clone(&second.events);
    let pay = |payer: Payer| (payer.answer(payer.pay(&server, "k", 1, "hold-before")), payer.reasons());
    std::thread::scope(|scope| {
        let first = scope.spawn(|| pay(first));
        server.await_running();
        let second = scope.spawn(|| pay(second));
        eventually("a duplicate", || (!seen.0.lock().unwrap().is_empty()).then_some(()));
        server.release();
        assert_eq!(first.join().unwrap(), ((201, false), vec![]));
        assert_eq!(second.join().unwrap(), ((201, true), vec!["in-progress"]));
    });
    assert_eq!(server.effects(), 1);
}

#[test]
fn an_unknown_outcome_of_the_service_stops_the_client() {
    let mut server = Server::start(Contract::AtMostOnce, &["--lease-ms", "300"]);
    let held = Request::pay("k").simulate("hold-before").begin(server.address);
    server.await_running();
    server.kill();
    server.start_again();
    drop(held);
    let payer = Payer::new(Settings::new(Profile::Idem));
    let again = payer.client.post(format!("http://{}/v1/payments", server.address));
    let again = again.header("authorization", "Bearer acme").header("content-type", "application/json");
    let again =
        again.body(idem_http_suite::PAYMENT).with_extension(Operation::with_key(IdempotencyKey::new("k").unwrap()));
    assert_eq!(payer.stop(again), ErrorKind::Stopped(Stop::OutcomeUnknown));
    assert_eq!(server.effects(), 0);
}

/// Numbers of `cargo xtask test-client`; the suite takes smaller ones.
fn scale(name: &str, usual: u32) -> u32 {
    std::env::var(name).map_or(usual, |number| number.parse().unwrap())
}

/// Each payment has one effect and the right final answer, although three of ten exchanges come to harm.
#[test]
fn payments_through_a_storm_are_made_once() {
    let (payments, clients) = (scale("IDEM_CLIENT_PAYMENTS", 500), scale("IDEM_CLIENT_CLIENTS", 16));
    let seed = u64::from(scale("IDEM_CLIENT_SEED", 1));
    let server = Server::start(Contract::Transactional, &[]);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let (mut results, counts) = runtime.block_on(async {
        let proxy = Proxy::start("127.0.0.1", server.address.port(), Storm::new(seed)).await.unwrap();
        let origin = format!("http://127.0.0.1:{}", proxy.port());
        let tasks: Vec<_> = (0..clients)
            .map(|number| {
                // Each client is a process of its own as far as it can be: with its connections and its budget.
                let backoff = Backoff { base: Duration::from_millis(5), cap: Duration::from_millis(500) };
                let settings = Settings::new(Profile::Idem).backoff(backoff).retry_budget(100_000, 1000.0);
                let client = client(settings, reqwest::Client::builder()).unwrap().build();
                let origin = origin.clone();
                tokio::spawn(async move {
                    let mut results = Vec::new();
                    for amount in (1..=payments).filter(|amount| amount % clients == number) {
                        results.push(pay_once(&client, &origin, amount).await);
                    }
                    results
                })
            })
            .collect();
        let mut results = Vec::new();
        for task in tasks {
            results.extend(task.await.unwrap());
        }
        (results, proxy.counts())
    });
    let ids: HashSet<String> = results.iter().map(|result| result.id.clone()).collect();
    assert_eq!((results.len(), ids.len()), (payments as usize, payments as usize), "a right answer for each");
    let ledger = server.send(&Request::get("/v1/ledger")).json();
    let sum = u64::from(payments) * u64::from(payments + 1) / 2;
    assert_eq!((ledger["effects"].as_u64(), ledger["total"].as_u64()), (Some(u64::from(payments)), Some(sum)));
    let (exchanges, harmed) = counts;
    assert!(harmed * 4 > exchanges, "{harmed} of {exchanges} exchanges came to harm");
    let replays = results.iter().filter(|result| result.replayed).count();
    assert!(replays > 0, "some answers were lost");
    let attempts: u32 = results.iter().map(|result| result.attempts).sum();
    results.sort_by_key(|result| result.took);
    let percentile = |hundredths: usize| results[(results.len() * hundredths / 100).min(results.len() - 1)].took;
    println!(
        "{payments} payments by {clients} clients, seed {seed}: {} effects, {} right answers ({replays} replays); {harmed} of \
         {exchanges} exchanges came to harm; {:.3} attempts per payment, p50 {:.1?}, p99 {:.1?}",
        ledger["effects"],
        ids.len(),
        f64::from(attempts) / f64::from(payments),
        percentile(50),
        percentile(99),
    );
}

struct Paid {
    id: String,
    attempts: u32,
    replayed: bool,
    took: Duration,
}

async fn pay_once(client: &ClientWithMiddleware, origin: &str, amount: u32) -> Paid {
    let began = Instant::now();
    let response = payment(client, origin, amount).send().await.unwrap();
    let (report, status) = (Report::of(&response).unwrap().clone(), response.status());
    let body: serde_json::Value = serde_json::from_slice(&response.bytes().await.unwrap()).unwrap();
    assert_eq!((status.as_u16(), body["amount"].as_u64()), (201, Some(u64::from(amount))), "{body}");
    Paid {
        id: body["id"].as_str().unwrap().to_owned(),
        attempts: report.attempts,
        replayed: report.replayed,
        took: began.elapsed(),
    }
}
