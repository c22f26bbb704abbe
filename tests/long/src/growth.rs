//! `growth`: acquire and replay take as long in a large table as in a small one.

use std::time::Duration;

use idem_core::{AcquireOutcome, IdempotencyStore};
use idem_postgres::{PostgresConfig, PostgresStore};
use serde_json::json;
use tokio::time::Instant;

use crate::Error;
use crate::database::Database;
use crate::random::Random;
use crate::records::{DAY, Maker};
use crate::report::{Passed, Report, percentile, rounded};

/// How much longer the median may take.
const RATIO: f64 = 1.25;

/// The bytes of a record with its indexes, with room to spare for the write-ahead log and for building the indexes.
const BYTES_PER_RECORD: u64 = 2_200;

/// The body that most answers have.
const BODY: usize = 300;

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// How many records the large table has.
    #[arg(long, default_value_t = 10_000_000)]
    records: u64,
    /// How many the small one has.
    #[arg(long, default_value_t = 100_000)]
    few: u64,
    /// How often the tables take turns.
    #[arg(long, default_value_t = 6)]
    rounds: u64,
    /// How many acquires, and how many replays, each has in a round.
    #[arg(long, default_value_t = 2_000)]
    operations: u64,
}

/// One of the tables, and how long the verbs took in it, in milliseconds.
struct Table {
    maker: Maker,
    records: u64,
    next: u64,
    acquires: Vec<f64>,
    replays: Vec<f64>,
}

pub(crate) async fn run(options: &Options) -> Result<Passed, Error> {
    expect_room(options.records + options.few)?;
    let mut database = Database::start(&[]).await?;
    let mut report = Report::new("growth", database.version());
    let mut small = Table::fill(&mut database, "small", options.few).await?;
    let mut large = Table::fill(&mut database, "large", options.records).await?;
    // What filling has left to write would slow down whoever comes first.
    database.run("CHECKPOINT").await?;
    for table in [&mut small, &mut large] {
        table.measure(options.operations / 2).await?;
        (table.acquires, table.replays) = (Vec::new(), Vec::new());
    }
    println!("medians in ms:  acquire small  large   replay small  large");
    for round in 1..=options.rounds {
        let medians = [small.measure(options.operations).await?, large.measure(options.operations).await?];
        let [(a, b), (c, d)] = medians;
        println!("  round {round:>2} {a:>19.3} {c:>6.3} {b:>14.3} {d:>6.3}");
    }
    report.note("records", json!([options.few, options.records]));
    report.note("operations", options.rounds * options.operations);
    compare(&mut report, "acquire", &mut small.acquires, &mut large.acquires);
    compare(&mut report, "replay", &mut small.replays, &mut large.replays);
    Ok(report.finish())
}

fn compare(report: &mut Report, verb: &str, small: &mut [f64], large: &mut [f64]) {
    small.sort_by(f64::total_cmp);
    large.sort_by(f64::total_cmp);
    let [low, high] = [percentile(small, 0.5), percentile(large, 0.5)];
    let [slow, slower] = [percentile(small, 0.99), percentile(large, 0.99)];
    let ratio = high / low;
    report.fact(&format!("{verb}_p50_ms"), json!([rounded(low, 3), rounded(high, 3)]));
    report.fact(&format!("{verb}_p99_ms"), json!([rounded(slow, 3), rounded(slower, 3)]));
    report.fact(&format!("{verb}_p50_ratio"), rounded(ratio, 3));
    report.fact(&format!("{verb}_p99_ratio"), rounded(slower / slow, 3));
    report.expect(ratio <= RATIO, format!("the median of {verb} grew by a factor of {ratio:.2}, more than {RATIO}"));
}

impl Table {
    /// A table with so many settled records. One is made by the store, the others are copies of it with ids and times of
    /// their own.
    async fn fill(database: &mut Database, schema: &str, records: u64) -> Result<Self, Error> {
        let started = Instant::now();
        let store = PostgresStore::open(PostgresConfig::new(database.url()).schema(schema)).await?;
        let maker = Maker::new(store, DAY, BODY);
        maker.make(0, Duration::ZERO).await?;
        let table = format!("{schema}.idem_records");
        let indexes = Indexes::take(database, &table).await?;
        let columns = columns_of(database, schema).await?;
        database.run(&copies(&columns, &table, records)).await?;
        indexes.put_back(database, &table).await?;
        database.run(&format!("VACUUM (ANALYZE) {table}")).await?;
        let filled = database.number(&format!("SELECT count(*) FROM {table}")).await?;
        let size = database.size(&table).await?;
        let seconds = started.elapsed().as_secs();
        println!("{schema}: {filled} records, {} MB with indexes, filled in {seconds} s", size / 1_000_000);
        Ok(Self { maker, records, next: records, acquires: Vec::new(), replays: Vec::new() })
    }

    /// Acquires new keys and replays old ones in turn, one after another; answers the medians.
    async fn measure(&mut self, operations: u64) -> Result<(f64, f64), Error> {
        let mut random = Random::new();
        let first = self.acquires.len();
        for _ in 0..operations {
            let request = self.maker.request(self.next);
            self.next += 1;
            let started = Instant::now();
            let outcome = self.maker.store.acquire(&request).await?;
            self.acquires.push(started.elapsed().as_secs_f64() * 1e3);
            if !matches!(outcome, AcquireOutcome::Acquired(_)) {
                return Err(format!("a new key was not acquired: {outcome:?}").into());
            }
            let old = random.below(self.records);
            let started = Instant::now();
            self.maker.replay(old).await?;
            self.replays.push(started.elapsed().as_secs_f64() * 1e3);
        }
        let median = |times: &[f64]| {
            let mut sorted = times.to_vec();
            sorted.sort_by(f64::total_cmp);
            percentile(&sorted, 0.5)
        };
        Ok((median(&self.acquires[first..]), median(&self.replays[first..])))
    }
}

/// The indexes of a table, put aside while it is filled: row by row that takes hours.
struct Indexes {
    key: String,
    others: Vec<String>,
}

impl Indexes {
    async fn take(database: &mut Database, table: &str) -> Result<Self, Error> {
        let of = |column: &str, condition: &str| {
            format!(
                "SELECT coalesce(string_agg({column}, ';'), '') FROM pg_index
                JOIN pg_class ON pg_class.oid = indexrelid
                WHERE indrelid = '{table}'::regclass AND {condition}"
            )
        };
        let key =
            "SELECT conname || ' ' || pg_get_constraintdef(oid) FROM pg_constraint WHERE contype = 'p' AND conrelid = ";
        let key = database.text(&format!("{key}'{table}'::regclass")).await?;
        let others = database.text(&of("pg_get_indexdef(indexrelid)", "NOT indisprimary")).await?;
        let names = database.text(&of("indexrelid::regclass::TEXT", "NOT indisprimary")).await?;
        let name = key.split(' ').next().unwrap_or_default();
        database.run(&format!("ALTER TABLE {table} DROP CONSTRAINT {name}")).await?;
        for index in names.split(';').filter(|index| !index.is_empty()) {
            database.run(&format!("DROP INDEX {index}")).await?;
        }
        Ok(Self { key, others: others.split(';').map(str::to_owned).collect() })
    }

    async fn put_back(self, database: &mut Database, table: &str) -> Result<(), Error> {
        database.run("SET maintenance_work_mem = '512MB'").await?;
        database.run(&format!("ALTER TABLE {table} ADD CONSTRAINT {}", self.key)).await?;
        for index in self.others.iter().filter(|index| !index.is_empty()) {
            database.run(index).await?;
        }
        Ok(())
    }
}

async fn columns_of(database: &mut Database, schema: &str) -> Result<String, Error> {
    let sql = format!(
        "SELECT string_agg(column_name, ',' ORDER BY ordinal_position) FROM information_schema.columns
        WHERE table_schema = '{schema}' AND table_name = 'idem_records'"
    );
    database.text(&sql).await
}

/// Copies the record that is there under the ids of the numbers up to `records`, as if they had come one after another
/// during the last twelve hours.
fn copies(columns: &str, table: &str, records: u64) -> String {
    let span = 12_i64 * 3600 * 1_000_000;
    let age = format!("({span} - {span}::NUMERIC * number / {records})::BIGINT");
    let values = columns.split(',').map(|column| match column {
        "id" => "sha256(number::TEXT::BYTEA)".to_owned(),
        "owner" => "uuid_send(gen_random_uuid())".to_owned(),
        "created_at" | "updated_at" | "expires_at" | "purge_after" => format!("{column} - {age}"),
        column => column.to_owned(),
    });
    let values = values.collect::<Vec<_>>().join(",");
    format!(
        "INSERT INTO {table} ({columns}) SELECT {values} FROM {table}, generate_series(1, {records}::BIGINT - 1) AS number"
    )
}

/// The server's data are in the folder for temporary files.
fn expect_room(records: u64) -> Result<(), Error> {
    let needed = records * BYTES_PER_RECORD;
    let output = std::process::Command::new("df").arg("-Pk").arg(std::env::temp_dir()).output()?;
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let available = printed.lines().nth(1).and_then(|line| line.split_ascii_whitespace().nth(3)?.parse::<u64>().ok());
    let available = available.ok_or("df did not say how much room there is")? * 1024;
    println!("room for temporary files: {} GB; up to {} GB are needed", available >> 30, (needed >> 30) + 1);
    if available < needed {
        return Err("there is not enough room; set TMPDIR to a larger disk, or give fewer --records".into());
    }
    Ok(())
}
