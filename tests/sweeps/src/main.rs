//! `cargo xtask sweeps`: drops every future of a store at every await, and cuts every exchange with its server after every
//! byte.

mod coverage;
mod ended;
mod engine;
mod harm;
mod leased;
mod panics;
mod sweep;
mod transactions;
mod world;

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use clap::Parser;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use coverage::{Coverage, Row};
use ended::Site;
use engine::Setting;
use panics::Culprit;
use sweep::{Case, Pass, Sweep};
use world::Place;

/// Returns an error unless a condition holds.
macro_rules! hold {
    ($holds:expr, $($message:tt)*) => {
        if !$holds {
            return Err(format!($($message)*).into());
        }
    };
}
pub(crate) use hold;

/// How many violations of one sweep are printed: what is wrong at one byte is wrong at most of them.
const SHOWN: usize = 3;

/// Drops every future at every await, and cuts every exchange after every byte.
#[derive(Debug, Parser)]
#[command(bin_name = "cargo xtask sweeps")]
struct Options {
    /// Sweeps only this store.
    #[arg(long, value_enum)]
    store: Option<Store>,
    /// Sweeps only verbs whose name in the table contains this text.
    #[arg(long)]
    verb: Option<String>,
    /// Tries one in this many bytes; by default every byte.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    every: u16,
    /// Number of concurrent sweeps.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u8).range(1..))]
    jobs: u8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Store {
    Engine,
    Sqlite,
    Postgres,
    #[value(name = "mariadb")]
    MariaDb,
    Redis,
    Hybrid,
}

impl Options {
    fn wants(&self, store: Store, verb: &str) -> bool {
        self.store.is_none_or(|wanted| wanted == store) && self.verb.as_ref().is_none_or(|wanted| verb.contains(wanted))
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    let options = Options::parse();
    let began = Instant::now();
    let swept = run(&options).await;
    print!("{}", coverage::table(&swept));
    println!("in {:.0} s", began.elapsed().as_secs_f64());
    let is_clean = swept.values().all(|coverage| coverage.violations.is_empty());
    if is_clean { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

async fn run(options: &Options) -> BTreeMap<Row, Coverage> {
    const PLACES: [(Store, Place); 7] = [
        (Store::Sqlite, Place::Sqlite),
        (Store::Postgres, Place::Postgres),
        (Store::Postgres, Place::PostgresPooled),
        (Store::MariaDb, Place::MariaDb),
        (Store::Redis, Place::Redis),
        (Store::Hybrid, Place::HybridPostgres),
        (Store::Hybrid, Place::HybridRedis),
    ];
    let jobs = Arc::new(Semaphore::new(options.jobs.into()));
    let mut sweeps = JoinSet::new();
    for setting in Setting::ALL.into_iter().filter(|setting| options.wants(Store::Engine, setting.name())) {
        let jobs = Arc::clone(&jobs);
        sweeps.spawn(async move {
            let _job = jobs.acquire_owned().await;
            (Row::Engine(setting), setting.sweep().await)
        });
    }
    for culprit in Culprit::ALL.into_iter().filter(|culprit| options.wants(Store::Engine, culprit.name())) {
        let jobs = Arc::clone(&jobs);
        sweeps.spawn(async move {
            let _job = jobs.acquire_owned().await;
            (Row::Panics(culprit), culprit.sweep().await)
        });
    }
    for site in Site::ALL {
        let store = match site {
            Site::Sqlite => Store::Sqlite,
            Site::Postgres | Site::PostgresPooled => Store::Postgres,
            Site::MariaDb => Store::MariaDb,
            Site::Redis | Site::RedisSentinel | Site::RedisCluster => Store::Redis,
        };
        for verb in site.verbs().into_iter().filter(|verb| options.wants(store, verb.name())) {
            let jobs = Arc::clone(&jobs);
            sweeps.spawn(async move {
                let _job = jobs.acquire_owned().await;
                (Row::Ended(site, verb), ended::sweep(site, verb).await)
            });
        }
    }
    for (store, place) in PLACES {
        for case in Case::all(place).into_iter().filter(|case| options.wants(store, case.name())) {
            for pass in Pass::all(place, case) {
                let (jobs, every) = (Arc::clone(&jobs), options.every.into());
                sweeps.spawn(async move {
                    let _job = jobs.acquire_owned().await;
                    (Row::Store(place, case), Sweep::run(place, case, pass, every).await)
                });
            }
        }
    }
    let mut swept: BTreeMap<Row, Coverage> = BTreeMap::new();
    while let Some(sweep) = sweeps.join_next().await {
        match sweep {
            Ok((row, coverage)) => {
                show(row, &coverage);
                swept.entry(row).or_default().add(coverage);
            }
            // A panic is a bug of the sweeps, and has been printed.
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        }
    }
    swept
}

fn show(row: Row, coverage: &Coverage) {
    let [store, verb] = row.names();
    for violation in coverage.violations.iter().take(SHOWN) {
        println!("{store}, {verb}: {violation}");
    }
    if coverage.violations.len() > SHOWN {
        println!("{store}, {verb}: and {} more like it", coverage.violations.len() - SHOWN);
    }
}
