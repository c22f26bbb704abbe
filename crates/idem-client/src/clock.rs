//! The time since the first send of an operation.

use std::time::{Duration, SystemTime};

use tokio::time::Instant;

/// Counts by two clocks, of which the larger time holds: the monotonic one stands still while a machine sleeps, and the wall
/// clock can be set back.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Since {
    before: Duration,
    wall: SystemTime,
    monotonic: Instant,
}

impl Since {
    /// Counts from now on, and `before` on top.
    pub(crate) fn now(before: Duration) -> Self {
        Self { before, wall: SystemTime::now(), monotonic: Instant::now() }
    }

    pub(crate) fn elapsed(&self) -> Duration {
        let by_wall = self.wall.elapsed().unwrap_or_default();
        self.before.saturating_add(by_wall.max(self.monotonic.elapsed()))
    }

    /// The time of this client's own attempts, by the monotonic clock.
    pub(crate) fn active(&self) -> Duration {
        self.monotonic.elapsed()
    }
}
