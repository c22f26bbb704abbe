//! How the two stores work together, each default with its reason.

use std::time::Duration;

/// How a [`HybridStore`](crate::HybridStore) uses its fast store.
#[derive(Debug, Clone)]
pub struct HybridConfig {
    pub(crate) locks: bool,
    pub(crate) caches: bool,
    pub(crate) replays_while_durable_fails: bool,
    pub(crate) patience: Duration,
}

impl HybridConfig {
    /// Locks and cache, with every default.
    #[must_use]
    pub fn new() -> Self {
        Self { locks: true, caches: true, replays_while_durable_fails: true, patience: Duration::from_millis(200) }
    }

    /// Lets the durable store turn duplicates away. Default: the fast store does, so the durable store need not read a
    /// record that its owner is about to change.
    #[must_use]
    pub fn without_locks(mut self) -> Self {
        self.locks = false;
        self
    }

    /// Lets the durable store serve replays. Default: the fast store does, from copies of the settled records with their
    /// responses.
    #[must_use]
    pub fn without_cache(mut self) -> Self {
        self.caches = false;
        self
    }

    /// Serves no replays from the fast store while the durable store does not answer.
    ///
    /// A process notices that only when it asks the durable store, which it does not do for a replay. Default: the fast
    /// store still serves replays, since a final answer does not change. Only requests that need a decision fail.
    #[must_use]
    pub fn without_replays_while_durable_fails(mut self) -> Self {
        self.replays_while_durable_fails = false;
        self
    }

    /// Sets the timeout of each call to the fast store, at least 1 ms. Default 200 ms: twice the timeout of a
    /// `RedisFastStore`, which should notice first that its server does not answer.
    #[must_use]
    pub fn patience(mut self, patience: Duration) -> Self {
        self.patience = patience.max(Duration::from_millis(1));
        self
    }
}

impl Default for HybridConfig {
    fn default() -> Self {
        Self::new()
    }
}
