//! The pause before a retry for which the server names none.
//!
//! `retry-policies` computes the same from the system clock; here, the table and its callers have no clock of their own.
//! `tower::retry::backoff` has no full jitter.

use std::time::Duration;

/// Capped exponential backoff with full jitter: a random pause below a bound that doubles with each retry.
///
/// Full jitter spreads the retries of many clients that failed at the same moment over the whole pause.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backoff {
    /// The bound of the first pause. Default 200 ms, about the time of a reconnect over the Internet.
    pub base: Duration,
    /// The largest bound. Default 10 s, so that a client notices within seconds that a server is back.
    pub cap: Duration,
}

impl Default for Backoff {
    fn default() -> Self {
        Self { base: Duration::from_millis(200), cap: Duration::from_secs(10) }
    }
}

impl Backoff {
    /// The bound of the pause after `failures` attempts have failed; 1 after the first one.
    #[must_use]
    pub fn bound(self, failures: u32) -> Duration {
        let doublings = failures.saturating_sub(1).min(31);
        self.base.saturating_mul(1 << doublings).min(self.cap)
    }

    /// The pause after `failures` attempts have failed. `random` is uniform in 0 to 1.
    #[must_use]
    pub fn pause(self, failures: u32, random: f64) -> Duration {
        let bound = self.bound(failures);
        Duration::try_from_secs_f64(bound.as_secs_f64() * random.clamp(0.0, 1.0)).unwrap_or(bound)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bound_doubles_up_to_the_cap() {
        let backoff = Backoff { base: Duration::from_millis(100), cap: Duration::from_secs(1) };
        let bounds = [0, 1, 2, 3, 4, 5, u32::MAX].map(|failures| backoff.bound(failures).as_millis());
        assert_eq!(bounds, [100, 100, 200, 400, 800, 1000, 1000]);
        let huge = Backoff { base: Duration::MAX, cap: Duration::MAX };
        assert_eq!((huge.bound(40), huge.pause(40, 1.0)), (Duration::MAX, Duration::MAX));
    }

    #[test]
    fn jitter_is_full() {
        let backoff = Backoff { base: Duration::from_millis(100), cap: Duration::from_secs(1) };
        assert_eq!(backoff.pause(3, 0.0), Duration::ZERO);
        assert_eq!(backoff.pause(3, 0.5), Duration::from_millis(200));
        assert_eq!(backoff.pause(3, 1.0), Duration::from_millis(400));
    }
}
