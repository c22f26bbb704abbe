//! Requests, answers, stores, and handlers that count how often they run.

use std::future::{Ready, ready};
use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::response::Response;
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use http_body_util::BodyExt;
use idem_axum::{IdempotencyLayer, ProblemKind, SingleTenant};
use idem_core::MemoryStore;
use idem_sqlite::{SqliteConfig, SqliteStore};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tower::ServiceExt;

/// A timeout far above what any test takes on a loaded machine, so that reaching it is a failure.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) fn memory() -> Arc<MemoryStore> {
    Arc::new(MemoryStore::new(NonZeroUsize::new(10_000).unwrap()))
}

/// A single-tenant layer on a new store, under the contract that keeps every outcome.
pub(crate) fn at_most_once() -> IdempotencyLayer<SingleTenant> {
    IdempotencyLayer::at_most_once(memory()).single_tenant()
}

/// A new database, with a table for business writes.
pub(crate) struct Database {
    pub(crate) store: SqliteStore,
    _folder: TempDir,
}

impl Database {
    pub(crate) async fn new() -> Self {
        let folder = TempDir::new().unwrap();
        let url = format!("sqlite://{}", folder.path().join("test.db").display());
        let store = SqliteStore::open(SqliteConfig::new(url)).await.unwrap();
        sqlx::query("CREATE TABLE payments (id INTEGER PRIMARY KEY)").execute(store.pool()).await.unwrap();
        Self { store, _folder: folder }
    }

    pub(crate) fn layer(&self) -> IdempotencyLayer<SingleTenant> {
        IdempotencyLayer::transactional(Arc::new(self.store.clone())).single_tenant()
    }

    /// How many payments are committed.
    pub(crate) async fn payments(&self) -> i64 {
        sqlx::query_scalar("SELECT count(*) FROM payments").fetch_one(self.store.pool()).await.unwrap()
    }
}

/// Makes a payment in the transaction of `connection`.
pub(crate) async fn pay(connection: &mut sqlx::SqliteConnection) {
    sqlx::query("INSERT INTO payments DEFAULT VALUES").execute(connection).await.unwrap();
}

/// How often a handler ran.
#[derive(Clone, Default)]
pub(crate) struct Runs(Arc<AtomicUsize>);

impl Runs {
    /// Counts a run, and says which it is.
    pub(crate) fn next(&self) -> usize {
        self.0.fetch_add(1, Ordering::SeqCst) + 1
    }

    pub(crate) fn count(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }
}

/// A handler that answers 201 and which run it was.
pub(crate) fn counted(runs: &Runs) -> impl Fn() -> Ready<(StatusCode, String)> + Clone + Send + Sync + 'static {
    let runs = runs.clone();
    move || ready((StatusCode::CREATED, format!("run {}", runs.next())))
}

/// A POST without a body under `key`.
pub(crate) fn post(target: &str, key: &str) -> Request {
    Request::post(target).header("idempotency-key", key).body(Body::empty()).unwrap()
}

/// A [`post`] that waits for the answer of a run in progress.
pub(crate) fn post_and_wait(target: &str, key: &str) -> Request {
    with(post(target, key), "prefer", "wait=30")
}

pub(crate) fn with(mut request: Request, name: &'static str, value: &str) -> Request {
    request.headers_mut().append(HeaderName::from_static(name), HeaderValue::from_str(value).unwrap());
    request
}

pub(crate) fn with_body(request: Request, body: impl Into<Body>) -> Request {
    request.map(|_| body.into())
}

/// A complete response.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    pub(crate) trailers: Option<HeaderMap>,
    /// The kind in the extensions, if it is a problem.
    pub(crate) problem: Option<ProblemKind>,
}

impl Answer {
    pub(crate) async fn read(response: Response) -> Self {
        let (head, body) = response.into_parts();
        let body = body.collect().await.unwrap();
        let trailers = body.trailers().cloned();
        let problem = head.extensions.get::<ProblemKind>().copied();
        Self { status: head.status, headers: head.headers, body: body.to_bytes(), trailers, problem }
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }

    pub(crate) fn is_replay(&self) -> bool {
        self.header("idempotency-replayed") == Some("true")
    }

    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    /// Asserts that it is this problem in every way that a client or an outer layer can see.
    #[track_caller]
    pub(crate) fn assert_problem(&self, kind: ProblemKind) {
        assert_eq!(self.problem, Some(kind), "{self:?}");
        self.assert_problem_document(kind);
    }

    /// Like [`assert_problem`](Self::assert_problem), for answers from a store, which keeps no extensions.
    #[track_caller]
    pub(crate) fn assert_problem_document(&self, kind: ProblemKind) {
        assert_eq!(self.status.as_u16(), kind.status(), "{self:?}");
        assert_eq!(self.header("content-type"), Some("application/problem+json"), "{self:?}");
        assert_eq!(self.json()["type"], kind.type_uri(), "{self:?}");
    }

    #[track_caller]
    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error} in {self:?}"))
    }

    /// Asserts that it is the first answer of that run.
    #[track_caller]
    pub(crate) fn assert_run(&self, run: usize) {
        assert_eq!(self.text(), format!("run {run}"), "{self:?}");
        assert!(!self.is_replay(), "{self:?}");
    }

    /// Asserts that it is a replay of `first`.
    #[track_caller]
    pub(crate) fn assert_replay_of(&self, first: &Self) {
        assert!(self.is_replay(), "{self:?}");
        assert_eq!((self.status, &self.body), (first.status, &first.body), "{self:?}");
    }
}

/// Sends a request to the router in this process, without reading the answer's body.
pub(crate) async fn begin(router: &Router, request: Request) -> Response {
    router.clone().oneshot(request).await.unwrap()
}

pub(crate) async fn send(router: &Router, request: Request) -> Answer {
    Answer::read(begin(router, request).await).await
}

/// Asks repeatedly until there is an answer; fails after [`PATIENCE`].
pub(crate) async fn eventually<T>(what: &str, mut ask: impl AsyncFnMut() -> Option<T>) -> T {
    let asked = tokio::time::timeout(PATIENCE, async {
        loop {
            if let Some(answer) = ask().await {
                return answer;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    asked.await.unwrap_or_else(|_| panic!("{what} did not happen within {PATIENCE:?}"))
}

/// Serves the router on a free port until the runtime of the test ends.
pub(crate) async fn serve(router: Router) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, router).await });
    address
}

/// An HTTP/1.1 connection on which every byte is written and read by hand.
pub(crate) struct Wire(TcpStream);

impl Wire {
    /// Connects and sends the head of a POST to `/p` under `key`, with these further lines.
    pub(crate) async fn post(address: SocketAddr, key: &str, lines: &str) -> Self {
        let mut wire = Self(TcpStream::connect(address).await.unwrap());
        let head = format!("POST /p HTTP/1.1\r\nhost: test\r\nidempotency-key: {key}\r\n{lines}\r\n");
        wire.send(&head).await;
        wire
    }

    pub(crate) async fn send(&mut self, text: &str) {
        self.0.write_all(text.as_bytes()).await.unwrap();
    }

    /// Ends the sending half.
    pub(crate) async fn half_close(&mut self) {
        self.0.shutdown().await.unwrap();
    }

    /// Reads until `end` has come, and returns everything up to it; fails when the connection ends before.
    pub(crate) async fn read_until(&mut self, end: &str) -> String {
        let mut read = Vec::new();
        while !read.ends_with(end.as_bytes()) {
            let byte = tokio::time::timeout(PATIENCE, self.0.read_u8()).await;
            let byte =
                byte.unwrap_or_else(|_| panic!("{end:?} did not come after {:?}", String::from_utf8_lossy(&read)));
            read.push(byte.unwrap_or_else(|error| panic!("{error} after {:?}", String::from_utf8_lossy(&read))));
        }
        String::from_utf8(read).unwrap()
    }

    /// Reads whatever comes until the connection ends, in good order or not.
    pub(crate) async fn read_to_end(&mut self) -> String {
        let mut read = Vec::new();
        // A reset ends the connection as well; what arrived before it counts.
        let _ = tokio::time::timeout(PATIENCE, self.0.read_to_end(&mut read)).await.expect("the connection stays open");
        String::from_utf8_lossy(&read).into_owned()
    }
}
