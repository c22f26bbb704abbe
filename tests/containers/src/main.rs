//! `cargo xtask test-containers`: runs the suites against servers and the example in containers on a private network, and
//! removes them afterwards.

mod conformance;
mod container;
mod docker;
mod example;
mod faults;
mod http;
mod images;
mod leftovers;
mod servers;

use std::process::ExitCode;
use std::time::Instant;

use clap::{Parser, ValueEnum};
use tokio::signal::unix::{SignalKind, signal};

use container::Network;
use example::Store;
use images::Images;
use servers::Servers;

/// An error, for people.
pub(crate) type Error = Box<dyn std::error::Error + Send + Sync>;

/// Starts Postgres, PgBouncer, Redis, a group with Sentinels, a Redis Cluster and the example as containers, and runs the
/// suites against them.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask test-containers")]
struct Options {
    /// The suites to run; default all of them.
    #[arg(long, value_enum)]
    only: Vec<Suite>,
    /// The stores of the example for the HTTP cases; default all of them.
    #[arg(long, value_enum)]
    store: Vec<Store>,
    /// Uses servers of this release of Debian, such as `trixie`, from images that `cargo xtask images --release` makes. `both` runs
    /// the suites on the default servers, and then on those of trixie.
    #[arg(long)]
    release: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Suite {
    /// The conformance suites of the stores, from this machine.
    Conformance,
    /// The cases over sockets, against the example in containers.
    Http,
    /// Payments while Postgres and Redis are paused, killed, restarted and cut off.
    Faults,
}

fn main() -> ExitCode {
    let options = Options::parse();
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return complain(&error.into()),
    };
    let outcome = runtime.block_on(run_until_stopped(&options));
    // Clients that still wait for a server that has been removed are left alone.
    runtime.shutdown_background();
    outcome.map_or_else(|error| complain(&error), |()| ExitCode::SUCCESS)
}

fn complain(error: &Error) -> ExitCode {
    eprintln!("error: {error}");
    ExitCode::FAILURE
}

/// Runs the suites, and removes everything even if a signal stops the run.
async fn run_until_stopped(options: &Options) -> Result<(), Error> {
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    leftovers::remove_of_the_dead().await?;
    let outcome = tokio::select! {
        outcome = run_releases(options) => outcome,
        _ = interrupt.recv() => Err("interrupted".into()),
        _ = terminate.recv() => Err("terminated".into()),
    };
    // This also removes what was just being started.
    let removed = leftovers::remove_own().await;
    println!("all containers and their network are removed");
    outcome.and(removed)
}

/// The word for the default servers, and those of [`NEWER`].
const BOTH: &str = "both";
const NEWER: &str = "trixie";

async fn run_releases(options: &Options) -> Result<(), Error> {
    let Some(BOTH) = options.release.as_deref() else { return run(options, options.release.as_deref()).await };
    // So that a missing image ends the run before it begins.
    Images::choose(Some(NEWER)).await?;
    let before = run(options, None).await;
    let removed = leftovers::remove_own().await;
    println!("servers of {NEWER}:");
    match (before.and(removed), run(options, Some(NEWER)).await) {
        (Err(before), Err(newer)) => Err(format!("default servers: {before}; {NEWER}: {newer}").into()),
        (before, newer) => before.and(newer),
    }
}

async fn run(options: &Options, release: Option<&str>) -> Result<(), Error> {
    let is_wanted = |suite| options.only.is_empty() || options.only.contains(&suite);
    let images = Images::choose(release).await?;
    let began = Instant::now();
    let network = Network::new();
    let servers = Servers::start(&network, &images).await?;
    println!("servers: started in {} s", began.elapsed().as_secs());
    let mut failed = Vec::new();
    if is_wanted(Suite::Conformance) {
        note(&mut failed, "conformance", conformance::run(&servers).await);
    }
    if is_wanted(Suite::Http) {
        note(&mut failed, "http", http::run(&network, &images, &servers, &options.store).await);
    }
    if is_wanted(Suite::Faults) {
        note(&mut failed, "faults", faults::run(&network, &images, &servers).await);
    }
    if failed.is_empty() { Ok(()) } else { Err(format!("failed: {}", failed.join(", ")).into()) }
}

/// A suite that fails does not keep the others from running.
fn note(failed: &mut Vec<&'static str>, suite: &'static str, outcome: Result<(), Error>) {
    match outcome {
        Ok(()) => println!("{suite}: passed"),
        Err(error) => {
            println!("{suite}: FAILED: {error}");
            failed.push(suite);
        }
    }
}
