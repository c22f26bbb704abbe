//! `idem capacity`: how much a store needs for a rate of operations. It asks no store.

use std::error::Error;
use std::time::Duration;

use clap::{Args, ValueEnum};
use serde_json::json;

use crate::Ended;
use crate::output::{say, say_json};

/// The bytes of a settled record without its answer, derived from the totals of `cargo xtask bench at-rest`.
const POSTGRES_ROW: u64 = 268;
const POSTGRES_INDEXES: u64 = 105;
const MARIADB_RECORD: u64 = 940;
const REDIS_RECORD: u64 = 439;
const SQLITE_RECORD: u64 = 480;

/// A page of Postgres, its header, and the pointer to each row.
const PAGE: u64 = 8_192;
const PAGE_HEADER: u64 = 24;
const ROW_POINTER: u64 = 4;

/// Above this size Postgres moves an answer that it cannot compress out of the row, in pieces of [`PIECE`] bytes that take [`PIECE_OVERHEAD`] more each.
const LONGEST_ROW: u64 = 2_032;
const PIECE: u64 = 1_996;
const PIECE_OVERHEAD: u64 = 100;

const REDIS_SLOTS: u64 = 16_384;
const SECONDS_OF_A_DAY: u64 = 86_400;

/// For which load.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// The store.
    #[arg(long, value_enum)]
    engine: Engine,
    /// New operations a second, on average over the retention. Repeats make no records.
    #[arg(long, value_name = "NUMBER")]
    rate: f64,
    /// How long answers are kept.
    #[arg(long, default_value = "24h", value_name = "TIME", value_parser = humantime::parse_duration)]
    retention: Duration,
    /// The bytes of an answer: its header fields and its body.
    #[arg(long, default_value_t = 512, value_name = "BYTES")]
    body: u64,
    /// The fillfactor of the table in Postgres.
    #[arg(long, default_value_t = 25, value_name = "PERCENT", value_parser = clap::value_parser!(u64).range(10..=100))]
    fillfactor: u64,
    /// How much time a partition covers, in Postgres with partitions.
    #[arg(long, default_value = "24h", value_name = "TIME", value_parser = humantime::parse_duration)]
    partition: Duration,
    /// What a gigabyte costs in a month, of disk or of memory, in any currency.
    #[arg(long, value_name = "PRICE")]
    price: Option<f64>,
}

/// A store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Engine {
    Postgres,
    Mariadb,
    Redis,
    Sqlite,
}

impl Engine {
    /// The bytes of a record and its indexes. In Postgres at most: rows that are in progress together share pages until they
    /// are settled.
    fn record_bytes(self, answer: u64, fillfactor: u64) -> u64 {
        match self {
            Self::Postgres => {
                let row = POSTGRES_ROW.saturating_add(answer);
                let (row, outside) = match row > LONGEST_ROW {
                    true => (POSTGRES_ROW, answer.saturating_add(answer.div_ceil(PIECE) * PIECE_OVERHEAD)),
                    false => (row, 0),
                };
                let filled = (PAGE - PAGE_HEADER) * fillfactor / 100;
                let rows = (filled / (row + ROW_POINTER)).max(1);
                (PAGE / rows + POSTGRES_INDEXES).saturating_add(outside)
            }
            Self::Mariadb => MARIADB_RECORD.saturating_add(answer),
            Self::Redis => REDIS_RECORD.saturating_add(answer),
            Self::Sqlite => SQLITE_RECORD.saturating_add(answer),
        }
    }
}

/// What a load needs.
struct Need {
    live: f64,
    record_bytes: u64,
    gigabytes: f64,
}

impl Need {
    fn of(options: &Options) -> Result<Self, Box<dyn Error>> {
        if !(options.rate.is_finite() && options.rate > 0.0) {
            return Err("--rate must be a number above 0".into());
        }
        if options.retention < Duration::from_secs(1) {
            return Err("--retention must be at least 1s".into());
        }
        if options.partition < Duration::from_secs(1) {
            return Err("--partition must be at least 1s".into());
        }
        if options.price.is_some_and(|price| !(price.is_finite() && price >= 0.0)) {
            return Err("--price must be a number from 0 on".into());
        }
        let live = options.rate * options.retention.as_secs_f64();
        let record_bytes = options.engine.record_bytes(options.body, options.fillfactor);
        Ok(Self { live, record_bytes, gigabytes: live * record_bytes as f64 / 1e9 })
    }
}

/// Prints what the load needs.
pub(crate) fn run(options: &Options, as_json: bool) -> Result<Ended, Box<dyn Error>> {
    let need = Need::of(options)?;
    let partitions = (options.retention.as_secs_f64() / options.partition.as_secs_f64()).ceil() + 3.0;
    let price = options.price.map(|price| price * need.gigabytes);
    if as_json {
        say_json(&json!({
            "live_records": need.live,
            "record_bytes": need.record_bytes,
            "gigabytes": need.gigabytes,
            "purged_per_second": options.rate,
            "partitions": (options.engine == Engine::Postgres).then_some(partitions),
            "records_per_slot": (options.engine == Engine::Redis).then_some(need.live / REDIS_SLOTS as f64),
            "price_per_month": price,
        }));
        return Ok(Ended::Done);
    }
    say(&format!("live records        {:.0}", need.live));
    say(&format!("bytes of a record   {}", need.record_bytes));
    let place = if options.engine == Engine::Redis { "memory" } else { "disk" };
    say(&format!("{place:<18}  {:.1} GB", need.gigabytes));
    let rate = if options.rate < 10.0 { format!("{:.2}", options.rate) } else { format!("{:.0}", options.rate) };
    say(&format!("to purge            {rate} a second"));
    match options.engine {
        Engine::Postgres => {
            let a_day = options.rate * SECONDS_OF_A_DAY as f64;
            say(&format!("in partitions       {partitions:.0}, so that no row is purged; {a_day:.0} records a day"));
        }
        Engine::Redis => {
            say(&format!(
                "records of a slot   {:.0} of a Cluster's {REDIS_SLOTS} slots",
                need.live / REDIS_SLOTS as f64
            ));
            say("while it saves      up to twice the memory, as pages change");
        }
        Engine::Mariadb | Engine::Sqlite => {}
    }
    if let Some(price) = price {
        say(&format!("price of a month    {price:.2}"));
    }
    Ok(Ended::Done)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rows of Postgres in the table of `cargo xtask bench at-rest`, with answers of 512 bytes.
    #[test]
    fn measured_bytes_are_met_within_two_percent() {
        let measured = [(Engine::Postgres, 25, 4_201), (Engine::Postgres, 90, 1_015)];
        for (engine, fillfactor, bytes) in measured {
            let modelled = engine.record_bytes(512, fillfactor);
            assert!(modelled.abs_diff(bytes) * 50 <= bytes, "{engine:?} at {fillfactor}: {modelled}, measured {bytes}");
        }
    }

    #[test]
    fn an_answer_that_leaves_its_row_still_counts() {
        let [small, large] = [2_000, 100_000].map(|answer| Engine::Postgres.record_bytes(answer, 90));
        assert!(small < 3_000, "{small}");
        assert!((100_000..110_000).contains(&large), "{large}");
        assert!(Engine::Postgres.record_bytes(u64::MAX / 4, 25) > u64::MAX / 4);
    }

    #[test]
    fn a_load_that_is_none_is_refused() {
        let options = |rate, retention, partition| Options {
            engine: Engine::Postgres,
            rate,
            retention: Duration::from_secs(retention),
            body: 512,
            fillfactor: 25,
            partition: Duration::from_secs(partition),
            price: None,
        };
        assert_eq!(Need::of(&options(100.0, 86_400, 3_600)).unwrap().live, 8_640_000.0);
        for (rate, retention, partition) in [(0.0, 1, 1), (f64::NAN, 1, 1), (-1.0, 1, 1), (1.0, 0, 1), (1.0, 1, 0)] {
            assert!(Need::of(&options(rate, retention, partition)).is_err(), "{rate} {retention} {partition}");
        }
    }
}
