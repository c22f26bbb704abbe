//! The clocks of stores that have no server to ask for the time.

use std::fmt;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::timestamp::Timestamp;

/// The clock of an embedded store.
///
/// It belongs to the store, never to the core: decisions get the time as an argument. All processes that share a store
/// must share its clock, which for an embedded store is the machine's.
pub trait Clock: fmt::Debug + Send + Sync + 'static {
    /// The present time.
    fn now(&self) -> Timestamp;
}

/// The machine's clock.
///
/// If the clock is set back, leases and retentions last longer by as much. If it is set forward, they end earlier.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    #[expect(clippy::disallowed_methods, reason = "this is the one clock of the embedded stores")]
    fn now(&self) -> Timestamp {
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Timestamp::from_unix_micros(0).saturating_add(since_epoch)
    }
}

/// A clock for tests that moves only by [`advance`](ManualClock::advance).
#[derive(Debug)]
pub struct ManualClock(AtomicI64);

impl ManualClock {
    /// A clock that stands at `start`.
    #[must_use]
    pub const fn new(start: Timestamp) -> Self {
        Self(AtomicI64::new(start.unix_micros()))
    }

    /// Moves the clock forward.
    pub fn advance(&self, by: Duration) {
        let later = |micros| Some(Timestamp::from_unix_micros(micros).saturating_add(by).unix_micros());
        // The closure never returns `None`, so the update never fails.
        let _ = self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, later);
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Timestamp {
        Timestamp::from_unix_micros(self.0.load(Ordering::SeqCst))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_system_clock_is_past_this_librarys_first_release() {
        assert!(SystemClock.now() > Timestamp::from_unix_micros(1_700_000_000_000_000));
    }

    #[test]
    fn a_manual_clock_moves_when_told() {
        let clock = ManualClock::new(Timestamp::from_unix_micros(5));
        clock.advance(Duration::from_micros(2));
        assert_eq!(clock.now(), Timestamp::from_unix_micros(7));
    }
}
