//! The rows of the client's decision table against real answers of the service.

use std::io;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router;
use axum::http::request::Parts;
use axum::routing::post;
use idem_axum::IdempotencyLayer;
use idem_client::{
    Error, ErrorKind, Failure, Journal, JournalConfig, Operation, Profile, Report, ResumeError, RetryPolicy, Settings,
    Stop, client,
};
use idem_core::engine::{Idempotency, Settings as EngineSettings};
use idem_core::{IdempotencyKey, MemoryStore};
use idem_proxy::{Ended, Harm, Proxy};
use idem_servers::Postgres;
use reqwest_middleware::RequestBuilder;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::{Payer, payment};
use crate::support::{Contract, Request, Server, eventually};

/// The documentation of the table, whose rows are lines of `///`.
const TABLE: &str = include_str!("../../../crates/idem-client/src/table.rs");

const RECORDED: &str = include_str!("../../../crates/idem-client/src/table/tests.rs");
const SCRIPTED: &str = include_str!("../../../crates/idem-client/tests/client/sending.rs");
const SERVICE: &str = include_str!("../client.rs");
const HERE: &str = include_str!("rows.rs");
const JOBS: &str = include_str!("../../../examples/reports/tests/client/mod.rs");

/// Each row with the tests that show it: by answers of `payments`, and of `reports` for a 202. Only three kinds of rows are shown
/// otherwise: those of Stripe by answers that its documentation describes, a TLS that is refused by none, and a document that is
/// cut by a script, because those of the service are short.
const ROWS: [(&str, &[(&str, &str)]); 18] = [
    (
        "no connection; reset, cut or late answer | retry",
        &[
            (SERVICE, "payments_through_a_storm_are_made_once"),
            (HERE, "without_a_connection_the_operation_is_repeated"),
            (HERE, "a_late_answer_is_fetched_by_a_repeat"),
        ],
    ),
    ("refused TLS, a request that cannot be sent | stop", &[(HERE, "a_request_that_cannot_be_sent_stops")]),
    (
        "Idem: problem `outcome-unknown`, `record-unreadable`, `misconfigured` | stop",
        &[
            (SERVICE, "an_unknown_outcome_of_the_service_stops_the_client"),
            (HERE, "a_record_that_the_service_cannot_read_stops_the_client"),
            (HERE, "misconfigured_layers_stop_the_client"),
        ],
    ),
    (
        "a problem document, or a 409 of Stripe, whose body was not read whole and may say one of these things or those below | retry",
        &[
            (SCRIPTED, "a_small_body_limit_changes_no_decision"),
            (RECORDED, "a_body_that_was_not_read_whole_makes_no_end_that_the_rest_may_contradict"),
        ],
    ),
    ("202, with [`poll`](Self::poll) and a `Location` | poll", &[(JOBS, "a_client_polls_a_job_until_it_has_ended")]),
    ("marked as a replay | final", &[(SERVICE, "the_rows_of_the_table_are_what_the_service_answers")]),
    (
        "Idem: problem `in-progress`, `backoff`, `body-incomplete`; a type of [`in_progress_type`](Self::in_progress_type) | retry",
        &[
            (SERVICE, "a_duplicate_waits_for_the_run_of_another_request"),
            (HERE, "a_failed_run_is_repeated_after_its_backoff"),
            (HERE, "a_body_that_arrives_in_part_is_sent_again"),
            (HERE, "a_type_that_was_named_for_runs_in_progress_is_repeated"),
        ],
    ),
    ("Stripe: `Stripe-Should-Retry: false` | final", &[(RECORDED, "recorded_errors_of_stripe")]),
    (
        "Stripe: `Stripe-Should-Retry: true`; 409 `idempotency_key_in_use` | retry",
        &[(RECORDED, "recorded_errors_of_stripe")],
    ),
    ("408, 425, 429 | retry", &[(SERVICE, "the_rows_of_the_table_are_what_the_service_answers")]),
    (
        "501, 505: the server never serves such requests | final",
        &[(HERE, "what_a_server_never_serves_is_not_repeated_and_its_other_faults_are")],
    ),
    (
        "other 5xx, of the server or of a proxy | retry",
        &[
            (HERE, "what_a_server_never_serves_is_not_repeated_and_its_other_faults_are"),
            (HERE, "a_store_that_is_away_is_503_until_it_is_back"),
        ],
    ),
    (
        "everything else: 2xx, 3xx, other 4xx | final",
        &[(SERVICE, "the_rows_of_the_table_are_what_the_service_answers")],
    ),
    (
        "3xx, 401, 403, 404, 405, 407, 421 | stop",
        &[(HERE, "a_login_that_refuses_a_repeat_ends_no_operation_that_may_have_run")],
    ),
    (
        "as for an operation: no answer; 408, 425, 429; 5xx but 501 and 505 | retry",
        &[(JOBS, "a_client_polls_a_job_across_a_restart_of_its_server")],
    ),
    (
        "202; 200 with `Retry-After`, by which `idem-jobs` says that the job has not ended | poll again",
        &[(JOBS, "a_client_polls_a_job_until_it_has_ended")],
    ),
    (
        "3xx but 303, 401, 403, 404, 405, 407, 421 | stop",
        &[(JOBS, "a_poll_of_a_server_that_does_not_know_the_job_ends_no_operation")],
    ),
    ("everything else | final", &[(JOBS, "a_client_polls_a_job_until_it_has_ended")]),
];

/// Whether a source has a test of this name.
fn has_test(source: &str, name: &str) -> bool {
    let Some((before, _)) = source.split_once(&format!("fn {name}(")) else { return false };
    let above = before.trim_end_matches("async ").lines().rev();
    let mut attributes = above.take_while(|line| line.starts_with('#') || line.starts_with("///"));
    attributes.any(|line| line == "#[test]" || line.starts_with("#[tokio::test"))
}

#[test]
fn each_row_of_the_table_is_shown_by_a_test() {
    let rows = TABLE.lines().filter_map(|line| line.trim().strip_prefix("/// | ")?.strip_suffix(" |"));
    let documented: Vec<&str> = rows.filter(|row| *row != "answer | decision").collect();
    assert_eq!(documented, ROWS.map(|(row, _)| row));
    for (row, tests) in ROWS {
        assert!(!tests.is_empty(), "no test shows {row}");
        for (source, name) in tests {
            assert!(has_test(source, name), "there is no test {name}, which shows {row}");
        }
    }
}

fn key(key: &str) -> Operation {
    Operation::with_key(IdempotencyKey::new(key).unwrap()).deadline(Duration::from_secs(60))
}

/// The request that [`Request::pay`] makes.
fn pay(payer: &Payer, origin: &str, operation: Operation) -> RequestBuilder {
    payment(&payer.client, origin, 1).body(idem_http_suite::PAYMENT).with_extension(operation)
}

fn origin(server: &Server) -> String {
    format!("http://{}", server.address)
}

fn payer() -> Payer {
    Payer::new(Settings::new(Profile::Idem))
}

#[test]
fn without_a_connection_the_operation_is_repeated() {
    let mut server = Server::start(Contract::Transactional, &[]);
    server.kill();
    let payer = payer();
    let operation = key("k").deadline(Duration::from_millis(300));
    assert_eq!(payer.stop(pay(&payer, &origin(&server), operation)), ErrorKind::DeadlineExceeded);
    assert_eq!(payer.reasons(), ["connect"]);
}

#[test]
fn a_late_answer_is_fetched_by_a_repeat() {
    let server = Server::start(Contract::Transactional, &[]);
    let payer = Payer::new(Settings::new(Profile::Idem).attempt_timeout(Duration::from_millis(500)));
    let (seen, held) = (Arc::clone(&payer.events), origin(&server));
    std::thread::scope(|scope| {
        let client = scope.spawn(move || {
            (payer.answer(pay(&payer, &held, key("k")).header("x-simulate", "hold-before")), payer.reasons())
        });
        server.await_running();
        eventually("a timeout", || seen.0.lock().unwrap().contains(&"timeout").then_some(()));
        server.release();
        let (answer, reasons) = client.join().unwrap();
        assert_eq!((answer, reasons[0]), ((201, true), "timeout"));
    });
    assert_eq!(server.effects(), 1);
}

#[test]
fn a_request_that_cannot_be_sent_stops() {
    let payer = payer();
    let stopped = payer.stop(pay(&payer, "ftp://127.0.0.1", key("k")));
    assert_eq!(stopped, ErrorKind::Stopped(Stop::CannotSend(Failure::Request)));
    assert_eq!(payer.reasons(), [""; 0]);
}

#[test]
fn a_record_that_the_service_cannot_read_stops_the_client() {
    let server = Server::start(Contract::AtMostOnce, &[]);
    let payer = payer();
    let again = || pay(&payer, &origin(&server), key("k"));
    assert_eq!(payer.answer(again()), (201, false));
    server.make_records_unreadable();
    assert_eq!(payer.stop(again()), ErrorKind::Stopped(Stop::RecordUnreadable));
    assert_eq!(payer.reasons(), [""; 0]);
    assert_eq!(server.effects(), 1);
}

/// The service itself has no route with two layers.
#[test]
fn misconfigured_layers_stop_the_client() {
    let payer = payer();
    let origin = payer.runtime.block_on(async {
        let engine = Idempotency::at_most_once(Arc::new(MemoryStore::new(NonZeroUsize::MIN)), EngineSettings::new());
        let layer = IdempotencyLayer::new(engine).scope(|_: &Parts| Some("acme"));
        let route = post(async || "paid").layer(layer.clone()).layer(layer);
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(axum::serve(listener, Router::new().route("/v1/payments", route)).into_future());
        format!("http://{address}")
    });
    assert_eq!(payer.stop(pay(&payer, &origin, key("k"))), ErrorKind::Stopped(Stop::Misconfigured));
    assert_eq!(payer.reasons(), [""; 0]);
}

#[test]
fn a_failed_run_is_repeated_after_its_backoff() {
    let server = Server::start(Contract::AtLeastOnce, &["--backoff-ms", "2000"]);
    // Another client has sent it, and has gone.
    assert_eq!(server.send(&Request::pay("k").simulate("status-before=502")).status, 502);
    let payer = payer();
    assert_eq!(payer.answer(pay(&payer, &origin(&server), key("k"))), (201, false));
    assert_eq!((payer.reasons(), server.effects()), (vec!["backoff"], 1));
}

/// The end of the first request gets lost, and the server still answers.
#[derive(Debug, Default)]
struct LostEnd(AtomicUsize);

impl Harm for LostEnd {
    async fn carry(&self, client: &mut TcpStream, server: &mut TcpStream) -> io::Result<Ended> {
        let mut request = Vec::new();
        while !request.ends_with(b"}") {
            if client.read_buf(&mut request).await? == 0 {
                return Ok(Ended::Closed);
            }
        }
        if self.0.fetch_add(1, Ordering::SeqCst) == 0 {
            request.truncate(request.len() - 10);
            server.write_all(&request).await?;
            server.shutdown().await?;
        } else {
            server.write_all(&request).await?;
        }
        let mut answer = vec![0; 64 * 1024];
        let read = server.read(&mut answer).await?;
        client.write_all(&answer[..read]).await?;
        Ok(Ended::Closed)
    }
}

#[test]
fn a_body_that_arrives_in_part_is_sent_again() {
    let server = Server::start(Contract::Transactional, &[]);
    let payer = payer();
    let proxy = Proxy::start("127.0.0.1", server.address.port(), LostEnd::default());
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let proxy = runtime.block_on(proxy).unwrap();
    let answer = payer.answer(pay(&payer, &format!("http://127.0.0.1:{}", proxy.port()), key("k")));
    assert_eq!((answer, payer.reasons(), server.effects()), ((201, false), vec!["body-incomplete"], 1));
}

/// As a server with another implementation of the draft documents it.
#[test]
fn a_type_that_was_named_for_runs_in_progress_is_repeated() {
    let server = Server::start(Contract::AtMostOnce, &[]);
    let draft = || RetryPolicy::new(Profile::IetfDraft { retention: Duration::from_secs(60 * 60) });
    let busy = "https://docs.rs/idem-http/latest/idem_http/problem/index.html#in-progress";
    let told = Payer::new(Settings::of(draft().in_progress_type(busy)));
    let untold = Payer::new(Settings::of(draft()));
    let held = Request::pay("k").simulate("hold-before").begin(server.address);
    server.await_running();
    assert_eq!(untold.answer(pay(&untold, &origin(&server), key("k"))), (409, false));
    let (seen, place) = (Arc::clone(&told.events), origin(&server));
    std::thread::scope(|scope| {
        let client = scope.spawn(move || (told.answer(pay(&told, &place, key("k"))), told.reasons()));
        eventually("a duplicate", || (!seen.0.lock().unwrap().is_empty()).then_some(()));
        server.release();
        assert_eq!(client.join().unwrap(), ((201, true), vec!["in-progress"]));
    });
    drop(held);
}

#[test]
fn what_a_server_never_serves_is_not_repeated_and_its_other_faults_are() {
    let payer = payer();
    let simulate = |server: &Server, simulated: &str| {
        let operation = key("k").deadline(Duration::from_secs(3));
        pay(&payer, &origin(server), operation).header("x-simulate", simulated)
    };
    for status in [501, 505] {
        let server = Server::start(Contract::AtLeastOnce, &["--backoff-ms", "1"]);
        assert_eq!(payer.answer(simulate(&server, &format!("status-before={status}"))), (status, false));
        assert_eq!(payer.reasons(), [""; 0]);
    }
    for fault in ["status-before=500", "status-before=502", "status-before=504", "panic-before"] {
        let server = Server::start(Contract::AtLeastOnce, &["--backoff-ms", "1"]);
        assert_eq!(payer.stop(simulate(&server, fault)), ErrorKind::DeadlineExceeded);
        assert_eq!(payer.reasons()[0], "server-error", "{fault}");
    }
}

#[test]
fn a_store_that_is_away_is_503_until_it_is_back() {
    let mut postgres = Postgres::start().unwrap();
    let args = ["--store", &postgres.url(), "--ledger", "sqlite://ledger.db"];
    let server = Server::start(Contract::AtLeastOnce, &args);
    let payer = payer();
    let (seen, place) = (Arc::clone(&payer.events), origin(&server));
    postgres.kill().unwrap();
    std::thread::scope(|scope| {
        let client = scope.spawn(move || (payer.answer(pay(&payer, &place, key("k"))).0, payer.reasons()));
        eventually("a refusal", || (!seen.0.lock().unwrap().is_empty()).then_some(()));
        assert_eq!(server.effects(), 0);
        postgres.start_again().unwrap();
        let (status, reasons) = client.join().unwrap();
        assert_eq!((status, reasons[0]), (201, "unavailable"));
    });
    assert_eq!(server.effects(), 1);
}

/// The first attempt is late, and its process ends. The next one has lost its token.
#[test]
fn a_login_that_refuses_a_repeat_ends_no_operation_that_may_have_run() {
    let server = Server::start(Contract::Transactional, &["--tenants", "acme"]);
    let folder = tempfile::TempDir::new().unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    runtime.block_on(async {
        let journal = Journal::open(JournalConfig::new(folder.path().join("journal"))).await.unwrap();
        let settings = Settings::new(Profile::Idem).journal(journal.clone());
        let client = client(settings, reqwest::Client::builder()).unwrap().build();
        let late = payment(&client, &origin(&server), 1).header("x-simulate", "hold-after");
        let late = late.with_extension(key("k").deadline(Duration::from_secs(2)));
        let error = late.send().await.unwrap_err();
        assert_eq!(Error::of(&error).unwrap().kind(), ErrorKind::DeadlineExceeded);
        server.release();
        eventually("the effect", || (server.effects() == 1).then_some(()));
        let id = journal.pending().await.unwrap().pop().unwrap().id;
        let resume = async |token: &'static str| {
            let credentials = |request: &mut reqwest::Request| {
                request.headers_mut().insert("authorization", reqwest::header::HeaderValue::from_static(token));
            };
            journal.resume(&id, &client, credentials).await
        };
        let Err(ResumeError::Client(error)) = resume("Bearer other").await else { panic!("a stranger was let in") };
        let error = Error::of(&error).unwrap();
        assert_eq!(error.kind(), ErrorKind::Stopped(Stop::NotAnswered));
        assert_eq!(error.report().last_status.unwrap(), 401);
        let answer = resume("Bearer acme").await.unwrap();
        assert_eq!((answer.status().as_u16(), Report::of(&answer).unwrap().replayed), (201, true));
    });
    assert_eq!(server.effects(), 1);
}
