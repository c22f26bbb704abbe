//! The layer around a service without a framework, served by hyper.
#![expect(clippy::unwrap_used, reason = "a test says what it expects by failing")]

use std::convert::Infallible;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderMap, Request, Response, StatusCode};
use http_body::Frame;
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use idem_core::MemoryStore;
use idem_sqlite::{SqliteConfig, SqliteStore, SqliteTransaction};
use idem_tower::{
    BoxError, Idempotency, IdempotencyLayer, Plain, ProblemKind, Route, Settings, context_of, transaction_of,
};
use tokio::net::{TcpListener, TcpStream};
use tower::{Layer as _, Service, ServiceExt as _, service_fn};

type Body = <Plain as idem_tower::Framework>::Body;

fn engine() -> Idempotency {
    let store = Arc::new(MemoryStore::new(NonZeroUsize::new(1000).unwrap()));
    Idempotency::at_least_once(store, Settings::new().wait(Duration::from_secs(5)))
}

/// The account that the request claims.
fn account(request: &Parts) -> Option<String> {
    Some(request.headers.get("x-account")?.to_str().ok()?.to_owned())
}

fn post(path: &str, key: &str, body: &'static str) -> Request<Full<Bytes>> {
    let request = Request::post(path).header("x-account", "acme").header("idempotency-key", key);
    request.body(Full::from(body)).unwrap()
}

/// Serves every connection until the test ends.
async fn serve<S, R>(service: S) -> u16
where
    S: Service<Request<hyper::body::Incoming>, Response = Response<R>, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send + 'static,
    R: http_body::Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let service = TowerToHyperService::new(service.clone());
            tokio::spawn(async move {
                auto::Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(stream), service).await
            });
        }
    });
    port
}

struct Answer {
    status: StatusCode,
    headers: HeaderMap,
    body: Bytes,
    trailers: Option<HeaderMap>,
}

/// Sends a request on a new connection, over HTTP/2.
async fn send(port: u16, mut request: Request<Full<Bytes>>) -> Answer {
    let uri = format!("http://127.0.0.1:{port}{}", request.uri().path());
    *request.uri_mut() = uri.parse().unwrap();
    let stream = TokioIo::new(TcpStream::connect(("127.0.0.1", port)).await.unwrap());
    let (mut sender, connection) = http2::handshake(TokioExecutor::new(), stream).await.unwrap();
    tokio::spawn(connection);
    let (head, body) = sender.send_request(request).await.unwrap().into_parts();
    let body = body.collect().await.unwrap();
    let trailers = body.trailers().cloned();
    Answer { status: head.status, headers: head.headers, body: body.to_bytes(), trailers }
}

fn is_replay(answer: &Answer) -> bool {
    answer.headers.contains_key("idempotency-replayed")
}

#[tokio::test]
async fn a_repeat_is_answered_and_duplicates_at_once_run_once() {
    let runs = Arc::new(AtomicU32::new(0));
    let pay = {
        let runs = Arc::clone(&runs);
        move |request: Request<Body>| {
            let runs = Arc::clone(&runs);
            async move {
                let attempt = context_of(request.extensions().get()).unwrap().attempt();
                let amount = request.into_body().collect().await.unwrap().to_bytes();
                tokio::time::sleep(Duration::from_millis(100)).await;
                let run = runs.fetch_add(1, Ordering::Relaxed) + 1;
                let answer = format!("run {run}, attempt {attempt}, {} bytes", amount.len());
                Ok::<_, Infallible>(Response::new(Full::<Bytes>::from(answer)))
            }
        }
    };
    let service = IdempotencyLayer::new(engine()).scope(account).layer(service_fn(pay));
    let port = serve(service).await;
    let at_once: Vec<_> = (0..20).map(|_| tokio::spawn(send(port, post("/pay", "k-1", "12 EUR")))).collect();
    let mut replays = 0;
    for answer in at_once {
        let answer = answer.await.unwrap();
        assert_eq!((answer.status, &answer.body[..]), (StatusCode::OK, &b"run 1, attempt 1, 6 bytes"[..]));
        assert_eq!(answer.headers.contains_key("idempotency-retention"), !is_replay(&answer));
        replays += u32::from(is_replay(&answer));
    }
    assert_eq!((replays, runs.load(Ordering::Relaxed)), (19, 1));
    assert_eq!(send(port, post("/pay", "k-1", "13 EUR")).await.status, StatusCode::UNPROCESSABLE_ENTITY);
    // Another path, another account and another key are other operations.
    let mut other = post("/pay", "k-1", "12 EUR");
    other.headers_mut().insert("x-account", "other".parse().unwrap());
    for (run, request) in
        [post("/refund", "k-1", "12 EUR"), other, post("/pay", "k-2", "12 EUR")].into_iter().enumerate()
    {
        let answer = send(port, request).await;
        assert!(answer.body.starts_with(format!("run {}", run + 2).as_bytes()), "{:?}", answer.body);
    }
    let mut nobody = post("/pay", "k-1", "12 EUR");
    nobody.headers_mut().remove("x-account");
    assert_eq!(send(port, nobody).await.status, StatusCode::UNAUTHORIZED);
}

/// The body, its trailers and its headers, the first time and again.
#[tokio::test]
async fn what_the_service_answers_is_sent_whole_and_repeated_without_its_trailers() {
    let stream = |_: Request<Body>| async {
        let trailers = HeaderMap::from_iter([("x-checksum".parse().unwrap(), "7".parse().unwrap())]);
        let frames = [Frame::data(Bytes::from("a")), Frame::data(Bytes::from("bc")), Frame::trailers(trailers)];
        let body = StreamBody::new(futures_util::stream::iter(frames.map(Ok::<_, BoxError>)));
        let response = Response::builder().status(201).header("content-type", "text/plain").body(body);
        Ok::<_, Infallible>(response.unwrap())
    };
    let port = serve(IdempotencyLayer::new(engine()).scope(account).layer(service_fn(stream))).await;
    let first = send(port, post("/pay", "k", "")).await;
    assert_eq!((first.status, &first.body[..]), (StatusCode::CREATED, &b"abc"[..]));
    assert_eq!(first.trailers.unwrap()["x-checksum"], "7");
    let again = send(port, post("/pay", "k", "")).await;
    assert!(is_replay(&again));
    assert_eq!(
        (again.status, &again.body[..], &again.headers["content-type"]),
        (first.status, &b"abc"[..], &first.headers["content-type"])
    );
    assert!(again.trailers.is_none());
}

#[tokio::test]
async fn a_body_that_breaks_off_is_a_fault_and_runs_again() {
    let runs = Arc::new(AtomicU32::new(0));
    let breaks = {
        let runs = Arc::clone(&runs);
        move |_: Request<Body>| {
            let first = runs.fetch_add(1, Ordering::Relaxed) == 0;
            async move {
                let end: Result<Frame<Bytes>, BoxError> =
                    if first { Err("it broke off".into()) } else { Ok(Frame::data(Bytes::from("c"))) };
                let frames = [Ok(Frame::data(Bytes::from("ab"))), end];
                Ok::<_, Infallible>(Response::new(StreamBody::new(futures_util::stream::iter(frames))))
            }
        }
    };
    let port = serve(IdempotencyLayer::new(engine()).scope(account).layer(service_fn(breaks))).await;
    assert_eq!(send(port, post("/pay", "k", "")).await.status, StatusCode::INTERNAL_SERVER_ERROR);
    let again = loop {
        let again = send(port, post("/pay", "k", "")).await;
        // The operation waits before its next attempt.
        if again.status != StatusCode::CONFLICT {
            break again;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    };
    assert_eq!((again.status, &again.body[..]), (StatusCode::OK, &b"abc"[..]));
    assert_eq!(runs.load(Ordering::Relaxed), 2);
}

#[tokio::test]
async fn a_route_that_is_named_shares_its_keys() {
    let answer = |request: Request<Body>| async move {
        Ok::<_, Infallible>(Response::new(Full::<Bytes>::from(request.uri().path().to_owned())))
    };
    let layered = IdempotencyLayer::new(engine()).scope(account).layer(service_fn(answer));
    let routed = layered.map_request(|mut request: Request<hyper::body::Incoming>| {
        request.extensions_mut().insert(Route("/pay/{id}"));
        request
    });
    let port = serve(routed).await;
    assert_eq!(send(port, post("/pay/1", "k", "")).await.status, StatusCode::OK);
    assert!(is_replay(&send(port, post("/pay/1", "k", "")).await));
    // The path is still part of the fingerprint.
    assert_eq!(send(port, post("/pay/2", "k", "")).await.status, StatusCode::UNPROCESSABLE_ENTITY);
}

#[tokio::test]
async fn grpc_is_refused_with_its_problem_and_nothing_runs() {
    let never = |_: Request<Body>| async { panic!("it ran") as Result<Response<Full<Bytes>>, Infallible> };
    let port = serve(IdempotencyLayer::new(engine()).scope(account).layer(service_fn(never))).await;
    let mut request = post("/shop.Payments/Pay", "k", "\0\0\0\0\0");
    request.headers_mut().insert("content-type", "application/grpc+proto".parse().unwrap());
    let answer = send(port, request).await;
    let problem: serde_json::Value = serde_json::from_slice(&answer.body).unwrap();
    assert_eq!(answer.status, StatusCode::UNSUPPORTED_MEDIA_TYPE);
    assert_eq!(problem["type"], ProblemKind::GrpcUnsupported.type_uri());
}

#[tokio::test]
async fn business_writes_commit_with_the_answer_or_not_at_all() {
    let folder = tempfile::tempdir().unwrap();
    let store =
        SqliteStore::open(SqliteConfig::new(format!("sqlite://{}/p.db", folder.path().display()))).await.unwrap();
    let pool = store.pool().clone();
    sqlx::query("CREATE TABLE payments (amount INTEGER NOT NULL)").execute(&pool).await.unwrap();
    let pay = |request: Request<Body>| async move {
        let context = context_of(request.extensions().get()).unwrap().clone();
        let mut transaction = transaction_of::<SqliteTransaction>(Some(&context)).unwrap();
        let insert = sqlx::query("INSERT INTO payments (amount) VALUES (1250)");
        insert.execute(&mut **transaction).await.unwrap();
        let refused = request.headers().contains_key("x-fail");
        let status = if refused { StatusCode::INTERNAL_SERVER_ERROR } else { StatusCode::CREATED };
        Ok::<_, Infallible>(Response::builder().status(status).body(Full::<Bytes>::from("answer")).unwrap())
    };
    let layer = IdempotencyLayer::transactional(Arc::new(store)).scope(account);
    let port = serve(layer.layer(service_fn(pay))).await;
    let mut fails = post("/pay", "k", "");
    fails.headers_mut().insert("x-fail", "1".parse().unwrap());
    assert_eq!(send(port, fails).await.status, StatusCode::INTERNAL_SERVER_ERROR);
    let count = async || sqlx::query_scalar::<_, i64>("SELECT count(*) FROM payments").fetch_one(&pool).await.unwrap();
    assert_eq!(count().await, 0, "a failed run left its write");
    assert_eq!(send(port, post("/pay", "k", "")).await.status, StatusCode::CREATED);
    assert!(is_replay(&send(port, post("/pay", "k", "")).await));
    assert_eq!(count().await, 1);
    layer.engine().shutdown(Duration::from_secs(10)).await.unwrap();
}
