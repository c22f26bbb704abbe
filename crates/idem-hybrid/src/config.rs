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
    /// Both sides, with every default.
    #[must_use]
    pub fn new() -> Self {
        Self { locks: true, caches: true, replays_while_durable_fails: true, patience: Duration::from_millis(200) }
    }

    /// Lets the durable store turn duplicates away. Default: the fast store does, which spares the other one a look at a
    /// record that somebody is about to change.
    #[must_use]
    pub fn without_locks(mut self) -> Self {
        self.locks = false;
        self
    }

    /// Lets the durable store replay. Default: the fast store does, which has copies of the settled records then, answers
    /// and all.
    #[must_use]
    pub fn without_cache(mut self) -> Self {
        self.caches = false;
        self
    }

    /// Replays nothing while the durable store does not answer, as far as this process has noticed: a process that is asked
    /// for nothing but replays does not ask it. Default: what the fast store has is replayed all the same, since a settled
    /// record does not change; only what needs a decision is refused.
    #[must_use]
    pub fn without_replays_while_durable_fails(mut self) -> Self {
        self.replays_while_durable_fails = false;
        self
    }

    /// How long the fast store is waited for, each time it is asked, at least 1 ms. Default 200 ms: twice the timeout of a
    /// `RedisFastStore`, which should notice by itself that its server does not answer.
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
