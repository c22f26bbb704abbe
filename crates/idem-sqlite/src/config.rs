//! How the database is opened, each default with its reason.

use std::num::NonZeroU32;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use idem_core::memory::{Clock, SystemClock};
use idem_core::{StoreError, StoreErrorKind};
use sqlx::SqlitePool;
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqliteSynchronous};

/// How long an operation waits for a transaction. Shorter than the engine's `store_timeout` (2 s), which would end the wait
/// without saying why. The rest of that time is for the in-progress mark, which may wait for the write lock.
const TRANSACTION_WAIT: Duration = Duration::from_secs(1);

/// Longer times are cut to this. SQLite counts milliseconds in 32 bits.
const LONGEST: Duration = Duration::from_secs(24 * 60 * 60);

/// Where the database is and how it is used.
#[derive(Debug, Clone)]
pub struct SqliteConfig {
    source: Source,
    pub(crate) busy_timeout: Duration,
    pub(crate) max_transactions: NonZeroU32,
    pub(crate) transaction_wait: Duration,
    pub(crate) synchronous: SqliteSynchronous,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) migrate: bool,
}

#[derive(Debug, Clone)]
enum Source {
    Url(String),
    Pool(SqlitePool),
}

impl SqliteConfig {
    /// Sets the database at `url`, such as `sqlite://payments.db` or `sqlite:///var/lib/app/payments.db`. A missing file is
    /// created. A database in memory is refused, because its connections would not share it.
    #[must_use]
    pub fn new(url: impl Into<String>) -> Self {
        Self::with(Source::Url(url.into()))
    }

    /// Uses the application's connection pool for handlers' transactions, with its `after_connect`, lifetimes and metrics.
    ///
    /// The store opens further connections to the same file, with the pool's options: one that writes records, and some that
    /// read. So settlements never wait for a connection of the pool, and neither do repeats once the operation has begun. The file
    /// is in write-ahead mode from then on.
    /// Opening fails if the pool's connections set another `journal_mode` or cannot write. For a handler's writes the pool's
    /// `busy_timeout` holds.
    ///
    /// Unless it is set, [`max_transactions`](Self::max_transactions) is one less than the pool's `max_connections`, and at
    /// most 16. Handlers' transactions commit with the pool's `synchronous`. If that is below `FULL`, the default, opening
    /// fails, unless [`dangerous_synchronous_normal`](Self::dangerous_synchronous_normal) accepts `NORMAL`.
    ///
    /// A connection returns to the pool when its transaction has committed. Otherwise the store closes it, and the pool opens
    /// another one. It also closes a connection with temporary objects, attached databases, or a changed `query_only` or
    /// `busy_timeout`. Other settings that a handler changes stay: let `after_connect` set them.
    ///
    /// The store uses the commit hook of the connections, and removes one of the application's.
    ///
    /// Its own connections overwrite what rows were before (`PRAGMA secure_delete = FAST`), so that an
    /// [erasure](idem_core::Operate::erase) leaves nothing in their pages. Set it for the pool too if handlers settle records.
    ///
    /// Write into the main database only. SQLite does not commit several files together in write-ahead mode, so a crash can
    /// lose what a handler wrote into an attached one. A handler that reads before it writes then fails, as if it had written.
    #[must_use]
    pub fn from_pool(pool: SqlitePool) -> Self {
        let most = pool.options().get_max_connections();
        let mut config = Self::with(Source::Pool(pool));
        config.max_transactions =
            NonZeroU32::new(most.saturating_sub(1)).map_or(NonZeroU32::MIN, |most| most.min(config.max_transactions));
        config
    }

    fn with(source: Source) -> Self {
        Self {
            source,
            busy_timeout: Duration::from_secs(5),
            max_transactions: NonZeroU32::new(16).unwrap_or(NonZeroU32::MIN),
            transaction_wait: TRANSACTION_WAIT,
            synchronous: SqliteSynchronous::Full,
            clock: Arc::new(SystemClock),
            migrate: true,
        }
    }

    /// How long a write waits for another one, at most a day. Default 5 s. SQLite has one writer, and a handler that has written holds the
    /// write lock until it ends.
    #[must_use]
    pub fn busy_timeout(mut self, timeout: Duration) -> Self {
        self.busy_timeout = timeout.min(LONGEST);
        self
    }

    /// How many handlers may have a transaction open at once. Default 16, because each needs a connection with a thread, and
    /// only one can write. Up to 1,024 further handlers wait for [`transaction_wait`](Self::transaction_wait); beyond that,
    /// `begin` fails at once with [`StoreErrorKind::Busy`]. A caller that is dropped leaves the queue.
    #[must_use]
    pub fn max_transactions(mut self, limit: NonZeroU32) -> Self {
        self.max_transactions = limit;
        self
    }

    /// How long an operation waits for a transaction while handlers use all of them. After that the error is
    /// [`StoreErrorKind::Busy`], and an HTTP client gets 503. Default 1 s. Keep it below the engine's `store_timeout` (2 s),
    /// which would end the wait without saying why.
    #[must_use]
    pub fn transaction_wait(mut self, wait: Duration) -> Self {
        self.transaction_wait = wait.min(LONGEST);
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

    /// Neither makes a missing file nor changes the schema: opening fails if they are not there, or of another version. For tools
    /// that look into the database of an application, and for applications with a migration tool ([`migrations`](crate::migrations)).
    #[must_use]
    pub fn without_migrating(mut self) -> Self {
        self.migrate = false;
        self
    }

    /// The clock that judges leases and retentions; tests inject time through it. Default: the system clock.
    #[must_use]
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }

    /// The application's pool, if there is one.
    pub(crate) fn pool(&self) -> Option<&SqlitePool> {
        match &self.source {
            Source::Url(_) => None,
            Source::Pool(pool) => Some(pool),
        }
    }

    /// The options of the store's own connections.
    pub(crate) fn connect_options(&self) -> Result<SqliteConnectOptions, StoreError> {
        let options = match &self.source {
            Source::Url(url) => of_url(url)?.create_if_missing(self.migrate),
            Source::Pool(pool) => {
                let (most, limit) = (pool.options().get_max_connections(), self.max_transactions);
                if limit.get() >= most {
                    return Err(misconfigured(format!(
                        "handlers may have {limit} transactions of a pool with {most} connections; leave at least one to \
                         the rest of the application: lower max_transactions, or raise the pool's max_connections"
                    )));
                }
                pool.connect_options().as_ref().clone()
            }
        };
        // With a shared cache, the writer would meet the locks of handlers without waiting for them.
        let options = options.shared_cache(false).journal_mode(SqliteJournalMode::Wal);
        // What a row was before leaves nothing in its page, where an erasure would not find it. This costs no write to the disk.
        let options = options.pragma("secure_delete", "FAST");
        Ok(options.synchronous(self.synchronous).busy_timeout(self.busy_timeout))
    }
}

fn misconfigured(message: String) -> StoreError {
    StoreError::new(StoreErrorKind::Misconfigured, message)
}

/// The error of a database in memory.
pub(crate) fn in_memory() -> StoreError {
    misconfigured("a SQLite database in memory cannot hold records; name a file".to_owned())
}

fn of_url(url: &str) -> Result<SqliteConnectOptions, StoreError> {
    if url.contains(":memory:") || url.contains("mode=memory") {
        return Err(in_memory());
    }
    let not_a_url = || misconfigured(format!("{url:?} is not a SQLite URL; write sqlite://path/to/file.db"));
    if !url.starts_with("sqlite:") {
        return Err(not_a_url());
    }
    SqliteConnectOptions::from_str(url).map_err(|error| not_a_url().with_source(error))
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

    #[tokio::test]
    async fn a_pool_that_handlers_would_use_up_is_refused() {
        let file = SqliteConnectOptions::new().filename("records.db");
        let refused = |most, options: &SqliteConnectOptions| {
            let pool = sqlx::sqlite::SqlitePoolOptions::new().max_connections(most).connect_lazy_with(options.clone());
            SqliteConfig::from_pool(pool).connect_options().unwrap_err().to_string()
        };
        assert!(refused(1, &file).contains("leave at least one"));
        let pool = sqlx::sqlite::SqlitePoolOptions::new().max_connections(5).connect_lazy_with(file);
        assert!(SqliteConfig::from_pool(pool.clone()).connect_options().is_ok());
        let all = SqliteConfig::from_pool(pool).max_transactions(NonZeroU32::new(5).unwrap());
        assert_eq!(all.connect_options().unwrap_err().kind(), StoreErrorKind::Misconfigured);
    }
}
