//! What the service does, independent of the framework that carries its requests.

use std::time::Duration;

use bytes::Bytes;
use idem_core::engine::{Context, Idempotency, Operation};
use idem_core::{Fingerprint, JsonPointerError, Scope, State};
use idem_http::{HttpPolicy, Meaning};
use idem_hybrid::HybridMetrics;

use crate::answer::{Answer, Body, End};
use crate::config::Config;
use crate::ledger::{Ledger, NewPayment};
use crate::metrics::Metrics;
use crate::openapi;
use crate::problem::Problem;
use crate::running::{Running, Stage};
use crate::simulate::{Outside, Simulation};
use crate::store::{Health, Store};

/// The pages, and the methods that each of them takes.
pub(crate) const HOME: (&str, &str) = ("/", READ);
/// The state of a key's record, for the page at `/`. A real service does not show it to clients.
pub(crate) const RECORD: (&str, &str) = ("/v1/records/{key}", READ);
pub(crate) const PAYMENTS: (&str, &str) = ("/v1/payments", "GET, HEAD, POST");
pub(crate) const QUOTES: (&str, &str) = ("/v1/quotes", "POST");
pub(crate) const PAYMENT: (&str, &str) = ("/v1/payments/{id}", READ);
pub(crate) const LEDGER: (&str, &str) = ("/v1/ledger", READ);
/// The stages of the tenant's requests. DELETE releases a request that is held, and POST ends the timeout of a request that
/// has one. Only under `--simulate`.
pub(crate) const RUNNING: (&str, &str) = ("/v1/running", "DELETE, GET, HEAD, POST");
/// Answers any method with what arrived. It is behind a layer with a policy unlike the default, and inside of CORS and
/// compression. Only under `--simulate`.
pub(crate) const MIRROR: &str = "/v1/mirror";
/// Takes messages that have their key in the body. Its policy has the options that [`MIRROR`] does not have. Only under
/// `--simulate`.
pub(crate) const NOTICES: &str = "/v1/notices";
/// Whether this process answers, for any client and without a query to the store. A page that queries the store would let
/// clients keep it busy, and one that counts would reveal how much business there is.
pub(crate) const HEALTH: (&str, &str) = ("/healthz", READ);
/// What the store says about itself, for operators.
pub(crate) const STORE_HEALTH: (&str, &str) = ("/operator/health", READ);
/// Counters, durations and gauges for Prometheus, which sends the operator's token.
pub(crate) const METRICS: (&str, &str) = ("/metrics", READ);
pub(crate) const DESCRIPTION: (&str, &str) = ("/openapi.json", READ);
const READ: &str = "GET, HEAD";

/// The header that marks replays of the mirror.
pub(crate) const MIRROR_REPLAY_HEADER: &str = "x-operation-replayed";

/// The service.
#[derive(Debug)]
pub(crate) struct Service {
    config: Config,
    store: Store,
    /// Where the payments are: the store's own database under the transactional contract.
    ledger: Ledger,
    engine: Idempotency,
    running: Running,
    /// `None` without an operator token: no one could read them.
    metrics: Option<Metrics>,
}

/// What a handler gets of a request.
#[derive(Debug, Default)]
pub(crate) struct Asked<'a> {
    pub(crate) authorization: Option<&'a [u8]>,
    pub(crate) simulate: Option<&'a [u8]>,
}

type Answered = Result<Answer, Problem>;

impl Service {
    pub(crate) fn new(
        config: Config,
        store: Store,
        ledger: Ledger,
        engine: Idempotency,
        metrics: Option<Metrics>,
    ) -> Self {
        Self { config, store, ledger, engine, running: Running::default(), metrics }
    }

    /// How `POST /v1/quotes` is protected: a quote moves no money, so a client may ask for it without a key.
    pub(crate) fn quotes_policy(&self) -> HttpPolicy {
        self.policy().key_optional()
    }

    /// How `POST /v1/payments` is protected.
    pub(crate) fn policy(&self) -> HttpPolicy {
        let Config { body_limit, stored_limit, .. } = self.config;
        HttpPolicy::new().request_body_limit(body_limit).stored_response_limit(stored_limit)
    }

    /// How the mirror is protected: unlike the default.
    pub(crate) fn mirror_policy(&self) -> HttpPolicy {
        self.policy()
            .key_header("X-Operation-Key")
            .replay_header(MIRROR_REPLAY_HEADER)
            .methods(&["POST", "PUT", "GET"])
            .fingerprint_header("X-Version")
            .fingerprint_header("Host")
            .fingerprint_header("Cookie")
            .response_body_timeout(Duration::from_millis(500))
            .allow_stored_header("X-Request-Id")
            .store_named_headers_only()
    }

    /// How the notices are protected.
    pub(crate) fn notices_policy(&self) -> Result<HttpPolicy, JsonPointerError> {
        let policy = self.policy().key_only().min_key_length(8).mismatch_is_conflict();
        let policy = policy.problem_type_base("https://errors.test/");
        // A notice that is not valid may be corrected under its key.
        let policy = policy.classify(|answer| match answer.status {
            422 => Meaning::Release,
            status => Meaning::of_status(status),
        });
        Ok(policy.key_member("/id".parse()?))
    }

    pub(crate) fn body_limit(&self) -> usize {
        self.config.body_limit
    }

    pub(crate) fn client_timeout(&self) -> Duration {
        Duration::from_millis(self.config.client_timeout_ms.into())
    }

    pub(crate) fn is_simulating(&self) -> bool {
        self.config.is_simulating()
    }

    /// What the request wants to be simulated outside of the idempotency layer.
    pub(crate) fn outside(&self, asked: &Asked<'_>) -> Outside {
        let Some(tenant) = self.tenant(asked).filter(|_| self.config.is_simulating()) else {
            return Outside::default();
        };
        // The handler refuses a malformed header.
        let simulation = Simulation::from_header(true, asked.simulate).unwrap_or_default();
        Outside::new(simulation, self.running.enter(&tenant, Stage::Open))
    }

    pub(crate) async fn create_payment(&self, asked: Asked<'_>, run: &Context, body: Bytes) -> Answered {
        let tenant = self.tenant(&asked).ok_or(Problem::Unauthenticated)?;
        let simulation = Simulation::from_header(self.config.is_simulating(), asked.simulate)?;
        let payment = NewPayment::from_json(&body)?;
        let made = self.make_payment(&simulation, run, &tenant, payment);
        let answer =
            if simulation.timeout_inside { self.running.until_time_out(&tenant, made).await? } else { made.await };
        answer.map(|answer| simulation.directed(answer))
    }

    async fn make_payment(
        &self,
        simulation: &Simulation,
        run: &Context,
        tenant: &str,
        payment: NewPayment,
    ) -> Answered {
        let mut running = self.running.enter(tenant, Stage::Before);
        if let Some(answer) = simulation.before(&running).await {
            return Ok(answer);
        }
        let payment = payment.made_now()?;
        let mut document = serde_json::json!(payment);
        if simulation.padding > 0 {
            document["padding"] = "p".repeat(simulation.padding).into();
        }
        let answer = Answer::json(201, &document)
            .header("location", format!("/v1/payments/{}", payment.id))
            .header("etag", format!("\"{}\"", payment.id))
            .header("x-attempt", run.attempt().to_string());
        self.ledger.pay(run, tenant, &payment, &answer).await?;
        running.has_effect();
        if let Some(answer) = simulation.after(&running).await {
            return Ok(answer);
        }
        tracing::info!(payment = payment.id, attempt = run.attempt(), "money moved");
        Ok(simulation.dress(answer, &running))
    }

    pub(crate) fn make_quote(&self, asked: &Asked<'_>, is_protected: bool, body: &[u8]) -> Answered {
        self.tenant(asked).ok_or(Problem::Unauthenticated)?;
        let quote = NewPayment::from_json(body)?.quoted(is_protected);
        Ok(Answer::json(201, &quote))
    }

    pub(crate) async fn list_payments(&self, asked: Asked<'_>) -> Answered {
        let tenant = self.tenant(&asked).ok_or(Problem::Unauthenticated)?;
        let payments = self.ledger.payments(&tenant).await?;
        Ok(Answer::json(200, &serde_json::json!({ "payments": payments })))
    }

    pub(crate) async fn show_payment(&self, asked: Asked<'_>, id: &str) -> Answered {
        let tenant = self.tenant(&asked).ok_or(Problem::Unauthenticated)?;
        let payment = self.ledger.payment(&tenant, id).await?.ok_or(Problem::NotFound)?;
        Ok(Answer::json(200, &payment))
    }

    pub(crate) async fn show_ledger(&self, asked: Asked<'_>) -> Answered {
        let tenant = self.tenant(&asked).ok_or(Problem::Unauthenticated)?;
        Ok(Answer::json(200, &self.ledger.totals(&tenant).await?))
    }

    /// A page that shows in a browser what a retry does.
    pub(crate) fn show_home() -> Answer {
        let html = Bytes::from_static(include_bytes!("page.html"));
        let headers = vec![("content-type", b"text/html; charset=utf-8".to_vec())];
        Answer { status: 200, headers, body: Body::Whole(html), directives: None }
    }

    pub(crate) async fn show_record(&self, asked: Asked<'_>, key: &str) -> Answered {
        let tenant = self.tenant(&asked).ok_or(Problem::Unauthenticated)?;
        let key = key.parse().map_err(|_| Problem::NotFound)?;
        let scope = Scope::new(tenant, format!("POST {}", PAYMENTS.0));
        // A record is found by its scope and key alone.
        let operation = Operation::new(scope, key, Fingerprint::of_bytes("", b""));
        let id = self.engine.acquire_for(&operation).id;
        let record = self.store.peek(&id).await.map_err(Problem::StoreAway)?;
        let Some(record) = record else { return Ok(Answer::json(200, &serde_json::json!({ "state": "absent" }))) };
        let (state, status) = match &record.state {
            State::InProgress { .. } => ("in progress", None),
            State::Completed { response } => ("completed", Some(response.status)),
            State::Failed { response, .. } => ("failed", Some(response.status)),
        };
        Ok(Answer::json(200, &serde_json::json!({ "state": state, "attempt": record.attempt, "status": status })))
    }

    pub(crate) fn show_running(&self, asked: &Asked<'_>) -> Answered {
        let tenant = self.tenant(asked).ok_or(Problem::Unauthenticated)?;
        if !self.config.is_simulating() {
            return Err(Problem::NotFound);
        }
        Ok(self.stages(&tenant))
    }

    fn stages(&self, tenant: &str) -> Answer {
        let mut document = serde_json::json!(self.running.stages(tenant));
        // Of all tenants.
        document["waiting"] = self.engine.waiting().into();
        document["contract"] = self.config.contract.name().into();
        document["is_cached"] = self.config.cache.is_some().into();
        document["memory_bytes"] = memory_bytes().into();
        Answer::json(200, &document)
    }

    pub(crate) fn release_run(&self, asked: &Asked<'_>) -> Answered {
        let tenant = self.tenant(asked).ok_or(Problem::Unauthenticated)?;
        if !self.config.is_simulating() {
            return Err(Problem::NotFound);
        }
        self.running.release(&tenant);
        Ok(self.stages(&tenant))
    }

    pub(crate) fn time_out_run(&self, asked: &Asked<'_>) -> Answered {
        let tenant = self.tenant(asked).ok_or(Problem::Unauthenticated)?;
        if !self.config.is_simulating() {
            return Err(Problem::NotFound);
        }
        self.running.time_out(&tenant);
        Ok(self.stages(&tenant))
    }

    /// Answers with what arrived.
    pub(crate) fn mirror(&self, asked: &Asked<'_>, method: &str, is_protected: bool, body: &[u8]) -> Answer {
        if asked.simulate == Some(b"endless") {
            return Answer::json(200, &"").stream(100, End::Never, "application/octet-stream");
        }
        let id = uuid::Uuid::new_v4().to_string();
        let document = serde_json::json!({
            "id": id,
            "method": method,
            "is_protected": is_protected,
            "body": String::from_utf8_lossy(body),
            // Enough to be worth compressing.
            "padding": "p".repeat(1500),
        });
        Answer::json(200, &document).header("x-request-id", id).header("x-unnamed", "1")
    }

    /// Takes a notice, if it has an amount.
    pub(crate) fn take_notice(&self, body: &[u8]) -> Answer {
        let notice: serde_json::Value = serde_json::from_slice(body).unwrap_or_default();
        if !notice["amount"].is_u64() {
            return Answer::json(422, &serde_json::json!({ "error": "a notice needs an amount" }));
        }
        let id = uuid::Uuid::new_v4().to_string();
        let location = format!("{NOTICES}/{id}");
        Answer::json(201, &serde_json::json!({ "id": id })).header("location", location)
    }

    pub(crate) fn show_description(&self) -> Answer {
        Answer::json(200, &openapi::describe(&self.policy(), &self.quotes_policy()))
    }

    pub(crate) fn show_health(&self) -> Answer {
        Answer::json(200, &serde_json::json!({ "status": "ok" }))
    }

    pub(crate) async fn show_store_health(&self, asked: Asked<'_>) -> Answered {
        self.expect_operator(&asked)?;
        Ok(self.store_health().await)
    }

    pub(crate) fn show_metrics(&self, asked: &Asked<'_>) -> Answered {
        self.expect_operator(asked)?;
        let page = self.metrics.as_ref().ok_or(Problem::NotFound)?.page(&self.store);
        let headers = vec![("content-type", b"text/plain; version=0.0.4; charset=utf-8".to_vec())];
        Ok(Answer { status: 200, headers, body: Body::Whole(page.into()), directives: None })
    }

    fn expect_operator(&self, asked: &Asked<'_>) -> Result<(), Problem> {
        let operator = self.config.operator_token.as_ref().ok_or(Problem::NotFound)?;
        bearer_token(asked).filter(|token| operator.is(token)).map(drop).ok_or(Problem::Unauthenticated)
    }

    async fn store_health(&self) -> Answer {
        match self.store.health().await {
            Ok(health) => {
                let Health { store, version, counted, count, cache } = health;
                let contract = self.config.contract.name();
                let mut document = serde_json::json!({
                    "status": "ok", "store": store, "version": version, "contract": contract, (counted): count
                });
                if let Some(metrics) = cache {
                    document["cache"] = cache_metrics(&metrics);
                }
                Answer::json(200, &document)
            }
            Err(error) => {
                tracing::error!(error = &error as &dyn std::error::Error, "the store is not healthy");
                Answer::json(503, &serde_json::json!({ "status": "unavailable" }))
            }
        }
    }

    /// The tenant: in this example, the bearer token that the client sends. A real service looks up the account of the token,
    /// and names that: principals are stored readable, and a token is a secret.
    pub(crate) fn tenant(&self, asked: &Asked<'_>) -> Option<String> {
        let token = bearer_token(asked)?;
        let is_known = self.config.tenants.is_empty() || self.config.tenants.iter().any(|tenant| tenant == token);
        // A record would show the operator's token.
        let is_operator = self.config.operator_token.as_ref().is_some_and(|operator| operator.is(token));
        (is_known && !is_operator).then(|| token.to_owned())
    }
}

fn bearer_token<'a>(asked: &Asked<'a>) -> Option<&'a str> {
    let value = std::str::from_utf8(asked.authorization?).ok()?;
    let (scheme, token) = value.split_once(' ')?;
    let token = token.trim();
    (scheme.eq_ignore_ascii_case("bearer") && !token.is_empty()).then_some(token)
}

/// The resident memory of this process in bytes, if the system reports it.
fn memory_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let kibibytes = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB"))?;
    Some(kibibytes.parse::<u64>().ok()? * 1024)
}

fn cache_metrics(metrics: &HybridMetrics) -> serde_json::Value {
    serde_json::json!({
        "is_open": metrics.is_open,
        "opened": metrics.opened,
        "failures": metrics.fast_failures,
        "skipped": metrics.fast_skipped,
        "unreadable": metrics.unreadable,
        "replays": { "cache": metrics.fast_replays, "store": metrics.durable_replays },
        "in_progress": { "cache": metrics.fast_in_progress, "store": metrics.durable_in_progress },
    })
}
