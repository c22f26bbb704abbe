//! The seam by which tests move the time of a store whose server keeps it.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

/// What such a store adds to its server's clock: nothing, except in tests. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct TimeOffset(Arc<AtomicI64>);

impl TimeOffset {
    /// Moves the time forward, for every verb that begins afterwards. More than there is is as good as for ever.
    pub fn advance(&self, by: Duration) {
        let by = i64::try_from(by.as_micros()).unwrap_or(i64::MAX);
        // It never says no.
        let _ = self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |offset| Some(offset.saturating_add(by)));
    }

    /// How far it was moved, in microseconds.
    #[must_use]
    pub fn micros(&self) -> i64 {
        self.0.load(Ordering::SeqCst)
    }
}
