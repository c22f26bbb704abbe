//! `hammer`: every contract keeps its promise while connections are cut and processes die.

mod client;
mod ledger;
mod process;
mod saboteur;
mod verdict;

use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use idem_core::engine::Contract;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use crate::Error;
use crate::database::Database;
use crate::random::Random;
use crate::records::each;
use crate::report::{Passed, Report};
use client::Client;
use ledger::Ledger;
use process::Processes;
use saboteur::Saboteur;

/// So short that leases of dead processes expire and are taken over several times in a run.
const LEASE: Duration = Duration::from_secs(3);

/// How much longer than a lease a key may have no answer. It may meet more than one death, and clients pause.
const MARGIN: Duration = Duration::from_secs(12);

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// How long clients begin operations for each contract, in seconds.
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Number of clients, each with one operation at a time.
    #[arg(long, default_value_t = 64)]
    clients: u64,
    /// Repeats choose among this many of the newest keys.
    #[arg(long, default_value = "1000")]
    keys: NonZeroU64,
    /// The contract to test.
    #[arg(long, value_enum, default_value = "all")]
    contract: Which,
    /// Seconds between the deaths of two processes; 0 for none.
    #[arg(long, default_value_t = 7)]
    deaths: u64,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Which {
    Transactional,
    AtMostOnce,
    AtLeastOnce,
    All,
}

/// The state that all clients share.
#[derive(Debug)]
struct World {
    contract: Contract,
    /// Unique to this run, so that no answer equals one of another run.
    name: String,
    processes: Processes,
    ledger: Ledger,
    over: AtomicBool,
}

pub(crate) async fn run(options: &Options) -> Result<Passed, Error> {
    let contracts = match options.contract {
        Which::Transactional => vec![Contract::Transactional],
        Which::AtMostOnce => vec![Contract::AtMostOnce],
        Which::AtLeastOnce => vec![Contract::AtLeastOnce],
        Which::All => vec![Contract::Transactional, Contract::AtMostOnce, Contract::AtLeastOnce],
    };
    let mut passed = true;
    for contract in contracts {
        passed &= hammer(options, contract).await?.0;
    }
    Ok(Passed(passed))
}

async fn hammer(options: &Options, contract: Contract) -> Result<Passed, Error> {
    let mut database = Database::start(&[]).await?;
    println!("{contract:?}: {} clients, {} s, a lease of {LEASE:?}", options.clients, options.seconds);
    database.run("CREATE TABLE business (key TEXT NOT NULL, attempt BIGINT NOT NULL, nonce TEXT NOT NULL)").await?;
    let world = Arc::new(World {
        contract,
        name: format!("{contract:?}-{}", uuid::Uuid::new_v4().simple()),
        processes: Processes::start(&database, contract).await?,
        ledger: Ledger::default(),
        over: AtomicBool::new(false),
    });
    let saboteur = Saboteur::start(&database, &world, Duration::from_secs(options.deaths)).await?;
    let started = Instant::now();
    let mut clients = JoinSet::new();
    for _ in 0..options.clients {
        let client =
            Client { world: Arc::clone(&world), random: Random::new(), newest: options.clients, recent: options.keys };
        clients.spawn(client.work());
    }
    sleep(Duration::from_secs(options.seconds)).await;
    world.over.store(true, Ordering::Relaxed);
    while let Some(ended) = clients.join_next().await {
        ended?;
    }
    let worked = started.elapsed();
    // Clients that still wait for an answer wait under sabotage.
    let sabotage = saboteur.stop().await?;
    let keys = world.ledger.keys();
    each(0..keys, options.clients as usize, |key| client::ask_again(&world, key)).await?;
    let mut report = Report::new("hammer", database.version());
    verdict::judge(&mut report, &mut database, &world, options, worked, &sabotage).await?;
    Ok(report.finish())
}
