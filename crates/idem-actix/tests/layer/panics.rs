//! Application code that panics in every place where the layer calls it. No key stays held, no share of the budget stays
//! taken, the worker lives, and the engine shuts down in order.

use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

use actix_http::Request;
use actix_web::body::{BodyStream, BoxBody, MessageBody};
use actix_web::dev::{Payload, Service, ServiceRequest, ServiceResponse};
use actix_web::error::PayloadError;
use actix_web::test::{TestRequest, init_service};
use actix_web::{App, Error, HttpRequest, HttpResponse, HttpServer, ResponseError, rt, web};
use bytes::Bytes;
use futures_util::{FutureExt, Stream, StreamExt, stream};
use idem_actix::{HttpPolicy, IdempotencyLayer, ProblemKind, ScopeSource, SingleTenant};
use idem_http::ByteBudget;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;

use crate::support::{Answer, Database, PATIENCE, Runs, at_most_once, counted, memory, post, send};

/// A budget for one body of six bytes.
fn narrow() -> HttpPolicy {
    HttpPolicy::new().budget(ByteBudget::new(6))
}

/// Two bytes, and then a panic in the stream itself.
fn panicking<E: 'static>() -> impl Stream<Item = Result<Bytes, E>> {
    stream::iter([Ok(Bytes::from("12"))]).chain(stream::once(async { panic!("the body panics") }))
}

fn with_body() -> TestRequest {
    post("/p", "k").set_payload("123456")
}

/// Sends a request whose application code panics outside of the handler. It uses a separate task, as a server does.
async fn assert_panics<B: MessageBody + 'static>(
    app: &impl Service<Request, Response = ServiceResponse<B>, Error = Error>,
    request: Request,
) {
    let ended = std::panic::AssertUnwindSafe(async { app.call(request).await.map(|_| ()).map_err(drop) });
    assert!(ended.catch_unwind().await.is_err(), "it has an answer");
}

/// Asserts that the key and the whole budget are free, and that a shutdown waits for nothing.
async fn assert_nothing_is_left<B: MessageBody + 'static, S: ScopeSource<HttpRequest>>(
    app: &impl Service<Request, Response = ServiceResponse<B>, Error = Error>,
    layer: &IdempotencyLayer<S>,
    run: usize,
) {
    send(app, with_body()).await.assert_run(run);
    layer.engine().shutdown(PATIENCE).await.expect("the shutdown waits for something");
}

fn brittle_scope(request: &HttpRequest) -> Option<&'static str> {
    assert!(!request.headers().contains_key("x-panic"), "the scope panics");
    Some("acme")
}

#[actix_web::test]
async fn a_scope_that_panics_leaves_nothing_behind() {
    let runs = Runs::default();
    let layer = IdempotencyLayer::at_most_once(memory()).scope(brittle_scope).policy(narrow());
    let app = init_service(App::new().wrap(layer.clone()).route("/p", web::post().to(counted(&runs)))).await;
    assert_panics(&app, with_body().insert_header(("x-panic", "1")).to_request()).await;
    assert_nothing_is_left(&app, &layer, 1).await;
}

/// The server has one worker, so that the test would notice its end.
#[actix_web::test]
async fn a_worker_whose_scopes_panic_serves_on() {
    let layer = IdempotencyLayer::at_most_once(memory()).scope(brittle_scope);
    let app = move || App::new().wrap(layer.clone()).route("/p", web::post().to(HttpResponse::Created));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let server = HttpServer::new(app).workers(1).disable_signals().listen(listener).unwrap().run();
    let handle = server.handle();
    rt::spawn(server);
    for (panics, expected) in
        [("x-panic: 1\r\n", ""), ("", "HTTP/1.1 201 "), ("x-panic: 1\r\n", ""), ("", "HTTP/1.1 201 ")]
    {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let head = format!("POST /p HTTP/1.1\r\nhost: test\r\nidempotency-key: k\r\nconnection: close\r\n{panics}\r\n");
        stream.write_all(head.as_bytes()).await.unwrap();
        let mut answer = String::new();
        rt::time::timeout(PATIENCE, stream.read_to_string(&mut answer)).await.expect("the worker is dead").unwrap();
        assert_eq!(answer.is_empty(), expected.is_empty(), "{answer}");
        assert!(answer.starts_with(expected), "{answer}");
    }
    handle.stop(false).await;
}

/// Actix calls services in the task of the connection, which has other streams too.
#[actix_web::test]
async fn a_scope_that_panics_leaves_the_other_streams_of_its_connection_alone() {
    let (began, gate) = (Arc::new(Semaphore::new(0)), Arc::new(Semaphore::new(0)));
    let layer = IdempotencyLayer::at_most_once(memory()).scope(brittle_scope);
    let (app_began, app_gate) = (Arc::clone(&began), Arc::clone(&gate));
    let app = move || {
        let (began, gate) = (Arc::clone(&app_began), Arc::clone(&app_gate));
        let handler = move || {
            let (began, gate) = (Arc::clone(&began), Arc::clone(&gate));
            async move {
                began.add_permits(1);
                gate.acquire().await.unwrap().forget();
                HttpResponse::Created().finish()
            }
        };
        App::new().wrap(layer.clone()).route("/p", web::post().to(handler))
    };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let server = HttpServer::new(app).workers(1).disable_signals().listen_auto_h2c(listener).unwrap().run();
    let handle = server.handle();
    rt::spawn(server);
    let stream = TcpStream::connect(address).await.unwrap();
    let (client, connection) = h2::client::handshake(stream).await.unwrap();
    rt::spawn(async { drop(connection.await) });
    let mut client = client.ready().await.unwrap();
    let mut send = |name| {
        let request = http::Request::post("http://test/p").header("idempotency-key", "k").header(name, "1");
        client.send_request(request.body(()).unwrap(), true).unwrap().0
    };
    let held = send("x-other");
    rt::time::timeout(PATIENCE, began.acquire()).await.unwrap().unwrap().forget();
    assert!(rt::time::timeout(PATIENCE, send("x-panic")).await.expect("it is open still").is_err());
    gate.add_permits(1);
    let answer = rt::time::timeout(PATIENCE, held).await.unwrap().expect("its connection ended");
    assert_eq!(answer.status().as_u16(), 201);
    handle.stop(false).await;
}

#[actix_web::test]
async fn a_request_body_that_panics_leaves_nothing_behind() {
    let runs = Runs::default();
    let layer = at_most_once().policy(narrow());
    let app = init_service(App::new().wrap(layer.clone()).route("/p", web::post().to(counted(&runs)))).await;
    let payload = Payload::Stream { payload: panicking::<PayloadError>().boxed_local() };
    assert_panics(&app, post("/p", "k").to_request().replace_payload(payload).0).await;
    assert_nothing_is_left(&app, &layer, 1).await;
}

/// An app whose first answer has this body.
async fn app_with(
    runs: &Runs,
    layer: IdempotencyLayer<SingleTenant>,
    body: fn() -> BoxBody,
) -> impl Service<Request, Response = ServiceResponse, Error = Error> {
    let runs = runs.clone();
    let handler = move || {
        let answer = match runs.next() {
            1 => HttpResponse::Created().body(body()),
            run => HttpResponse::Created().body(format!("run {run}")),
        };
        std::future::ready(answer)
    };
    init_service(App::new().wrap(layer).route("/p", web::post().to(handler))).await
}

fn panicking_body() -> BoxBody {
    BoxBody::new(BodyStream::new(panicking::<Error>()))
}

#[actix_web::test]
async fn an_answer_whose_body_panics_is_a_fault() {
    let (database, runs) = (Database::new().await, Runs::default());
    let layer = database.layer().policy(narrow());
    let app = app_with(&runs, layer.clone(), panicking_body).await;
    send(&app, with_body()).await.assert_problem(ProblemKind::HandlerFailed);
    assert_nothing_is_left(&app, &layer, 2).await;

    let runs = Runs::default();
    let app = app_with(&runs, at_most_once().policy(narrow()), panicking_body).await;
    let first = send(&app, with_body()).await;
    first.assert_problem(ProblemKind::HandlerFailed);
    send(&app, with_body()).await.assert_replay_of(&first);
}

#[actix_web::test]
async fn an_answer_whose_body_panics_beyond_what_is_kept_was_made() {
    let runs = Runs::default();
    let layer = at_most_once().policy(narrow().stored_response_limit(1));
    let app = app_with(&runs, layer.clone(), panicking_body).await;
    let response = app.call(with_body().to_request()).await;
    let read = std::panic::AssertUnwindSafe(Answer::read(response)).catch_unwind().await;
    assert!(read.is_err(), "the body is whole");
    send(&app, with_body()).await.assert_problem(ProblemKind::BodyNotRetained);
    layer.engine().shutdown(PATIENCE).await.expect("the shutdown waits for something");
}

/// An error whose answer panics when it is made.
#[derive(Debug)]
struct Brittle;

impl std::fmt::Display for Brittle {
    fn fmt(&self, _: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        panic!("an error panics when it is shown");
    }
}

impl ResponseError for Brittle {}

#[actix_web::test]
async fn an_error_that_panics_when_it_is_answered_is_a_fault() {
    let (database, runs) = (Database::new().await, Runs::default());
    let layer = database.layer().policy(narrow());
    let fails = runs.clone();
    let inside = move |request: ServiceRequest, inner: &_| {
        let inner = (fails.next() > 1).then(|| Service::<ServiceRequest>::call(inner, request));
        async move {
            match inner {
                Some(answered) => answered.await,
                None => Err::<ServiceResponse, Error>(Brittle.into()),
            }
        }
    };
    let handled = Runs::default();
    let route = web::resource("/p").route(web::post().to(counted(&handled))).wrap_fn(inside).wrap(layer.clone());
    let app = init_service(App::new().service(route)).await;
    send(&app, with_body()).await.assert_problem(ProblemKind::HandlerFailed);
    assert_nothing_is_left(&app, &layer, 1).await;
}

/// An answer that never ends is as bad as a panic.
#[actix_web::test]
async fn an_answer_that_never_ends_is_a_fault_and_holds_up_no_shutdown() {
    fn endless() -> BoxBody {
        let slow = stream::unfold((), async |()| {
            rt::time::sleep(Duration::from_millis(5)).await;
            Some((Ok::<_, Error>(Bytes::from("x")), ()))
        });
        BoxBody::new(BodyStream::new(slow.boxed_local()))
    }
    let (database, runs) = (Database::new().await, Runs::default());
    let layer = database.layer().policy(narrow().response_body_timeout(Duration::from_millis(100)));
    let app = app_with(&runs, layer.clone(), endless).await;
    send(&app, with_body()).await.assert_problem(ProblemKind::HandlerFailed);
    assert_nothing_is_left(&app, &layer, 2).await;
}
