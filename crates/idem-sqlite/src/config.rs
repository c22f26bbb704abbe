//! How the database is opened, each default with its reason.

use std::num::NonZeroU32;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use idem_core::memory::{Clock, SystemClock};
use idem_core::{StoreError, StoreErrorKind};
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqliteSynchronous};

/// Where the database is and how it is used.
#[derive(Debug, Clone)]
pub struct SqliteConfig {
    pub(crate) url: String,
    pub(crate) busy_timeout: Duration,
    pub(crate) max_transactions: NonZeroU32,
    pub(crate) synchronous: SqliteSynchronous,
    pub(crate) clock: Arc<dyn Clock>,
}

impl SqliteConfig {
    /// Sets the database at `url`, such as `sqlite://payments.db` or `sqlite:///var/lib/app/payments.db`. A missing file is
    /// created. A database in memory is refused, because its connections would not share it.
    #[must_use]
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            busy_timeout: Duration::from_secs(5),
            max_transactions: NonZeroU32::new(16).unwrap_or(NonZeroU32::MIN),
            synchronous: SqliteSynchronous::Full,
            clock: Arc::new(SystemClock),
        }
    }

    /// How long a write waits for another one. Default 5 s. SQLite has one writer, and a handler that has written holds the
    /// write lock until it ends.
    #[must_use]
    pub fn busy_timeout(mut self, timeout: Duration) -> Self {
        self.busy_timeout = timeout;
        self
    }

    /// How many handlers may have a transaction open at once. Default 16, because each needs a connection with a thread, and
    /// only one can write. Up to 1,024 further handlers wait; beyond that, `begin` fails at once with
    /// [`StoreErrorKind::Busy`]. A caller that is dropped leaves the queue.
    #[must_use]
    pub fn max_transactions(mut self, limit: NonZeroU32) -> Self {
        self.max_transactions = limit;
        self
    }

    /// Commits without waiting for the disk, which is faster. The death of the process loses nothing. A loss of power can
    /// lose the last acknowledged records, and their operations then run again.
    ///
    /// Default off: every commit is synced (`synchronous = FULL`).
    #[must_use]
    pub fn dangerous_synchronous_normal(mut self) -> Self {
        self.synchronous = SqliteSynchronous::Normal;
        self
    }

    /// The clock that judges leases and retentions; tests inject time through it. Default: the system clock.
    #[must_use]
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }

    pub(crate) fn connect_options(&self) -> Result<SqliteConnectOptions, StoreError> {
        let misconfigured = |message: String| StoreError::new(StoreErrorKind::Misconfigured, message);
        if self.url.contains(":memory:") || self.url.contains("mode=memory") {
            return Err(misconfigured("a SQLite database in memory cannot hold records; name a file".to_owned()));
        }
        let not_a_url = || misconfigured(format!("{:?} is not a SQLite URL; write sqlite://path/to/file.db", self.url));
        if !self.url.starts_with("sqlite:") {
            return Err(not_a_url());
        }
        let options = SqliteConnectOptions::from_str(&self.url).map_err(|error| not_a_url().with_source(error))?;
        Ok(options
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(self.synchronous)
            .busy_timeout(self.busy_timeout))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn databases_that_cannot_be_shared_are_refused() {
        for url in ["sqlite::memory:", "sqlite://x.db?mode=memory", "sqlite://x.db?nonsense=1", "postgres://x", "x.db"]
        {
            let error = SqliteConfig::new(url).connect_options().unwrap_err();
            assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{url}");
        }
    }
}
