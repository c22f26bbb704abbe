//! The retry budget of each host.
//!
//! The budget of `tower` 0.5 forgets what it gave after half of its window: `expire` moves on by two of its ten slots where one
//! has passed. `reqwest::retry` uses the same one. So it is given half of the retries that are allowed.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use reqwest::Url;
use tower::retry::budget::{Budget, TpsBudget};

/// How many hosts have a separate budget. The others share one, so that a client which is given URLs by others does not grow
/// without a bound.
const MOST_HOSTS: usize = 1024;

/// The window, of which one half counts.
const WINDOW: Duration = Duration::from_secs(10);

/// The budgets by origin.
pub(crate) struct Hosts {
    per_second: u32,
    share: f32,
    budgets: Mutex<HashMap<String, Arc<TpsBudget>>>,
}

impl Hosts {
    pub(crate) fn new(per_second: u32, share: f32) -> Self {
        Self { per_second, share, budgets: Mutex::default() }
    }

    /// The budget of the host of a URL, with its scheme and port.
    pub(crate) fn budget(&self, url: &Url) -> Arc<TpsBudget> {
        let origin = url.origin().ascii_serialization();
        let mut budgets = self.budgets.lock().unwrap_or_else(PoisonError::into_inner);
        let name = if budgets.len() < MOST_HOSTS || budgets.contains_key(&origin) { origin } else { String::new() };
        let make = || Arc::new(TpsBudget::new(WINDOW, self.per_second.div_ceil(2), self.share));
        Arc::clone(budgets.entry(name).or_insert_with(make))
    }
}

/// Counts a new operation, which is no retry.
pub(crate) fn count_operation(budget: &TpsBudget) {
    budget.deposit();
}

/// Whether a retry may be sent now.
pub(crate) fn may_retry(budget: &TpsBudget) -> bool {
    budget.withdraw()
}

impl fmt::Debug for Hosts {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Hosts").field("per_second", &self.per_second).field("share", &self.share).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_budget_belongs_to_a_host_and_bounds_its_retries() {
        let hosts = Hosts::new(2, 0.2);
        let budget = |url: &str| hosts.budget(&url.parse().unwrap());
        let retries = |url: &str| (0..1000).take_while(|_| may_retry(&budget(url))).count();
        assert_eq!(retries("http://a.test/one"), 10, "two a second, five seconds ahead");
        assert_eq!(retries("http://a.test/two"), 0);
        assert_eq!(retries("http://a.test:81/one"), 10);
        for _ in 0..100 {
            count_operation(&budget("http://a.test/three"));
        }
        assert_eq!(retries("http://a.test/three"), 20, "a fifth of the operations");
    }

    #[tokio::test(start_paused = true)]
    async fn a_minute_of_retries_stays_within_the_rate() {
        let budget = Hosts::new(4, 0.0).budget(&"http://a.test/".parse().unwrap());
        let mut retries = 0;
        for _ in 0..8571 {
            retries += u32::from(may_retry(&budget));
            // Not a divisor of a slot's time, which is what happens outside of tests.
            tokio::time::advance(Duration::from_millis(7)).await;
        }
        assert!((200..=4 * 60 + 4 * 5).contains(&retries), "{retries} retries, four a second and five seconds ahead");
    }

    #[test]
    fn budgets_are_bounded() {
        let hosts = Hosts::new(1, 0.2);
        for number in 0..MOST_HOSTS + 10 {
            hosts.budget(&format!("http://host-{number}.test/").parse().unwrap());
        }
        assert_eq!(hosts.budgets.lock().unwrap().len(), MOST_HOSTS + 1);
    }
}
