//! The state that all tasks of one cell share, and the servers that the cell uses.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::{Duration, Instant};

use idem_faults::{Behind, Cell, Contract, Key, Operation, Payment, Promise, Store};
use idem_servers::{MariaDb, PgBouncer, Postgres, Redis, redis_command};
use sqlx::{Connection, Row};
use tempfile::TempDir;

use crate::Error;
use crate::client::read_recipient;
use crate::service::{Ports, Service};

/// So short that leases of dead processes expire and are taken over many times in a run.
pub(crate) const LEASE: Duration = Duration::from_secs(2);

/// How much longer than a lease a key may have no answer after the last fault. In this time services reconnect, and clients ask
/// for all missing answers at once.
const MARGIN: Duration = Duration::from_secs(10);

/// The number of services, one on each framework.
pub(crate) const SERVICES: usize = 2;

/// Each service has a pool for its store and one for its ledger.
const MOST_CONNECTIONS: i64 = 64;

/// Twenty accounts. The payment determines who pays and who receives.
///
/// One payment in fifty writes its two accounts in the opposite order, so that some transactions deadlock. Postgres fails one
/// of them after a second. More deadlocks would block all clients all the time, and a late answer would say nothing about the
/// library.
const POSTGRES_ACCOUNTS: &str = "
    CREATE TABLE payments.accounts (name BIGINT PRIMARY KEY, balance BIGINT NOT NULL, received BIGINT NOT NULL);
    INSERT INTO payments.accounts SELECT name, 0, 0 FROM generate_series(0, 19) AS name;
    CREATE FUNCTION payments.transfer() RETURNS trigger LANGUAGE plpgsql AS $$
    DECLARE
        payer BIGINT := abs(hashtext(NEW.payment)) % 20;
        receiver BIGINT := (payer + 1 + abs(hashtext(NEW.payment)) / 20 % 19) % 20;
        is_reversed BOOLEAN := abs(hashtext(NEW.payment)) / 400 % 50 = 0;
        account BIGINT := CASE WHEN is_reversed THEN greatest(payer, receiver) ELSE least(payer, receiver) END;
    BEGIN
        FOR turn IN 1..2 LOOP
            UPDATE payments.accounts SET
                balance = balance + CASE name WHEN payer THEN -NEW.amount ELSE NEW.amount END,
                received = received + CASE name WHEN receiver THEN NEW.amount ELSE 0 END
                WHERE name = account;
            account := payer + receiver - account;
        END LOOP;
        RETURN NULL;
    END $$;
    CREATE TRIGGER transfer AFTER INSERT ON payments.ledger FOR EACH ROW EXECUTE FUNCTION payments.transfer();
    GRANT SELECT, UPDATE ON payments.accounts TO payments;";

/// The same for SQLite, which has one writer at a time.
const SQLITE_ACCOUNTS: &str = "
    CREATE TABLE accounts (name INTEGER PRIMARY KEY, balance INTEGER NOT NULL, received INTEGER NOT NULL) STRICT;
    WITH RECURSIVE number (name) AS (VALUES (0) UNION ALL SELECT name + 1 FROM number WHERE name < 19)
        INSERT INTO accounts SELECT name, 0, 0 FROM number;
    CREATE TRIGGER transfer AFTER INSERT ON ledger BEGIN
        UPDATE accounts SET balance = balance - NEW.amount WHERE name = NEW.id % 20;
        UPDATE accounts SET balance = balance + NEW.amount, received = received + NEW.amount
            WHERE name = (NEW.id + 7) % 20;
    END;";

/// The same for MariaDB.
const MARIADB_ACCOUNTS: [&str; 3] = [
    "CREATE TABLE accounts (name BIGINT PRIMARY KEY, balance BIGINT NOT NULL, received BIGINT NOT NULL) ENGINE = InnoDB",
    "INSERT INTO accounts SELECT seq, 0, 0 FROM seq_0_to_19",
    "CREATE TRIGGER transfer AFTER INSERT ON ledger FOR EACH ROW BEGIN
        DECLARE payer BIGINT DEFAULT CRC32(NEW.payment) % 20;
        DECLARE receiver BIGINT DEFAULT (payer + 1 + CRC32(NEW.payment) DIV 20 % 19) % 20;
        DECLARE is_reversed BOOLEAN DEFAULT CRC32(NEW.payment) DIV 400 % 50 = 0;
        DECLARE account BIGINT DEFAULT IF(is_reversed, GREATEST(payer, receiver), LEAST(payer, receiver));
        DECLARE turn INT DEFAULT 0;
        WHILE turn < 2 DO
            UPDATE accounts SET
                balance = balance + IF(name = payer, -NEW.amount, NEW.amount),
                received = received + IF(name = receiver, NEW.amount, 0)
                WHERE name = account;
            SET account = payer + receiver - account;
            SET turn = turn + 1;
        END WHILE;
    END",
];

/// The user of the services has all privileges on one database.
const MARIADB_USER: &str = "CREATE USER payments@'%' IDENTIFIED BY 'first'; GRANT ALL ON test.* TO payments@'%'";

/// The role and the user of the services, and their password outside of faults.
pub(crate) const USER: &str = "payments";
pub(crate) const PASSWORD: &str = "first";

/// `payments` may create schemas and must give its password; `stranger` may only log in. The superuser writes `pg_hba.conf` of
/// this server by COPY.
const ROLES: &str = "
    CREATE ROLE payments LOGIN PASSWORD 'first';
    GRANT CREATE ON DATABASE postgres TO payments;
    CREATE ROLE stranger LOGIN;
    DO $$ BEGIN EXECUTE format(
        'COPY (SELECT unnest(ARRAY[''host all payments all scram-sha-256'', ''host all all all trust'', ''local all all trust'']))
            TO %L', current_setting('hba_file'));
    END $$;
    SELECT pg_reload_conf();";

/// Enough connections to Postgres for a few handlers and for the verbs of two services.
const POOL_SIZE: u16 = 10;

/// Login retry of PgBouncer. After a refused login it waits for 15 s by default, which would prolong the planned faults.
const POOLER: [&str; 2] = ["server_login_retry = 1", "admin_users = postgres"];

/// A database.
enum Ledger {
    Postgres(String),
    MariaDb(String),
    Sqlite(String),
}

#[derive(Debug)]
pub(crate) struct World {
    pub(crate) started: Instant,
    pub(crate) lease: Duration,
    /// Ports at which clients reach the services.
    pub(crate) ports: Vec<u16>,
    pub(crate) keys: AtomicU64,
    pub(crate) over: AtomicBool,
    /// If true, clients send nothing for a moment.
    pub(crate) hush: AtomicBool,
    pub(crate) history: Mutex<Vec<Operation>>,
}

impl World {
    pub(crate) fn new(services: &[Service]) -> Self {
        Self {
            started: Instant::now(),
            lease: LEASE,
            ports: services.iter().map(|service| service.to_service.port()).collect(),
            keys: AtomicU64::new(0),
            over: AtomicBool::new(false),
            hush: AtomicBool::new(false),
            history: Mutex::default(),
        }
    }

    /// The amount for a key. An altered body asks for one more.
    pub(crate) fn amount_of(&self, key: &Key) -> i64 {
        1 + 2 * (key.key % 1000) as i64
    }
}

/// The servers of one cell. Their data are deleted with them.
#[derive(Debug)]
pub(crate) struct Servers {
    pub(crate) postgres: Option<Postgres>,
    pub(crate) pooler: Option<PgBouncer>,
    pub(crate) redis: Option<Redis>,
    pub(crate) mariadb: Option<MariaDb>,
    pub(crate) folder: TempDir,
}

impl Servers {
    pub(crate) async fn start(cell: Cell) -> Result<Self, Error> {
        let mut servers = tokio::task::block_in_place(|| Self::start_alone(cell))?;
        if let Some(postgres) = &servers.postgres {
            sqlx::raw_sql(ROLES).execute(&mut sqlx::PgConnection::connect(&postgres.url()).await?).await?;
            if cell.store == Store::Pooled {
                let url = format!("postgres://{USER}:{PASSWORD}@127.0.0.1:{}/postgres", postgres.port());
                let pooler = tokio::task::block_in_place(|| PgBouncer::start_with(&url, POOL_SIZE, &POOLER))?;
                servers.pooler = Some(pooler);
            }
        }
        if let Some(mariadb) = &servers.mariadb {
            sqlx::raw_sql(MARIADB_USER).execute(&mut sqlx::MySqlConnection::connect(&mariadb.url()).await?).await?;
        }
        Ok(servers)
    }

    fn start_alone(cell: Cell) -> Result<Self, Error> {
        let postgres = cell.has_postgres().then(Postgres::start_with_own_clock).transpose()?;
        // Passed as a setting, so that the user exists after a restart too.
        let password = format!(">{PASSWORD}");
        let mut settings = vec!["--user", USER, "on", &password, "~*", "&*", "+@all"];
        if cell.store == Store::Redis {
            // Without Postgres behind it, Redis must keep its data through crashes.
            settings.extend(["--appendonly", "yes", "--appendfsync", "always"]);
        }
        let redis = cell.has_redis().then(|| Redis::start_with(&settings)).transpose()?;
        let mariadb = (cell.store == Store::MariaDb).then(MariaDb::start).transpose()?;
        Ok(Self { postgres, pooler: None, redis, mariadb, folder: TempDir::new()? })
    }

    pub(crate) fn ports(&self) -> Ports {
        let pooler = self.pooler.as_ref().map(PgBouncer::port);
        let postgres = self.postgres.as_ref().map(Postgres::port);
        let (redis, mariadb) = (self.redis.as_ref().map(Redis::port), self.mariadb.as_ref().map(MariaDb::port));
        Ports { postgres: pooler.or(postgres), redis, mariadb }
    }

    /// The effects that really happened: the ledger, in the order in which it was written.
    pub(crate) async fn effects(&self, cell: Cell) -> Result<Vec<Payment>, Error> {
        let columns = "SELECT payment.id, payment.recipient, payment.amount, CAST(ledger.attempt AS BIGINT)";
        let rows: Vec<(String, String, i64, i64)> = match self.ledger(cell) {
            Ledger::Postgres(url) => {
                let sql = format!(
                    "{columns} FROM payments.ledger JOIN payments.payments AS payment ON payment.id = ledger.payment \
                     ORDER BY ledger.id"
                );
                let mut connection = sqlx::PgConnection::connect(&url).await?;
                let rows = sqlx::query(sqlx::AssertSqlSafe(sql)).fetch_all(&mut connection).await?;
                rows.iter()
                    .map(|row| Ok((row.try_get(0)?, row.try_get(1)?, row.try_get(2)?, row.try_get(3)?)))
                    .collect::<Result<_, sqlx::Error>>()?
            }
            Ledger::MariaDb(url) => {
                let sql = "SELECT payment.id, payment.recipient, payment.amount, ledger.attempt \
                     FROM ledger JOIN payments AS payment ON payment.id = ledger.payment ORDER BY ledger.id";
                let mut connection = sqlx::MySqlConnection::connect(&url).await?;
                let rows = sqlx::query(sql).fetch_all(&mut connection).await?;
                rows.iter()
                    .map(|row| Ok((row.try_get(0)?, row.try_get(1)?, row.try_get(2)?, row.try_get(3)?)))
                    .collect::<Result<_, sqlx::Error>>()?
            }
            Ledger::Sqlite(url) => {
                let sql = format!(
                    "{columns} FROM ledger JOIN payments AS payment ON payment.id = ledger.payment ORDER BY ledger.id"
                );
                let mut connection = sqlx::SqliteConnection::connect(&url).await?;
                let rows = sqlx::query(sqlx::AssertSqlSafe(sql)).fetch_all(&mut connection).await?;
                rows.iter()
                    .map(|row| Ok((row.try_get(0)?, row.try_get(1)?, row.try_get(2)?, row.try_get(3)?)))
                    .collect::<Result<_, sqlx::Error>>()?
            }
        };
        let read = |(id, recipient, amount, attempt): (String, String, i64, i64)| {
            let key = read_recipient(&recipient).ok_or_else(|| format!("a payment to {recipient:?}"))?;
            Ok(Payment { id, key, amount, attempt: attempt.try_into()? })
        };
        rows.into_iter().map(read).collect()
    }

    /// Makes every line of the ledger move its amount between two accounts, in the transaction that writes the line.
    pub(crate) async fn open_accounts(&self, cell: Cell) -> Result<(), Error> {
        match self.ledger(cell) {
            Ledger::Postgres(url) => {
                sqlx::raw_sql(POSTGRES_ACCOUNTS).execute(&mut sqlx::PgConnection::connect(&url).await?).await?;
            }
            Ledger::MariaDb(url) => {
                let mut connection = sqlx::MySqlConnection::connect(&url).await?;
                for statement in MARIADB_ACCOUNTS {
                    sqlx::raw_sql(statement).execute(&mut connection).await?;
                }
            }
            Ledger::Sqlite(url) => {
                sqlx::raw_sql(SQLITE_ACCOUNTS).execute(&mut sqlx::SqliteConnection::connect(&url).await?).await?;
            }
        }
        Ok(())
    }

    /// Describes an imbalance. Money that left one account must be in another, and the ledger must list all of it.
    pub(crate) async fn unbalanced(&self, cell: Cell) -> Result<Option<String>, Error> {
        let sums = |accounts: &str, ledger: &str, number: &str| {
            format!(
                "SELECT CAST(coalesce(sum(balance), 0) AS {number}), CAST(coalesce(sum(received), 0) AS {number}),
                        (SELECT CAST(coalesce(sum(amount), 0) AS {number}) FROM {ledger}) FROM {accounts}"
            )
        };
        let (total, received, written): (i64, i64, i64) = match self.ledger(cell) {
            Ledger::Postgres(url) => {
                let mut connection = sqlx::PgConnection::connect(&url).await?;
                let sql = sums("payments.accounts", "payments.ledger", "BIGINT");
                let row = sqlx::query(sqlx::AssertSqlSafe(sql)).fetch_one(&mut connection).await?;
                (row.try_get(0)?, row.try_get(1)?, row.try_get(2)?)
            }
            Ledger::MariaDb(url) => {
                let mut connection = sqlx::MySqlConnection::connect(&url).await?;
                let sql = sums("accounts", "ledger", "SIGNED");
                let row = sqlx::query(sqlx::AssertSqlSafe(sql)).fetch_one(&mut connection).await?;
                (row.try_get(0)?, row.try_get(1)?, row.try_get(2)?)
            }
            Ledger::Sqlite(url) => {
                let mut connection = sqlx::SqliteConnection::connect(&url).await?;
                let sql = sums("accounts", "ledger", "BIGINT");
                let row = sqlx::query(sqlx::AssertSqlSafe(sql)).fetch_one(&mut connection).await?;
                (row.try_get(0)?, row.try_get(1)?, row.try_get(2)?)
            }
        };
        let is_balanced = total == 0 && received == written && written > 0;
        Ok((!is_balanced).then(|| format!("accounts: {total} in all, {received} received, {written} in the ledger")))
    }

    /// The database with the ledger of the example.
    fn ledger(&self, cell: Cell) -> Ledger {
        match (&self.postgres, &self.mariadb) {
            (Some(postgres), _) if cell.commits_both() => Ledger::Postgres(postgres.url()),
            (_, Some(mariadb)) if cell.commits_both() => Ledger::MariaDb(mariadb.url()),
            _ => Ledger::Sqlite(format!("sqlite://{}", self.folder.path().join("ledger.db").display())),
        }
    }

    /// Describes leaks after the last request: open transactions, too many connections, and Redis keys without a TTL.
    pub(crate) async fn leaks(&self) -> Result<Vec<String>, Error> {
        let mut leaks = Vec::new();
        if let Some(postgres) = &self.postgres {
            let mut connection = sqlx::PgConnection::connect(&postgres.url()).await?;
            let sql = "SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in transaction%'";
            let open: i64 = sqlx::query(sql).fetch_one(&mut connection).await?.try_get(0)?;
            if open > 0 {
                leaks.push(format!("{open} transactions are open"));
            }
            let sql = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'";
            let connections: i64 = sqlx::query(sql).fetch_one(&mut connection).await?.try_get(0)?;
            if connections > MOST_CONNECTIONS {
                leaks.push(format!("{connections} connections to Postgres are open"));
            }
        }
        if let Some(mariadb) = &self.mariadb {
            let mut connection = sqlx::MySqlConnection::connect(&mariadb.url()).await?;
            let sql = "SELECT count(*) FROM information_schema.innodb_trx WHERE trx_mysql_thread_id <> connection_id()";
            let open: i64 = sqlx::query(sql).fetch_one(&mut connection).await?.try_get(0)?;
            if open > 0 {
                leaks.push(format!("{open} transactions are open"));
            }
            let sql = "SELECT count(*) FROM information_schema.processlist WHERE user = 'payments'";
            let connections: i64 = sqlx::query(sql).fetch_one(&mut connection).await?.try_get(0)?;
            if connections > MOST_CONNECTIONS {
                leaks.push(format!("{connections} connections to MariaDB are open"));
            }
        }
        if let Some(redis) = &self.redis {
            const IMMORTAL: &str = "local immortal = 0
                for _, key in ipairs(redis.call('KEYS', '*')) do
                    if redis.call('TTL', key) < 0 then immortal = immortal + 1 end
                end
                return immortal";
            let immortal = redis_command(redis.port(), &["EVAL", IMMORTAL, "0"])?.integer().unwrap_or_default();
            let clients = redis_command(redis.port(), &["INFO", "clients"])?;
            let connections: i64 = clients.field("connected_clients").and_then(|count| count.parse().ok()).unwrap_or(0);
            if connections > MOST_CONNECTIONS {
                leaks.push(format!("{connections} connections to Redis are open"));
            }
            if immortal > 0 {
                leaks.push(format!("{immortal} keys of Redis have no end"));
            }
        }
        Ok(leaks)
    }
}

/// How the engine bounds late settlements: if the store does not accept one, the caller waits for five seconds.
const SETTLES_BEHIND: Behind = Behind { patience: Duration::from_secs(5), delay: MARGIN };

/// The promise of a cell.
pub(crate) fn promise(cell: Cell) -> Promise {
    let stale_lock = match (cell.store, cell.contract) {
        (Store::Hybrid, _) => LEASE + Duration::from_secs(1),
        _ => Duration::ZERO,
    };
    Promise {
        at_most_one_effect: cell.contract != Contract::AtLeastOnce || cell.commits_both(),
        may_be_unknown: cell.contract == Contract::AtMostOnce,
        stale_lock,
        settles_behind: (cell.contract == Contract::AtMostOnce).then_some(SETTLES_BEHIND),
        live_within: LEASE + MARGIN,
        lease: LEASE,
    }
}
