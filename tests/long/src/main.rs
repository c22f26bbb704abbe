//! Checks of stores that take minutes: `cargo xtask long help`.
//!
//! Each check starts its own servers, those of Postgres with the settings of a new cluster. It measures, prints the results and
//! one line of JSON, and fails if a required condition does not hold.

mod churn;
mod database;
mod failover;
mod front;
mod hammer;
mod hot;
mod polite;
mod random;
mod records;
mod report;
mod scheduled;
mod waiters;

use std::process::ExitCode;

use clap::Parser;

use crate::report::Passed;

/// An error that ends a check before its verdict.
type Error = Box<dyn std::error::Error + Send + Sync>;

#[derive(Debug, Parser)]
#[command(bin_name = "cargo xtask long")]
enum Check {
    /// Runs operations of many clients in two processes, while connections are cut and processes die.
    Hammer(hammer::Options),
    /// Measures how many settlements are heap-only updates, and checks that a replay writes nothing.
    Hot(hot::Options),
    /// Measures the size of the table while records come and go, with one purge, with two, and in partitions.
    Churn(churn::Options),
    /// Checks what Redis acknowledged after Sentinels replace a paused primary, with and without awaiting replicas.
    Sentinel(failover::Options),
    /// Checks the same in a Redis Cluster, whose slots move and whose primaries are killed or paused in turn.
    Cluster(failover::Options),
    /// Checks what Postgres acknowledged after its standby takes over, synchronous and asynchronous.
    Standby(failover::standby::Options),
    /// Checks that pg_cron removes expired records by the documented schedule (needs Debian's postgresql-15-cron).
    Scheduled(scheduled::Options),
    /// Runs payments over HTTP on Postgres with a failing Redis as its cache, with and without restarts of Postgres.
    Front(front::Options),
    /// Measures how long curl and Python's urllib3 take for a payment whose first connection is lost, by their own retry rules.
    Polite(polite::Options),
    /// Counts the store's calls while thousands of duplicates wait for one key, and measures how soon all have its answer.
    Waiters(waiters::Options),
    /// Measures first requests, replays and duplicates on Postgres, on Redis, and on Postgres with Redis as its cache.
    Latency(front::LatencyOptions),
}

#[tokio::main]
async fn main() -> ExitCode {
    let passed = match Check::parse() {
        Check::Hammer(options) => hammer::run(&options).await,
        Check::Hot(options) => hot::run(&options).await,
        Check::Churn(options) => churn::run(&options).await,
        Check::Sentinel(options) => failover::sentinel::run(&options).await,
        Check::Cluster(options) => failover::cluster::run(&options).await,
        Check::Standby(options) => failover::standby::run(&options).await,
        Check::Scheduled(options) => scheduled::run(&options).await,
        Check::Front(options) => front::run(&options).await,
        Check::Polite(options) => polite::run(&options).await,
        Check::Waiters(options) => waiters::run(&options).await,
        Check::Latency(options) => front::latency(&options).await,
    };
    match passed {
        Ok(Passed(true)) => ExitCode::SUCCESS,
        Ok(Passed(false)) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
