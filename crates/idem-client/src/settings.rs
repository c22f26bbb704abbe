//! How a client retries, each default with its reason.

use std::sync::Arc;
use std::time::Duration;

use crate::backoff::Backoff;
use crate::keep::{Keep, Rules};
use crate::observer::Observer;
use crate::profile::Profile;
use crate::table::RetryPolicy;

/// How a client retries.
#[derive(Debug, Clone)]
pub struct Settings {
    pub(crate) policy: RetryPolicy,
    pub(crate) backoff: Backoff,
    pub(crate) attempt_timeout: Duration,
    pub(crate) deadline: Duration,
    pub(crate) wait: Duration,
    pub(crate) bare_key: bool,
    pub(crate) retention: Option<Duration>,
    pub(crate) retries_per_second: u32,
    pub(crate) retry_share: f32,
    pub(crate) body_limit: usize,
    pub(crate) observer: Option<Arc<dyn Observer>>,
    pub(crate) keep: Option<Arc<dyn Keep>>,
}

impl Settings {
    /// The defaults for servers of this profile.
    #[must_use]
    pub fn new(profile: Profile) -> Self {
        Self::of(RetryPolicy::new(profile))
    }

    /// The defaults with these rules.
    #[must_use]
    pub fn of(policy: RetryPolicy) -> Self {
        let bare_key = policy.profile() == Profile::Stripe;
        Self {
            policy,
            backoff: Backoff::default(),
            attempt_timeout: Duration::from_secs(30),
            deadline: Duration::from_secs(120),
            wait: Duration::from_secs(20),
            bare_key,
            retention: None,
            retries_per_second: 10,
            retry_share: 0.2,
            body_limit: 1024 * 1024,
            observer: None,
            keep: None,
        }
    }

    /// The pauses between attempts for which the server names no wait.
    #[must_use]
    pub fn backoff(mut self, backoff: Backoff) -> Self {
        self.backoff = backoff;
        self
    }

    /// How long one attempt may take, from its connection to the end of its answer.
    ///
    /// Default 30 s: longer than a request may wait for the run of another one (20 s).
    #[must_use]
    pub fn attempt_timeout(mut self, timeout: Duration) -> Self {
        self.attempt_timeout = timeout;
        self
    }

    /// How long an operation may take with all of its attempts and pauses.
    ///
    /// Default 2 min. A server that crashed frees or answers a key after one lease, 30 s by default; this is time for two of them
    /// and a restart.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// How long the server may wait for the run of another request with the same key, by `Prefer: wait=N` (RFC 7240), in whole
    /// seconds. Zero sends no such field; neither does a request that has a `Prefer`, nor one to Stripe.
    ///
    /// Default 20 s, and at most two thirds of [`attempt_timeout`](Self::attempt_timeout), so that the server answers before the
    /// attempt ends.
    #[must_use]
    pub fn wait(mut self, wait: Duration) -> Self {
        self.wait = wait;
        self
    }

    /// Sends keys as they are, without the quotes of RFC 8941. Default: quoted, but bare for Stripe.
    #[must_use]
    pub fn bare_keys(mut self, bare: bool) -> Self {
        self.bare_key = bare;
        self
    }

    /// How long the server keeps an answer, as its documentation says. If an answer states less by `Idempotency-Retention`, that
    /// counts. A server that keeps answers for less than the profile's time needs this setting: the answer that would say so can
    /// be lost.
    ///
    /// Default: the time of the profile. With [`Profile::Idem`], what answers to the operation have stated counts instead.
    #[must_use]
    pub fn retention(mut self, retention: Duration) -> Self {
        self.retention = Some(retention);
        self
    }

    /// How many retries a host gets from this client, together from all of its operations: `per_second`, and `share` of the
    /// number of operations. A retry beyond that waits, and asks again after a pause. The retries of up to 5 s may come at once.
    /// `share` is cut to 0 to 1000, and `per_second` to 1,000,000; an odd one counts as the next even one.
    ///
    /// Default: 10 a second, and 0.2. So a server that is down gets a fifth more requests at most, and a client with few
    /// operations still retries.
    #[must_use]
    pub fn retry_budget(mut self, per_second: u32, share: f32) -> Self {
        self.retries_per_second = per_second.min(1_000_000);
        self.retry_share = if share.is_finite() { share.clamp(0.0, 1000.0) } else { 0.0 };
        self
    }

    /// The largest answer that is read whole before the caller gets it, in bytes. The rest of a larger one is not protected: if
    /// it breaks off, the caller sees the error.
    ///
    /// Default 1 MiB, which is also the largest answer that a server with idem stores. Of a 4xx or 5xx, at least
    /// [`Answer::PROBLEM_BYTES`](crate::Answer::PROBLEM_BYTES) are read, whatever the limit: what to do is in its body.
    #[must_use]
    pub fn body_limit(mut self, bytes: usize) -> Self {
        self.body_limit = bytes;
        self
    }

    /// What sees the progress of operations. Default: none.
    #[must_use]
    pub fn observer(mut self, observer: Arc<dyn Observer>) -> Self {
        self.observer = Some(observer);
        self
    }

    /// Keeps each operation in a journal from before its first send until it has a final answer. Default: none.
    #[cfg(feature = "journal")]
    #[must_use]
    pub fn journal(mut self, journal: crate::Journal) -> Self {
        self.keep = Some(Arc::new(journal));
        self
    }

    /// The wait that a request asks for, in whole seconds.
    pub(crate) fn wait_s(&self) -> u64 {
        if self.policy.profile() == Profile::Stripe {
            return 0;
        }
        self.wait.min(self.attempt_timeout / 3 * 2).as_secs()
    }

    /// How long after the first send a repeat is safe. A tenth of the retention is left out, for the time that a request spends
    /// in queues and proxies, and for clocks that run at different speeds.
    pub(crate) fn repeatable_for(&self, rules: Rules, stated: Option<Duration>) -> Duration {
        let retention = shorter(rules.retention, stated).unwrap_or_else(|| self.policy.profile().retention());
        retention - retention / 10
    }

    /// What has to stay the same when an operation is resumed.
    pub(crate) fn rules(&self) -> Rules {
        let retention = self.retention.or_else(|| self.policy.profile().promised_retention());
        Rules { bare_key: self.bare_key, retention }
    }
}

/// The shorter of two times, as far as they are known.
pub(crate) fn shorter(one: Option<Duration>, other: Option<Duration>) -> Option<Duration> {
    one.into_iter().chain(other).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shorter_of_two_known_retentions_counts() {
        let seconds = Duration::from_secs;
        let repeatable = |settings: &Settings, stated| settings.repeatable_for(settings.rules(), stated);
        let told = Settings::new(Profile::Idem);
        assert_eq!(repeatable(&told, None), seconds(24 * 3600 / 10 * 9));
        assert_eq!(repeatable(&told, Some(seconds(100))), seconds(90));
        assert_eq!(repeatable(&told, Some(seconds(100 * 3600))), seconds(90 * 3600));
        let promised = Settings::new(Profile::IetfDraft { retention: seconds(1000) });
        for settings in [told.retention(seconds(1000)), promised] {
            assert_eq!(repeatable(&settings, None), seconds(900));
            assert_eq!(repeatable(&settings, Some(seconds(100))), seconds(90));
            assert_eq!(repeatable(&settings, Some(seconds(100 * 3600))), seconds(900));
        }
    }

    #[test]
    fn the_server_answers_before_the_attempt_ends() {
        let settings = Settings::new(Profile::Idem);
        assert_eq!(settings.wait_s(), 20);
        assert_eq!(settings.clone().attempt_timeout(Duration::from_secs(6)).wait_s(), 4);
        assert_eq!(settings.wait(Duration::ZERO).wait_s(), 0);
        assert_eq!(Settings::new(Profile::Stripe).wait_s(), 0);
    }
}
