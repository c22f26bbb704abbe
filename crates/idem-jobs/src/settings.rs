//! How jobs behave, each default with its reason.

use std::num::NonZeroU32;
use std::time::Duration;

use crate::job::SUSPECT_FROM;

/// Longer than anything is awaited, and short enough for the arithmetic of every clock.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// Settings of jobs. Durations are a year at most. The processes that enqueue and those that work need the same ones.
#[derive(Debug, Clone)]
pub struct JobSettings {
    pub(crate) start_deadline: Duration,
    pub(crate) visibility_timeout: Duration,
    pub(crate) poll_interval: Duration,
    pub(crate) max_lost_deliveries: u32,
    pub(crate) concurrency: NonZeroU32,
    pub(crate) queue_timeout: Duration,
    pub(crate) location_prefix: String,
    pub(crate) see_other: bool,
}

impl Default for JobSettings {
    fn default() -> Self {
        Self::new()
    }
}

impl JobSettings {
    /// The defaults.
    #[must_use]
    pub fn new() -> Self {
        Self {
            start_deadline: Duration::from_secs(60 * 60),
            visibility_timeout: Duration::from_secs(30),
            poll_interval: Duration::from_secs(1),
            max_lost_deliveries: 5,
            concurrency: NonZeroU32::new(16).unwrap_or(NonZeroU32::MIN),
            queue_timeout: Duration::from_secs(5),
            location_prefix: "/jobs/".to_owned(),
            see_other: false,
        }
    }

    /// How long after its request a job may still start, at least 1 s. Default 1 h: by then a client has given up. A job that has
    /// not started by then never does, and has failed with a 504. Started jobs go on, also with further attempts.
    ///
    /// On Postgres, a run that was rolled back counts as not started. The database's clock decides. The engine must keep results for
    /// at least as long as the deadline and its [`renewal_limit`](idem_core::engine::Settings::renewal_limit) together.
    #[must_use]
    pub fn start_deadline(mut self, deadline: Duration) -> Self {
        self.start_deadline = deadline.clamp(Duration::from_secs(1), LONGEST);
        self
    }

    /// How long a claimed job is hidden from other workers, at least 1 s. Default 30 s, like a lease. A worker that lives extends
    /// it, up to the engine's [`renewal_limit`](idem_core::engine::Settings::renewal_limit). After a crash, a job waits for this
    /// long.
    #[must_use]
    pub fn visibility_timeout(mut self, timeout: Duration) -> Self {
        self.visibility_timeout = timeout.clamp(Duration::from_secs(1), LONGEST);
        self
    }

    /// How often a worker without work asks the queue, at least every 10 ms. Default 1 s, which costs a database next to
    /// nothing. A job that was enqueued in the worker's process wakes it: for the next half second it asks more often.
    #[must_use]
    pub fn poll_interval(mut self, interval: Duration) -> Self {
        self.poll_interval = interval.max(Duration::from_millis(10)).min(LONGEST);
        self
    }

    /// After how many lost deliveries a job is parked, at least 3. Default 5: restarts of workers must not park an innocent job, and
    /// a job that kills its process must not kill it for ever.
    ///
    /// A job that was lost twice runs alone. Each further loss counts only if its handler was about to start.
    ///
    /// A delivery is lost if its worker disappears, or if its transaction cannot be committed. A run that leaves an attempt in the
    /// record starts the count again, because the record limits attempts. Under AtLeastOnce,
    /// [`max_attempts`](idem_core::engine::Settings::max_attempts) is added, so that steps can be undone first.
    #[must_use]
    pub fn max_lost_deliveries(mut self, limit: u32) -> Self {
        self.max_lost_deliveries = limit.max(SUSPECT_FROM + 1);
        self
    }

    /// How many jobs a worker runs at once. Default 16. One suspect may run in addition.
    #[must_use]
    pub fn concurrency(mut self, limit: NonZeroU32) -> Self {
        self.concurrency = limit;
        self
    }

    /// How long to wait for the queue's database, at least 100 ms. Default 5 s. It must be less than a third of the visibility
    /// timeout.
    #[must_use]
    pub fn queue_timeout(mut self, timeout: Duration) -> Self {
        self.queue_timeout = timeout.clamp(Duration::from_millis(100), LONGEST);
        self
    }

    /// The start of the `Location` of a 202; the id of the job follows. Default `/jobs/`.
    ///
    /// If it changes, repeats of earlier requests get their first 202 and no final answer.
    #[must_use]
    pub fn location_prefix(mut self, prefix: impl Into<String>) -> Self {
        self.location_prefix = prefix.into();
        self
    }

    /// [`status`](crate::Jobs::status) answers 303 when the job has completed with a `Location`. Default off: the result is in
    /// the answer.
    #[must_use]
    pub fn see_other(mut self) -> Self {
        self.see_other = true;
        self
    }
}
