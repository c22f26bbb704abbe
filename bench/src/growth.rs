//! How cost grows with the number of records, and what a purge costs concurrent writers.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use idem_core::engine::{Purger, PurgerSettings};
use idem_core::{AcquireOutcome, Term};
use idem_postgres::{PostgresConfig, PostgresStore};
use idem_redis::{RedisConfig, RedisStore};
use idem_servers::Postgres;
use sqlx::{AssertSqlSafe, PgConnection, Row};
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;

use crate::contest::{Contestant, Outcome, Sample, hold, p50, p99, say};
use crate::drive::{Work, driven, histogram, sample};
use crate::error::Error;
use crate::judged::Goal;
use crate::outside::pgbench;
use crate::pace::Pace;
use crate::records::{Maker, scattered};
use crate::report::Report;
use crate::servers;

/// One client, which shows what a single request waits for.
const CLIENTS: usize = 1;

/// How many records the small and the large table have.
const SIZES: (u64, u64) = (100_000, 10_000_000);

/// How many acquires per second there are while the purge runs, and how many writers.
const RATE: u64 = 5_000;
const WRITERS: u64 = 64;

/// With it, a page has as many copied rows as rows that were acquired and then settled: six. The latter are small when they
/// come, and grow into the space that the page has kept free.
const FILLFACTOR: u32 = 65;

/// How long the records of the purge live.
const LIFE: Duration = Duration::from_secs(2);

pub(crate) async fn run(pace: Pace, report: &mut Report) -> Result<(), Error> {
    let server = servers::postgres()?;
    let mut connection = servers::connect(&server).await?;
    let (few, many) = if pace.quick { (10_000, 300_000) } else { SIZES };
    let tables = tables(&server, &mut connection, few, many).await?;
    let name = format!("Postgres, {few} and {many} records");
    let before = blocks_read(&mut connection).await?;
    compare(&name, 1.25, &tables, pace, report).await?;
    let read = blocks_read(&mut connection).await? - before;
    report.note(format!("{name}: Postgres read {read} blocks of the large table that it did not have in its memory"));
    report.add(of_the_latest(&name, &tables, few, pace).await?);
    drop(tables);
    purge(&server, &mut connection, pace, report).await?;
    drop((connection, server));

    let many = if pace.quick { 200_000 } else { 2_000_000 };
    let redis = [servers::redis()?, servers::redis()?];
    let mut tables = Vec::new();
    for ((name, records), server) in [("small", few), ("large", many)].into_iter().zip(&redis) {
        let maker = Maker::new(Arc::new(RedisStore::open(RedisConfig::new(server.url())).await?));
        maker.fill(records).await?;
        tables.push(Stored { name, records, maker });
    }
    compare(&format!("Redis, {few} and {many} records"), 1.15, &tables, pace, report).await
}

async fn tables(server: &Postgres, connection: &mut PgConnection, few: u64, many: u64) -> Result<Vec<Stored>, Error> {
    let mut tables = Vec::new();
    for (schema, records) in [("small", few), ("large", many)] {
        let store = PostgresStore::open(PostgresConfig::new(server.url()).schema(schema)).await?;
        let maker = Maker::new(Arc::new(store));
        maker.cycle(0).await?;
        fill(connection, schema, records).await?;
        tables.push(Stored { name: schema, records, maker });
    }
    servers::run(connection, "CHECKPOINT").await?;
    Ok(tables)
}

/// Reads rows of the same two tables by their keys, and does nothing else.
pub(crate) async fn selects(pace: Pace, report: &mut Report) -> Result<(), Error> {
    let server = servers::postgres()?;
    let mut connection = servers::connect(&server).await?;
    // The scripts have the same numbers.
    let (few, many) = SIZES;
    drop(tables(&server, &mut connection, few, many).await?);
    let port = server.port();
    let by = |name, script: &'static str| Contestant::new(name, move |_| pgbench(port, script, CLIENTS, pace.turn));
    let contestants = vec![by("small", "small_select.sql"), by("large", "large_select.sql")];
    let outcome = hold(&format!("Postgres, at most: {few} and {many} rows by key"), pace.rounds, contestants).await?;
    say(&outcome, "large", "small", ("p50", p50));
    report.add(outcome);
    Ok(())
}

/// A store with its number of settled records.
struct Stored {
    name: &'static str,
    records: u64,
    maker: Arc<Maker>,
}

async fn compare(name: &str, most: f64, tables: &[Stored], pace: Pace, report: &mut Report) -> Result<(), Error> {
    let fresh = Arc::new(AtomicU64::new(tables.iter().map(|table| table.records).max().unwrap_or_default()));
    let acquires = tables.iter().map(|table| {
        let maker = Arc::clone(&table.maker);
        let acquire = move |number| -> Work {
            let maker = Arc::clone(&maker);
            Box::pin(async move { maker.acquire(number).await.map(drop) })
        };
        driven(table.name, CLIENTS, pace.turn, &fresh, acquire)
    });
    let acquired = hold(&format!("{name}: acquire"), pace.rounds, acquires.collect()).await?;
    let replays = tables
        .iter()
        .map(|table| driven(table.name, CLIENTS, pace.turn, &Arc::default(), table.maker.replays(table.records)));
    let replayed = hold(&format!("{name}: replay"), pace.rounds, replays.collect()).await?;
    for (verb, outcome) in [("acquire", acquired), ("replay", replayed)] {
        report.judge(&format!("{name}: p50 of {verb}"), Goal::AtMost(most), outcome.ratio("large", "small", p50));
        report.add(outcome);
    }
    Ok(())
}

/// Replays of the latest records of each table: as many of the large table as the small one has. It shows the growth that is
/// left if all requested records are in memory.
async fn of_the_latest(name: &str, tables: &[Stored], most: u64, pace: Pace) -> Result<Outcome, Error> {
    let contestants = tables.iter().map(|table| {
        let (maker, first) = (Arc::clone(&table.maker), table.records.saturating_sub(most));
        let replay = move |number| -> Work {
            let maker = Arc::clone(&maker);
            Box::pin(async move { maker.replay(first + scattered(number, most)).await })
        };
        driven(table.name, CLIENTS, pace.turn, &Arc::default(), replay)
    });
    hold(&format!("{name}: replay of the latest {most}"), pace.rounds, contestants.collect()).await
}

/// How many blocks of the large table and its indexes the server did not have in its shared buffers.
async fn blocks_read(connection: &mut PgConnection) -> Result<u64, Error> {
    // Sessions report their statistics at most a second late.
    tokio::time::sleep(Duration::from_secs(2)).await;
    let read = "SELECT (heap_blks_read + idx_blks_read)::TEXT FROM pg_statio_user_tables \
         WHERE schemaname = 'large' AND relname = 'idem_records'";
    Ok(text(connection, read).await?.parse()?)
}

/// Copies record 0 under the ids of the numbers up to `records`. Each copy has other times, as if the records had come one
/// after another during the last twelve hours. The indexes are dropped meanwhile, because updating them row by row takes an hour.
pub(crate) async fn fill(connection: &mut PgConnection, schema: &str, records: u64) -> Result<(), Error> {
    let started = Instant::now();
    let table = format!("{schema}.idem_records");
    let columns = text(
        connection,
        &format!(
            "SELECT string_agg(column_name, ',' ORDER BY ordinal_position) FROM information_schema.columns \
             WHERE table_schema = '{schema}' AND table_name = 'idem_records'"
        ),
    )
    .await?;
    let of_indexes = |what: &str| {
        format!(
            "SELECT coalesce(string_agg({what}, ';\n'), '') FROM pg_index WHERE indrelid = '{table}'::regclass \
             AND NOT indisprimary"
        )
    };
    let indexes = text(connection, &of_indexes("pg_get_indexdef(indexrelid)")).await?;
    let drops = text(connection, &of_indexes("'DROP INDEX ' || indexrelid::regclass::TEXT")).await?;
    let key = format!("FROM pg_constraint WHERE contype = 'p' AND conrelid = '{table}'::regclass");
    let (name, definition) = (
        text(connection, &format!("SELECT conname::TEXT {key}")).await?,
        text(connection, &format!("SELECT pg_get_constraintdef(oid) {key}")).await?,
    );
    let before =
        text(connection, &format!("SELECT reloptions[1] FROM pg_class WHERE oid = '{table}'::regclass")).await?;
    let prepare = format!("ALTER TABLE {table} DROP CONSTRAINT {name}, SET (fillfactor = {FILLFACTOR});\n{drops}");
    servers::run(connection, &prepare).await?;
    let span = 12_i64 * 3600 * 1_000_000;
    let values = columns.split(',').map(|column| match column {
        // As `Maker::id` makes them.
        "id" => "sha256(int8send(number))".to_owned(),
        "owner" => "uuid_send(gen_random_uuid())".to_owned(),
        "created_at" | "updated_at" | "expires_at" | "purge_after" => {
            format!("{column} - ({span} - {span}::NUMERIC * number / {records})::BIGINT")
        }
        column => column.to_owned(),
    });
    let values = values.collect::<Vec<_>>().join(",");
    let copy = format!(
        "INSERT INTO {table} ({columns}) SELECT {values} FROM {table}, generate_series(1, {records}::BIGINT - 1) AS number"
    );
    servers::run(connection, &copy).await?;
    let back = format!(
        "SET maintenance_work_mem = '1GB';\nALTER TABLE {table} ADD CONSTRAINT {name} {definition}, SET ({before});\n\
         {indexes};\nVACUUM (ANALYZE) {table}"
    );
    servers::run(connection, &back).await?;
    println!("{schema}: {records} records in {} s", started.elapsed().as_secs());
    Ok(())
}

pub(crate) async fn text(connection: &mut PgConnection, sql: &str) -> Result<String, Error> {
    Ok(sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).fetch_one(connection).await?.try_get(0)?)
}

async fn purge(server: &Postgres, connection: &mut PgConnection, pace: Pace, report: &mut Report) -> Result<(), Error> {
    let store = PostgresStore::open(PostgresConfig::new(server.url()).schema("purged")).await?;
    let maker = Maker::new(Arc::new(store.clone()));
    let numbers = Arc::new(AtomicU64::new(0));
    let turn = pace.turn.max(LIFE) * 2;
    let without = Contestant::new("without", |_| at_a_rate(Arc::clone(&maker), Arc::clone(&numbers), turn));
    let with = Contestant::new("with", |_| {
        let (maker, numbers, store) = (Arc::clone(&maker), Arc::clone(&numbers), store.clone());
        async move {
            let purger =
                Purger::start_with(Arc::new(store), PurgerSettings::new().longest_pause(Duration::from_secs(1)));
            let sample = at_a_rate(maker, numbers, turn).await;
            purger.stop().await;
            sample
        }
    });
    let name = format!("Postgres: {RATE} acquires/s, with and without a purge");
    let outcome: Outcome = hold(&name, pace.rounds, vec![without, with]).await?;
    report.judge("p99 of acquire while a purge runs", Goal::AtMost(1.5), outcome.ratio("with", "without", p99));
    report.add(outcome);
    let over = "SELECT count(*)::TEXT FROM purged.idem_records WHERE purge_after < \
         (extract(epoch FROM clock_timestamp()) * 1e6)::BIGINT - 2000000";
    // Records of the last turn are over soon. Records that earlier turns without a purge left had to be removed in later turns.
    let left: u64 = text(connection, over).await?.parse()?;
    report.note(format!("purge: {left} records that were over for more than 2 s were left at the end"));
    Ok(())
}

/// Acquires at a steady rate, whether or not earlier acquires are done. Each time counts from when the acquire was due.
async fn at_a_rate(maker: Arc<Maker>, numbers: Arc<AtomicU64>, turn: Duration) -> Result<Sample, Error> {
    let started = Instant::now();
    let mut writers = JoinSet::new();
    for _ in 0..WRITERS {
        let (maker, numbers) = (Arc::clone(&maker), Arc::clone(&numbers));
        writers.spawn(async move {
            let mut times = histogram()?;
            let mut ticks =
                tokio::time::interval(Duration::from_secs(1) * u32::try_from(WRITERS)? / u32::try_from(RATE)?);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
            while started.elapsed() < turn {
                let due = ticks.tick().await;
                let number = numbers.fetch_add(1, Ordering::Relaxed);
                let mut request = maker.request(number);
                request.term = Term { lease: LIFE / 2, retention: LIFE / 2 };
                match maker.store.acquire(&request).await? {
                    AcquireOutcome::Acquired(_) => {}
                    other => return Err(format!("record {number} was not acquired: {other:?}").into()),
                }
                times.saturating_record(u64::try_from(due.elapsed().as_nanos())?);
            }
            Ok::<_, Error>(times)
        });
    }
    let mut times = histogram()?;
    while let Some(done) = writers.join_next().await {
        times.add(done??)?;
    }
    Ok(sample(&times, started.elapsed()))
}
