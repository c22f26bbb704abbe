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
use crate::error::{Error, with_causes};
use crate::pace::Pace;
use crate::records::Maker;
use crate::report::Report;
use crate::{servers, store};

const SIZES: [u64; 3] = [100_000, 1_000_000, 10_000_000];

/// One client, which shows what a single request waits for.
const CLIENTS: usize = 1;

/// How many records are made at once.
const AT_ONCE: usize = 256;

/// The same for moto, which answers one request after another. With 256 the first acquires failed.
const AT_ONCE_ON_MOTO: usize = 16;

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

    fn at_once(self) -> usize {
        match self {
            Self::Moto => AT_ONCE_ON_MOTO,
            _ => AT_ONCE,
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
    let mut failed = Ok(());
    for &engine in engines {
        if let Err(error) = grow(engine, pace, report).await {
            println!("{}: {}", engine.name(), with_causes(&error));
            // The next engine is measured before this error ends the run.
            failed = Err(error);
        }
    }
    failed
}

async fn grow(engine: Engine, pace: Pace, report: &mut Report) -> Result<(), Error> {
    let (mut server, store) = Server::start(engine).await?;
    let maker = Maker::new(store);
    let (mut there, mut before, fresh) = (0, server.bytes().await?, Arc::new(AtomicU64::new(MEASURED)));
    report.note(
        "\n| store | records | made a second | bytes of each more | acquire, p50 and p99 µs | replay, p50 and p99 µs |"
            .into(),
    );
    report.note("|---|---|---|---|---|---|".into());
    for &records in engine.sizes(pace) {
        let began = Instant::now();
        maker.fill_range(there..records, engine.at_once()).await?;
        let made = (records - there) as f64 / began.elapsed().as_secs_f64();
        let bytes = (server.bytes().await? - before) / (records - there) as f64;
        there = records;
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
        report.note(format!(
            "| {} | {records} | {made:.0} | {bytes:.0} | {} | {} |",
            engine.name(),
            latencies(&outcome, "acquire"),
            latencies(&outcome, "replay")
        ));
        report.add(outcome);
        // The measurement has added records.
        before = server.bytes().await?;
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
    Redis(Redis),
    Sqlite { file: PathBuf, _folder: TempDir },
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
                let store = RedisStore::open(RedisConfig::new(server.url())).await?;
                (Self::Redis(server), Arc::new(store))
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

    /// The bytes of all records with their indexes.
    async fn bytes(&mut self) -> Result<f64, Error> {
        match self {
            Self::Postgres(server) => {
                let mut connection = servers::connect(server).await?;
                of_table(&mut connection, "idem.idem_records").await
            }
            Self::MariaDb(server) => {
                let mut connection = MySqlConnection::connect(&server.url()).await?;
                of_mariadb(&mut connection, TABLE).await
            }
            Self::Redis(server) => used_memory(server),
            Self::Sqlite { file, .. } => of_sqlite(file).await,
            Self::DynamoDb(server) => of_items(server).await,
        }
    }
}

/// The bytes of all items as DynamoDB counts them for its storage: names and values of attributes, and 100 bytes for each item.
async fn of_items(server: &DynamoDb) -> Result<f64, Error> {
    const ITEM: usize = 100;
    let (client, mut bytes, mut from) = (store::dynamodb_client(server), 0, None);
    loop {
        let page = client.scan().table_name(TABLE).set_exclusive_start_key(from).send().await?;
        for item in page.items() {
            bytes += ITEM;
            for (name, value) in item {
                bytes += name.len() + of_value(value)?;
            }
        }
        from = page.last_evaluated_key.filter(|key| !key.is_empty());
        if from.is_none() {
            return Ok(bytes as f64);
        }
    }
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
