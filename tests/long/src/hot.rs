//! `hot`: a settlement is a heap-only update, and a replay writes nothing.

use std::collections::BTreeSet;
use std::time::Duration;

use idem_postgres::{PostgresConfig, PostgresStore};
use serde_json::json;
use sqlx::Row;
use tokio::time::{Instant, sleep};

use crate::Error;
use crate::database::Database;
use crate::random::Random;
use crate::records::{DAY, Maker, each};
use crate::report::{Passed, Report, rounded};

/// The share of heap-only updates that must be reached.
const SHARE: f64 = 0.95;

/// The largest body, in bytes, for which the table's default fillfactor must reach it.
const LARGEST_BODY: usize = 300;

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// How many records are made in each table.
    #[arg(long, default_value_t = 100_000)]
    records: u64,
    /// Tests only this fillfactor; by default the table's own and nine others.
    #[arg(long)]
    fillfactor: Option<i64>,
    /// Tests only bodies of this many bytes.
    #[arg(long)]
    body: Option<usize>,
    /// How many records are in progress concurrently.
    #[arg(long, default_value_t = 64)]
    concurrent: usize,
    /// How long each record is in progress, in milliseconds.
    #[arg(long, default_value_t = 0)]
    running_ms: u64,
    /// How many replays are requested in each table.
    #[arg(long, default_value_t = 20_000)]
    replays: u64,
}

struct Measured {
    fillfactor: i64,
    body: usize,
    ratio: f64,
    heap: f64,
    index: f64,
}

pub(crate) async fn run(options: &Options) -> Result<Passed, Error> {
    let mut database = Database::start(&[]).await?;
    let mut report = Report::new("hot", database.version());
    let delivered = delivered(&mut database).await?;
    report.fact("delivered_fillfactor", delivered);
    let fillfactors = match options.fillfactor {
        Some(only) => BTreeSet::from([only]),
        None => BTreeSet::from([20, 25, 30, 40, 50, 60, 70, 80, 90, delivered]),
    };
    let bodies = options.body.map_or_else(|| vec![0, LARGEST_BODY, 1000], |only| vec![only]);
    println!("fillfactor  body  HOT share  heap B/record  index B/record  records/s");
    let mut table = Vec::new();
    for fillfactor in fillfactors {
        for body in &bodies {
            table.push(measure(&mut database, &mut report, options, fillfactor, *body).await?);
        }
    }
    let reaches = |fillfactor: i64| {
        let mut small = table.iter().filter(|row| row.fillfactor == fillfactor && row.body <= LARGEST_BODY).peekable();
        small.peek().is_some() && small.all(|row| row.ratio >= SHARE)
    };
    let best = table.iter().map(|row| row.fillfactor).filter(|fillfactor| reaches(*fillfactor)).max();
    report.fact("largest_fillfactor_that_suffices", best);
    match options.fillfactor {
        None => report.expect(reaches(delivered), format!("the table's own fillfactor, {delivered}, does not suffice")),
        Some(_) => report.expect(
            best.is_some() || bodies.iter().all(|body| *body > LARGEST_BODY),
            "this fillfactor does not suffice",
        ),
    }
    let rows = table.iter().map(|row| {
        json!({"fillfactor": row.fillfactor, "body": row.body, "hot": rounded(row.ratio, 4),
            "heap_bytes_per_record": rounded(row.heap, 0), "index_bytes_per_record": rounded(row.index, 0)})
    });
    report.note("table", rows.collect::<Vec<_>>());
    report.note("records", options.records);
    report.note("concurrent", options.concurrent);
    report.note("running_ms", options.running_ms);
    Ok(report.finish())
}

/// The fillfactor that the migrations set for the table.
async fn delivered(database: &mut Database) -> Result<i64, Error> {
    PostgresStore::open(PostgresConfig::new(database.url()).schema("delivered")).await?;
    let sql = "SELECT coalesce((SELECT option_value::BIGINT FROM pg_options_to_table(reloptions)
        WHERE option_name = 'fillfactor'), 100) FROM pg_class WHERE oid = 'delivered.idem_records'::regclass";
    database.number(sql).await
}

async fn measure(
    database: &mut Database,
    report: &mut Report,
    options: &Options,
    fillfactor: i64,
    body: usize,
) -> Result<Measured, Error> {
    let schema = format!("hot_{fillfactor}_{body}");
    let table = format!("{schema}.idem_records");
    let config = PostgresConfig::new(database.url()).schema(schema);
    let maker = Maker::new(PostgresStore::open(config.clone()).await?, DAY, body);
    database.run(&format!("ALTER TABLE {table} SET (fillfactor = {fillfactor})")).await?;
    let started = Instant::now();
    let running = Duration::from_millis(options.running_ms);
    each(0..options.records, options.concurrent, |number| maker.make(number, running)).await?;
    let rate = options.records as f64 / started.elapsed().as_secs_f64();
    // Sessions report their statistics when they end.
    drop(maker);
    let made = options.records as i64;
    let updates = format!("SELECT n_tup_upd FROM pg_stat_all_tables WHERE relid = '{table}'::regclass");
    wait_for(database, &updates, made).await?;
    let counted = Counters::of(database, &table).await?;
    report.expect(counted.inserted == made && counted.updated == made, format!("not {made} of each: {counted:?}"));
    let ratio = counted.hot as f64 / counted.updated as f64;
    let heap = database.number(&format!("SELECT pg_table_size('{table}')")).await? as f64 / made as f64;
    let index = database.number(&format!("SELECT pg_indexes_size('{table}')")).await? as f64 / made as f64;
    println!("{fillfactor:>10} {body:>5} {:>9.2}% {heap:>14.0} {index:>15.0} {rate:>10.0}", ratio * 100.0);
    replay(database, report, options, &table, Maker::new(PostgresStore::open(config).await?, DAY, body)).await?;
    Ok(Measured { fillfactor, body, ratio, heap, index })
}

/// Checks that replays leave no trace in the table.
async fn replay(
    database: &mut Database,
    report: &mut Report,
    options: &Options,
    table: &str,
    maker: Maker,
) -> Result<(), Error> {
    // Dead rows are removed before, so that autovacuum neither removes nor recounts them meanwhile.
    database.run(&format!("ALTER TABLE {table} SET (autovacuum_enabled = off)")).await?;
    database.run(&format!("VACUUM (ANALYZE) {table}")).await?;
    let before = Counters::of(database, table).await?;
    let scans = format!("SELECT sum(idx_scan)::BIGINT FROM pg_stat_all_indexes WHERE relid = '{table}'::regclass");
    let scanned = database.number(&scans).await?;
    let mut random = Random::new();
    let numbers: Vec<u64> = (0..options.replays).map(|_| random.below(options.records)).collect();
    each(numbers.into_iter(), options.concurrent, |number| maker.replay(number)).await?;
    drop(maker);
    // Each replay has scanned the index, so once all scans are counted, everything is.
    wait_for(database, &scans, scanned + options.replays as i64).await?;
    let after = Counters::of(database, table).await?;
    // Reading a page may remove dead rows of settlements from it.
    let dead = after.dead.min(before.dead);
    let same = after == Counters { dead, ..before };
    report.expect(same, format!("{} replays wrote: {before:?} became {after:?}", options.replays));
    Ok(())
}

/// The server's statistics of a table.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Counters {
    inserted: i64,
    updated: i64,
    hot: i64,
    deleted: i64,
    dead: i64,
}

impl Counters {
    async fn of(database: &mut Database, table: &str) -> Result<Self, Error> {
        let sql = format!(
            "SELECT n_tup_ins, n_tup_upd, n_tup_hot_upd, n_tup_del, n_dead_tup
            FROM pg_stat_all_tables WHERE relid = '{table}'::regclass"
        );
        let rows = database.rows(&sql).await?;
        let row = rows.first().ok_or("a table without statistics")?;
        Ok(Self {
            inserted: row.try_get(0)?,
            updated: row.try_get(1)?,
            hot: row.try_get(2)?,
            deleted: row.try_get(3)?,
            dead: row.try_get(4)?,
        })
    }
}

async fn wait_for(database: &mut Database, sql: &str, at_least: i64) -> Result<(), Error> {
    let give_up_at = Instant::now() + Duration::from_secs(30);
    while database.number(sql).await? < at_least {
        if Instant::now() > give_up_at {
            return Err(format!("{sql}: still less than {at_least}").into());
        }
        sleep(Duration::from_millis(100)).await;
    }
    Ok(())
}
