//! How the database is reached and used, each default with its reason.

use std::fmt;
use std::num::NonZeroU32;
use std::time::Duration;

use idem_core::{StoreError, StoreErrorKind, TimeOffset};
use sqlx::MySqlPool;
use sqlx::mysql::MySqlConnectOptions;

use crate::timeouts::{LONGEST_WAIT, TRANSACTION_WAIT};

/// Where the database is and how it is used.
#[derive(Clone)]
pub struct MySqlConfig {
    source: Result<Source, String>,
    pub(crate) migrate: bool,
    pub(crate) verb_connections: NonZeroU32,
    pub(crate) max_transactions: NonZeroU32,
    pub(crate) transaction_wait: Duration,
    pub(crate) offset: TimeOffset,
}

#[derive(Clone)]
pub(crate) enum Source {
    Options(Box<MySqlConnectOptions>),
    Pool(MySqlPool),
}

impl MySqlConfig {
    /// The database at `url`, such as `mysql://user:secret@host/database?ssl-mode=VERIFY_IDENTITY`. Opening the store reports
    /// what is wrong with it.
    #[must_use]
    pub fn new(url: impl AsRef<str>) -> Self {
        let url = url.as_ref();
        // The driver takes any scheme.
        if !url.starts_with("mysql://") && !url.starts_with("mariadb://") {
            return Self::with(Err("it begins neither with mysql:// nor with mariadb://".to_owned()));
        }
        let options = url.parse().map_err(|error: sqlx::Error| error.to_string());
        Self::with(options.map(|options| Source::Options(Box::new(options))))
    }

    /// The database that these options lead to, for options that a URL cannot express.
    #[must_use]
    pub fn from_options(options: MySqlConnectOptions) -> Self {
        Self::with(Ok(Source::Options(Box::new(options))))
    }

    /// Uses the application's connection pool for handlers' transactions, with its `after_connect`, lifetimes and metrics.
    ///
    /// The store opens [`verb_connections`](Self::verb_connections) more with the pool's options, because settlements and
    /// repeats must not wait for handlers. Unless it is set, [`max_transactions`](Self::max_transactions) is one less than the
    /// pool's `max_connections`, and at most 16.
    ///
    /// Handlers' transactions have the isolation level and the `sql_mode` of the pool's sessions. If that `sql_mode` is not
    /// strict, [`self_test`](crate::MySqlStore::self_test) reports it. After a transaction, the session's access mode is
    /// `READ WRITE`.
    ///
    /// Set `wait_timeout` of the pool's sessions to some minutes. If a machine loses its power, the server keeps the locks of
    /// its open transactions for that long: 8 h by default.
    ///
    /// These further connections keep the options that the pool has now. After `set_connect_options` with another password, open the
    /// store again.
    ///
    /// The store does not change the pool's statement logging. By default, its log contains stored answers: all at the level
    /// `DEBUG`, and those of slow commits at `WARN`. `disable_statement_logging` of the pool's options ends that.
    #[must_use]
    pub fn from_pool(pool: MySqlPool) -> Self {
        let most = pool.options().get_max_connections();
        let mut config = Self::with(Ok(Source::Pool(pool)));
        config.max_transactions =
            NonZeroU32::new(most.saturating_sub(1)).map_or(NonZeroU32::MIN, |most| most.min(config.max_transactions));
        config
    }

    fn with(source: Result<Source, String>) -> Self {
        Self {
            source,
            migrate: true,
            verb_connections: NonZeroU32::new(16).unwrap_or(NonZeroU32::MIN),
            max_transactions: NonZeroU32::new(16).unwrap_or(NonZeroU32::MIN),
            transaction_wait: TRANSACTION_WAIT,
            offset: TimeOffset::default(),
        }
    }

    /// Opens the store without migrating: a migration tool applies the [`migrations`](crate::migrations()). Default off:
    /// opening the store brings the schema up to date, and any number of processes may do so at once.
    #[must_use]
    pub fn without_migrating(mut self) -> Self {
        self.migrate = false;
        self
    }

    /// How many connections carry the verbs of the store. Default 16.
    ///
    /// Three of them carry the verbs that share a transaction. The others, at least one, carry those that run alone, such as a takeover.
    /// A server has 151 connections by default, for all processes together.
    #[must_use]
    pub fn verb_connections(mut self, connections: NonZeroU32) -> Self {
        self.verb_connections = connections;
        self
    }

    /// How many handlers may have a transaction open at once. Further ones wait for [`transaction_wait`](Self::transaction_wait).
    /// Default 16, because each needs a connection.
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
        self.transaction_wait = wait.min(LONGEST_WAIT);
        self
    }

    /// Moves the store's clock, for tests. Default none.
    #[must_use]
    pub fn time_offset(mut self, offset: TimeOffset) -> Self {
        self.offset = offset;
        self
    }

    pub(crate) fn source(&self) -> Result<Source, StoreError> {
        let source = self.source.clone().map_err(|error| {
            let message = "the URL of the database cannot be understood; write mysql://user:password@host/database";
            StoreError::new(StoreErrorKind::Misconfigured, message).with_source(error)
        })?;
        if let Source::Pool(pool) = &source {
            let (most, limit) = (pool.options().get_max_connections(), self.max_transactions);
            if limit.get() >= most {
                let message = format!(
                    "handlers may have {limit} transactions of a pool with {most} connections; leave at least one to the rest \
                     of the application: lower max_transactions, or raise the pool's max_connections"
                );
                return Err(StoreError::new(StoreErrorKind::Misconfigured, message));
            }
        }
        Ok(source)
    }
}

/// Omits the connect options, which contain a password.
impl fmt::Debug for MySqlConfig {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("MySqlConfig")
            .field("migrate", &self.migrate)
            .field("verb_connections", &self.verb_connections)
            .field("max_transactions", &self.max_transactions)
            .field("transaction_wait", &self.transaction_wait)
            .finish_non_exhaustive()
    }
}
