//! A `payments` process with its own folder and databases.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;

use idem_servers::{MariaDb, PgBouncer};
use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{ConnectOptions, Connection};
use tempfile::TempDir;

use super::postgres::Schemas;
use super::redis::Keys;
use super::{Answer, Contract, Request, eventually};

/// The framework of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Framework {
    Axum,
    Actix,
    /// hyper with the layer of `idem-tower`, without a framework.
    Hyper,
}

impl Framework {
    /// The frameworks of all whole-system tests.
    pub(crate) const ALL: [Self; 2] = [Self::Axum, Self::Actix];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Axum => "axum",
            Self::Actix => "actix",
            Self::Hyper => "hyper",
        }
    }
}

/// The store of the records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Backend {
    /// In the memory of the process.
    Memory,
    Sqlite,
    Postgres,
    /// Postgres, with transactions from a connection pool of the application.
    OwnPool,
    /// Postgres, with transactions that the application opens.
    Joined,
    /// Postgres behind a private PgBouncer in transaction mode.
    PgBouncer,
    /// A private MariaDB.
    #[allow(dead_code, reason = "only the HTTP matrix starts one")]
    MariaDb,
    Redis,
    /// Postgres with Redis as a cache.
    Hybrid,
    /// A Redis primary that Sentinels name.
    RedisSentinel,
    RedisCluster,
}

impl Backend {
    /// The contracts that the store supports.
    pub(crate) fn contracts(self) -> &'static [Contract] {
        match self {
            // The pool and its transactions matter here only; the other contracts do the same as without it.
            Self::OwnPool | Self::Joined => &[Contract::Transactional],
            Self::Sqlite | Self::Postgres | Self::PgBouncer | Self::MariaDb | Self::Hybrid => &Contract::ALL,
            Self::Memory | Self::Redis | Self::RedisSentinel | Self::RedisCluster => &Contract::LEASED,
        }
    }
}

/// A framework on a backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Setup {
    pub(crate) framework: Framework,
    pub(crate) backend: Backend,
}

impl Setup {
    /// The contracts that the store supports.
    pub(crate) fn contracts(self) -> &'static [Contract] {
        self.backend.contracts()
    }

    /// The strongest contract of the store.
    pub(crate) fn strongest_contract(self) -> Contract {
        self.contracts()[0]
    }
}

/// The default framework is axum.
impl From<Backend> for Setup {
    fn from(backend: Backend) -> Self {
        Self { framework: Framework::Axum, backend }
    }
}

/// The connections between PgBouncer and Postgres: enough for a few handlers in transactions, and for the verbs.
const POOL_CONNECTIONS: u16 = 6;

/// The token of the operator.
pub(crate) const OPERATOR: &str = "operator-of-this-test";

/// The place of a server's records.
enum Records {
    /// In its folder.
    Folder,
    Postgres(Arc<Schemas>),
    MariaDb(Box<MariaDb>),
    Redis(Keys),
}

/// A running server; killed when dropped, and its databases removed.
pub(crate) struct Server {
    process: Child,
    pub(crate) address: SocketAddr,
    folder: TempDir,
    args: Vec<String>,
    records: Records,
    _pooler: Option<PgBouncer>,
    contract: Contract,
}

impl Server {
    /// Starts a server on SQLite, with fresh databases and simulations enabled.
    pub(crate) fn start(contract: Contract, args: &[&str]) -> Self {
        Self::start_on(Backend::Sqlite, contract, args)
    }

    /// Starts a server in any setup, with fresh databases and simulations enabled.
    pub(crate) fn start_on(setup: impl Into<Setup>, contract: Contract, args: &[&str]) -> Self {
        let Setup { framework, backend } = setup.into();
        let args = [&["--framework", framework.name()], args].concat();
        match backend {
            Backend::Memory => {
                let in_memory = ["--store", "memory:", "--ledger", "sqlite://ledger.db"];
                Self::start_with(Records::Folder, None, contract, &[&in_memory, args.as_slice()].concat())
            }
            Backend::Sqlite => Self::start_with(Records::Folder, None, contract, &args),
            Backend::Postgres => Self::start_with(Records::Postgres(Arc::new(Schemas::new())), None, contract, &args),
            Backend::OwnPool | Backend::Joined => {
                let flag = if backend == Backend::OwnPool { "--own-pool" } else { "--join" };
                let args: Vec<&str> = args.iter().copied().chain([flag]).collect();
                Self::start_with(Records::Postgres(Arc::new(Schemas::new())), None, contract, &args)
            }
            Backend::PgBouncer => {
                let pooler = PgBouncer::start(&idem_servers::postgres_url(), POOL_CONNECTIONS).unwrap();
                Self::start_with(Records::Postgres(Arc::new(Schemas::new())), Some(pooler), contract, &args)
            }
            Backend::MariaDb => {
                let records = Records::MariaDb(Box::new(MariaDb::start().unwrap()));
                Self::start_with(records, None, contract, &args)
            }
            Backend::Redis => Self::start_on_redis(idem_servers::redis_url(), contract, &args),
            Backend::Hybrid => Self::start_behind(&idem_servers::redis_url(), contract, &args),
            Backend::RedisSentinel => Self::start_on_redis(idem_servers::redis_sentinel_url(), contract, &args),
            Backend::RedisCluster => Self::start_on_redis(idem_servers::redis_cluster_url(), contract, &args),
        }
    }

    /// Starts a server with axum on the Redis at `url`.
    pub(crate) fn start_on_redis(url: String, contract: Contract, args: &[&str]) -> Self {
        let accepts_loss = (contract == Contract::AtMostOnce).then_some("--dangerous-accept-store-loss");
        let args: Vec<&str> = args.iter().copied().chain(accepts_loss).collect();
        Self::start_with(Records::Redis(Keys::new(url)), None, contract, &args)
    }

    /// Starts a server with axum on Postgres, with the Redis at `url` as its cache.
    pub(crate) fn start_behind(url: &str, contract: Contract, args: &[&str]) -> Self {
        let prefix = Keys::new(url.to_owned()).prefix;
        let args = [&["--cache", url, "--redis-key-prefix", &prefix], args].concat();
        Self::start_with(Records::Postgres(Arc::new(Schemas::new())), None, contract, &args)
    }

    fn start_with(records: Records, pooler: Option<PgBouncer>, contract: Contract, args: &[&str]) -> Self {
        let folder = TempDir::new().unwrap();
        let mut all = vec!["--contract".to_owned(), contract.name().to_owned(), "--simulate".to_owned()];
        all.extend(["--operator-token", OPERATOR].map(str::to_owned));
        all.extend(args.iter().map(|&arg| arg.to_owned()));
        match &records {
            Records::Folder => {}
            Records::Postgres(schemas) => {
                let url = pooler.as_ref().map_or_else(idem_servers::postgres_url, |pooler| pooler.url().to_owned());
                all.extend(schemas.arguments(&url));
                all.extend(pooler.iter().map(|_| "--pooler".to_owned()));
            }
            Records::MariaDb(server) => all.extend(["--store".to_owned(), server.url()]),
            Records::Redis(keys) => all.extend(keys.arguments()),
        }
        let (process, address) = spawn(folder.path(), &all);
        Self { process, address, folder, args: all, records, _pooler: pooler, contract }
    }

    /// Starts another server, with any framework, on the same databases; it must not outlive this one.
    pub(crate) fn replica_on(&self, framework: Framework) -> Replica {
        let mut args = self.args.clone();
        if let Some(at) = args.iter().position(|arg| arg == "--framework") {
            args[at + 1] = framework.name().to_owned();
        }
        let (process, address) = spawn(self.folder.path(), &args);
        Replica { process, address }
    }

    /// Restarts it on the same databases after it has ended.
    pub(crate) fn start_again(&mut self) {
        (self.process, self.address) = spawn(self.folder.path(), &self.args);
    }

    /// The database that holds the records.
    pub(crate) fn store(&self) -> PathBuf {
        self.folder.path().join("payments.db")
    }

    /// Gives all records of a server on SQLite the format of a later version, as if this one followed a rollback.
    pub(crate) fn make_records_unreadable(&self) {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        runtime.block_on(async {
            let options = SqliteConnectOptions::new().filename(self.store());
            let mut connection = options.connect().await.unwrap();
            sqlx::raw_sql("UPDATE idem_records SET format = 2").execute(&mut connection).await.unwrap();
            connection.close().await.unwrap();
        });
    }

    /// The arguments by which the program `idem` finds its records.
    pub(crate) fn store_arguments(&self) -> Vec<String> {
        match &self.records {
            Records::Folder => vec!["--store".into(), format!("sqlite://{}", self.store().display())],
            Records::Postgres(schemas) => {
                vec!["--store".into(), idem_servers::postgres_url(), "--schema".into(), schemas.idem.clone()]
            }
            Records::MariaDb(server) => vec!["--store".into(), server.url()],
            Records::Redis(keys) => {
                vec!["--store".into(), keys.url.clone(), "--key-prefix".into(), keys.prefix.clone()]
            }
        }
    }

    /// Kills it, as a power cut would.
    pub(crate) fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    /// Sends it SIGTERM.
    pub(crate) fn terminate(&self) {
        let sent = Command::new("kill").args(["-TERM", &self.process_id().to_string()]).status().unwrap();
        assert!(sent.success());
    }

    /// Waits for its end.
    pub(crate) fn wait(&mut self) -> ExitStatus {
        eventually("the end of the server", || self.process.try_wait().unwrap())
    }

    pub(crate) fn send(&self, request: &Request) -> Answer {
        request.send(self.address)
    }

    /// Releases a held run of `acme`.
    pub(crate) fn release(&self) {
        assert_eq!(self.send(&Request::get("/v1/running").method("DELETE")).status, 200);
    }

    /// The number of payments of `acme` whose money really moved.
    pub(crate) fn effects(&self) -> u64 {
        let answer = self.send(&Request::get("/v1/ledger"));
        assert_eq!(answer.status, 200, "{answer:?}");
        answer.json()["effects"].as_u64().unwrap()
    }

    /// The health of the store, as an operator sees it.
    pub(crate) fn health(&self) -> serde_json::Value {
        let answer = self.send(&Request::get("/operator/health").tenant(OPERATOR));
        assert_eq!(answer.status, 200, "{answer:?}");
        answer.json()
    }

    /// The number of records.
    pub(crate) fn records(&self) -> u64 {
        match &self.records {
            Records::Folder => self.health()["records"].as_u64().unwrap(),
            // The server itself only estimates it.
            Records::Postgres(schemas) => schemas.records(),
            // The server itself only estimates it.
            Records::MariaDb(server) => records_of(server),
            // The server itself counts the keys of all servers.
            Records::Redis(keys) => keys.all().len() as u64,
        }
    }

    /// Waits until a first request has acquired its key, and nothing else is running.
    pub(crate) fn await_running(&self) {
        eventually("the first request", || {
            let running = match (&self.records, self.contract) {
                (Records::Postgres(schemas), Contract::Transactional) => schemas.transactions() == 1,
                _ => self.records() == 1,
            };
            running.then_some(())
        });
    }

    /// The schemas of a server on Postgres.
    pub(crate) fn schemas(&self) -> Arc<Schemas> {
        let Records::Postgres(schemas) = &self.records else { panic!("the records are not in Postgres") };
        Arc::clone(schemas)
    }

    /// The keys of a server on Redis.
    pub(crate) fn keys(&self) -> &Keys {
        let Records::Redis(keys) = &self.records else { panic!("the records are not in Redis") };
        keys
    }

    pub(crate) fn process_id(&self) -> u32 {
        self.process.id()
    }

    /// Its log.
    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap()
    }
}

/// A second process on the databases of a [`Server`]; killed when dropped.
pub(crate) struct Replica {
    process: Child,
    pub(crate) address: SocketAddr,
}

impl Drop for Replica {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Counts the records of a server on MariaDB.
fn records_of(server: &MariaDb) -> u64 {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let mut connection = sqlx::MySqlConnection::connect(&server.url()).await.unwrap();
        let count: i64 =
            sqlx::query_scalar("SELECT count(*) FROM idem_records").fetch_one(&mut connection).await.unwrap();
        connection.close().await.unwrap();
        count.try_into().unwrap()
    })
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The error of a server that cannot start with these arguments.
pub(crate) fn refusal(args: &[&str]) -> String {
    let folder = TempDir::new().unwrap();
    let args: Vec<String> = args.iter().map(|&arg| arg.to_owned()).collect();
    let (mut process, line) = launch(folder.path(), &args);
    if !line.is_empty() {
        process.kill().unwrap();
    }
    let status = process.wait().unwrap();
    let log = std::fs::read_to_string(folder.path().join("log")).unwrap();
    assert_eq!((line.as_str(), status.code()), ("", Some(1)), "{args:?}: {log}");
    log
}

fn spawn(folder: &Path, args: &[String]) -> (Child, SocketAddr) {
    let (process, line) = launch(folder, args);
    let address = line.trim().strip_prefix("listening on http://");
    let address = address.unwrap_or_else(|| {
        panic!("the server said {line:?}: {}", std::fs::read_to_string(folder.join("log")).unwrap())
    });
    (process, address.parse().unwrap())
}

/// Starts a server and waits for the line that says that it listens. The line is empty if the server has ended.
fn launch(folder: &Path, args: &[String]) -> (Child, String) {
    let log = std::fs::File::options().create(true).append(true).open(folder.join("log")).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_payments"));
    // Settings in the developer's environment, such as a store, are not for this server.
    let settings = std::env::vars_os().map(|(name, _)| name);
    settings.filter(|name| name.to_string_lossy().starts_with("PAYMENTS_")).for_each(|name| {
        command.env_remove(name);
    });
    let mut process = command
        .args(["--listen", "127.0.0.1:0"])
        .args(args)
        .current_dir(folder)
        .stdout(Stdio::piped())
        .stderr(log)
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
    (process, line)
}
