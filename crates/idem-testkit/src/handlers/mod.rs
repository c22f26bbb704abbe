//! Trials of handlers: whether an operation behind the layer is safe to repeat.
//!
//! A [`Trial`] starts the service on separate runtimes, which stand for processes. It sends one request in several ways, and counts
//! the effects:
//!
//! - twice, and eight times at once;
//! - from a client that disconnects;
//! - to a process that crashes before the handler runs, and to one that crashes between the effect and its record.

mod broken;
mod process;

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Request, Response, StatusCode, header};
use http_body::Body;
use http_body_util::Full;
use idem_core::OwnerToken;
use idem_core::engine::Contract;
use tower_service::Service;

pub use broken::Broken;
use process::{Process, Start, call_of};

use crate::faults::{Fault, Faults, Verb};
use crate::subject::TimeControl;

/// How many requests are sent at once.
const AT_ONCE: usize = 8;

/// How long to wait for what must come, and the pause between two checks.
const PATIENCE: Duration = Duration::from_secs(20);
const PAUSE: Duration = Duration::from_millis(10);

/// Longer than a trial takes.
const NEVER: Duration = Duration::from_secs(3_600);

type Counting = Arc<dyn Fn() -> Pin<Box<dyn Future<Output = u64> + Send>> + Send + Sync>;
type Requests = Arc<dyn Fn() -> Request<Bytes> + Send + Sync>;
type Answer = Result<Response<Bytes>, Broken>;

/// A service, the request to try, and how to count its effects.
pub struct Trial {
    contract: Contract,
    start: Start,
    request: Requests,
    effects: Counting,
    refused: Option<Requests>,
    time: Option<Arc<dyn TimeControl>>,
    lease: Duration,
    key_header: HeaderName,
}

impl Trial {
    /// A trial of the service that `start` makes, which promises `contract`.
    ///
    /// - `start` is called once for each process, on its runtime. Open the store in it, wrap it with [`Faults::wrap`], and return
    ///   the service with its layer.
    /// - `request` makes the request, always the same. The trial adds the idempotency key.
    /// - `effects` counts the effects of all requests so far, as others see them. Under AtLeastOnce, effects with the same
    ///   downstream key count once.
    pub fn new<S, R, Started, Counted>(
        contract: Contract,
        start: impl Fn(Faults) -> Started + Send + Sync + 'static,
        request: impl Fn() -> Request<Bytes> + Send + Sync + 'static,
        effects: impl Fn() -> Counted + Send + Sync + 'static,
    ) -> Self
    where
        Started: Future<Output = S> + Send + 'static,
        Counted: Future<Output = u64> + Send + 'static,
        S: Service<Request<Full<Bytes>>, Response = Response<R>> + Clone + Send + Sync + 'static,
        S::Error: fmt::Debug,
        S::Future: Send,
        R: Body + Send + 'static,
        R::Data: Send,
        R::Error: fmt::Debug,
    {
        Self {
            contract,
            start: Arc::new(move |faults| {
                let started = start(faults);
                Box::pin(async move { call_of(started.await) })
            }),
            request: Arc::new(request),
            effects: Arc::new(move || Box::pin(effects())),
            refused: None,
            time: None,
            lease: Duration::from_secs(30),
            key_header: HeaderName::from_static("idempotency-key"),
        }
    }

    /// Also tries a request that the handler answers with an error (4xx or 5xx), which must leave no effect.
    #[must_use]
    pub fn refused(mut self, request: impl Fn() -> Request<Bytes> + Send + Sync + 'static) -> Self {
        self.refused = Some(Arc::new(request));
        self
    }

    /// Moves the store's time past the lease of a process that has ended. Without it, the trial waits for the lease to end:
    /// give the engine a short lease then.
    #[must_use]
    pub fn time(mut self, time: Arc<dyn TimeControl>) -> Self {
        self.time = Some(time);
        self
    }

    /// The lease of the engine. Default 30 s, which is the engine's.
    #[must_use]
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// The header that carries the key. Default `Idempotency-Key`.
    #[must_use]
    pub fn key_header(mut self, name: HeaderName) -> Self {
        self.key_header = name;
        self
    }

    /// Runs the trial.
    ///
    /// # Errors
    /// The first promise that does not hold.
    ///
    /// # Panics
    /// When the service does not start.
    pub async fn check(&self) -> Result<(), Broken> {
        self.twice().await?;
        self.at_once().await?;
        self.disconnected().await?;
        self.refuses().await?;
        self.crashed_before_it_ran().await?;
        self.crashed_before_it_was_recorded().await
    }

    async fn twice(&self) -> Result<(), Broken> {
        let (process, key, before) = (self.process().await, key(), self.effects().await);
        let first = self.answer(&process, &key).await?;
        if !first.status().is_success() && !first.status().is_redirection() {
            return Err(Broken::FirstRequestFailed(first.status()));
        }
        match self.effects_since(before).await {
            0 => return Err(Broken::AnsweredTooEarly),
            1 => {}
            many => return Err(Broken::ManyEffects(many)),
        }
        let repeat = self.answer(&process, &key).await?;
        if self.effects_since(before).await > 1 {
            return Err(Broken::RepeatRan);
        }
        same(&first, &repeat)
    }

    async fn at_once(&self) -> Result<(), Broken> {
        let (process, key, before) = (self.process().await, key(), self.effects().await);
        let sent: Vec<_> = (0..AT_ONCE).map(|_| process.send(self.keyed(&self.request, &key))).collect();
        let mut answers = Vec::new();
        for sent in sent {
            answers.push(told(sent.await)?);
        }
        if self.effects_since(before).await > 1 {
            return Err(Broken::RanAtOnce(AT_ONCE));
        }
        let first = self.answer(&process, &key).await?;
        answers.iter().filter(|answer| !asks_to_repeat(answer)).try_for_each(|answer| same(&first, answer))
    }

    async fn disconnected(&self) -> Result<(), Broken> {
        let (process, key, before) = (self.process().await, key(), self.effects().await);
        let sent = process.send(self.keyed(&self.request, &key));
        self.until(|| sent.is_finished() || asked(&process.faults) > 0).await;
        sent.abort();
        let answer = self.answer(&process, &key).await?;
        match self.effects_since(before).await {
            _ if asks_to_repeat(&answer) => Err(Broken::Stuck(answer.status())),
            1 => Ok(()),
            _ => Err(Broken::RanAfterDisconnect),
        }
    }

    async fn refuses(&self) -> Result<(), Broken> {
        let Some(request) = &self.refused else { return Ok(()) };
        let (process, before) = (self.process().await, self.effects().await);
        let answer = told(process.send(self.keyed(request, &key())).await)?;
        match self.effects_since(before).await {
            0 => Ok(()),
            _ => Err(Broken::RefusedWithEffect(answer.status())),
        }
    }

    async fn crashed_before_it_ran(&self) -> Result<(), Broken> {
        let (key, before) = (key(), self.effects().await);
        self.crash_at([Verb::Acquire, Verb::Begin], Fault::LostAnswer, &key).await?;
        self.repeat_after_crash(&key).await?;
        match (self.effects_since(before).await, self.contract) {
            (1, _) | (0, Contract::AtMostOnce) => Ok(()),
            (effects, contract) => Err(Broken::AfterCrash { effects, contract }),
        }
    }

    async fn crashed_before_it_was_recorded(&self) -> Result<(), Broken> {
        let (key, before) = (key(), self.effects().await);
        self.crash_at([Verb::Settle, Verb::Finish], Fault::Late(NEVER), &key).await?;
        if self.contract == Contract::Transactional && self.effects_since(before).await > 0 {
            return Err(Broken::WroteOutside);
        }
        self.repeat_after_crash(&key).await?;
        match (self.effects_since(before).await, self.contract) {
            (1, _) => Ok(()),
            (effects, contract) => Err(Broken::AfterCrash { effects, contract }),
        }
    }

    /// Ends a process during one of the verbs.
    async fn crash_at(&self, verbs: [Verb; 2], fault: Fault, key: &HeaderValue) -> Result<(), Broken> {
        let process = self.process().await;
        verbs.into_iter().for_each(|verb| process.faults.next(verb, fault));
        let sent = process.send(self.keyed(&self.request, key));
        self.until(|| sent.is_finished() || process.faults.fired() > 0).await;
        if process.faults.fired() == 0 { Err(Broken::StoreNotWrapped) } else { Ok(()) }
    }

    /// The repeat in a new process, after the lease of the one that has ended.
    async fn repeat_after_crash(&self, key: &HeaderValue) -> Answer {
        if let Some(time) = &self.time {
            time.advance(self.lease);
        }
        let process = self.process().await;
        let answer = self.answer(&process, key).await?;
        if asks_to_repeat(&answer) { Err(Broken::Stuck(answer.status())) } else { Ok(answer) }
    }

    /// The answer to a request. While the answer asks for a repeat, the request is sent again.
    async fn answer(&self, process: &Process, key: &HeaderValue) -> Answer {
        let start = Instant::now();
        loop {
            let answer = told(process.send(self.keyed(&self.request, key)).await)?;
            if !asks_to_repeat(&answer) || start.elapsed() > self.patience() {
                return Ok(answer);
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    async fn process(&self) -> Process {
        Process::start(&self.start).await
    }

    async fn effects(&self) -> u64 {
        (self.effects)().await
    }

    async fn effects_since(&self, before: u64) -> u64 {
        self.effects().await.saturating_sub(before)
    }

    fn keyed(&self, request: &Requests, key: &HeaderValue) -> Request<Bytes> {
        let mut request = request();
        request.headers_mut().insert(&self.key_header, key.clone());
        request
    }

    fn patience(&self) -> Duration {
        PATIENCE + if self.time.is_some() { Duration::ZERO } else { self.lease }
    }

    async fn until(&self, mut is_so: impl FnMut() -> bool) {
        let start = Instant::now();
        while !is_so() && start.elapsed() < self.patience() {
            tokio::time::sleep(PAUSE).await;
        }
    }
}

impl fmt::Debug for Trial {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Trial").field("contract", &self.contract).finish_non_exhaustive()
    }
}

/// Tries a handler; see [`Trial::check`].
///
/// # Panics
/// With a sentence that says which promise the handler breaks.
pub async fn assert_idempotent(trial: &Trial) {
    if let Err(broken) = trial.check().await {
        panic!("{broken}");
    }
}

fn key() -> HeaderValue {
    let hex: String = OwnerToken::random().as_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    HeaderValue::from_str(&format!("\"{hex}\"")).expect("hex is a header value")
}

fn asked(faults: &Faults) -> u64 {
    faults.calls(Verb::Acquire) + faults.calls(Verb::Begin)
}

fn told(sent: Result<Result<Response<Bytes>, String>, tokio::task::JoinError>) -> Answer {
    match sent {
        Ok(answered) => answered.map_err(Broken::NoAnswer),
        Err(error) => Err(Broken::NoAnswer(error.to_string())),
    }
}

/// Whether the client should send the same request later: it runs, is in backoff, or its store is unavailable.
fn asks_to_repeat(answer: &Response<Bytes>) -> bool {
    let statuses = [StatusCode::CONFLICT, StatusCode::SERVICE_UNAVAILABLE];
    statuses.contains(&answer.status()) && answer.headers().contains_key(header::RETRY_AFTER)
}

/// Compares status, body, content type and location. Other headers may differ, such as those of middleware around the layer.
fn same(first: &Response<Bytes>, repeat: &Response<Bytes>) -> Result<(), Broken> {
    let is_same = |name| first.headers().get(&name) == repeat.headers().get(&name);
    if first.status() == repeat.status()
        && first.body() == repeat.body()
        && is_same(header::CONTENT_TYPE)
        && is_same(header::LOCATION)
    {
        return Ok(());
    }
    Err(Broken::AnotherAnswer { first: first.status(), repeat: repeat.status() })
}
