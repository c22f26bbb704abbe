//! `cargo xtask bench`: what the safety costs, as ratios between contestants that take turns in one run.
//!
//! Machines differ and are noisy, so no figure here means anything alone. The contestants of a contest use the same servers
//! and take turns. The report has the median of the ratios of the turns, with the lowest and the highest.

mod at_rest;
mod contest;
mod delay;
mod document;
mod drive;
mod error;
mod fingerprint;
mod growth;
mod http;
mod jobs;
mod judged;
mod limits;
mod links;
mod memory;
mod messages;
mod operators;
mod outside;
mod pace;
mod page;
mod peers;
mod plot;
mod records;
mod report;
mod scale;
mod servers;
mod store;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand, ValueEnum};

use crate::error::{Error, with_causes};
use crate::pace::Pace;
use crate::report::Report;

#[derive(Debug, Parser)]
#[command(name = "cargo xtask bench")]
struct Options {
    #[command(subcommand)]
    other: Option<Other>,
    /// The groups to run. Default: all but dynamodb, scale and limits.
    #[arg(value_enum)]
    groups: Vec<Group>,
    /// The stores of the group `scale`. Default: all.
    #[arg(long = "engine", value_enum, value_name = "ENGINE")]
    engines: Vec<scale::Engine>,
    /// Run fewer and shorter rounds on smaller tables: it takes five minutes at most, and the figures are noisier.
    #[arg(long)]
    quick: bool,
    /// Write the figures to this file in JSON.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Write the plots to this folder.
    #[arg(long)]
    plots: Option<PathBuf>,
    /// Replace the tables of this Markdown page by those of this run.
    #[arg(long)]
    page: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
enum Other {
    /// Runs one of the servers of the HTTP contests.
    #[command(hide = true)]
    Serve(http::serve::Options),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Group {
    /// Postgres, Redis, Redis in front of Postgres, MariaDB, and SQLite, against code written by hand.
    Store,
    /// The part of `store` that is about Redis alone.
    Redis,
    /// The part of `store` that is about MariaDB alone.
    Mariadb,
    /// Postgres over links with a delay.
    Links,
    /// Jobs on Postgres, against a worker written by hand.
    Jobs,
    /// Messages of JetStream with effects in Postgres, against a consumer written by hand.
    Messages,
    /// The layers of axum and actix, and the memory of requests in flight.
    Http,
    /// Metrics and spans, apart and together, in the layer of axum and in `payments`, which it builds (needs valgrind).
    Observed,
    /// The fingerprint of a request body.
    Fingerprint,
    /// Small and large tables, and a purge beside acquires.
    Growth,
    /// What an operator waits for on ten million records of Postgres.
    Operators,
    /// Bytes of a record in each store.
    AtRest,
    /// Python libraries on the same Redis (needs python3 with venv).
    Peers,
    /// DynamoDB on emulators, against requests written by hand; runs only if it is named.
    Dynamodb,
    /// Bytes and latencies of each store with 100,000, a million and ten million records; runs only if it is named. It takes hours,
    /// 12 GB of memory and 40 GB of disk.
    Scale,
    /// What bounds the others; runs only if it is named.
    Limits,
}

#[tokio::main]
async fn main() -> ExitCode {
    let options = Options::parse();
    let done = match options.other {
        Some(Other::Serve(serve)) => http::serve::run(&serve).await,
        None => bench(&options).await,
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", with_causes(&error));
            ExitCode::FAILURE
        }
    }
}

async fn bench(options: &Options) -> Result<(), Error> {
    if let Some(page) = &options.page {
        // The page is opened before half an hour of work, and not after it.
        std::fs::File::open(page)
            .map_err(|error| format!("{}: {error}; a relative path counts from the folder bench", page.display()))?;
    }
    if !options.engines.is_empty() && !options.groups.contains(&Group::Scale) {
        return Err("--engine selects stores of the group scale: name the group too".into());
    }
    let pace = if options.quick { Pace::QUICK } else { Pace::FULL };
    let wanted = |group| options.groups.is_empty() || options.groups.contains(&group);
    let mut report = Report::new(pace);
    report.note(machine());
    if wanted(Group::Fingerprint) {
        fingerprint::run(pace, &mut report)?;
    }
    if wanted(Group::Store) {
        store::run(pace, &mut report).await?;
    } else if options.groups.contains(&Group::Redis) {
        store::run_redis(&servers::redis()?, pace, &mut report).await?;
    } else if options.groups.contains(&Group::Mariadb) {
        store::run_mariadb(&servers::mariadb()?, pace, &mut report).await?;
    }
    if wanted(Group::Links) {
        links::run(pace, &mut report).await?;
    }
    if wanted(Group::Jobs) {
        jobs::run(pace, &mut report).await?;
    }
    if wanted(Group::Messages) {
        messages::run(pace, &mut report).await?;
    }
    if wanted(Group::Http) {
        http::run(pace, &mut report).await?;
        memory::run(&mut report).await?;
    }
    if wanted(Group::Observed) {
        http::observed::run(pace, &mut report).await?;
    }
    if wanted(Group::Peers) {
        peers::run(pace, &mut report).await?;
    }
    if wanted(Group::Growth) {
        growth::run(pace, &mut report).await?;
    }
    if wanted(Group::Operators) {
        operators::run(pace, &mut report).await?;
    }
    if wanted(Group::AtRest) {
        at_rest::run(pace, &mut report).await?;
    }
    if options.groups.contains(&Group::Dynamodb) {
        store::run_dynamodb(pace, &mut report).await?;
    }
    if options.groups.contains(&Group::Scale) {
        scale::run(&options.engines, pace, &mut report).await?;
    }
    if options.groups.contains(&Group::Limits) {
        limits::run(pace, &mut report).await?;
    }
    report.finish(options.json.as_deref(), options.plots.as_deref(), options.page.as_deref())
}

/// The machine of this run.
fn machine() -> String {
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let processors = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = processors.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or_default();
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    format!("{cores} cores, {}, Linux {}", model.trim_start_matches([' ', '\t', ':']), kernel.trim())
}
