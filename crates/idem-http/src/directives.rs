//! A handler's overrides for how one response settles.

use std::time::Duration;

/// A handler's overrides for one response; put them into the response's extensions.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ResponseDirectives {
    pub(crate) do_not_store: bool,
    pub(crate) retention: Option<Duration>,
    pub(crate) retryable: Option<Option<Duration>>,
    pub(crate) keep_writes: bool,
    pub(crate) body_not_retained: bool,
}

impl ResponseDirectives {
    /// No overrides.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Do not store this response: the key is free again, and the next repeat runs.
    #[must_use]
    pub fn do_not_store(mut self) -> Self {
        self.do_not_store = true;
        self
    }

    /// Keep the record for `retention` instead of the layer's retention; at least 1 s. To keep nothing, use
    /// [`do_not_store`](Self::do_not_store).
    #[must_use]
    pub fn retain_for(mut self, retention: Duration) -> Self {
        self.retention = Some(retention);
        self
    }

    /// The operation failed and had no effect: a repeat may run it after `wait`, or after the layer's backoff if `wait` is
    /// `None`.
    ///
    /// Under AtMostOnce, a failure without this directive or [`do_not_store`](Self::do_not_store) is the outcome. `wait` is
    /// also the `Retry-After` of this response, unless the handler has sent one.
    #[must_use]
    pub fn retryable_after(mut self, wait: impl Into<Option<Duration>>) -> Self {
        self.retryable = Some(wait.into());
        self
    }

    /// Under Transactional, commit the handler's writes although the status is a 4xx.
    #[must_use]
    pub fn keep_writes(mut self) -> Self {
        self.keep_writes = true;
        self
    }

    /// Do not store the body, for example of a streamed response. The record is a tombstone, and replays say so.
    #[must_use]
    pub fn do_not_retain_body(mut self) -> Self {
        self.body_not_retained = true;
        self
    }
}
