//! How an inbox behaves, each default with its reason.

use std::time::Duration;

/// From which delivery on a message is a suspect.
///
/// A message that kills its process takes the other messages of its consumer with it. Were they all handled together again,
/// innocent ones would be parked with it. So suspects are handled one at a time. One lost delivery is normal in a deployment.
pub const SUSPECT_FROM: u32 = 3;

/// Settings of an inbox. Consumers of one subscriber need the same ones.
#[derive(Debug, Clone)]
pub struct InboxSettings {
    pub(crate) max_lost_runs: u32,
    pub(crate) pause: Duration,
}

impl Default for InboxSettings {
    fn default() -> Self {
        Self::new()
    }
}

impl InboxSettings {
    /// The defaults.
    #[must_use]
    pub fn new() -> Self {
        Self { max_lost_runs: 3, pause: Duration::from_secs(1) }
    }

    /// After how many lost runs a suspect is parked, at least 1. Default 3, after two deliveries that were lost before it became a
    /// suspect: restarts of consumers must not park an innocent message, and one that kills its process must not kill it for
    /// ever.
    ///
    /// A run is lost if its process disappears. A run whose transaction cannot be committed counts too. A message that is no suspect
    /// is parked for that after [`max_attempts`](idem_core::engine::Settings::max_attempts) of the engine.
    #[must_use]
    pub fn max_lost_runs(mut self, limit: u32) -> Self {
        self.max_lost_runs = limit.max(1);
        self
    }

    /// How long a consumer pauses if the store is unavailable, at least 10 ms. Default 1 s: soon enough after a failover, and
    /// seldom enough to leave the database alone.
    #[must_use]
    pub fn pause(mut self, pause: Duration) -> Self {
        self.pause = pause.max(Duration::from_millis(10));
        self
    }
}
