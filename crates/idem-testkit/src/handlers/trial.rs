//! What to try, and how.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Request, Response};
use http_body::Body;
use http_body_util::Full;
use idem_core::engine::Contract;
use tower_service::Service;

use super::process::{Start, call_of};
use crate::faults::Faults;
use crate::subject::TimeControl;

pub(super) type Counting = Arc<dyn Fn() -> Pin<Box<dyn Future<Output = u64> + Send>> + Send + Sync>;
pub(super) type Requests = Arc<dyn Fn() -> Request<Bytes> + Send + Sync>;
pub(super) type PutKey = Arc<dyn Fn(&mut Request<Bytes>, &str) + Send + Sync>;

/// A service, the request to try, and how to count its effects.
pub struct Trial {
    pub(super) contract: Contract,
    pub(super) start: Start,
    pub(super) request: Requests,
    pub(super) effects: Counting,
    pub(super) refused: Option<Requests>,
    pub(super) time: Option<Arc<dyn TimeControl>>,
    pub(super) lease: Duration,
    pub(super) put_key: PutKey,
    pub(super) body_is_kept: bool,
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
        S: Service<Request<Full<Bytes>>, Response = Response<R>> + Clone + Send + 'static,
        S::Error: fmt::Debug,
        S::Future: Send,
        R: Body + Send + 'static,
        R::Data: Send,
        R::Error: fmt::Debug,
    {
        let start = Arc::new(start);
        Self {
            contract,
            start: Arc::new(move |faults| {
                let start = Arc::clone(&start);
                Box::pin(async move { call_of(start(faults).await) })
            }),
            request: Arc::new(request),
            effects: Arc::new(move || Box::pin(effects())),
            refused: None,
            time: None,
            lease: Duration::from_secs(30),
            put_key: Arc::new(|request, key| {
                let quoted = HeaderValue::from_str(&format!("\"{key}\"")).expect("a key is hex");
                request.headers_mut().insert("idempotency-key", quoted);
            }),
            body_is_kept: true,
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

    /// Puts the key, 32 hexadecimal digits, into a request. Default: the header `Idempotency-Key`, quoted.
    ///
    /// Needed where the policy takes the key from another header or from the body.
    #[must_use]
    pub fn put_key(mut self, put: impl Fn(&mut Request<Bytes>, &str) + Send + Sync + 'static) -> Self {
        self.put_key = Arc::new(put);
        self
    }

    /// Repeats get no body, as with `HttpPolicy::key_only` or `do_not_retain_body`: the status is the first one, or 410.
    #[must_use]
    pub fn body_is_not_kept(mut self) -> Self {
        self.body_is_kept = false;
        self
    }
}

impl fmt::Debug for Trial {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Trial").field("contract", &self.contract).finish_non_exhaustive()
    }
}
