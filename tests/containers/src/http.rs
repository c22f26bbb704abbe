//! Runs the HTTP cases over sockets against the example in containers, on every framework, store and contract.

use std::time::{Duration, Instant};

use clap::ValueEnum as _;
use idem_http_suite::{CASES, Contract, Report, differences, run as run_cases};

use crate::Error;
use crate::container::Network;
use crate::example::{Example, FRAMEWORKS, Setup, Store};
use crate::images::Images;
use crate::servers::Servers;

/// Longer timeouts, because a busy machine takes seconds for what usually takes milliseconds.
const PATIENT: [&str; 6] = ["--store-timeout-ms", "25000", "--cache-timeout-ms", "10000", "--backoff-ms", "6000"];

/// The results for one store, contract and framework.
struct Cell {
    place: String,
    report: Report,
    took: Duration,
}

/// Runs all cases in every cell, prints a line for each, and compares the answers of the frameworks.
pub(crate) async fn run(network: &Network, images: &Images, servers: &Servers, chosen: &[Store]) -> Result<(), Error> {
    let stores = if chosen.is_empty() { Store::value_variants() } else { chosen };
    println!("\n{} cases over sockets against the example in containers\n", CASES.len());
    println!("| store     | contract      | framework | passed |   time |");
    println!("|-----------|---------------|-----------|--------|--------|");
    let mut failures = Vec::new();
    for &store in stores {
        for &contract in store.contracts() {
            let mut cells = Vec::new();
            for framework in FRAMEWORKS {
                let cell = fill(network, images, servers, store, contract, framework).await?;
                let (score, seconds) = (cell.report.score(), cell.took.as_secs_f32());
                println!("| {store:9} | {:13} | {framework:9} | {score:>6} | {seconds:4.1} s |", contract.name());
                cells.push(cell);
            }
            failures.extend(cells.iter().flat_map(failures_of));
            if let [axum, actix] = cells.as_slice() {
                let differing = differences(&axum.report, &actix.report);
                failures.extend(differing.into_iter().map(|it| format!("{} differ: {it}", axum.place)));
            }
        }
    }
    println!();
    if failures.is_empty() { Ok(()) } else { Err(failures.join("\n").into()) }
}

async fn fill(
    network: &Network,
    images: &Images,
    servers: &Servers,
    store: Store,
    contract: Contract,
    framework: &str,
) -> Result<Cell, Error> {
    let records = format!("{store}_{}_{framework}", contract.name().replace('-', "_"));
    let setup = Setup { store, contract, framework, records: &records, more: &PATIENT };
    let example = Example::start(network, images, servers, setup).await?;
    let (address, began) = (example.address, Instant::now());
    let report = tokio::task::spawn_blocking(move || run_cases(address, contract)).await?;
    let place = format!("{framework} on {store} under {}", contract.name());
    Ok(Cell { place, report, took: began.elapsed() })
}

fn failures_of(cell: &Cell) -> impl Iterator<Item = String> {
    cell.report.failed.iter().map(|(case, reason)| format!("{}: {case}: {reason}", cell.place))
}
