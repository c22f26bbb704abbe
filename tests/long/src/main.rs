//! Checks of stores that take minutes: `cargo xtask long help`.
//!
//! Each starts servers of its own, those of Postgres with the settings of a new cluster, measures, prints what it measured and one line of
//! JSON, and fails when what it has to show does not hold.

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
mod waiters;

use std::process::ExitCode;

use clap::Parser;

use crate::report::Passed;

/// Whatever ends a check before its verdict.
type Error = Box<dyn std::error::Error + Send + Sync>;

#[derive(Debug, Parser)]
#[command(bin_name = "cargo xtask long")]
enum Check {
    /// Operations of many clients in two processes, while connections are cut and processes die.
    Hammer(hammer::Options),
    /// How many settlements are heap-only updates, and that a replay writes nothing.
    Hot(hot::Options),
    /// The size of the table while records come and go, with one purge, with two, and in partitions.
    Churn(churn::Options),
    /// What Redis has acknowledged after Sentinels replaced a paused primary, with and without awaiting replicas.
    Sentinel(failover::Options),
    /// The same in a Redis Cluster, whose slots move and whose primaries are killed or paused in turn.
    Cluster(failover::Options),
    /// What Postgres has acknowledged after its standby took over, synchronous and asynchronous.
    Standby(failover::standby::Options),
    /// Payments over HTTP on Postgres with Redis in front, which does everything wrong, without and with restarts of Postgres.
    Front(front::Options),
    /// How long curl and Python's urllib3 take for a payment whose first connection is lost, by their own rules for repeats.
    Polite(polite::Options),
    /// How often the store is asked while thousands of duplicates wait for one key, and how soon all have its answer.
    Waiters(waiters::Options),
    /// How long first requests, replays and duplicates take with Redis in front of Postgres, beside either alone.
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
