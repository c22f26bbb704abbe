//! Bytes of a settled record, compared with the smallest hand-written record that holds as much: key, fingerprint, token,
//! end, status, and the same answer of 512 bytes.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use idem_core::{Begin, TransactionalStore, Writes};
use idem_mysql::{MySqlConfig, MySqlStore};
use idem_postgres::{PostgresConfig, PostgresStore};
use idem_redis::{RedisConfig, RedisStore};
use idem_servers::{Redis, redis_command};
use idem_sqlite::{SqliteConfig, SqliteStore};
use sqlx::{AssertSqlSafe, Connection, MySqlConnection, PgConnection, Row, SqliteConnection};

use crate::error::Error;
use crate::outside::number_after;
use crate::pace::Pace;
use crate::records::{DAY, Maker};
use crate::report::Report;
use crate::servers;
use crate::store::MARIADB_BY_HAND;

/// By hand on Redis: a string for each key, with an end.
const REDIS_BY_HAND: &str = "for number = 1, ARGV[1] do redis.call('SET', string.rep('k', 26) .. string.format('%06d', number), \
     string.rep('v', 32 + 16 + 2 + 512), 'PX', '86400000') end";

const SQLITE_BY_HAND: &str = "CREATE TABLE records (key BLOB PRIMARY KEY, state INTEGER NOT NULL, fingerprint BLOB NOT NULL, \
     token BLOB NOT NULL, expires_at INTEGER NOT NULL, status INTEGER, response BLOB) WITHOUT ROWID; \
     WITH RECURSIVE numbers (number) AS (SELECT 1 UNION ALL SELECT number + 1 FROM numbers WHERE number < ?) \
     INSERT INTO records SELECT randomblob(32), 2, randomblob(32), randomblob(16), unixepoch(), 200, randomblob(512) FROM numbers";

pub(crate) async fn run(pace: Pace, report: &mut Report) -> Result<(), Error> {
    let records = if pace.quick { 10_000 } else { 100_000 };
    println!("\nAt rest: bytes of a settled record, of {records}");
    println!("| store | bytes | by hand | 10 million records | 1,000 million |");
    println!("|---|---|---|---|---|");
    postgres(records, report).await?;
    mariadb(records, report).await?;
    redis(records, report).await?;
    sqlite(records, report).await
}

fn tell(report: &mut Report, store: &str, bytes: f64, by_hand: f64) {
    let gigabytes = |records: f64| bytes * records / 1e9;
    report.note(format!(
        "| {store} | {bytes:.0} | {by_hand:.0} | {:.1} GB | {:.0} GB |",
        gigabytes(1e7),
        gigabytes(1e9)
    ));
}

async fn postgres(records: u64, report: &mut Report) -> Result<(), Error> {
    let server = servers::postgres()?;
    let mut connection = servers::connect(&server).await?;
    servers::run(&mut connection, include_str!("../sql/schema.sql")).await?;
    let insert = format!(
        "INSERT INTO hand_records SELECT sha256(int8send(number)), 2, sha256('f'), \
         '\\x00112233445566778899aabbccddeeff', now(), now(), 200, convert_to(repeat('x', 512), 'UTF8') \
         FROM generate_series(1::BIGINT, {records}) AS number"
    );
    servers::run(&mut connection, &insert).await?;
    let by_hand = of_table(&mut connection, "hand_records").await? / records as f64;
    for (schema, way, fillfactor) in [
        ("crowd", Way::Leased { at_once: 256 }, 25),
        ("alone", Way::Leased { at_once: 1 }, 25),
        ("alone_90", Way::Leased { at_once: 1 }, 90),
        ("transactions", Way::Transactions, 25),
        ("transactions_90", Way::Transactions, 90),
    ] {
        let store = PostgresStore::open(PostgresConfig::new(server.url()).schema(schema)).await?;
        let set = format!("ALTER TABLE {schema}.idem_records SET (fillfactor = {fillfactor})");
        servers::run(&mut connection, &set).await?;
        let maker = Maker::new(Arc::new(store.clone()));
        match way {
            Way::Leased { at_once } => maker.fill_by(records, at_once).await?,
            Way::Transactions => in_transactions(&store, &maker, records).await?,
        }
        let bytes = of_table(&mut connection, &format!("{schema}.idem_records")).await? / records as f64;
        tell(report, &format!("Postgres, {way}, fillfactor {fillfactor}"), bytes, by_hand);
    }
    Ok(())
}

/// How records are created.
#[derive(Debug, Clone, Copy)]
enum Way {
    /// Each is in progress first, and so many at once.
    Leased {
        at_once: usize,
    },
    Transactions,
}

impl fmt::Display for Way {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Leased { at_once } => write!(formatter, "{at_once} leased at once"),
            Self::Transactions => write!(formatter, "in transactions"),
        }
    }
}

/// The bytes of a table of Postgres with its indexes, after a vacuum.
pub(crate) async fn of_table(connection: &mut PgConnection, table: &str) -> Result<f64, Error> {
    servers::run(connection, &format!("VACUUM (ANALYZE) {table}")).await?;
    let size = format!("SELECT pg_total_relation_size('{table}')");
    let bytes: i64 = sqlx::raw_sql(AssertSqlSafe(size)).fetch_one(connection).await?.try_get(0)?;
    Ok(bytes as f64)
}

async fn in_transactions(store: &PostgresStore, maker: &Maker, records: u64) -> Result<(), Error> {
    use futures_util::{StreamExt, TryStreamExt};
    let run = |number| async move {
        let Begin::Acquired { transaction, .. } = store.begin(&maker.request(number)).await? else {
            return Err(Error::from(format!("record {number} was there already")));
        };
        transaction.finish(&maker.settlement(), DAY, Writes::Keep).await?;
        Ok(())
    };
    futures_util::stream::iter(0..records).map(run).buffer_unordered(16).try_collect().await
}

async fn mariadb(records: u64, report: &mut Report) -> Result<(), Error> {
    let server = servers::mariadb()?;
    let mut connection = MySqlConnection::connect(&server.url()).await?;
    sqlx::raw_sql(MARIADB_BY_HAND).execute(&mut connection).await?;
    let insert = format!(
        "INSERT INTO hand_records SELECT unhex(sha2(seq, 256)), 2, unhex(sha2('f', 256)), unhex(repeat('5', 32)), 0, 200, \
         repeat('x', 512) FROM seq_1_to_{records}"
    );
    sqlx::raw_sql(AssertSqlSafe(insert)).execute(&mut connection).await?;
    Maker::new(Arc::new(MySqlStore::open(MySqlConfig::new(server.url())).await?)).fill(records).await?;
    let mut bytes = Vec::new();
    for table in ["hand_records", "idem_records"] {
        bytes.push(of_mariadb(&mut connection, table).await? / records as f64);
    }
    tell(report, "MariaDB, 256 leased at once", bytes[1], bytes[0]);
    Ok(())
}

/// The bytes of a table of MariaDB with its indexes, by the server's statistics.
pub(crate) async fn of_mariadb(connection: &mut MySqlConnection, table: &str) -> Result<f64, Error> {
    let analyze = format!("ANALYZE TABLE {table}");
    sqlx::raw_sql(AssertSqlSafe(analyze)).execute(&mut *connection).await?;
    let size = "SELECT CAST(data_length + index_length AS SIGNED) FROM information_schema.tables \
         WHERE table_schema = 'test' AND table_name = ?";
    let size: i64 = sqlx::query_scalar(size).bind(table).fetch_one(connection).await?;
    Ok(size as f64)
}

async fn redis(records: u64, report: &mut Report) -> Result<(), Error> {
    let [by_hand, idem] = [servers::redis()?, servers::redis()?];
    let before = [used_memory(&by_hand)?, used_memory(&idem)?];
    redis_command(by_hand.port(), &["EVAL", REDIS_BY_HAND, "0", &records.to_string()])?;
    Maker::new(Arc::new(RedisStore::open(RedisConfig::new(idem.url())).await?)).fill(records).await?;
    let each = |after: f64, before: f64| (after - before) / records as f64;
    tell(report, "Redis", each(used_memory(&idem)?, before[1]), each(used_memory(&by_hand)?, before[0]));
    Ok(())
}

pub(crate) fn used_memory(server: &Redis) -> Result<f64, Error> {
    let info = redis_command(server.port(), &["INFO", "memory"])?;
    let used = info.text().and_then(|text| number_after(text, "used_memory:"));
    Ok(used.ok_or("Redis does not say how much memory it uses")?)
}

async fn sqlite(records: u64, report: &mut Report) -> Result<(), Error> {
    let folder = tempfile::tempdir()?;
    let [by_hand, idem] = ["hand.db", "idem.db"].map(|name| folder.path().join(name));
    let mut connection = SqliteConnection::connect(&format!("sqlite://{}?mode=rwc", by_hand.display())).await?;
    for statement in SQLITE_BY_HAND.split("; ") {
        sqlx::query(statement).bind(i64::try_from(records)?).execute(&mut connection).await?;
    }
    connection.close().await?;
    let store = SqliteStore::open(SqliteConfig::new(format!("sqlite://{}", idem.display()))).await?;
    Maker::new(Arc::new(store)).fill(records).await?;
    let each = |bytes: f64| bytes / records as f64;
    tell(report, "SQLite", each(of_sqlite(&idem).await?), each(of_sqlite(&by_hand).await?));
    Ok(())
}

/// The bytes of a file of SQLite, after the contents of its log have moved into it.
pub(crate) async fn of_sqlite(file: &Path) -> Result<f64, Error> {
    let mut connection = SqliteConnection::connect(&format!("sqlite://{}", file.display())).await?;
    sqlx::query("PRAGMA wal_checkpoint(TRUNCATE)").fetch_all(&mut connection).await?;
    connection.close().await?;
    Ok(std::fs::metadata(file)?.len() as f64)
}
