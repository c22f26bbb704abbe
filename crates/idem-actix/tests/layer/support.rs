//! Requests, answers, stores, and handlers that count how often they run.

use std::future::{Ready, ready};
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use actix_http::Request;
use actix_web::body::{self, BoxBody, MessageBody};
use actix_web::dev::{Payload, Service, ServiceResponse};
use actix_web::error::PayloadError;
use actix_web::http::StatusCode;
use actix_web::http::header::HeaderMap;
use actix_web::test::TestRequest;
use actix_web::{Error, HttpResponse, rt};
use bytes::Bytes;
use futures_util::future::LocalBoxFuture;
use futures_util::{Stream, StreamExt};
use idem_actix::{IdempotencyLayer, ProblemKind, SingleTenant};
use idem_core::MemoryStore;
use idem_sqlite::{SqliteConfig, SqliteStore};
use tempfile::TempDir;
use tokio::sync::Semaphore;

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

    /// Counts a run, and answers 201 and which it is.
    pub(crate) fn answer(&self) -> HttpResponse {
        HttpResponse::Created().body(format!("run {}", self.next()))
    }
}

/// A handler that only counts its runs.
pub(crate) fn counted(runs: &Runs) -> impl Fn() -> Ready<HttpResponse> + Clone + 'static {
    let runs = runs.clone();
    move || ready(runs.answer())
}

/// A POST without a body under `key`.
pub(crate) fn post(target: &str, key: &str) -> TestRequest {
    TestRequest::post().uri(target).insert_header(("idempotency-key", key))
}

/// A [`post`] that waits for the answer of a run in progress.
pub(crate) fn post_and_wait(target: &str, key: &str) -> TestRequest {
    post(target, key).insert_header(("prefer", "wait=30"))
}

/// A complete response.
#[derive(Debug, Clone)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    /// The kind in the extensions, if it is a problem.
    pub(crate) problem: Option<ProblemKind>,
}

impl Answer {
    /// Reads the result of a service. Actix makes the response of an error, with all that middlewares have added.
    pub(crate) async fn read<B: MessageBody + 'static>(given: Result<ServiceResponse<B>, Error>) -> Self {
        let response: HttpResponse<BoxBody> = match given {
            Ok(response) => response.into_parts().1.map_into_boxed_body(),
            Err(error) => error.error_response(),
        };
        let (head, body) = response.into_parts();
        let problem = head.extensions().get::<ProblemKind>().copied();
        let body = body::to_bytes(body).await.unwrap();
        Self { status: head.status(), headers: head.headers().clone(), body, problem }
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

    #[track_caller]
    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error} in {self:?}"))
    }

    /// Asserts that it is this problem in every way that a client or an outer middleware can see.
    #[track_caller]
    pub(crate) fn assert_problem(&self, kind: ProblemKind) {
        assert_eq!(self.problem, Some(kind), "{self:?}");
        assert_eq!(self.status.as_u16(), kind.status(), "{self:?}");
        assert_eq!(self.header("content-type"), Some("application/problem+json"), "{self:?}");
        assert_eq!(self.json()["type"], kind.type_uri(), "{self:?}");
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

pub(crate) async fn send<B: MessageBody + 'static>(
    app: &impl Service<Request, Response = ServiceResponse<B>, Error = Error>,
    request: TestRequest,
) -> Answer {
    Answer::read(app.call(request.to_request()).await).await
}

/// Sends a POST to `/p` under `k` with a body of these chunks and no declared length.
pub(crate) async fn send_chunks<B: MessageBody + 'static>(
    app: &impl Service<Request, Response = ServiceResponse<B>, Error = Error>,
    chunks: impl Stream<Item = Result<Bytes, PayloadError>> + 'static,
) -> Answer {
    let (request, _) = post("/p", "k").to_request().replace_payload(Payload::Stream { payload: chunks.boxed_local() });
    Answer::read(app.call(request).await).await
}

/// Asks repeatedly until there is an answer; fails after [`PATIENCE`].
pub(crate) async fn eventually<T>(what: &str, mut ask: impl AsyncFnMut() -> Option<T>) -> T {
    let asked = rt::time::timeout(PATIENCE, async {
        loop {
            if let Some(answer) = ask().await {
                return answer;
            }
            rt::time::sleep(Duration::from_millis(5)).await;
        }
    });
    asked.await.unwrap_or_else(|_| panic!("{what} did not happen within {PATIENCE:?}"))
}

/// A handler that counts its runs, and then waits at a gate.
pub(crate) fn counted_at_gate(
    runs: &Runs,
    gate: &Arc<Semaphore>,
) -> impl Fn() -> LocalBoxFuture<'static, HttpResponse> + Clone + use<> {
    let (runs, gate) = (runs.clone(), Arc::clone(gate));
    move || {
        let (answer, gate) = (runs.answer(), Arc::clone(&gate));
        Box::pin(async move {
            gate.acquire().await.unwrap().forget();
            answer
        })
    }
}
