//! `front`: payments over HTTP on Postgres with Redis as a cache. It measures the load that Redis takes from Postgres, and
//! checks the answers while Redis fails in every way, with and without restarts of Postgres.

mod client;
mod latency;
mod ledger;
mod saboteur;
mod service;
mod verdict;

use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use idem_servers::Redis;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use crate::Error;
use crate::database::Database;
use crate::random::Random;
use crate::records::each;
use crate::report::{Passed, Report};
use client::Client;
use ledger::Ledger;
use saboteur::{Sabotage, Saboteur};
use service::Service;

pub(crate) use latency::{Options as LatencyOptions, run as latency};

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// How long clients send requests in each part, in seconds; the calm part takes a third of it.
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Number of clients, each with one request at a time.
    #[arg(long, default_value_t = 64)]
    clients: u64,
    /// Repeats choose among this many of the newest keys; the run must make at least as many.
    #[arg(long, default_value = "5000")]
    keys: NonZeroU64,
    /// How often Postgres is restarted in the last part.
    #[arg(long, default_value_t = 10)]
    restarts: u64,
    /// The least number of Redis faults in each part but the first.
    #[arg(long, default_value_t = 30)]
    faults: u64,
}

/// A part of the check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    /// Nothing fails: how much load does Redis take from Postgres?
    Calm,
    /// Redis is killed, paused, flushed, filled with garbage and restarted.
    RedisFails,
    /// Redis fails, and Postgres is restarted meanwhile.
    BothFail,
}

/// The state that all clients share.
#[derive(Debug)]
struct World {
    services: [Service; 2],
    ledger: Ledger,
    over: AtomicBool,
    started: Instant,
}

pub(crate) async fn run(options: &Options) -> Result<Passed, Error> {
    let mut passed = true;
    for part in [Part::Calm, Part::RedisFails, Part::BothFail] {
        passed &= play(options, part).await?.0;
    }
    Ok(Passed(passed))
}

async fn play(options: &Options, part: Part) -> Result<Passed, Error> {
    let mut database = Database::start(&[]).await?;
    let redis = Redis::start()?;
    let seconds = if part == Part::Calm { options.seconds.div_ceil(3) } else { options.seconds };
    println!("{part:?}: two processes, {} clients, {seconds} s, {} in front", options.clients, redis.version());
    let service = || Service::start(&database.url(), &redis.url());
    let services = [service()?, service()?];
    let world =
        Arc::new(World { services, ledger: Ledger::default(), over: AtomicBool::new(false), started: Instant::now() });
    // The services test their caches when they start.
    let before = world.cache().await?;
    let mut clients = JoinSet::new();
    for _ in 0..options.clients {
        let client =
            Client::new(Arc::clone(&world), Random::new(), options.clients, options.keys.get(), part == Part::Calm);
        clients.spawn(client.work());
    }
    let sabotage = match part {
        Part::Calm => {
            sleep(Duration::from_secs(seconds)).await;
            Sabotage::default()
        }
        Part::RedisFails | Part::BothFail => {
            let restarts = if part == Part::BothFail { options.restarts } else { 0 };
            let saboteur = Saboteur::new(redis, world.started, Duration::from_secs(seconds), restarts);
            let (sabotage, restarted) = saboteur.work(database).await?;
            database = restarted;
            sabotage
        }
    };
    world.over.store(true, Ordering::Relaxed);
    while let Some(ended) = clients.join_next().await {
        ended??;
    }
    let worked = world.started.elapsed();
    let after = world.cache().await?;
    let keys = world.ledger.keys();
    each(0..keys, options.clients as usize, |key| client::ask_again(&world, key)).await?;
    let mut report = Report::new("front", database.version());
    report.note("part", format!("{part:?}"));
    report.fact("operations_per_second", (world.ledger.requests() as f64 / worked.as_secs_f64()).round());
    if part == Part::Calm {
        verdict::spared(&mut report, &before, &after);
    }
    verdict::judge(&mut report, &mut database, &world, options, part, &sabotage).await?;
    Ok(report.finish())
}

impl World {
    /// The sum of the cache statistics of both processes.
    async fn cache(&self) -> Result<service::Cache, Error> {
        let [one, other] = &self.services;
        Ok(one.cache().await? + other.cache().await?)
    }
}
