//! Tasks and runtimes that end while their store connects or waits for an answer: the store must serve the next verb.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use idem_core::engine::{Answer, Conclusion, Disposition, Idempotency, Operation, Settings};
use idem_core::{
    Acquire, AcquireOutcome, Begin, Fingerprint, IdempotencyStore, Lease, OwnerToken, Scope, Settlement,
    TransactionalStore, Writes,
};
use idem_mysql::{MySqlConfig, MySqlStore};
use idem_postgres::{PostgresConfig, PostgresStore};
use idem_redis::{RedisConfig, RedisStore};
use idem_servers::{PgBouncer, RedisCluster, RedisSentinel, redis_command};
use idem_sqlite::{SqliteConfig, SqliteStore};
use idem_testkit::fixture::{KEPT, checkpoint, completed, request, response};
use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, Executor, MySqlConnection, PgConnection, SqliteConnection};
use tempfile::TempDir;
use tokio::runtime::Builder;
use tokio::time::{sleep, timeout};

use crate::coverage::Coverage;
use crate::hold;
use crate::world::{Checked, PATIENCE, SHORT, mariadb};
use idem_proxy::{Cut, Cuts, Direction, Ended, Ending, Proxy};

/// The time until the store must serve again: a dead connection is given up after [`SHORT`], more than once at worst.
const BOUND: Duration = Duration::from_secs(10);

/// How long a verb runs before it ends, if its progress cannot be observed.
const MOMENT: Duration = Duration::from_millis(40);

/// The lease of the engine's runs, in real time.
const LEASE: Duration = Duration::from_millis(900);

/// At how many points of its exchange a verb is stopped.
const POINTS: usize = 6;

/// The store of a trial.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Site {
    Sqlite,
    Postgres,
    PostgresPooled,
    MariaDb,
    Redis,
    RedisSentinel,
    RedisCluster,
}

/// The verb that is interrupted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Verb {
    /// The store is opened.
    Open,
    Acquire,
    Renew,
    Checkpoint,
    Settle,
    Peek,
    Begin,
    /// An operation of an engine.
    Execute,
}

/// What ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// The future of the verb is dropped.
    Future,
    /// The runtime that called the verb ends.
    Runtime,
    /// The runtime that opened the store and called the verb ends.
    RuntimeOfAll,
}

#[derive(Debug, Clone, Copy)]
struct Trial {
    verb: Verb,
    end: End,
    /// Whether a connection must be made first.
    is_cold: bool,
    /// After this many bytes of answers, nothing more arrives.
    after: usize,
}

#[derive(Clone)]
struct Store {
    leased: Arc<dyn IdempotencyStore>,
    transactional: Option<Arc<dyn TransactionalStore>>,
    engine: Idempotency,
}

/// The server of a site, which a trial can stop.
struct Server {
    site: Site,
    url: String,
    /// The name of a schema, or the prefix of keys.
    name: String,
    proxy: Option<Proxy<Cuts>>,
    group: Mutex<Group>,
    _pooler: Option<PgBouncer>,
    _folder: Option<TempDir>,
}

enum Group {
    Sentinel(RedisSentinel),
    Cluster(RedisCluster),
    /// Holds the lock of the file.
    File(Option<SqliteConnection>),
    None,
}

impl Site {
    pub(crate) const ALL: [Self; 7] = [
        Self::Sqlite,
        Self::Postgres,
        Self::PostgresPooled,
        Self::MariaDb,
        Self::Redis,
        Self::RedisSentinel,
        Self::RedisCluster,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Sqlite => "sqlite",
            Self::Postgres => "postgres",
            Self::PostgresPooled => "postgres, pooled",
            Self::MariaDb => "mariadb",
            Self::Redis => "redis",
            Self::RedisSentinel => "redis, Sentinels",
            Self::RedisCluster => "redis, Cluster",
        }
    }

    /// All verbs of this store.
    pub(crate) fn verbs(self) -> Vec<Verb> {
        let has_transactions = !matches!(self, Self::Redis | Self::RedisSentinel | Self::RedisCluster);
        Verb::ALL.into_iter().filter(|verb| has_transactions || *verb != Verb::Begin).collect()
    }
}

impl Verb {
    const ALL: [Self; 8] = [
        Self::Open,
        Self::Acquire,
        Self::Renew,
        Self::Checkpoint,
        Self::Settle,
        Self::Peek,
        Self::Begin,
        Self::Execute,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Open => "ends in: open",
            Self::Acquire => "ends in: acquire",
            Self::Renew => "ends in: renew",
            Self::Checkpoint => "ends in: checkpoint",
            Self::Settle => "ends in: settle",
            Self::Peek => "ends in: peek",
            Self::Begin => "ends in: begin",
            Self::Execute => "ends in: execute",
        }
    }
}

/// Interrupts a verb at a site in every way.
pub(crate) async fn sweep(site: Site, verb: Verb) -> Coverage {
    let mut coverage = Coverage::default();
    let server = match Server::start(site).await {
        Ok(server) => Arc::new(server),
        Err(error) => {
            coverage.violations.push(format!("it cannot be started: {error}"));
            return coverage;
        }
    };
    for is_cold in [true, false] {
        for end in [End::Future, End::Runtime, End::RuntimeOfAll] {
            let trial = |after| Trial { verb, end, is_cold, after };
            let mut points = vec![0];
            match server.measure(trial(usize::MAX)).await {
                Ok(bytes) => points.extend((1..POINTS).map(|point| bytes * point / POINTS).filter(|after| *after > 0)),
                Err(error) => coverage.violations.push(format!("{:?}: it does not run at all: {error}", trial(0))),
            }
            coverage.bytes[Direction::Answers as usize] = points.last().copied().unwrap_or_default();
            for trial in points.into_iter().map(trial) {
                match timeout(PATIENCE * 4, Arc::clone(&server).suffer(trial)).await {
                    Ok(Ok(())) => coverage.drops += 1,
                    Ok(Err(error)) => coverage.violations.push(format!("{trial:?}: {error}")),
                    Err(_) => coverage.violations.push(format!("{trial:?}: it hangs")),
                }
                server.let_go().await;
            }
        }
    }
    if let Err(error) = server.close().await {
        coverage.violations.push(format!("it cannot be closed: {error}"));
    }
    coverage
}

impl Server {
    async fn start(site: Site) -> Checked<Self> {
        let token: String = OwnerToken::random().as_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
        let name = format!("sweep_{token}");
        let (mut group, mut proxy, mut pooler, mut folder) = (Group::None, None, None, None);
        let url = match site {
            Site::Sqlite => {
                let temporary = TempDir::new()?;
                let url = format!("sqlite://{}", temporary.path().join("records.db").display());
                (group, folder) = (Group::File(None), Some(temporary));
                url
            }
            Site::Postgres | Site::PostgresPooled => {
                if site == Site::PostgresPooled {
                    pooler = Some(PgBouncer::start(&idem_servers::postgres_url(), 2)?);
                }
                let url = pooler.as_ref().map_or_else(idem_servers::postgres_url, |pooler| pooler.url().to_owned());
                behind(&url, &mut proxy).await?
            }
            Site::MariaDb => {
                let server = mariadb()?;
                let create = format!("CREATE DATABASE {name}");
                MySqlConnection::connect(&server.url()).await?.execute(AssertSqlSafe(create)).await?;
                behind(&server.url_of("root", &name), &mut proxy).await?
            }
            Site::Redis => behind(&idem_servers::redis_url(), &mut proxy).await?,
            Site::RedisSentinel => {
                let sentinel = tokio::task::block_in_place(RedisSentinel::start)?;
                let url = sentinel.url();
                group = Group::Sentinel(sentinel);
                url
            }
            Site::RedisCluster => {
                let cluster = tokio::task::block_in_place(RedisCluster::start)?;
                let url = cluster.url();
                group = Group::Cluster(cluster);
                url
            }
        };
        Ok(Self { site, url, name, proxy, group: Mutex::new(group), _pooler: pooler, _folder: folder })
    }

    async fn open(&self) -> Checked<Store> {
        let settings = Settings::new().lease(LEASE).store_timeout(SHORT);
        let transactional: Arc<dyn TransactionalStore> = match self.site {
            Site::Sqlite => Arc::new(SqliteStore::open(SqliteConfig::new(&self.url).busy_timeout(SHORT)).await?),
            Site::Postgres | Site::PostgresPooled => {
                let config = PostgresConfig::new(&self.url).schema(&self.name).statement_timeout(SHORT);
                let config = config.verb_connections(1.try_into()?).max_transactions(1.try_into()?);
                let is_pooled = self.site == Site::PostgresPooled;
                let config = if is_pooled { config.through_transaction_pooler() } else { config };
                Arc::new(PostgresStore::open(config).await?)
            }
            Site::MariaDb => {
                let config =
                    MySqlConfig::new(&self.url).verb_connections(4.try_into()?).max_transactions(1.try_into()?);
                Arc::new(MySqlStore::open(config).await?)
            }
            Site::Redis | Site::RedisSentinel | Site::RedisCluster => {
                let config = RedisConfig::new(&self.url).key_prefix(&self.name).timeout(SHORT);
                let leased = Arc::new(RedisStore::open(config).await?);
                let engine = Idempotency::at_least_once(leased.clone(), settings);
                return Ok(Store { leased, transactional: None, engine });
            }
        };
        let engine = Idempotency::at_least_once(transactional.clone(), settings);
        Ok(Store { leased: transactional.clone(), transactional: Some(transactional), engine })
    }

    /// The number of bytes in the answers to a verb.
    async fn measure(&self, trial: Trial) -> Checked<usize> {
        let store = self.open().await?;
        let (request, lease) = prepare(&store, trial.verb).await?;
        if let Some(proxy) = &self.proxy {
            if trial.is_cold {
                proxy.end_all(Ended::Reset);
            }
            proxy.arm(None);
        }
        timeout(PATIENCE, self.act(&store, trial.verb, request, lease)).await??;
        Ok(self.proxy.as_ref().map_or(0, |proxy| proxy.carried(Direction::Answers)))
    }

    /// Stops a verb midway, ends it, and checks that the store then serves another caller.
    async fn suffer(self: Arc<Self>, trial: Trial) -> Checked {
        let store = if trial.end == End::RuntimeOfAll { None } else { Some(self.open().await?) };
        let store = if trial.end == End::Future {
            self.stand_still(store, trial).await?
        } else {
            let server = Arc::clone(&self);
            let ended = tokio::task::spawn_blocking(move || {
                let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
                let store = runtime.block_on(server.stand_still(store, trial));
                runtime.shutdown_timeout(PATIENCE);
                store
            });
            ended.await??
        };
        self.let_go().await;
        // If opening itself was interrupted, there is no store yet.
        let store = match store {
            Some(store) => store,
            None => timeout(BOUND, self.open()).await.map_err(|_| "it cannot be opened any more")??,
        };
        if trial.end == End::RuntimeOfAll && store.transactional.is_some() && says_that_it_ended(&store).await? {
            let store = timeout(BOUND, self.open()).await.map_err(|_| "it cannot be opened any more")??;
            return serves(&store, trial.verb).await;
        }
        serves(&store, trial.verb).await
    }

    /// Stops a verb midway and drops it. Returns the store, unless the store was being opened.
    async fn stand_still(&self, store: Option<Store>, trial: Trial) -> Checked<Option<Store>> {
        if trial.verb == Verb::Open {
            self.hold(trial).await?;
            tokio::select! {
                _ = self.open() => {}
                () = self.is_held() => {}
            }
            return Ok(None);
        }
        let store = match store {
            Some(store) => store,
            None => self.open().await?,
        };
        let (request, lease) = prepare(&store, trial.verb).await?;
        self.hold(trial).await?;
        tokio::select! {
            _ = self.act(&store, trial.verb, request, lease) => {}
            () = self.is_held() => {}
        }
        Ok(Some(store))
    }

    async fn act(&self, store: &Store, verb: Verb, request: Acquire, lease: Option<Lease>) -> Checked {
        let leased = &store.leased;
        match (verb, lease) {
            (Verb::Open, _) => drop(self.open().await?),
            (Verb::Renew, Some(lease)) => drop(leased.renew(&lease, request.term).await?),
            (Verb::Checkpoint, Some(lease)) => drop(leased.checkpoint(&lease, &checkpoint("charged")).await?),
            (Verb::Settle, Some(lease)) => drop(leased.settle(&lease, &completed(), KEPT).await?),
            (Verb::Peek, _) => drop(leased.peek(&request.id).await?),
            (Verb::Begin, _) => drop(begin(store, &request).await?),
            (Verb::Execute, _) => execute(store, LEASE / 10).await?,
            _ => drop(leased.acquire(&request).await?),
        }
        Ok(())
    }

    /// Stops all answers from now on, at once or after some bytes.
    async fn hold(&self, trial: Trial) -> Checked {
        if let Some(proxy) = &self.proxy {
            if trial.is_cold {
                proxy.end_all(Ended::Reset);
            }
            proxy.arm(Some(Cut { direction: Direction::Answers, after: trial.after, ending: Ending::Silence }));
            return Ok(());
        }
        if self.site == Site::Sqlite {
            let options: SqliteConnectOptions = self.url.parse()?;
            let mut connection = options.create_if_missing(true).busy_timeout(SHORT).connect().await?;
            sqlx::raw_sql("BEGIN IMMEDIATE").execute(&mut connection).await?;
            *self.group() = Group::File(Some(connection));
            return Ok(());
        }
        tokio::task::block_in_place(|| self.hold_group(trial.is_cold))
    }

    fn hold_group(&self, is_cold: bool) -> Checked {
        let mut group = self.group();
        for port in nodes(&group)? {
            if is_cold {
                redis_command(port, &["CLIENT", "KILL", "TYPE", "normal"])?;
            }
            match &mut *group {
                Group::Sentinel(sentinel) => sentinel.pause(port)?,
                Group::Cluster(cluster) => cluster.pause(port)?,
                Group::File(_) | Group::None => {}
            }
        }
        Ok(())
    }

    /// Waits until a verb is stopped.
    async fn is_held(&self) {
        match &self.proxy {
            Some(proxy) => {
                while !proxy.is_cut() {
                    sleep(Duration::from_millis(1)).await;
                }
            }
            None => sleep(MOMENT).await,
        }
    }

    /// Lets all answers through again.
    async fn let_go(&self) {
        if let Some(proxy) = &self.proxy {
            proxy.disarm();
        }
        let file = match &mut *self.group() {
            Group::File(connection) => connection.take(),
            _ => None,
        };
        if let Some(connection) = file {
            // The transaction ends with the connection.
            let _ = connection.close().await;
        }
        let group = &mut *self.group();
        for port in nodes(group).unwrap_or_default() {
            // A node that is not paused needs nothing.
            let _ = match group {
                Group::Sentinel(sentinel) => sentinel.resume(port),
                Group::Cluster(cluster) => cluster.resume(port),
                Group::File(_) | Group::None => Ok(()),
            };
        }
    }

    fn group(&self) -> std::sync::MutexGuard<'_, Group> {
        self.group.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn close(&self) -> Checked {
        if matches!(self.site, Site::Postgres | Site::PostgresPooled) {
            let mut connection = PgConnection::connect(&idem_servers::postgres_url()).await?;
            let drop_schema = format!("SET lock_timeout = '2s'; DROP SCHEMA \"{}\" CASCADE", self.name);
            sqlx::raw_sql(AssertSqlSafe(drop_schema)).execute(&mut connection).await?;
        }
        Ok(())
    }
}

/// The ports of the nodes that serve keys.
fn nodes(group: &Group) -> Checked<Vec<u16>> {
    Ok(match group {
        Group::Sentinel(sentinel) => vec![sentinel.primary_port()?],
        Group::Cluster(cluster) => cluster.ports(),
        Group::File(_) | Group::None => Vec::new(),
    })
}

/// The URL of a new proxy in front of the server at `url`.
async fn behind(url: &str, proxy: &mut Option<Proxy<Cuts>>) -> Checked<String> {
    let (scheme, rest) = url.split_once("://").ok_or("a URL has a scheme")?;
    let (authority, path) =
        rest.split_once('/').map_or((rest, String::new()), |(first, path)| (first, format!("/{path}")));
    let (login, address) = authority.rsplit_once('@').map_or(("", authority), |(login, address)| (login, address));
    let (host, port) = address.rsplit_once(':').ok_or("the URL needs a port")?;
    let started = proxy.insert(Proxy::start(host, port.parse()?, Cuts::default()).await?);
    let login = if login.is_empty() { String::new() } else { format!("{login}@") };
    Ok(format!("{scheme}://{login}127.0.0.1:{}{path}", started.port()))
}

/// Prepares what a verb needs, which also opens connections.
async fn prepare(store: &Store, verb: Verb) -> Checked<(Acquire, Option<Lease>)> {
    let request = request();
    match verb {
        Verb::Open => Ok((request, None)),
        Verb::Begin => {
            begin(store, &request).await?;
            Ok((idem_testkit::fixture::request(), None))
        }
        Verb::Acquire | Verb::Execute => {
            lease(store, &request).await?;
            Ok((idem_testkit::fixture::request(), None))
        }
        Verb::Renew | Verb::Checkpoint | Verb::Settle | Verb::Peek => {
            let lease = lease(store, &request).await?;
            Ok((request, Some(lease)))
        }
    }
}

async fn lease(store: &Store, request: &Acquire) -> Checked<Lease> {
    match store.leased.acquire(request).await? {
        AcquireOutcome::Acquired(lease) => Ok(lease),
        other => Err(format!("a key that is free was not to be had: {other:?}").into()),
    }
}

/// Runs a transaction from beginning to end.
async fn begin(store: &Store, request: &Acquire) -> Checked {
    let transactional = store.transactional.as_ref().ok_or("it has no transactions")?;
    match transactional.begin(request).await? {
        Begin::Acquired { transaction, .. } => {
            transaction.finish(&Settlement::Released, KEPT, Writes::Keep).await?;
            Ok(())
        }
        other => Err(format!("a key that is free was not to be had: {other:?}").into()),
    }
}

/// Runs an operation for this long, and checks its replay.
async fn execute(store: &Store, lasts: Duration) -> Checked {
    let token: String = OwnerToken::random().as_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    let operation = || -> Checked<Operation> {
        Ok(Operation::new(Scope::new("acme", "pay"), token.parse()?, Fingerprint::of_bytes("pay", b"12.50 EUR")))
    };
    let conclusion = || Conclusion {
        value: (),
        disposition: Disposition::Complete { response: response(), writes: Writes::Keep },
        retention: None,
    };
    let handler = async move |_| {
        sleep(lasts).await;
        conclusion()
    };
    let ran = store.engine.execute(operation()?, handler, conclusion).await?;
    hold!(matches!(ran, Answer::Ran { attempt: 1, .. }), "a fresh operation was told {ran:?}");
    let again = store.engine.execute(operation()?, async move |_| conclusion(), conclusion).await?;
    hold!(matches!(again, Answer::Replay(_)), "its repeat was told {again:?}");
    Ok(())
}

/// Whether the store reports, without delay, that the runtime in which it was opened has ended.
async fn says_that_it_ended(store: &Store) -> Checked<bool> {
    let asked = timeout(SHORT, store.leased.acquire(&request())).await;
    let asked = asked.map_err(|_| format!("its runtime has ended, and it says nothing within {SHORT:?}"))?;
    Ok(asked.is_err_and(|error| error.to_string().contains("store was opened has ended")))
}

/// Checks that the store serves a caller within its bound, in every way.
async fn serves(store: &Store, ended: Verb) -> Checked {
    let began = Instant::now();
    loop {
        let served = async {
            let request = request();
            let lease = lease(store, &request).await?;
            store.leased.settle(&lease, &completed(), KEPT).await?;
            if store.transactional.is_some() {
                begin(store, &idem_testkit::fixture::request()).await?;
            }
            Checked::Ok(())
        };
        let left = BOUND.saturating_sub(began.elapsed());
        match timeout(left, served).await {
            Ok(Ok(())) => break,
            Ok(Err(error)) => hold!(began.elapsed() < BOUND, "it serves nobody within {BOUND:?}: {error}"),
            Err(_) => return Err(format!("it serves nobody within {BOUND:?}").into()),
        }
        sleep(Duration::from_millis(20)).await;
    }
    // Renewals must work too.
    let lasts = if ended == Verb::Execute { LEASE * 3 / 2 } else { Duration::ZERO };
    timeout(BOUND, execute(store, lasts)).await.map_err(|_| "the engine hangs")?
}
