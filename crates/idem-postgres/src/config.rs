//! How the database is reached and used, each default with its reason.

use std::fmt;
use std::num::NonZeroU32;
use std::time::Duration;

use idem_core::{StoreError, StoreErrorKind, TimeOffset};
use sqlx::PgPool;
use sqlx::postgres::PgConnectOptions;

use crate::connect::source::ConnectSource;
use crate::timeouts::{
    LOCK_TIMEOUT, LONGEST_STATEMENT_TIMEOUT, LONGEST_WAIT, MIGRATION_WAIT, STATEMENT_TIMEOUT, TRANSACTION_WAIT,
};

/// Where the database is and how it is used.
#[derive(Clone)]
pub struct PostgresConfig {
    source: Result<ConnectSource, String>,
    pub(crate) schema: String,
    pub(crate) migrate: bool,
    pub(crate) migration_wait: Duration,
    pub(crate) partitioned: Option<Duration>,
    pub(crate) verb_connections: NonZeroU32,
    pub(crate) max_transactions: NonZeroU32,
    pub(crate) transaction_wait: Duration,
    pub(crate) isolation: Isolation,
    pub(crate) statement_timeout: Duration,
    pub(crate) lock_timeout: Duration,
    pub(crate) idle_in_transaction: Duration,
    pub(crate) pooled: bool,
    pub(crate) offset: TimeOffset,
}

/// The isolation level of handlers' transactions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Isolation {
    /// Every statement sees what was committed before it.
    #[default]
    ReadCommitted,
    /// All statements see the same snapshot.
    RepeatableRead,
    /// As if transactions ran one after another. A handler's transaction may then fail at its end. It is rolled back, and
    /// its operation may run again.
    Serializable,
}

impl Isolation {
    pub(crate) fn sql(self) -> &'static str {
        match self {
            Self::ReadCommitted => "READ COMMITTED",
            Self::RepeatableRead => "REPEATABLE READ",
            Self::Serializable => "SERIALIZABLE",
        }
    }
}

impl PostgresConfig {
    /// The database at `url`, such as `postgres://user:secret@host/database?sslmode=verify-full`. Opening the store reports
    /// what is wrong with it.
    #[must_use]
    pub fn new(url: impl AsRef<str>) -> Self {
        let url = url.as_ref();
        if !url.starts_with("postgres://") && !url.starts_with("postgresql://") {
            return Self::with(Err("it does not begin with postgres://".to_owned()));
        }
        let options = url.parse().map_err(|error: sqlx::Error| error.to_string());
        Self::with(options.map(|options| ConnectSource::Options(Box::new(options))))
    }

    /// The database that these options lead to, for options that a URL cannot express.
    #[must_use]
    pub fn from_options(options: PgConnectOptions) -> Self {
        Self::with(Ok(ConnectSource::Options(Box::new(options))))
    }

    /// Uses the application's connection pool for handlers' transactions and upkeep.
    ///
    /// They get the pool's `after_connect`, lifetimes and metrics. The store opens one more connection
    /// ([`verb_connections`](Self::verb_connections)), because settlements and lookups must not wait for handlers. It
    /// connects with the pool's current options, so that rotated credentials (`Pool::set_connect_options`) reach it. The README
    /// says when there are further connections.
    ///
    /// Unless it is set, [`max_transactions`](Self::max_transactions) is one less than the pool's `max_connections`, and at
    /// most 16. A handler that needs a second connection gets the one that is left. The README says what is weaker than with
    /// the store's own sessions, and [`self_test`](crate::PostgresStore::self_test) reports it.
    ///
    /// While a handler's transaction is open, `default_transaction_read_only` is on in its session. Afterwards it has its
    /// previous value. So a handler that ends its transaction cannot write outside of it. The same holds if a nested `begin`
    /// fails or is cancelled, because sqlx then ends the transaction.
    ///
    /// The store does not change the pool's statement logging. At its default level, `DEBUG`, the log contains stored
    /// answers.
    #[must_use]
    pub fn from_pool(pool: PgPool) -> Self {
        let most = pool.options().get_max_connections();
        let mut config = Self::with(Ok(ConnectSource::Pool(pool)));
        config.verb_connections = NonZeroU32::MIN;
        config.max_transactions =
            NonZeroU32::new(most.saturating_sub(1)).map_or(NonZeroU32::MIN, |most| most.min(config.max_transactions));
        config
    }

    fn with(source: Result<ConnectSource, String>) -> Self {
        Self {
            source,
            schema: "idem".to_owned(),
            migrate: true,
            migration_wait: MIGRATION_WAIT,
            partitioned: None,
            verb_connections: NonZeroU32::new(2).unwrap_or(NonZeroU32::MIN),
            max_transactions: NonZeroU32::new(16).unwrap_or(NonZeroU32::MIN),
            transaction_wait: TRANSACTION_WAIT,
            isolation: Isolation::default(),
            statement_timeout: STATEMENT_TIMEOUT,
            lock_timeout: LOCK_TIMEOUT,
            idle_in_transaction: Duration::from_secs(600),
            pooled: false,
            offset: TimeOffset::default(),
        }
    }

    /// The schema that holds the tables and functions. Default `idem`: a separate schema, so that nothing collides with the
    /// application's.
    #[must_use]
    pub fn schema(mut self, name: impl Into<String>) -> Self {
        self.schema = name.into();
        self
    }

    /// Opens the store without migrating: a migration tool applies the [`migrations`](crate::migrations()). Default off:
    /// opening the store brings the schema up to date, and any number of processes may do so at once.
    #[must_use]
    pub fn without_migrating(mut self) -> Self {
        self.migrate = false;
        self
    }

    /// How long opening the store waits for a lock of another session, such as a replica that migrates. Default 60 s: longer
    /// than a migration takes.
    ///
    /// A server that falls silent meanwhile is given up only after this time, too.
    ///
    /// Spreading many records over [partitions](Self::partitioned) may take longer. Replicas that start meanwhile then fail,
    /// and must be started again. The error names the session that holds the lock, and so does the log after some seconds.
    #[must_use]
    pub fn migration_wait(mut self, wait: Duration) -> Self {
        self.migration_wait = wait.min(LONGEST_WAIT);
        self
    }

    /// Spreads records over partitions that cover `period` each, by their time of creation. Default off.
    ///
    /// A `Purger` of `idem_core::engine` drops a whole partition once every record in it has expired. It also makes the coming
    /// partitions, so at least one replica must run it. Without partitions, a purger removes rows from one table, which
    /// serves some thousand operations a second.
    ///
    /// Opening the store partitions the table, once and permanently. It copies the existing records, and no other session can
    /// use them meanwhile.
    ///
    /// The table of the partitions and its view are new, so grant privileges on them again. Until then a role that had them is
    /// refused.
    ///
    /// While no purger runs, the records of later periods gather in one partition, `idem_records_rest`. A purger then removes them
    /// one by one. If it has become so large that the server cannot read it within a second, the log says how to make partitions
    /// again.
    ///
    /// A day suits a retention of 24 h. A long-lived record keeps its whole partition, and every verb searches all
    /// partitions.
    #[must_use]
    pub fn partitioned(mut self, period: Duration) -> Self {
        self.partitioned = Some(period);
        self
    }

    /// How many connections carry the verbs of the store. Default 2, and 1 with a [pool](Self::from_pool) of the application.
    ///
    /// Verbs that arrive while a statement runs share the next one, so a few connections carry many verbs. While one
    /// connection waits for the disk or for a row lock of another session, the other goes on. More connections make smaller
    /// batches, which cost the server more for each verb.
    #[must_use]
    pub fn verb_connections(mut self, connections: NonZeroU32) -> Self {
        self.verb_connections = connections;
        self
    }

    /// How many handlers may have a transaction open at once. Further ones wait for
    /// [`transaction_wait`](Self::transaction_wait). Default 16: each needs a connection, and a server has 100 of them by
    /// default, for all processes together.
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

    /// The isolation of handlers' transactions. Default [`Isolation::ReadCommitted`], whatever the server's default: it
    /// is what the store's own statements need, and what most business writes are written for.
    ///
    /// At the other levels a purge that removes an expired record while its key runs again rolls that run back: the server
    /// reports a serialization failure. The client gets 503, and its repeat runs.
    #[must_use]
    pub fn isolation(mut self, isolation: Isolation) -> Self {
        self.isolation = isolation;
        self
    }

    /// How long the server may work on one statement of the store, at most 30 s. Default 2 s: the engine waits that long for
    /// a verb.
    ///
    /// It does not apply to handlers' transactions, which keep the application's session settings. The store waits for the
    /// beginning of a transaction for this timeout and one more second, and for its end for 5 s.
    #[must_use]
    pub fn statement_timeout(mut self, timeout: Duration) -> Self {
        self.statement_timeout = timeout.min(LONGEST_STATEMENT_TIMEOUT);
        self
    }

    /// How long a statement of the store may wait for a row lock of another session. Default 500 ms: only single statements
    /// and [guards](crate::Guard) lock rows, and a statement that waits makes the verbs behind it wait.
    #[must_use]
    pub fn lock_timeout(mut self, timeout: Duration) -> Self {
        self.lock_timeout = timeout;
        self
    }

    /// How long a handler's transaction may be idle before the server ends it. Default 10 min, as long as the engine lets any
    /// operation run. A transaction that hangs longer would keep its key taken, and keep the table from being vacuumed.
    #[must_use]
    pub fn idle_in_transaction_timeout(mut self, timeout: Duration) -> Self {
        self.idle_in_transaction = timeout;
        self
    }

    /// Declares that a transaction-pooling proxy, such as PgBouncer, stands between the store and the server. Default off.
    ///
    /// Use it also for a proxy that takes no start-up options. Each statement of the store then carries its settings and is
    /// planned anew, which costs the server more. Handlers' statements are not kept prepared, and prepared statements that
    /// another sqlx client left in the session are dropped first.
    ///
    /// One protection is missing. On a direct connection the server refuses what a handler writes after it has ended its
    /// transaction. Through a proxy these writes are committed, and the store notices only afterwards.
    #[must_use]
    pub fn through_transaction_pooler(mut self) -> Self {
        if let Ok(ConnectSource::Options(options)) = &mut self.source {
            **options = options.clone().statement_cache_capacity(0);
        }
        self.pooled = true;
        self
    }

    /// Moves the store's clock, for tests. Default none.
    #[must_use]
    pub fn time_offset(mut self, offset: TimeOffset) -> Self {
        self.offset = offset;
        self
    }

    /// Whether handlers' transactions come from a pool of the application.
    pub(crate) fn is_from_pool(&self) -> bool {
        matches!(self.source, Ok(ConnectSource::Pool(_)))
    }

    /// Whether handlers' sessions are exclusive to this store, so that it can prepare statements in them.
    pub(crate) fn has_own_sessions(&self) -> bool {
        !self.pooled && !self.is_from_pool()
    }

    pub(crate) fn connect_source(&self) -> Result<ConnectSource, StoreError> {
        let source = self.source.clone().map_err(|error| {
            let message = "the URL of the database cannot be understood; write postgres://user:password@host/database";
            StoreError::new(StoreErrorKind::Misconfigured, message).with_source(error)
        })?;
        if self.partitioned.is_some() && !self.migrate {
            let message =
                "to spread records over partitions is a migration; apply `partitioning` by the tool that migrates";
            return Err(StoreError::new(StoreErrorKind::Misconfigured, message));
        }
        if let Some(pool) = source.pool() {
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
impl fmt::Debug for PostgresConfig {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("PostgresConfig").field("schema", &self.schema).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_is_none_is_refused_without_showing_it() {
        for url in ["mysql://root:hunter2@host/db", "postgres//hunter2", "postgres://host:hunter2/db", ""] {
            let error = PostgresConfig::new(url).connect_source().unwrap_err();
            assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{url}");
            assert!(!format!("{error} {error:?}").contains("hunter2"), "{error:?}");
        }
    }

    #[test]
    fn the_password_is_not_shown() {
        let config = PostgresConfig::new("postgres://root:hunter2@host/db");
        config.connect_source().unwrap();
        assert!(!format!("{config:?}").contains("hunter2"));
    }
}
