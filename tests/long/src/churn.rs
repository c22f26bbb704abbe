//! `churn`: records come and go, and the table does not grow.
//!
//! One minute here stands for an hour. Time spans are sixty times shorter: records live 6 s instead of 6 min, and the purge and
//! autovacuum run once a second instead of once a minute. The rate, and counts of rows or bytes (autovacuum's threshold, the
//! purge's batch), are those of production.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use idem_core::engine::{Purger, PurgerSettings};
use idem_postgres::{PostgresConfig, PostgresStore};
use serde_json::json;
use sqlx::Row;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval};

use crate::Error;
use crate::database::Database;
use crate::records::Maker;
use crate::report::{Passed, Report, rounded};

/// How much larger than at its first steady state, without dead rows, the table may be at the end. The end is the median of the
/// last tenth of the time, because autovacuum makes the size go up and down.
const GROWTH: f64 = 1.5;

/// How much larger the table may be in the last quarter of the time than in the second.
const TREND: f64 = 1.2;

/// How many times the living records must be replaced.
const TURNOVER: f64 = 20.0;

/// How much time a partition covers.
const PERIOD: Duration = Duration::from_secs(5);

/// The longest pause of the purge; it stands for a minute.
const PAUSE: Duration = Duration::from_secs(1);

/// The table, or its partitions, with their statistics.
const PARTS: &str = "FROM (
        SELECT 'churn.idem_records'::regclass::OID AS oid
        UNION SELECT inhrelid FROM pg_inherits WHERE inhparent = 'churn.idem_records'::regclass
    ) AS part JOIN pg_class USING (oid) LEFT JOIN pg_stat_all_tables ON relid = part.oid";

/// The number of writers that share the rate.
const WRITERS: u64 = 32;

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// How long records come and go in each layout, in seconds.
    #[arg(long, default_value_t = 150)]
    seconds: u64,
    /// How many records are made per second.
    #[arg(long, default_value_t = 500)]
    rate: u64,
    /// How long a settled record is kept, in seconds.
    #[arg(long, default_value_t = 6)]
    retention_seconds: u64,
    /// Tests only this layout.
    #[arg(long)]
    layout: Option<Layout>,
}

#[derive(Debug, Clone, Copy, PartialEq, clap::ValueEnum)]
enum Layout {
    /// One table, one purge.
    One,
    /// One table, two purges.
    Two,
    /// Partitions, one purge.
    Partitioned,
}

impl Layout {
    fn name(self) -> &'static str {
        match self {
            Self::One => "one",
            Self::Two => "two",
            Self::Partitioned => "partitioned",
        }
    }
}

/// The table at one moment.
struct Sample {
    second: u64,
    made: u64,
    rows: i64,
    live: i64,
    dead: i64,
    bytes: i64,
    partitions: usize,
}

pub(crate) async fn run(options: &Options) -> Result<Passed, Error> {
    let layouts = match options.layout {
        Some(layout) => vec![layout],
        None => vec![Layout::One, Layout::Two, Layout::Partitioned],
    };
    let mut passed = true;
    for layout in layouts {
        passed &= churn(options, layout).await?.0;
    }
    Ok(Passed(passed))
}

async fn churn(options: &Options, layout: Layout) -> Result<Passed, Error> {
    let mut database = Database::start(&["autovacuum_naptime=1s"]).await?;
    println!("{}: {} records/s, kept {} s", layout.name(), options.rate, options.retention_seconds);
    let config = PostgresConfig::new(database.url()).schema("churn");
    let config = if layout == Layout::Partitioned { config.partitioned(PERIOD) } else { config };
    let store = PostgresStore::open(config.clone()).await?;
    let settings = PurgerSettings::new().longest_pause(PAUSE);
    let mut purgers = vec![Purger::start_with(Arc::new(store.clone()), settings.clone())];
    if layout == Layout::Two {
        purgers.push(Purger::start_with(Arc::new(PostgresStore::open(config).await?), settings));
    }
    let retention = Duration::from_secs(options.retention_seconds);
    let made = Arc::new(AtomicU64::new(0));
    let mut writers = start_writers(&Maker::new(store, retention, 300), options, &made);
    let mut names = BTreeSet::new();
    let mut series: Vec<Sample> = Vec::new();
    println!("second     made    rows    live    dead       kB  partitions");
    for second in 1..=options.seconds {
        tokio::select! {
            () = tokio::time::sleep(Duration::from_secs(1)) => {}
            Some(ended) = writers.join_next() => ended??,
        }
        let sample = sample(&mut database, second, made.load(Ordering::Relaxed), &mut names).await?;
        if second <= 2 * options.retention_seconds || second % 10 == 0 || second == options.seconds {
            let Sample { second, made, rows, live, dead, bytes, partitions } = &sample;
            println!("{second:>6} {made:>8} {rows:>7} {live:>7} {dead:>7} {:>8} {partitions:>11}", bytes / 1000);
        }
        series.push(sample);
    }
    writers.shutdown().await;
    for purger in purgers {
        purger.stop().await;
    }
    let mut report = Report::new("churn", database.version());
    report.note("layout", layout.name());
    judge(&mut report, options, layout, &series);
    if layout == Layout::Partitioned {
        judge_partitions(&mut report, &mut database, options, &series, &names).await?;
    }
    let line = |s: &Sample| json!([s.second, s.made, s.rows, s.live, s.dead, s.bytes, s.partitions]);
    report.note("series", series.iter().step_by(10).map(line).collect::<Vec<_>>());
    Ok(report.finish())
}

fn start_writers(maker: &Maker, options: &Options, made: &Arc<AtomicU64>) -> JoinSet<Result<(), Error>> {
    let mut writers = JoinSet::new();
    let pause = Duration::from_secs_f64(WRITERS as f64 / options.rate.max(1) as f64);
    for _ in 0..WRITERS {
        let (maker, made) = (maker.clone(), Arc::clone(made));
        writers.spawn(async move {
            let mut ticks = interval(pause);
            // After a stall the rate stays the same; it does not rise to catch up.
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            loop {
                ticks.tick().await;
                let number = made.fetch_add(1, Ordering::Relaxed);
                maker.make(number, Duration::ZERO).await?;
            }
        });
    }
    writers
}

async fn sample(
    database: &mut Database,
    second: u64,
    made: u64,
    names: &mut BTreeSet<String>,
) -> Result<Sample, Error> {
    let tables = database
        .rows(&format!(
            "SELECT part.oid::TEXT, pg_total_relation_size(part.oid), coalesce(n_dead_tup, 0)
            {PARTS} WHERE relkind = 'r'"
        ))
        .await?;
    let (mut bytes, mut dead) = (0, 0);
    for table in &tables {
        names.insert(table.try_get(0)?);
        // A partition may be dropped after it was listed.
        bytes += table.try_get::<Option<i64>, _>(1)?.unwrap_or_default();
        dead += table.try_get::<i64, _>(2)?;
    }
    let rows = database
        .rows(
            "SELECT count(*), count(*) FILTER (WHERE expires_at > extract(epoch FROM clock_timestamp()) * 1000000)
            FROM churn.idem_records",
        )
        .await?;
    let row = rows.first().ok_or("no count")?;
    let partitions = tables.len();
    Ok(Sample { second, made, rows: row.try_get(0)?, live: row.try_get(1)?, dead, bytes, partitions })
}

fn judge(report: &mut Report, options: &Options, layout: Layout, series: &[Sample]) {
    let samples = series.len();
    // The living records of the second half are those of the steady state.
    let steady_live = median(series.iter().skip(samples / 2).map(|sample| sample.live));
    let reached = series.iter().find(|sample| sample.live as f64 >= 0.95 * steady_live as f64);
    let (Some(reached), Some(last)) = (reached, series.last()) else {
        return report.expect(false, "there are no samples");
    };
    // A partition is dropped when its last record has expired, so the records of one more period are always present.
    let more = match layout {
        Layout::One | Layout::Two => 0.0,
        Layout::Partitioned => PERIOD.as_secs_f64() / options.retention_seconds as f64,
    };
    let steady = reached.bytes as f64 * (1.0 + more);
    let bytes = |from: usize, to: usize| median(series.iter().take(to).skip(from).map(|sample| sample.bytes));
    let (early, late) = (bytes(samples / 4, samples / 2), bytes(samples - samples / 4, samples));
    let end = bytes(samples - samples / 10, samples);
    let (growth, trend) = (end as f64 / steady, late as f64 / early as f64);
    let turnover = last.made as f64 / steady_live.max(1) as f64;
    report.fact("records_made", last.made);
    report.fact("steady_live_records", steady_live);
    report.fact("steady_reached_after_seconds", reached.second);
    report.fact("turnover", rounded(turnover, 1));
    report.fact("steady_bytes", rounded(steady, 0));
    report.fact("bytes_at_the_end", end);
    report.fact("largest_bytes", series.iter().map(|sample| sample.bytes).max());
    report.fact("growth", rounded(growth, 3));
    report.fact("last_quarter_to_second_quarter", rounded(trend, 3));
    report.note("autovacuum_naptime", "1s");
    report.note("seconds", options.seconds);
    report.expect(turnover >= TURNOVER, format!("only {turnover:.1} times the living records were made"));
    report.expect(growth <= GROWTH, format!("the table grew to {growth:.2} times its steady size"));
    report.expect(trend <= TREND, format!("the table still grows, by a factor of {trend:.2} in half of the time"));
    let all = options.rate * options.seconds;
    report.expect(last.made * 10 >= all * 8, format!("{} records were made, far fewer than {all}", last.made));
}

fn median(values: impl Iterator<Item = i64>) -> i64 {
    let mut sorted: Vec<i64> = values.collect();
    sorted.sort_unstable();
    sorted.get(sorted.len() / 2).copied().unwrap_or_default()
}

/// Checks that old partitions are dropped whole, so that their number does not grow.
async fn judge_partitions(
    report: &mut Report,
    database: &mut Database,
    options: &Options,
    series: &[Sample],
    names: &BTreeSet<String>,
) -> Result<(), Error> {
    let present = series.last().map_or(0, |sample| sample.partitions);
    let most = series.iter().map(|sample| sample.partitions).max().unwrap_or_default();
    let dropped = names.len().saturating_sub(present);
    // Those with living records, the current one, three future ones, the default one, and one or two that await the purge.
    let bound = options.retention_seconds.div_ceil(PERIOD.as_secs()) as usize + 7;
    let over = (options.seconds / PERIOD.as_secs()) as usize;
    let deleted = database.number(&format!("SELECT coalesce(sum(n_tup_del), 0)::BIGINT {PARTS}")).await?;
    report.fact("partitions_seen", names.len());
    report.fact("partitions_dropped", dropped);
    report.fact("partitions_at_most", most);
    report.fact("rows_deleted_one_by_one", deleted);
    report.expect(most <= bound, format!("there were {most} partitions at once, more than {bound}"));
    report.expect(dropped + bound >= over, format!("only {dropped} partitions of {over} were dropped"));
    report.expect(deleted == 0, format!("{deleted} rows were removed one by one"));
    Ok(())
}
