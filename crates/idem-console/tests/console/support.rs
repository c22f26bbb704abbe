//! A console in front of a store, and the requests of its clients.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use axum::Router;
use axum::body::Body;
use http::request::Parts;
use http::{HeaderMap, Request, StatusCode};
use http_body_util::BodyExt as _;
use idem_console::{Access, Console, Permissions};
use idem_core::memory::ManualClock;
use idem_core::{
    Acquire, AcquireOutcome, IdempotencyStore as _, Inspect, Lease, Operate, RecordId, Settlement, StateName, Takeover,
    Timestamp,
};
use idem_sqlite::{SqliteConfig, SqliteStore};
use idem_testkit::fixture::{KEPT, LEASE, checkpoint, repeat_of, request};
use tempfile::TempDir;
use tower::ServiceExt as _;

/// The users, by the header field `x-user`.
#[derive(Debug)]
struct Users;

#[async_trait]
impl Access for Users {
    async fn permissions(&self, request: &Parts) -> Permissions {
        match request.headers.get("x-user").and_then(|user| user.to_str().ok()) {
            Some("ann") => Permissions::read_only("ann").and_answers().and_resolve(),
            Some("bob") => Permissions::read_only("bob"),
            Some("stopper") => Permissions::read_only("stopper").and_resolve_as(&[StateName::OutcomeUnknown]),
            Some("acme") => Permissions::read_only("acme").and_answers().and_resolve().only("idem-testkit", "acme"),
            Some("other") => Permissions::read_only("other").and_answers().and_resolve().only("idem-testkit", "other"),
            Some("<script>") => Permissions::read_only("<script>alert(1)</script>").and_answers().and_resolve(),
            _ => Permissions::none(),
        }
    }
}

#[derive(Clone)]
pub struct World {
    pub store: Arc<SqliteStore>,
    _folder: Arc<TempDir>,
    clock: Arc<ManualClock>,
    router: Router,
}

fn router(inspect: Arc<dyn Inspect>, operate: Arc<dyn Operate>) -> Router {
    Router::new().nest("/admin/idem", Console::new(inspect, operate, Arc::new(Users)).router())
}

pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub text: String,
}

impl World {
    pub async fn new() -> Self {
        let clock = Arc::new(ManualClock::new(Timestamp::from_unix_micros(1_800_000_000_000_000)));
        let folder = TempDir::new().unwrap();
        let config = SqliteConfig::new(format!("sqlite:{}", folder.path().join("records.db").display()));
        let store = Arc::new(SqliteStore::open(config.clock(clock.clone())).await.unwrap());
        let router = router(store.clone(), store.clone());
        Self { store, _folder: Arc::new(folder), clock, router }
    }

    /// A console of the same store that reads by `inspect`.
    pub fn inspected_by(&self, inspect: Arc<dyn Inspect>) -> Self {
        Self { router: router(inspect, self.store.clone()), ..self.clone() }
    }

    pub fn wait(&self, time: Duration) {
        self.clock.advance(time);
    }

    pub async fn send(&self, request: Request<Body>) -> Answer {
        let response = self.router.clone().oneshot(request).await.unwrap();
        let (parts, body) = response.into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        Answer { status: parts.status, headers: parts.headers, text: String::from_utf8(body.to_vec()).unwrap() }
    }

    pub async fn get(&self, user: &str, path: &str) -> Answer {
        let request = Request::get(format!("/admin/idem{path}")).header("x-user", user);
        self.send(request.body(Body::empty()).unwrap()).await
    }

    /// Sends the form with these fields changed.
    pub async fn post(&self, user: &str, form: &Form, changes: &[(&str, &str)]) -> Answer {
        self.post_with(user, form, changes, &[]).await
    }

    /// The same with these header fields.
    pub async fn post_with(
        &self,
        user: &str,
        form: &Form,
        changes: &[(&str, &str)],
        headers: &[(&str, &str)],
    ) -> Answer {
        let mut request = Request::post(&form.path).header("content-type", "application/x-www-form-urlencoded");
        for (name, value) in [("x-user", user)].iter().chain(headers) {
            request = request.header(*name, *value);
        }
        self.send(request.body(Body::from(form.body(changes))).unwrap()).await
    }

    /// The form on the page of a record.
    pub async fn form(&self, user: &str, id: &RecordId) -> Form {
        let page = self.get(user, &format!("/records/{id}")).await;
        assert_eq!(page.status, StatusCode::OK, "{}", page.text);
        Form::read(&page.text)
    }

    pub async fn lease(&self, request: &Acquire) -> Lease {
        match self.store.acquire(request).await.unwrap() {
            AcquireOutcome::Acquired(lease) => lease,
            other => panic!("{other:?}"),
        }
    }

    /// A run under AtMostOnce whose process has crashed more than a lease ago.
    pub async fn crashed(&self) -> RecordId {
        let lease = self.lease(&Acquire { takeover: Takeover::Unknown, ..request() }).await;
        self.store.checkpoint(&lease, &checkpoint("charged")).await.unwrap();
        self.wait(LEASE + Duration::from_secs(61));
        lease.id
    }

    /// A run whose outcome is not known.
    pub async fn unknown(&self) -> RecordId {
        let lease = self.lease(&request()).await;
        self.store.settle(&lease, &Settlement::OutcomeUnknown, KEPT).await.unwrap();
        lease.id
    }

    pub async fn settled(&self, settlement: &Settlement) -> RecordId {
        let lease = self.lease(&request()).await;
        self.store.settle(&lease, settlement, KEPT).await.unwrap();
        lease.id
    }

    pub async fn acquire_again(&self, request: &Acquire) -> AcquireOutcome {
        self.store.acquire(&repeat_of(request)).await.unwrap()
    }

    pub async fn version(&self, id: &RecordId) -> String {
        self.store.peek(id).await.unwrap().unwrap().version().to_string()
    }
}

/// A form as a browser sends it: its path, and its fields with the values that the page gave them.
#[derive(Clone)]
pub struct Form {
    pub path: String,
    pub fields: Vec<(String, String)>,
}

impl Form {
    fn read(page: &str) -> Self {
        let form = page.split_once("<form class=\"resolve\"").expect("a form to resolve it").1;
        let form = form.split_once("</form>").unwrap().0;
        let attribute = |tag: &str, name: &str| {
            let value = tag.split_once(&format!(" {name}=\""))?.1.split_once('"')?.0;
            Some(value.to_owned())
        };
        let hidden = form.split("<input type=\"hidden\"").skip(1);
        let fields = hidden.map(|tag| (attribute(tag, "name").unwrap(), attribute(tag, "value").unwrap())).collect();
        Self { path: attribute(form, "action").unwrap(), fields }
    }

    fn body(&self, changes: &[(&str, &str)]) -> String {
        let kept = self.fields.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        let kept = kept.filter(|(name, _)| changes.iter().all(|(changed, _)| changed != name));
        let fields = kept.chain(changes.iter().copied());
        fields.map(|(name, value)| format!("{name}={}", encoded(value))).collect::<Vec<_>>().join("&")
    }
}

fn encoded(text: &str) -> String {
    let encode = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' => char::from(byte).to_string(),
        _ => format!("%{byte:02X}"),
    };
    text.bytes().map(encode).collect()
}
