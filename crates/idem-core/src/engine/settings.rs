//! How an engine behaves, each default with its reason.

use std::fmt;
use std::num::{NonZeroU32, NonZeroUsize};
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::Semaphore;

use super::observer::Observer;
use super::probe::Probe;
use crate::machine::{OnMismatch, SHORTEST_RETENTION, Term};
use crate::record_id::RecordIdentity;

/// Longer than anything is held or awaited, and short enough that the arithmetic of every clock can take it.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// Settings of an engine. Everything has a default. Leases, waits and timeouts are a year at most.
#[derive(Clone)]
pub struct Settings {
    pub(super) identity: RecordIdentity,
    pub(super) lease: Duration,
    pub(super) renewal_limit: Duration,
    pub(super) retention: Duration,
    pub(super) wait: Duration,
    pub(super) max_wait: Duration,
    pub(super) max_waiters_per_key: NonZeroUsize,
    pub(super) max_waiters: NonZeroUsize,
    pub(super) max_running: NonZeroUsize,
    pub(super) backoff: Duration,
    pub(super) max_backoff: Duration,
    pub(super) max_attempts: NonZeroU32,
    pub(super) store_timeout: Duration,
    pub(super) on_mismatch: OnMismatch,
    pub(super) fail_open: bool,
    pub(super) probe: Option<Arc<dyn Probe>>,
    pub(super) observer: Option<Arc<dyn Observer>>,
    pub(super) runtime: Option<Handle>,
    pub(super) renewals_on: Option<Handle>,
}

impl Default for Settings {
    fn default() -> Self {
        Self::new()
    }
}

impl Settings {
    /// The defaults.
    #[must_use]
    pub fn new() -> Self {
        Self {
            identity: RecordIdentity::new("idem"),
            lease: Duration::from_secs(30),
            renewal_limit: Duration::from_secs(10 * 60),
            retention: Duration::from_secs(24 * 60 * 60),
            wait: Duration::ZERO,
            max_wait: Duration::from_secs(30),
            max_waiters_per_key: NonZeroUsize::new(1024).unwrap_or(NonZeroUsize::MIN),
            max_waiters: NonZeroUsize::new(4096).unwrap_or(NonZeroUsize::MIN),
            max_running: NonZeroUsize::new(1024).unwrap_or(NonZeroUsize::MIN),
            backoff: Duration::from_secs(1),
            max_backoff: Duration::from_secs(60),
            max_attempts: NonZeroU32::new(10).unwrap_or(NonZeroU32::MIN),
            store_timeout: Duration::from_secs(2),
            on_mismatch: OnMismatch::Refuse,
            fail_open: false,
            probe: None,
            observer: None,
            runtime: None,
            renewals_on: None,
        }
    }

    /// How record ids are made. Default: SHA-256 in the namespace `idem`; give every application that shares the store
    /// its own namespace.
    #[must_use]
    pub fn identity(mut self, identity: RecordIdentity) -> Self {
        self.identity = identity;
        self
    }

    /// How long the right to execute holds without renewal; it is renewed at a third of it.
    ///
    /// Default 30 s: a crashed owner's key is stuck for that long at most, and two renewals may fail before it is lost.
    ///
    /// A dedicated thread renews leases, so that an operation that computes or blocks for long keeps its lease.
    ///
    /// # Panics
    /// When the lease is zero.
    #[must_use]
    pub fn lease(mut self, lease: Duration) -> Self {
        assert!(!lease.is_zero(), "a lease of zero would be over before the operation begins");
        self.lease = lease.min(LONGEST);
        self
    }

    /// For how long a lease is renewed at most. Default 10 minutes: an operation that hangs must not hold its key for
    /// ever.
    #[must_use]
    pub fn renewal_limit(mut self, limit: Duration) -> Self {
        self.renewal_limit = limit.min(LONGEST);
        self
    }

    /// How long a settled record is kept, and with it the protection, at least 1 s. Default 24 h, which is what payment APIs keep.
    ///
    /// # Panics
    /// When the retention is zero.
    #[must_use]
    pub fn retention(mut self, retention: Duration) -> Self {
        assert!(!retention.is_zero(), "a retention of zero would forget every answer at once");
        self.retention = retention.max(SHORTEST_RETENTION);
        self
    }

    /// How long a duplicate waits for the answer of the run in progress, unless
    /// [`Operation::wait`](super::Operation::wait) is set.
    ///
    /// Default zero: a waiting request holds a connection, so waiting is asked for.
    #[must_use]
    pub fn wait(mut self, wait: Duration) -> Self {
        self.wait = wait;
        self
    }

    /// The longest wait that an operation may ask for. Default 30 s, which most proxies tolerate.
    #[must_use]
    pub fn max_wait(mut self, limit: Duration) -> Self {
        self.max_wait = limit.min(LONGEST);
        self
    }

    /// How many duplicates of one key may wait at once; further ones are turned away. Default 1024: more
    /// than honest clients of one operation, and few enough that one key cannot exhaust the process.
    #[must_use]
    pub fn max_waiters_per_key(mut self, limit: NonZeroUsize) -> Self {
        self.max_waiters_per_key = limit;
        self
    }

    /// The most duplicates that may wait at once over all keys; further ones are answered at once, as in progress.
    ///
    /// Default 4096. For each key, one duplicate asks the store about once a second. If each waits for another key,
    /// that is a few thousand acquires a second.
    #[must_use]
    pub fn max_waiters(mut self, limit: NonZeroUsize) -> Self {
        self.max_waiters = limit;
        self
    }

    /// The most operations that this engine runs at once; further requests get
    /// [`ExecuteError::Overloaded`](super::ExecuteError::Overloaded) before the store is asked.
    ///
    /// A client that disconnects cancels nothing, so limits around the request do not bound the operations behind it.
    /// An operation counts from its acquire until its record is settled, even after its answer while the store is
    /// unavailable.
    ///
    /// Default 1024: more than a process does well at once, and little enough memory to survive. Raise it for handlers that
    /// mostly wait.
    #[must_use]
    pub fn max_running(mut self, limit: NonZeroUsize) -> Self {
        self.max_running = limit;
        self
    }

    /// How long a retryable failure rests after its first attempt; the time doubles up to `max`. Default 1 s to 60 s:
    /// soon enough for a passing fault, and no more than a request a minute for a lasting one.
    #[must_use]
    pub fn backoff(mut self, first: Duration, max: Duration) -> Self {
        self.backoff = first;
        self.max_backoff = max;
        self
    }

    /// How many attempts a retryable failure has in all. Default 10, which with the default backoff is some minutes.
    ///
    /// A retry that gives its key back counts, although it is not the last one: the number of the attempt grows with each run.
    #[must_use]
    pub fn max_attempts(mut self, limit: NonZeroU32) -> Self {
        self.max_attempts = limit;
        self
    }

    /// How long to wait for the store. Default 2 s: far above a healthy store's answer, far below a client's patience.
    ///
    /// Keep it below a sixth of the [lease](Self::lease). An acquire is tried twice, and if it took longer than a third
    /// of the lease, the engine has to confirm the lease before the operation runs.
    #[must_use]
    pub fn store_timeout(mut self, limit: Duration) -> Self {
        self.store_timeout = limit.min(LONGEST);
        self
    }

    /// What another request under the same key gets. Default [`OnMismatch::Refuse`].
    #[must_use]
    pub fn on_mismatch(mut self, policy: OnMismatch) -> Self {
        self.on_mismatch = policy;
        self
    }

    /// Runs operations *without protection* while the store cannot answer, instead of refusing them.
    ///
    /// Default off: an operation that may run twice is what this library exists to prevent. Each such run is reported
    /// as [`EventKind::FailedOpen`](super::EventKind::FailedOpen); raise an alarm on it. If the store refuses this
    /// process later, because a password or a privilege has changed, operations run unprotected until that is repaired.
    /// A record that cannot be read is still refused: the operation may have run. The setting has no effect under the
    /// Transactional contract, where the store is the database of the operation itself.
    #[must_use]
    pub fn dangerous_fail_open(mut self) -> Self {
        self.fail_open = true;
        self
    }

    /// The probe that finds out whether a crashed run took effect. Default none: the outcome then stays unknown.
    ///
    /// The engine asks it under AtMostOnce, when a lease ran out and the request is repeated.
    #[must_use]
    pub fn probe(mut self, probe: Arc<dyn Probe>) -> Self {
        self.probe = Some(probe);
        self
    }

    /// The observer that gets the events. Default none; problems are also logged by `tracing`.
    #[must_use]
    pub fn observer(mut self, observer: Arc<dyn Observer>) -> Self {
        self.observer = Some(observer);
        self
    }

    /// Where operations and their settlements run. Default: the runtime of the caller.
    ///
    /// For servers with a runtime of one thread for each worker: an operation there would end with its worker.
    #[must_use]
    pub fn runtime(mut self, runtime: Handle) -> Self {
        self.runtime = Some(runtime);
        self
    }

    /// The runtime that renews leases. Default: one dedicated thread with its own runtime, for all engines of the
    /// process.
    ///
    /// Name one if the process must have no further thread, and keep it running: the leases of operations that it no
    /// longer renews count as lost. While an operation keeps all of its threads busy, it renews nothing. In tests on a
    /// paused clock, name the runtime of the test.
    #[must_use]
    pub fn renewals_on(mut self, runtime: Handle) -> Self {
        self.renewals_on = Some(runtime);
        self
    }

    /// The [`retention`](Self::retention) that was set.
    #[must_use]
    pub fn record_retention(&self) -> Duration {
        self.retention
    }

    /// The [`renewal_limit`](Self::renewal_limit) that was set.
    #[must_use]
    pub fn longest_lease(&self) -> Duration {
        self.renewal_limit
    }

    /// Whether [`dangerous_fail_open`](Self::dangerous_fail_open) was set.
    #[must_use]
    pub fn fails_open(&self) -> bool {
        self.fail_open
    }

    /// The [`max_attempts`](Self::max_attempts) that was set.
    #[must_use]
    pub fn attempt_limit(&self) -> u32 {
        self.max_attempts.get()
    }

    /// Whether a runtime was named.
    #[must_use]
    pub fn has_runtime(&self) -> bool {
        self.runtime.is_some()
    }

    /// [`max_running`](Self::max_running), at most what a semaphore can count.
    pub(super) fn most_running(&self) -> usize {
        self.max_running.get().min(Semaphore::MAX_PERMITS)
    }

    pub(super) fn term(&self) -> Term {
        Term { lease: self.lease, retention: self.retention }
    }

    /// How long the failure of `attempt` rests: the first backoff, doubled for every attempt since.
    pub(super) fn backoff_after(&self, attempt: u32) -> Duration {
        let doublings = attempt.saturating_sub(1).min(31);
        self.backoff.saturating_mul(1 << doublings).min(self.max_backoff)
    }
}

impl fmt::Debug for Settings {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Settings")
            .field("identity", &self.identity)
            .field("lease", &self.lease)
            .field("retention", &self.retention)
            .field("wait", &self.wait)
            .field("max_attempts", &self.max_attempts)
            .field("store_timeout", &self.store_timeout)
            .field("on_mismatch", &self.on_mismatch)
            .field("fail_open", &self.fail_open)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_backoff_doubles_up_to_its_limit() {
        let settings = Settings::new().backoff(Duration::from_secs(1), Duration::from_secs(60));
        let seconds = |attempt| settings.backoff_after(attempt).as_secs();
        assert_eq!([1, 2, 3, 6, 7, 40, u32::MAX].map(seconds), [1, 2, 4, 32, 60, 60, 60]);
    }

    #[test]
    #[should_panic(expected = "a lease of zero")]
    fn a_lease_of_zero_is_refused() {
        let _ = Settings::new().lease(Duration::ZERO);
    }

    #[test]
    #[should_panic(expected = "a retention of zero")]
    fn a_retention_of_zero_is_refused() {
        let _ = Settings::new().retention(Duration::ZERO);
    }
}
