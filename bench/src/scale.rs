//! Bytes of a record and latencies of one client, as each store grows to ten million records.
//!
//! All records are acquired and settled by the store's verbs, because a copy of rows would lie in other pages.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Instant;

use aws_sdk_dynamodb::types::AttributeValue;
use clap::ValueEnum;
use idem_core::IdempotencyStore;
use idem_dynamodb::{DynamoConfig, DynamoStore};
use idem_mysql::{MySqlConfig, MySqlStore};
use idem_postgres::{PostgresConfig, PostgresStore};
use idem_redis::{RedisConfig, RedisStore};
use idem_servers::{DynamoDb, MariaDb, Postgres, Redis};
use idem_sqlite::{SqliteConfig, SqliteStore};
use sqlx::{Connection, MySqlConnection};
use tempfile::TempDir;

use crate::at_rest::{of_mariadb, of_sqlite, of_table, used_memory};
use crate::contest::{Outcome, hold, p50, p99};
use crate::drive::{Work, driven};
use crate::error::Error;
use crate::pace::Pace;
use crate::records::Maker;
use crate::report::Report;
use crate::{servers, store};

const SIZES: [u64; 3] = [100_000, 1_000_000, 10_000_000];

/// One client, which shows what a single request waits for.
const CLIENTS: usize = 1;

/// How many records are made at once.
const AT_ONCE: usize = 256;

/// Numbers of records that are acquired while latencies are measured. No record of a size has such a number.
const MEASURED: u64 = 1 << 40;

/// A store that grows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Engine {
    Postgres,
    Mariadb,
    Redis,
    Sqlite,
    /// An emulator of DynamoDB in Rust, with the first size only.
    Dynoxide,
    /// An emulator of DynamoDB in Python, with the first size only.
    Moto,
}

impl Engine {
    fn name(self) -> &'static str {
        match self {
            Self::Postgres => "Postgres",
            Self::Mariadb => "MariaDB",
            Self::Redis => "Redis",
            Self::Sqlite => "SQLite",
            Self::Dynoxide => "DynamoDB on dynoxide",
            Self::Moto => "DynamoDB on moto",
        }
    }

    fn sizes(self, pace: Pace) -> &'static [u64] {
        match self {
            Self::Dynoxide | Self::Moto if pace.quick => &[2_000],
            Self::Dynoxide | Self::Moto => &SIZES[..1],
            _ if pace.quick => &[10_000, 100_000],
            _ => &SIZES,
        }
    }
}

pub(crate) async fn run(engines: &[Engine], pace: Pace, report: &mut Report) -> Result<(), Error> {
    let engines = if engines.is_empty() { Engine::value_variants() } else { engines };
    let mut rows = Vec::new();
    for &engine in engines {
        grow(engine, pace, report, &mut rows).await?;
    }
    report.note("\n| store | records | made a second | bytes of a record | 1,000 million | acquire, p50 and p99 µs | replay, p50 and p99 µs |".into());
    report.note("|---|---|---|---|---|---|---|".into());
    rows.into_iter().for_each(|row| report.note(row));
    Ok(())
}

async fn grow(engine: Engine, pace: Pace, report: &mut Report, rows: &mut Vec<String>) -> Result<(), Error> {
    let (mut server, store) = Server::start(engine).await?;
    let maker = Maker::new(store);
    let (mut there, fresh) = (0, Arc::new(AtomicU64::new(MEASURED)));
    for &records in engine.sizes(pace) {
        let began = Instant::now();
        maker.fill_range(there..records, AT_ONCE).await?;
        let made = (records - there) as f64 / began.elapsed().as_secs_f64();
        there = records;
        // Before the measurement, which adds records.
        let bytes = server.bytes_of_a_record(records).await?;
        let acquiring = Arc::clone(&maker);
        let acquire = move |number| -> Work {
            let maker = Arc::clone(&acquiring);
            Box::pin(async move { maker.acquire(number).await.map(drop) })
        };
        let contestants = vec![
            driven("acquire", CLIENTS, pace.turn, &fresh, acquire),
            driven("replay", CLIENTS, pace.turn, &Arc::default(), maker.replays(records)),
        ];
        let outcome = hold(&format!("{}, {records} records", engine.name()), pace.rounds, contestants).await?;
        rows.push(format!(
            "| {} | {records} | {made:.0} | {bytes:.0} | {:.0} GB | {} | {} |",
            engine.name(),
            bytes,
            latencies(&outcome, "acquire"),
            latencies(&outcome, "replay")
        ));
        report.add(outcome);
    }
    Ok(())
}

fn latencies(outcome: &Outcome, verb: &str) -> String {
    let median = |of: fn(&_) -> Option<f64>| outcome.spread(verb, of).map_or(0.0, |spread| spread.median);
    format!("{:.0}, {:.0}", median(p50), median(p99))
}

/// Where the records are.
enum Server {
    Postgres(Postgres),
    MariaDb(MariaDb),
    Redis {
        server: Redis,
        /// Its memory when it was empty.
        empty: f64,
    },
    Sqlite {
        file: PathBuf,
        _folder: TempDir,
    },
    DynamoDb(DynamoDb),
}

const TABLE: &str = "idem_records";

impl Server {
    async fn start(engine: Engine) -> Result<(Self, Arc<dyn IdempotencyStore>), Error> {
        Ok(match engine {
            Engine::Postgres => {
                let server = servers::postgres()?;
                let store = PostgresStore::open(PostgresConfig::new(server.url())).await?;
                (Self::Postgres(server), Arc::new(store))
            }
            Engine::Mariadb => {
                let server = servers::mariadb()?;
                let store = MySqlStore::open(MySqlConfig::new(server.url())).await?;
                (Self::MariaDb(server), Arc::new(store))
            }
            Engine::Redis => {
                let server = servers::redis()?;
                let empty = used_memory(&server)?;
                let store = RedisStore::open(RedisConfig::new(server.url())).await?;
                (Self::Redis { server, empty }, Arc::new(store))
            }
            Engine::Sqlite => {
                let folder = tempfile::tempdir()?;
                let file = folder.path().join("idem.db");
                let store = SqliteStore::open(SqliteConfig::new(format!("sqlite://{}", file.display()))).await?;
                (Self::Sqlite { file, _folder: folder }, Arc::new(store))
            }
            Engine::Dynoxide | Engine::Moto => {
                let server = if engine == Engine::Moto { DynamoDb::moto()? } else { DynamoDb::dynoxide()? };
                let config = DynamoConfig::new(store::dynamodb_client(&server), TABLE);
                DynamoStore::create_table(&config).await?;
                let store = DynamoStore::open(config).await?;
                (Self::DynamoDb(server), Arc::new(store))
            }
        })
    }

    async fn bytes_of_a_record(&mut self, records: u64) -> Result<f64, Error> {
        let bytes = match self {
            Self::Postgres(server) => {
                let mut connection = servers::connect(server).await?;
                return of_table(&mut connection, "idem.idem_records", records).await;
            }
            Self::MariaDb(server) => {
                let mut connection = MySqlConnection::connect(&server.url()).await?;
                of_mariadb(&mut connection, TABLE).await?
            }
            Self::Redis { server, empty } => used_memory(server)? - *empty,
            Self::Sqlite { file, .. } => of_sqlite(file).await?,
            Self::DynamoDb(server) => return of_items(server).await,
        };
        Ok(bytes / records as f64)
    }
}

/// The bytes of an item as DynamoDB counts them for its storage: names and values of attributes, and 100 bytes for its indexes. All
/// items of this run are alike, so the first thousand count.
async fn of_items(server: &DynamoDb) -> Result<f64, Error> {
    const INDEXES: f64 = 100.0;
    let scan = store::dynamodb_client(server).scan().table_name(TABLE).limit(1_000);
    let items = scan.send().await?.items.unwrap_or_default();
    let bytes =
        items.iter().flatten().map(|(name, value)| Ok(name.len() + of_value(value)?)).sum::<Result<usize, Error>>()?;
    Ok(bytes as f64 / items.len().max(1) as f64 + INDEXES)
}

fn of_value(value: &AttributeValue) -> Result<usize, Error> {
    Ok(match value {
        AttributeValue::B(bytes) => bytes.as_ref().len(),
        AttributeValue::S(text) => text.len(),
        // About a byte for two digits, and one more.
        AttributeValue::N(digits) => digits.len().div_ceil(2) + 1,
        AttributeValue::Null(_) | AttributeValue::Bool(_) => 1,
        other => return Err(format!("an attribute of an unexpected type: {other:?}").into()),
    })
}
