//! The middleware over a real socket.

use std::error::Error as _;
use std::time::Duration;

use idem_client::{Error, ErrorKind, Failure, Operation, Profile, Report, RetryPolicy, Settings, Stop, client};
use idem_core::IdempotencyKey;
use reqwest_middleware::{ClientWithMiddleware, RequestBuilder};

use crate::server::{Act, Arrived, Server, answer, made, problem, quick, quick_for, with_pauses};

fn with(settings: Settings) -> ClientWithMiddleware {
    client(settings, reqwest::Client::builder()).unwrap().build()
}

fn pay(client: &ClientWithMiddleware, server: &Server) -> RequestBuilder {
    client.post(server.url("/pay")).body(r#"{"amount":1}"#).header("content-type", "application/json")
}

fn kind(error: &reqwest_middleware::Error) -> ErrorKind {
    Error::of(error).unwrap_or_else(|| panic!("{error:?}")).kind()
}

#[tokio::test]
async fn every_attempt_has_the_same_key_and_the_same_bytes() {
    let script = [
        Act::Close,
        Act::Cut("HTTP/1.1 201 Created\r\ncontent-length: 100\r\n\r\n{\"id\"".to_owned()),
        Act::Cut("HTTP/1.1 201 Created\r\ntransfer-encoding: chunked\r\n\r\n5\r\n{\"id\"\r\n".to_owned()),
        Act::Cut("HTTP/1.1 201 Cre".to_owned()),
        answer("500 Internal Server Error"),
        Act::Answer("502 Bad Gateway\r\ncontent-type: text/html", "<h1>proxy</h1>".to_owned()),
        answer("503 Service Unavailable\r\nretry-after: 0"),
        Act::Answer("504 Gateway Timeout\r\ncontent-type: text/html", "<h1>proxy</h1>".to_owned()),
        answer("408 Request Timeout"),
        answer("425 Too Early"),
        answer("429 Too Many Requests"),
        problem("409 Conflict", "in-progress"),
        problem("409 Conflict", "backoff"),
        problem("400 Bad Request", "body-incomplete"),
        Act::Answer("201 Created\r\nidempotency-replayed: true", "paid".to_owned()),
    ];
    let (server, count) = (Server::start(script.clone()).await, script.len());
    let response = pay(&with(quick()), &server).send().await.unwrap();
    assert_eq!(response.status(), 201);
    assert_eq!(response.url().as_str(), server.url("/pay"));
    let report = Report::of(&response).unwrap().clone();
    assert_eq!((report.attempts as usize, report.replayed, report.polls), (count, true, 0));
    assert_eq!(response.text().await.unwrap(), "paid");
    let arrived = server.arrived();
    assert_eq!(arrived.len(), count);
    assert!(arrived.iter().all(|request| *request == arrived[0]), "{arrived:#?}");
    assert_eq!(arrived[0].body, br#"{"amount":1}"#);
    assert_eq!(arrived[0].key(), format!("\"{}\"", report.key.unwrap().as_str()));
    assert_eq!(arrived[0].field("prefer"), ["wait=20"]);
}

#[tokio::test]
async fn a_final_answer_is_not_repeated() {
    for final_answer in [
        answer("200 OK"),
        answer("202 Accepted\r\nlocation: /jobs/1"),
        answer("302 Found\r\nlocation: /elsewhere"),
        answer("400 Bad Request"),
        answer("401 Unauthorized"),
        Act::Answer("409 Conflict\r\ncontent-type: application/json", r#"{"error":"sold out"}"#.to_owned()),
        problem("410 Gone", "body-not-retained"),
        problem("422 Unprocessable Content", "mismatch"),
        answer("503 Service Unavailable\r\nidempotency-replayed: true"),
    ] {
        let server = Server::start([final_answer.clone()]).await;
        pay(&with(quick()), &server).send().await.unwrap();
        assert_eq!(server.arrived().len(), 1, "{final_answer:?}");
    }
}

#[tokio::test]
async fn an_unknown_outcome_stops_with_the_key() {
    for (act, stop) in [
        (problem("504 Gateway Timeout", "outcome-unknown"), Stop::OutcomeUnknown),
        (problem("500 Internal Server Error", "record-unreadable"), Stop::RecordUnreadable),
        (problem("500 Internal Server Error", "misconfigured"), Stop::Misconfigured),
    ] {
        let server = Server::start([act]).await;
        let error = pay(&with(quick()), &server).send().await.unwrap_err();
        assert_eq!(kind(&error), ErrorKind::Stopped(stop));
        let report = Error::of(&error).unwrap().report();
        assert_eq!(format!("\"{}\"", report.key.as_ref().unwrap().as_str()), server.arrived()[0].key());
        assert_eq!((report.attempts, server.arrived().len()), (1, 1));
        assert!(!format!("{error:?}").contains(report.key.as_ref().unwrap().as_str()), "Debug hides the key");
    }
}

/// `reqwest` would follow these by itself: to another host, or as a GET.
#[tokio::test]
async fn a_redirect_takes_the_key_nowhere() {
    for status in
        ["301 Moved Permanently", "302 Found", "303 See Other", "307 Temporary Redirect", "308 Permanent Redirect"]
    {
        let other = Server::start([]).await;
        let target: &'static str = Box::leak(format!("{status}\r\nlocation: {}", other.url("/pay")).into_boxed_str());
        let server = Server::start([answer(target)]).await;
        // Even if the caller's client would follow them.
        let http = reqwest::Client::builder().redirect(reqwest::redirect::Policy::limited(5));
        let response = pay(&client(quick(), http).unwrap().build(), &server).send().await.unwrap();
        assert_eq!(response.status().as_str(), &status[..3]);
        assert_eq!((server.arrived().len(), other.arrived().len()), (1, 0));
    }
}

#[tokio::test]
async fn only_post_and_patch_get_a_key() {
    let server = Server::start([]).await;
    let client = with(quick());
    for method in ["GET", "PUT", "DELETE", "OPTIONS", "POST", "PATCH"] {
        client.request(method.parse().unwrap(), server.url("/pay")).send().await.unwrap();
    }
    let keys: Vec<usize> = server.arrived().iter().map(|request| request.field("idempotency-key").len()).collect();
    assert_eq!(keys, [0, 0, 0, 0, 1, 1]);
    let failing = Server::start([answer("503 Service Unavailable")]).await;
    assert_eq!(client.get(failing.url("/")).send().await.unwrap().status(), 503, "and no retries");
}

#[tokio::test]
async fn the_key_has_the_form_that_the_server_wants() {
    let server = Server::start([]).await;
    let key = || Operation::with_key(IdempotencyKey::new("order-\"1").unwrap());
    pay(&with(quick()), &server).with_extension(key()).send().await.unwrap();
    pay(&with(quick().bare_keys(true)), &server).with_extension(key()).send().await.unwrap();
    pay(&with(quick_for(Profile::Stripe)), &server).with_extension(key()).send().await.unwrap();
    pay(&with(quick().wait(Duration::ZERO)), &server).with_extension(key()).send().await.unwrap();
    pay(&with(quick()), &server).header("prefer", "return=minimal").send().await.unwrap();
    let arrived = server.arrived();
    let keys: Vec<&str> = arrived.iter().take(3).map(Arrived::key).collect();
    assert_eq!(keys, [r#""order-\"1""#, r#"order-"1"#, r#"order-"1"#]);
    let prefer: Vec<Vec<&str>> = arrived.iter().map(|request| request.field("prefer")).collect();
    assert_eq!(prefer, [vec!["wait=20"], vec!["wait=20"], vec![], vec![], vec!["return=minimal"]]);
}

#[tokio::test]
async fn keys_by_content_are_the_same_in_two_clients() {
    let server = Server::start([]).await;
    let pay = |body: &'static str| {
        let request = with(quick()).post(server.url("/pay")).header("content-type", "application/json").body(body);
        request.with_extension(Operation::by_content()).send()
    };
    pay(r#"{"amount":1,"to":"a"}"#).await.unwrap();
    pay(r#"{ "to": "a", "amount": 1 }"#).await.unwrap();
    pay(r#"{"amount":2,"to":"a"}"#).await.unwrap();
    let arrived = server.arrived();
    assert_eq!(arrived[0].key(), arrived[1].key());
    assert_ne!(arrived[0].key(), arrived[2].key());
}

#[tokio::test]
async fn what_cannot_be_repeated_is_refused_before_the_first_send() {
    let server = Server::start([]).await;
    let client = with(quick());
    let body = reqwest::Body::wrap(http_body_util::Empty::<bytes::Bytes>::new());
    let error = client.post(server.url("/pay")).body(body).send().await.unwrap_err();
    assert_eq!(kind(&error), ErrorKind::BodyNotRepeatable);
    let error = pay(&client, &server).header("Idempotency-Key", "mine").send().await.unwrap_err();
    assert_eq!(kind(&error), ErrorKind::KeyPresent);
    assert_eq!(server.arrived(), []);
}

#[tokio::test]
async fn an_attempt_has_a_time_limit() {
    let server = Server::start([Act::Hang, made()]).await;
    let response = pay(&with(quick().attempt_timeout(Duration::from_millis(200))), &server).send().await.unwrap();
    assert_eq!(Report::of(&response).unwrap().attempts, 2);
    let slow = Server::start([Act::Answer("201 Created", "a".repeat(100))]).await;
    assert_eq!(pay(&with(quick()), &slow).send().await.unwrap().text().await.unwrap().len(), 100);
}

#[tokio::test]
async fn the_deadline_ends_the_retries_and_says_what_came_last() {
    let server = Server::deciding(|_, _| answer("503 Service Unavailable")).await;
    let client = with(quick());
    let operation = Operation::new().deadline(Duration::from_millis(200));
    let error = pay(&client, &server).with_extension(operation.clone()).send().await.unwrap_err();
    assert_eq!(kind(&error), ErrorKind::DeadlineExceeded);
    let report = Error::of(&error).unwrap().report();
    let (attempts, arrived) = (report.attempts as usize, server.arrived().len());
    // The deadline may end the last attempt before it arrives.
    assert!(attempts == arrived || attempts == arrived + 1, "{attempts} attempts, {arrived} arrived");
    assert_eq!(report.last_status.unwrap(), 503);
    assert!(error.to_string().contains("answered 503"), "{error}");

    let refused = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let request = client.post(format!("http://{refused}/")).with_extension(operation);
    let error = request.send().await.unwrap_err();
    assert_eq!(kind(&error), ErrorKind::DeadlineExceeded);
    assert!(Error::of(&error).unwrap().source().is_some(), "the last error of the connection is kept");
}

#[tokio::test]
async fn a_wait_beyond_the_deadline_stops_at_once() {
    let server = Server::start([answer("503 Service Unavailable\r\nretry-after: 100000")]).await;
    let began = std::time::Instant::now();
    let error = pay(&with(quick()), &server).send().await.unwrap_err();
    assert_eq!(kind(&error), ErrorKind::DeadlineExceeded);
    assert!(began.elapsed() < Duration::from_secs(60));
    assert_eq!(server.arrived().len(), 1);
}

#[tokio::test]
async fn a_retry_is_never_earlier_than_the_server_asks() {
    let server = Server::start([answer("503 Service Unavailable\r\nretry-after: 1")]).await;
    let began = std::time::Instant::now();
    pay(&with(quick()), &server).send().await.unwrap();
    assert!(began.elapsed() >= Duration::from_secs(1));
    assert_eq!(server.arrived().len(), 2);
}

#[tokio::test]
async fn nothing_is_repeated_once_the_server_may_have_forgotten_the_key() {
    let retention = Duration::from_millis(400);
    let server = Server::deciding(|_, _| answer("503 Service Unavailable")).await;
    let error = pay(&with(quick().retention(retention)), &server).send().await.unwrap_err();
    assert_eq!(kind(&error), ErrorKind::RetentionOver);
    assert_eq!(Error::of(&error).unwrap().report().attempts as usize, server.arrived().len());

    // What the server states counts as well, and an attempt that is under way ends in time.
    let stated = Server::start([answer("503 Service Unavailable\r\nidempotency-retention: 1"), Act::Hang]).await;
    let began = std::time::Instant::now();
    let error = pay(&with(quick()), &stated).send().await.unwrap_err();
    assert_eq!(kind(&error), ErrorKind::RetentionOver);
    assert_eq!(stated.arrived().len(), 2);
    assert!(began.elapsed() < Duration::from_secs(20), "an attempt may take 30 s, and this one has less");
    let none = Server::start([answer("503 Service Unavailable\r\nidempotency-retention: 0")]).await;
    assert_eq!(kind(&pay(&with(quick()), &none).send().await.unwrap_err()), ErrorKind::RetentionOver);
    let nonsense = Server::start([answer("503 Service Unavailable\r\nidempotency-retention: -1")]).await;
    pay(&with(quick()), &nonsense).send().await.unwrap();
}

#[tokio::test]
async fn a_202_is_polled_at_its_own_server_only_and_without_the_key() {
    let polls = || with_pauses(Settings::of(RetryPolicy::new(Profile::Idem).poll(true)));
    let server = Server::start([
        answer("202 Accepted\r\nlocation: /jobs/1\r\nretry-after: 0"),
        answer("202 Accepted"),
        Act::Answer("200 OK\r\nretry-after: 0", r#"{"state":"running"}"#.to_owned()),
        answer("503 Service Unavailable"),
        Act::Close,
        Act::Answer("200 OK", r#"{"state":"completed"}"#.to_owned()),
    ])
    .await;
    let response = pay(&with(polls()), &server).header("authorization", "Bearer me").send().await.unwrap();
    let report = Report::of(&response).unwrap().clone();
    assert_eq!((report.attempts, report.polls), (1, 5));
    assert_eq!(response.text().await.unwrap(), r#"{"state":"completed"}"#);
    for poll in &server.arrived()[1..] {
        assert_eq!(poll.line(), "GET /jobs/1 HTTP/1.1");
        assert_eq!(poll.field("authorization"), ["Bearer me"]);
        for field in ["idempotency-key", "prefer", "content-type", "content-length"] {
            assert!(poll.field(field).is_empty(), "{poll:?}");
        }
    }

    // A login that has expired, and a router that does not know the place, do not end what still runs.
    for gate in ["401 Unauthorized", "404 Not Found"] {
        let server = Server::start([answer("202 Accepted\r\nlocation: /jobs/1\r\nretry-after: 0"), answer(gate)]).await;
        let error = pay(&with(polls()), &server).send().await.unwrap_err();
        assert_eq!(kind(&error), ErrorKind::Stopped(Stop::NotAnswered), "{gate}");
        assert_eq!(server.arrived().len(), 2);
    }

    let other = Server::start([]).await;
    let target: &'static str = Box::leak(format!("202 Accepted\r\nlocation: {}", other.url("/")).into_boxed_str());
    let server = Server::start([answer(target)]).await;
    let response = pay(&with(polls()), &server).header("authorization", "Bearer me").send().await.unwrap();
    assert_eq!((response.status().as_u16(), other.arrived().len()), (202, 0));
}

#[tokio::test]
async fn a_large_answer_and_a_stream_reach_the_caller_as_they_come() {
    let server = Server::start([
        Act::Answer("201 Created", "a".repeat(10_000)),
        Act::Cut("HTTP/1.1 201 Created\r\ncontent-type: text/event-stream\r\n\r\ndata: 1\n\n".to_owned()),
        Act::Cut(format!("HTTP/1.1 201 Created\r\ncontent-length: 10000\r\n\r\n{}", "a".repeat(9_000))),
    ])
    .await;
    let client = with(quick().body_limit(1000));
    assert_eq!(pay(&client, &server).send().await.unwrap().text().await.unwrap(), "a".repeat(10_000));
    assert_eq!(pay(&client, &server).send().await.unwrap().text().await.unwrap(), "data: 1\n\n");
    let cut = pay(&client, &server).send().await.unwrap();
    cut.text().await.unwrap_err();
    assert_eq!(server.arrived().len(), 3);
}

/// The caller wants short answers only. That is no reason to give up an operation that runs, or to repeat one that may have run.
#[tokio::test]
async fn a_small_body_limit_changes_no_decision() {
    let script = [problem("409 Conflict", "in-progress"), problem("409 Conflict", "backoff")];
    let server = Server::start(script).await;
    let client = with(quick().body_limit(0));
    let response = pay(&client, &server).send().await.unwrap();
    assert_eq!((response.status().as_u16(), server.arrived().len()), (201, 3));
    assert_eq!(response.text().await.unwrap(), r#"{"id":1}"#);
    let unknown = Server::start([problem("504 Gateway Timeout", "outcome-unknown")]).await;
    let error = pay(&client, &unknown).send().await.unwrap_err();
    assert_eq!(kind(&error), ErrorKind::Stopped(Stop::OutcomeUnknown));
    assert_eq!(unknown.arrived().len(), 1);

    // A document whose type comes after more than is read.
    let padded = |status| {
        let body = format!(r#"{{"title":"{}","type":"about:blank"}}"#, "x".repeat(100_000));
        Act::Answer(status, body)
    };
    let script = [padded("409 Conflict\r\ncontent-type: application/problem+json"), made()];
    let server = Server::start(script.clone()).await;
    assert_eq!(pay(&client, &server).send().await.unwrap().status(), 201);
    let server = Server::start(script).await;
    let response = pay(&with(quick()), &server).send().await.unwrap();
    assert_eq!((response.status().as_u16(), server.arrived().len()), (409, 1), "read whole, it is the application's");
}

#[tokio::test]
async fn a_server_without_the_tls_that_the_url_names_is_not_asked_for_ever() {
    // This build of reqwest has no TLS at all, so the URL cannot be used.
    let server = Server::start([]).await;
    let error = with(quick().deadline(Duration::from_secs(2)))
        .post(server.url("/").replace("http:", "https:"))
        .send()
        .await
        .unwrap_err();
    let kind = kind(&error);
    assert!(
        matches!(
            kind,
            ErrorKind::DeadlineExceeded | ErrorKind::Stopped(Stop::CannotSend(Failure::Tls | Failure::Request))
        ),
        "{kind:?}"
    );
    assert_eq!(server.arrived(), []);
}
