//! How jobs behave, each default with its reason.

use std::num::NonZeroU32;
use std::time::Duration;

/// Longer than anything is awaited, and short enough for the arithmetic of every clock.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// Settings of jobs. Durations are a year at most. The processes that enqueue and those that work need the same ones.
#[derive(Debug, Clone)]
pub struct JobSettings {
    pub(crate) deadline: Duration,
    pub(crate) longest_run: Duration,
    pub(crate) hold: Duration,
    pub(crate) poll: Duration,
    pub(crate) most_unreported: u32,
    pub(crate) concurrency: NonZeroU32,
    pub(crate) queue_timeout: Duration,
    pub(crate) location: String,
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
            deadline: Duration::from_secs(60 * 60),
            longest_run: Duration::from_secs(15 * 60),
            hold: Duration::from_secs(30),
            poll: Duration::from_secs(1),
            most_unreported: 5,
            concurrency: NonZeroU32::new(16).unwrap_or(NonZeroU32::MIN),
            queue_timeout: Duration::from_secs(5),
            location: "/jobs/".to_owned(),
            see_other: false,
        }
    }

    /// How long after its request a job may still start, at least 1 s. Default 1 h: a client that hears nothing for longer has
    /// asked somebody. After it, the job has failed with a 504. A run that has begun may end.
    ///
    /// The database's clock decides.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline.clamp(Duration::from_secs(1), LONGEST);
        self
    }

    /// How long a run takes at most. Default 15 min. It decides how long the record of the request is kept: deadline, longest run
    /// and the retention of the job's record. A run that takes longer is not cancelled.
    #[must_use]
    pub fn longest_run(mut self, limit: Duration) -> Self {
        self.longest_run = limit.min(LONGEST);
        self
    }

    /// How long a claimed job is hidden from other workers, at least 1 s. Default 30 s, like a lease. A worker that lives holds
    /// its jobs for as long as they run. After a crash, a job waits for this long.
    #[must_use]
    pub fn hold(mut self, hold: Duration) -> Self {
        self.hold = hold.clamp(Duration::from_secs(1), LONGEST);
        self
    }

    /// How often a worker without work asks the queue, at least every 10 ms. Default 1 s, which costs a database next to
    /// nothing. A job of this process wakes its worker at once.
    #[must_use]
    pub fn poll(mut self, interval: Duration) -> Self {
        self.poll = interval.clamp(Duration::from_millis(10), LONGEST);
        self
    }

    /// How many deliveries may disappear without a report, before a job is parked. Default 5: a few restarts of innocent workers
    /// must not park it, and a job that kills its process must not kill it for ever.
    ///
    /// Under AtLeastOnce the record counts attempts that crash, so a job is parked only if workers disappear more often than
    /// [`max_attempts`](idem_core::engine::Settings::max_attempts) and this limit together.
    #[must_use]
    pub fn most_unreported(mut self, limit: u32) -> Self {
        self.most_unreported = limit;
        self
    }

    /// How many jobs a worker runs at once. Default 16.
    #[must_use]
    pub fn concurrency(mut self, limit: NonZeroU32) -> Self {
        self.concurrency = limit;
        self
    }

    /// How long to wait for the queue's database. Default 5 s.
    #[must_use]
    pub fn queue_timeout(mut self, limit: Duration) -> Self {
        self.queue_timeout = limit.min(LONGEST);
        self
    }

    /// The path under which clients find a job; its id follows. Default `/jobs/`.
    #[must_use]
    pub fn location(mut self, prefix: impl Into<String>) -> Self {
        self.location = prefix.into();
        self
    }

    /// [`show`](crate::Jobs::show) answers 303 when the job has completed with a `Location`. Default off: the result is in the
    /// answer.
    #[must_use]
    pub fn see_other(mut self) -> Self {
        self.see_other = true;
        self
    }
}
