//! The offset by which tests move the time of a store whose server keeps the clock.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

/// The offset that a store adds to its server's clock: zero, except in tests. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct TimeOffset(Arc<AtomicI64>);

impl TimeOffset {
    /// Moves the time forward for every verb that begins afterwards. Saturates.
    pub fn advance(&self, by: Duration) {
        let by = i64::try_from(by.as_micros()).unwrap_or(i64::MAX);
        // The closure never returns `None`, so the update never fails.
        let _ = self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |offset| Some(offset.saturating_add(by)));
    }

    /// How far it was moved, in microseconds.
    #[must_use]
    pub fn micros(&self) -> i64 {
        self.0.load(Ordering::SeqCst)
    }
}
