//! The command line.

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;

use clap::{Parser, ValueEnum};
use subtle::ConstantTimeEq;

/// A payments API that survives retries: the same Idempotency-Key moves money once.
///
/// Every flag can also be set by the environment variable that is named with it.
#[derive(Debug, Clone, Parser)]
#[command(name = "payments", version)]
pub(crate) struct Config {
    /// Address to listen on; port 0 takes a free one.
    #[arg(long, env = "PAYMENTS_LISTEN", default_value = "127.0.0.1:8080")]
    pub(crate) listen: SocketAddr,
    /// The web framework that serves it. Clients see no difference.
    #[arg(long, env = "PAYMENTS_FRAMEWORK", value_enum, default_value_t = Framework::Axum)]
    pub(crate) framework: Framework,
    /// Where the idempotency records are: sqlite://FILE, postgres://USER@HOST/DATABASE,
    /// mysql://USER@HOST/DATABASE, redis://HOST, redis+sentinel://HOST,HOST/SERVICE, redis+cluster://HOST,HOST or memory:. Under the
    /// transactional contract the payments are there too, which takes a database. The records of memory: end with the process.
    #[arg(long, env = "PAYMENTS_STORE", default_value = "sqlite://payments.db")]
    store: String,
    /// A cache in Redis in front of --store, which must be a database and decides: redis://HOST,
    /// redis+sentinel://HOST,HOST/SERVICE or redis+cluster://HOST,HOST. Repeats are answered from it. If it fails, or loses
    /// its data, the store answers.
    #[arg(long, env = "PAYMENTS_CACHE")]
    pub(crate) cache: Option<String>,
    /// What the service promises across a crash.
    #[arg(long, env = "PAYMENTS_CONTRACT", value_enum, default_value_t = ContractName::Transactional)]
    pub(crate) contract: ContractName,
    /// Where the payments are under at-most-once and at-least-once. Default for a store in SQLite: sqlite://ledger.db. Default for a
    /// store in Postgres or MariaDB: the same database, in a separate transaction. Required for a store in Redis or in memory.
    #[arg(long, env = "PAYMENTS_LEDGER")]
    ledger: Option<String>,
    /// The Postgres schema of the payments.
    #[arg(long, env = "PAYMENTS_SCHEMA", default_value = "payments")]
    pub(crate) schema: SchemaName,
    /// The Postgres schema of the idempotency records.
    #[arg(long, env = "PAYMENTS_IDEM_SCHEMA", default_value = "idem")]
    pub(crate) idem_schema: SchemaName,
    /// Postgres is behind a transaction-pooling proxy, such as PgBouncer.
    #[arg(long, env = "PAYMENTS_POOLER", value_parser = clap::builder::FalseyValueParser::new())]
    pub(crate) pooler: bool,
    /// Take the transactions of a store in Postgres from a connection pool of the application, as a service with such a pool
    /// does.
    #[arg(long, env = "PAYMENTS_OWN_POOL", value_parser = clap::builder::FalseyValueParser::new(), conflicts_with = "pooler")]
    pub(crate) own_pool: bool,
    /// Open the transactions of the payments in this service, and let the runs of a store in Postgres join them, as a service
    /// with a unit-of-work middleware does. The pool is the application's, as with --own-pool.
    #[arg(long, env = "PAYMENTS_JOIN", value_parser = clap::builder::FalseyValueParser::new(), conflicts_with_all = ["pooler", "own_pool", "cache"])]
    pub(crate) join: bool,
    /// Settle each payment in the transaction that makes it, by the SQL interface of a store in Postgres, as a handler with
    /// another driver does. It takes --contract at-least-once, and yet each payment is made once.
    #[arg(long, env = "PAYMENTS_SETTLE_IN_HANDLER", value_parser = clap::builder::FalseyValueParser::new(), conflicts_with = "ledger")]
    pub(crate) settle_in_handler: bool,
    /// The prefix of the keys in Redis.
    #[arg(long, env = "PAYMENTS_REDIS_KEY_PREFIX", default_value = "idem:")]
    pub(crate) redis_key_prefix: String,
    /// How many replicas of Redis must have a change before the store acknowledges it. With 0, a failover loses changes that the primary
    /// has not sent on yet.
    #[arg(long, env = "PAYMENTS_MIN_REPLICAS", default_value_t = 0)]
    pub(crate) min_replicas: u32,
    /// Use a Redis that evicts records when its memory is full. The payments of evicted records are made again when they are
    /// repeated.
    #[arg(long, env = "PAYMENTS_DANGEROUS_ALLOW_EVICTION", value_parser = clap::builder::FalseyValueParser::new())]
    pub(crate) dangerous_allow_eviction: bool,
    /// Promise at-most-once on Redis, except for records that it loses; their payments are made again when they are repeated.
    /// A failover loses acknowledged records, and so does a restart without persistence.
    #[arg(long, env = "PAYMENTS_DANGEROUS_ACCEPT_STORE_LOSS", value_parser = clap::builder::FalseyValueParser::new())]
    pub(crate) dangerous_accept_store_loss: bool,
    /// Under at-most-once and at-least-once: while the store is unavailable, make payments without protection. They may be made
    /// twice.
    #[arg(long, env = "PAYMENTS_DANGEROUS_FAIL_OPEN", value_parser = clap::builder::FalseyValueParser::new())]
    pub(crate) dangerous_fail_open: bool,
    /// The only bearer tokens that are accepted, as in acme,other. Default: any token, and each is a separate tenant.
    #[arg(long, env = "PAYMENTS_TENANTS", value_delimiter = ',')]
    pub(crate) tenants: Vec<String>,
    /// How long a crashed request can hold its key, in milliseconds.
    #[arg(long, env = "PAYMENTS_LEASE_MS", default_value_t = 30_000, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) lease_ms: u64,
    /// How long answers are kept, in seconds.
    #[arg(long, env = "PAYMENTS_RETENTION_S", default_value_t = 24 * 60 * 60, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) retention_s: u64,
    /// How long to wait for the store before a request is refused, in milliseconds.
    #[arg(long, env = "PAYMENTS_STORE_TIMEOUT_MS", default_value_t = 2000, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) store_timeout_ms: u64,
    /// How long to wait for the Redis of --cache before answering without it, in milliseconds. If a lock cannot be removed in
    /// time, repeats get 409 until it is removed or ends, after one lease at most.
    #[arg(long, env = "PAYMENTS_CACHE_TIMEOUT_MS", default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    pub(crate) cache_timeout_ms: u64,
    /// The backoff of a failed payment under at-least-once, in milliseconds. It doubles with every failure.
    #[arg(long, env = "PAYMENTS_BACKOFF_MS", default_value_t = 1000, value_parser = clap::value_parser!(u64).range(1..=60_000))]
    pub(crate) backoff_ms: u64,
    /// How long a duplicate waits for the first answer if the client does not say, in milliseconds.
    #[arg(long, env = "PAYMENTS_WAIT_MS", default_value_t = 0, value_parser = clap::value_parser!(u64).range(..=30_000))]
    pub(crate) wait_ms: u64,
    /// The largest request body in bytes.
    #[arg(long, env = "PAYMENTS_BODY_LIMIT", default_value_t = 1024 * 1024)]
    pub(crate) body_limit: usize,
    /// The largest answer that is stored, in bytes.
    #[arg(long, env = "PAYMENTS_STORED_LIMIT", default_value_t = 1024 * 1024)]
    pub(crate) stored_limit: usize,
    /// The timeout of a client, in milliseconds: for the head of a request, for an idle connection, and for taking nothing of
    /// an answer.
    #[arg(long, env = "PAYMENTS_CLIENT_TIMEOUT_MS", default_value_t = 30_000, value_parser = clap::value_parser!(u32).range(1000..))]
    pub(crate) client_timeout_ms: u32,
    /// The bearer token of operators. It gives access to /operator/health and /metrics, which say what the store is, how much it
    /// holds, and what requests were answered. Default: none, and no such pages. Set it by the environment variable: every user of the machine can read arguments.
    #[arg(long, env = "PAYMENTS_OPERATOR_TOKEN", hide_env_values = true)]
    pub(crate) operator_token: Option<OperatorToken>,
    /// The pause between two counts of all records, for the gauges of /metrics, in milliseconds.
    #[arg(long, env = "PAYMENTS_COUNT_EVERY_MS", default_value_t = 60_000, value_parser = clap::value_parser!(u64).range(100..))]
    pub(crate) count_every_ms: u64,
    /// Obey the request header X-Simulate, for tests.
    #[cfg(feature = "simulate")]
    #[arg(long, env = "PAYMENTS_SIMULATE", value_parser = clap::builder::FalseyValueParser::new())]
    simulate: bool,
}

/// The operators' bearer token. `Debug` does not show it.
#[derive(Clone)]
pub(crate) struct OperatorToken(String);

impl OperatorToken {
    /// Compares in a time that does not depend on where the two differ.
    pub(crate) fn is(&self, token: &str) -> bool {
        self.0.as_bytes().ct_eq(token.as_bytes()).into()
    }
}

impl FromStr for OperatorToken {
    type Err = String;

    fn from_str(token: &str) -> Result<Self, String> {
        if token.is_empty() || token.contains(|character: char| !character.is_ascii_graphic()) {
            return Err("a token is visible ASCII characters without spaces".to_owned());
        }
        Ok(Self(token.to_owned()))
    }
}

impl fmt::Debug for OperatorToken {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("OperatorToken")
    }
}

/// The frameworks by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Framework {
    Axum,
    Actix,
    /// None: hyper, and the layer of `idem-tower`.
    Hyper,
}

/// The contracts by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ContractName {
    /// Payment, ledger row and answer commit in one transaction.
    Transactional,
    /// A crash makes the outcome unknown; nothing runs twice.
    AtMostOnce,
    /// A crash makes the next retry run again.
    AtLeastOnce,
}

impl ContractName {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Transactional => "transactional",
            Self::AtMostOnce => "at-most-once",
            Self::AtLeastOnce => "at-least-once",
        }
    }
}

impl Config {
    /// Whether tests tell the service what to do. Only a build with the feature `simulate` can do that.
    pub(crate) fn is_simulating(&self) -> bool {
        #[cfg(feature = "simulate")]
        return self.simulate;
        #[cfg(not(feature = "simulate"))]
        false
    }

    /// Whether the records are in a Redis Cluster.
    pub(crate) fn is_on_cluster(&self) -> bool {
        self.store.split_once("://").is_some_and(|(scheme, _)| scheme.ends_with("+cluster"))
    }

    /// Where the idempotency records are.
    pub(crate) fn store(&self) -> Result<Place<'_>, UnknownPlace> {
        if self.store.starts_with("redis") {
            return Ok(Place::Redis(&self.store));
        }
        if self.store == "memory:" {
            return Ok(Place::Memory);
        }
        Database::of(&self.store).map(Place::Database).ok_or(UnknownPlace::Store)
    }

    /// Where the payments are.
    pub(crate) fn ledger(&self) -> Result<Database<'_>, UnknownPlace> {
        match (self.contract, &self.ledger, self.store()?) {
            (ContractName::Transactional, _, Place::Database(store)) => Ok(store),
            (_, Some(url), _) => Database::of(url).ok_or(UnknownPlace::Ledger),
            (_, None, Place::Database(Database::Sqlite(_))) => Ok(Database::Sqlite("sqlite://ledger.db")),
            (_, None, Place::Database(store @ (Database::Postgres(_) | Database::MySql(_)))) => Ok(store),
            (_, None, Place::Redis(_) | Place::Memory) => Err(UnknownPlace::NoLedger),
        }
    }
}

/// Where records can be, by the URL.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Place<'a> {
    /// A database, which can hold payments too.
    Database(Database<'a>),
    /// One server, or those that Sentinels or a Cluster name.
    Redis(&'a str),
    /// In this process.
    Memory,
}

/// A database by its URL.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Database<'a> {
    Sqlite(&'a str),
    Postgres(&'a str),
    MySql(&'a str),
}

impl<'a> Database<'a> {
    fn of(url: &'a str) -> Option<Self> {
        match url.split_once(':')?.0 {
            "sqlite" => Some(Self::Sqlite(url)),
            "postgres" | "postgresql" => Some(Self::Postgres(url)),
            "mysql" | "mariadb" => Some(Self::MySql(url)),
            _ => None,
        }
    }
}

/// The error of a URL. It does not show the URL, which may hold a password.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum UnknownPlace {
    /// The URL of the store names no known store.
    Store,
    /// The URL of the ledger names no known database.
    Ledger,
    /// The store cannot hold payments, and no ledger is named.
    NoLedger,
    /// The cache is in front of a store that is as fast.
    NothingToSpare,
}

impl fmt::Display for UnknownPlace {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Store => {
                "--store takes sqlite://FILE, postgres://USER@HOST/DATABASE, mysql://USER@HOST/DATABASE, redis://HOST, \
                 redis+sentinel://HOST,HOST/SERVICE, redis+cluster://HOST,HOST or memory:"
            }
            Self::Ledger => "--ledger takes sqlite://FILE, postgres://USER@HOST/DATABASE or mysql://USER@HOST/DATABASE",
            Self::NoLedger => {
                "this store holds records only: say by --ledger where the payments are, sqlite://FILE, \
                 postgres://USER@HOST/DATABASE or mysql://USER@HOST/DATABASE"
            }
            Self::NothingToSpare => {
                "--cache needs a --store in SQLite, Postgres or MariaDB; leave it out with Redis or memory"
            }
        })
    }
}

impl std::error::Error for UnknownPlace {}

/// The name of a Postgres schema that is safe between quotes in a statement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SchemaName(String);

impl SchemaName {
    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for SchemaName {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let starts_well = name.starts_with(|first: char| first.is_ascii_lowercase() || first == '_');
        let goes_on_well = name.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_'));
        if starts_well && goes_on_well && name.len() <= 63 {
            return Ok(Self(name.to_owned()));
        }
        Err("a schema's name has 1 to 63 small letters, digits and underscores, and begins with no digit".to_owned())
    }
}
