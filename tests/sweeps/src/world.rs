//! A store behind proxies, another client of the same records, and queries outside both.

use std::net::{SocketAddr, ToSocketAddrs as _};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use idem_core::memory::ManualClock;
use idem_core::{
    Acquire, AcquireOutcome, Begin, IdempotencyStore, Lease, OwnerToken, RecordId, Settlement, StoreTransaction,
    TimeOffset, Timestamp, TransactionalStore, Writes,
};
use idem_hybrid::{HybridConfig, HybridStore};
use idem_mysql::{MySqlConfig, MySqlStore, MySqlTransaction};
use idem_postgres::{PostgresConfig, PostgresStore, PostgresTransaction};
use idem_redis::{RedisConfig, RedisFastStore, RedisStore};
use idem_servers::{MariaDb, PgBouncer};
use idem_sqlite::{SqliteConfig, SqliteStore, SqliteTransaction};
use idem_testkit::fixture::{KEPT, checkpoint, completed, request};
use sqlx::postgres::PgConnectOptions;
use sqlx::{AssertSqlSafe, ConnectOptions, Connection as _, MySqlConnection, PgConnection, SqlitePool};
use tempfile::TempDir;
use tokio::sync::Mutex;

use idem_proxy::{Cuts, Proxy};

/// A result whose error says what does not hold, or why that could not be checked.
pub(crate) type Checked<T = ()> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Longer than anything takes on a loaded machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// Longer than an answer takes on a loaded machine.
pub(crate) const LONG: Duration = Duration::from_secs(10);

/// The timeout after which a silent server is given up.
pub(crate) const SHORT: Duration = Duration::from_secs(2);

/// A store, and the server that trials disturb.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Place {
    Sqlite,
    Postgres,
    /// Postgres through a transaction-pooling proxy.
    PostgresPooled,
    MariaDb,
    Redis,
    /// Redis in front of Postgres, with harm to the exchanges with Postgres.
    HybridPostgres,
    /// Redis in front of Postgres, with harm to the exchanges with Redis.
    HybridRedis,
}

impl Place {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Sqlite => "sqlite",
            Self::Postgres => "postgres",
            Self::PostgresPooled => "postgres, pooled",
            Self::MariaDb => "mariadb",
            Self::Redis => "redis",
            Self::HybridPostgres => "hybrid, its Postgres",
            Self::HybridRedis => "hybrid, its Redis",
        }
    }

    pub(crate) fn has_server(self) -> bool {
        self != Self::Sqlite
    }

    pub(crate) fn has_transactions(self) -> bool {
        self != Self::Redis
    }
}

#[derive(Debug)]
pub(crate) struct World {
    pub(crate) place: Place,
    /// The store that comes to harm.
    pub(crate) store: Arc<dyn IdempotencyStore>,
    /// The same store, if it has transactions.
    pub(crate) transactional: Option<Arc<dyn TransactionalStore>>,
    /// Another client, which comes to no harm.
    pub(crate) rival: Arc<dyn IdempotencyStore>,
    /// The store that decides.
    pub(crate) truth: Arc<dyn IdempotencyStore>,
    pub(crate) proxies: Vec<Arc<Proxy<Cuts>>>,
    time: Time,
    business: Business,
    /// The parts of a hybrid store. Each trial builds a new one, so that its circuit breaker starts closed.
    parts: Option<(Arc<dyn TransactionalStore>, Arc<RedisFastStore>)>,
    _pooler: Option<PgBouncer>,
    _folder: Option<TempDir>,
}

#[derive(Debug)]
enum Time {
    Clock(Arc<ManualClock>),
    Offset(TimeOffset),
    /// Time passes by the expiry of the keys with this prefix.
    Keys(String),
}

/// Where handlers write.
#[derive(Debug)]
enum Business {
    Postgres { beside: Mutex<PgConnection>, name: String },
    MariaDb { beside: Mutex<MySqlConnection>, name: String },
    Sqlite(SqlitePool),
    None,
}

impl World {
    /// Opens a store that waits for its server for `timeout`.
    pub(crate) async fn open(place: Place, timeout: Duration) -> Checked<Self> {
        let world = match place {
            Place::Sqlite => Self::sqlite().await?,
            Place::Redis => Self::redis(timeout).await?,
            Place::MariaDb => Self::mariadb().await?,
            Place::Postgres | Place::PostgresPooled | Place::HybridPostgres | Place::HybridRedis => {
                Self::postgres(place, timeout).await?
            }
        };
        world.rehearse().await?;
        Ok(world)
    }

    async fn sqlite() -> Checked<Self> {
        let folder = TempDir::new()?;
        let clock = Arc::new(ManualClock::new(Timestamp::from_unix_micros(1_767_225_600_000_000)));
        let url = format!("sqlite://{}", folder.path().join("records.db").display());
        let config = || SqliteConfig::new(&url).dangerous_synchronous_normal().clock(clock.clone());
        let store = SqliteStore::open(config()).await?;
        sqlx::raw_sql("CREATE TABLE effects (id BLOB NOT NULL)").execute(store.pool()).await?;
        let business = Business::Sqlite(store.pool().clone());
        let rival: Arc<dyn IdempotencyStore> = Arc::new(SqliteStore::open(config()).await?);
        let store: Arc<dyn TransactionalStore> = Arc::new(store);
        let mut world = Self::of(Place::Sqlite, store.clone(), rival, Time::Clock(clock), business);
        (world.transactional, world._folder) = (Some(store), Some(folder));
        Ok(world)
    }

    async fn redis(timeout: Duration) -> Checked<Self> {
        let (proxy, prefix) = (redis_proxy().await?, fresh_name());
        let open =
            async |url: String| RedisStore::open(RedisConfig::new(url).key_prefix(&prefix).timeout(timeout)).await;
        let store = Arc::new(open(at(&proxy)).await?);
        let rival = Arc::new(open(idem_servers::redis_url()).await?);
        let mut world = Self::of(Place::Redis, store, rival, Time::Keys(prefix), Business::None);
        world.proxies.push(proxy);
        Ok(world)
    }

    /// The store decides how long it waits for its server.
    async fn mariadb() -> Checked<Self> {
        let (name, offset, server) = (fresh_name(), TimeOffset::default(), mariadb()?);
        let mut beside = MySqlConnection::connect(&server.url()).await?;
        let prepare = format!(
            "CREATE DATABASE {name}; CREATE TABLE {name}.effects (id BINARY(32) NOT NULL); \
             SET SESSION innodb_lock_wait_timeout = {}",
            PATIENCE.as_secs()
        );
        sqlx::raw_sql(AssertSqlSafe(prepare)).execute(&mut beside).await?;
        let proxy = Arc::new(Proxy::start("127.0.0.1", server.port(), Cuts::default()).await?);
        let open = async |url: String| {
            let config = MySqlConfig::new(url).time_offset(offset.clone());
            // The fewest of each kind: a broken one is then met by the next verbs.
            let config = config.verb_connections(4.try_into()?).max_transactions(1.try_into()?);
            let store: Arc<dyn TransactionalStore> = Arc::new(MySqlStore::open(config).await?);
            Checked::Ok(store)
        };
        let store = open(format!("mysql://root@127.0.0.1:{}/{name}", proxy.port())).await?;
        let rival = open(server.url_of("root", &name)).await?;
        let business = Business::MariaDb { beside: Mutex::new(beside), name };
        let mut world = Self::of(Place::MariaDb, store.clone(), rival, Time::Offset(offset.clone()), business);
        world.transactional = Some(store);
        world.proxies.push(proxy);
        Ok(world)
    }

    async fn postgres(place: Place, timeout: Duration) -> Checked<Self> {
        let (name, offset) = (fresh_name(), TimeOffset::default());
        let direct: PgConnectOptions = idem_servers::postgres_url().parse()?;
        let pooler = match place {
            Place::PostgresPooled => Some(PgBouncer::start(&idem_servers::postgres_url(), 2)?),
            _ => None,
        };
        let way: PgConnectOptions = pooler.as_ref().map_or(Ok(direct.clone()), |pooler| pooler.url().parse())?;
        let proxy = Arc::new(Proxy::start(way.get_host(), way.get_port(), Cuts::default()).await?);
        let through = match place {
            Place::HybridRedis => direct.clone(),
            _ => way.host("127.0.0.1").port(proxy.port()),
        };
        let open = async |options: PgConnectOptions, is_pooled: bool| {
            let config = PostgresConfig::from_options(options.application_name(&name)).schema(&name);
            let config = config.time_offset(offset.clone()).statement_timeout(timeout);
            // One connection of each kind: a broken one is then met by the next verb.
            let config = config.verb_connections(1.try_into()?).max_transactions(1.try_into()?);
            let config = if is_pooled { config.through_transaction_pooler() } else { config };
            let store: Arc<dyn TransactionalStore> = Arc::new(PostgresStore::open(config).await?);
            Checked::Ok(store)
        };
        let store = open(through, pooler.is_some()).await?;
        let rival = open(direct.clone(), false).await?;
        let mut beside = direct.disable_statement_logging().connect().await?;
        let table = format!("CREATE TABLE {name}.effects (id BYTEA NOT NULL)");
        sqlx::raw_sql(AssertSqlSafe(table)).execute(&mut beside).await?;
        let business = Business::Postgres { beside: Mutex::new(beside), name: name.clone() };
        let mut world = Self::of(place, store.clone(), rival.clone(), Time::Offset(offset.clone()), business);
        (world.transactional, world._pooler) = (Some(store.clone()), pooler);
        if matches!(place, Place::HybridPostgres | Place::HybridRedis) {
            let front = redis_proxy().await?;
            let fast = |url: String| {
                let config = RedisConfig::new(url).key_prefix(&name).timeout(timeout).time_offset(offset.clone());
                RedisFastStore::new(config).map(Arc::new)
            };
            world.rival = Arc::new(HybridStore::new(rival, fast(idem_servers::redis_url())?, patient()));
            world.parts = Some(match place {
                Place::HybridRedis => (store, fast(at(&front))?),
                _ => (store, fast(idem_servers::redis_url())?),
            });
            world.proxies.push(if place == Place::HybridRedis { front } else { proxy });
            world.renew();
        } else {
            world.proxies.push(proxy);
        }
        Ok(world)
    }

    fn of(
        place: Place,
        store: Arc<dyn IdempotencyStore>,
        rival: Arc<dyn IdempotencyStore>,
        time: Time,
        business: Business,
    ) -> Self {
        Self {
            place,
            store,
            transactional: None,
            truth: Arc::clone(&rival),
            rival,
            proxies: Vec::new(),
            time,
            business,
            parts: None,
            _pooler: None,
            _folder: None,
        }
    }

    /// Makes a new hybrid store.
    pub(crate) fn renew(&mut self) {
        if let Some((durable, fast)) = &self.parts {
            let store: Arc<dyn TransactionalStore> =
                Arc::new(HybridStore::new(Arc::clone(durable), Arc::clone(fast) as _, patient()));
            (self.store, self.transactional) = (store.clone(), Some(store));
        }
    }

    /// Whether another client may be answered for a while that an ended operation runs, because the fast store did not learn of
    /// the end.
    pub(crate) fn lags(&self) -> bool {
        self.parts.is_some()
    }

    /// Does everything once, so that servers know all statements and scripts.
    async fn rehearse(&self) -> Checked {
        for store in [&self.store, &self.rival] {
            let request = request();
            let AcquireOutcome::Acquired(lease) = store.acquire(&request).await? else {
                return Err("a fresh key was not to be had".into());
            };
            store.renew(&lease, request.term).await?;
            store.checkpoint(&lease, &checkpoint("charged")).await?;
            store.settle(&lease, &completed(), KEPT).await?;
            store.acquire(&request).await?;
            store.peek(&request.id).await?;
        }
        Ok(())
    }

    /// Uses all connections, which replaces those that have ended.
    pub(crate) async fn warm(&self, transactions: bool) -> Checked {
        let give_up_at = Instant::now() + PATIENCE;
        // A silent connection keeps its place for some seconds.
        while let Err(error) = self.use_all(transactions).await {
            if Instant::now() > give_up_at {
                return Err(error);
            }
        }
        Ok(())
    }

    async fn use_all(&self, transactions: bool) -> Checked {
        let request = request();
        let lease = self.lease(&request).await?;
        self.store.settle(&lease, &Settlement::Released, KEPT).await?;
        if transactions {
            let transaction = self.begin(&request).await?;
            transaction.finish(&Settlement::Released, KEPT, Writes::Keep).await?;
        }
        Ok(())
    }

    pub(crate) async fn lease(&self, request: &Acquire) -> Checked<Lease> {
        match self.store.acquire(request).await? {
            AcquireOutcome::Acquired(lease) => Ok(lease),
            other => Err(format!("a key that is free was not to be had: {other:?}").into()),
        }
    }

    pub(crate) async fn begin(&self, request: &Acquire) -> Checked<Box<dyn StoreTransaction>> {
        let transactional = self.transactional.as_ref().ok_or("it has no transactions")?;
        match transactional.begin(request).await? {
            Begin::Acquired { transaction, .. } => Ok(transaction),
            other => Err(format!("a key that is free was not to be had: {other:?}").into()),
        }
    }

    pub(crate) fn advance(&self, by: Duration) -> Checked<()> {
        match &self.time {
            Time::Clock(clock) => clock.advance(by),
            Time::Offset(offset) => offset.advance(by),
            Time::Keys(prefix) => {
                let server = redis_server()?.to_socket_addrs()?.find(SocketAddr::is_ipv4);
                idem_servers::redis_expire_sooner(server.ok_or("Redis has no address")?, prefix, by)?;
            }
        }
        Ok(())
    }

    /// Makes the business write of a handler.
    pub(crate) async fn write(&self, transaction: &mut dyn StoreTransaction, id: &RecordId) -> Result<(), sqlx::Error> {
        let id = id.as_bytes().as_slice();
        let missing = || sqlx::Error::Protocol("this is another store's transaction".into());
        match &self.business {
            Business::Postgres { name, .. } => {
                let insert = AssertSqlSafe(format!("INSERT INTO {name}.effects (id) VALUES ($1)"));
                let handlers: &mut PostgresTransaction = transaction.as_any_mut().downcast_mut().ok_or_else(missing)?;
                sqlx::query(insert).bind(id).execute(&mut **handlers).await.map(drop)
            }
            Business::MariaDb { name, .. } => {
                let insert = AssertSqlSafe(format!("INSERT INTO {name}.effects (id) VALUES (?)"));
                let handlers: &mut MySqlTransaction = transaction.as_any_mut().downcast_mut().ok_or_else(missing)?;
                sqlx::query(insert).bind(id).execute(&mut **handlers).await.map(drop)
            }
            Business::Sqlite(_) => {
                let insert = sqlx::query("INSERT INTO effects (id) VALUES (?)").bind(id);
                let handlers: &mut SqliteTransaction = transaction.as_any_mut().downcast_mut().ok_or_else(missing)?;
                insert.execute(&mut **handlers).await.map(drop)
            }
            Business::None => Err(missing()),
        }
    }

    /// The number of business writes of an operation.
    pub(crate) async fn effects(&self, id: &RecordId) -> Checked<i64> {
        let id = id.as_bytes().as_slice();
        Ok(match &self.business {
            Business::Postgres { beside, name } => {
                let count = AssertSqlSafe(format!("SELECT count(*) FROM {name}.effects WHERE id = $1"));
                sqlx::query_scalar(count).bind(id).fetch_one(&mut *beside.lock().await).await?
            }
            Business::MariaDb { beside, name } => {
                let count = AssertSqlSafe(format!("SELECT count(*) FROM {name}.effects WHERE id = ?"));
                sqlx::query_scalar(count).bind(id).fetch_one(&mut *beside.lock().await).await?
            }
            Business::Sqlite(pool) => {
                sqlx::query_scalar("SELECT count(*) FROM effects WHERE id = ?").bind(id).fetch_one(pool).await?
            }
            Business::None => 0,
        })
    }

    /// Waits until no traffic is pending between the store and its servers.
    pub(crate) async fn quiet(&self) {
        for proxy in &self.proxies {
            proxy.quiet().await;
        }
    }

    /// Waits until no session is in a transaction or holds a lock.
    pub(crate) async fn nothing_is_open(&self) -> Checked {
        let (beside, name) = match &self.business {
            Business::Postgres { beside, name } => (beside, name),
            Business::MariaDb { beside, name } => {
                return nothing_is_open_in_mariadb(&mut *beside.lock().await, name).await;
            }
            Business::Sqlite(_) | Business::None => return Ok(()),
        };
        let open = format!(
            "SELECT (SELECT count(*) FROM pg_stat_activity WHERE application_name = '{name}' \
             AND state IS DISTINCT FROM 'idle' AND backend_type = 'client backend') \
             + (SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid) \
             WHERE application_name = '{name}' AND locktype = 'advisory')"
        );
        let give_up_at = Instant::now() + PATIENCE;
        loop {
            let open = sqlx::query_scalar::<_, i64>(AssertSqlSafe(open.clone()));
            if open.fetch_one(&mut *beside.lock().await).await? == 0 {
                return Ok(());
            }
            if Instant::now() > give_up_at {
                return Err("a transaction or a lock stays open".into());
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    /// Removes what it made on a server.
    pub(crate) async fn close(self) -> Checked {
        match self.business {
            Business::Postgres { beside, name } => {
                let drop_schema = format!("SET lock_timeout='2s';DROP SCHEMA \"{name}\" CASCADE");
                sqlx::raw_sql(AssertSqlSafe(drop_schema)).execute(&mut beside.into_inner()).await?;
            }
            Business::MariaDb { beside, name } => {
                let drop_database = format!("DROP DATABASE {name}");
                sqlx::raw_sql(AssertSqlSafe(drop_database)).execute(&mut beside.into_inner()).await?;
            }
            Business::Sqlite(_) | Business::None => {}
        }
        Ok(())
    }
}

/// The MariaDB server of this process, which ends with it.
pub(crate) fn mariadb() -> Checked<&'static MariaDb> {
    static SERVER: OnceLock<Result<MariaDb, String>> = OnceLock::new();
    let server = SERVER.get_or_init(|| MariaDb::start_unsynced(&[]).map_err(|error| error.to_string()));
    server.as_ref().map_err(|error| error.clone().into())
}

/// Waits until no session executes a statement in this database, and no transaction has locked a row of it.
///
/// A poll of `innodb_trx` would read old rows: the server refreshes it only after 100 ms in which nobody has read it.
async fn nothing_is_open_in_mariadb(beside: &mut MySqlConnection, name: &str) -> Checked {
    let busy =
        format!("SELECT count(*) FROM information_schema.processlist WHERE db = '{name}' AND command <> 'Sleep'");
    let give_up_at = Instant::now() + PATIENCE;
    while sqlx::query_scalar::<_, i64>(AssertSqlSafe(busy.clone())).fetch_one(&mut *beside).await? != 0 {
        if Instant::now() > give_up_at {
            return Err("a statement goes on".into());
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    for table in ["idem_records", "effects"] {
        // A locking read waits for what is under way.
        let read = format!("SELECT count(*) FROM {name}.{table} FOR UPDATE");
        sqlx::query_scalar::<_, i64>(AssertSqlSafe(read)).fetch_one(&mut *beside).await?;
    }
    Ok(())
}

/// A configuration with a patience that never runs out.
fn patient() -> HybridConfig {
    HybridConfig::new().patience(LONG * 2)
}

/// A unique name, for a schema or as a prefix.
fn fresh_name() -> String {
    let token: String = OwnerToken::random().as_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sweep_{token}")
}

async fn redis_proxy() -> Checked<Arc<Proxy<Cuts>>> {
    let (host, port) = redis_server()?;
    Ok(Arc::new(Proxy::start(&host, port, Cuts::default()).await?))
}

/// The host and port of the shared Redis server.
fn redis_server() -> Checked<(String, u16)> {
    let url = idem_servers::redis_url();
    let authority = url.split("://").nth(1).and_then(|rest| rest.split('/').next()).unwrap_or_default();
    let (host, port) = authority.rsplit_once(':').ok_or("REDIS_URL needs a host and a port, without a password")?;
    Ok((host.to_owned(), port.parse()?))
}

fn at(proxy: &Proxy<Cuts>) -> String {
    format!("redis://127.0.0.1:{}", proxy.port())
}
