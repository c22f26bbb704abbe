//! `front`: payments on Postgres with Redis in front, over HTTP: what Redis spares, and what happens when it does everything
//! wrong, without and with restarts of Postgres.

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
    /// How long clients send requests in each part; the calm one takes a third of it.
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// How many clients there are, each with one request at a time.
    #[arg(long, default_value_t = 64)]
    clients: u64,
    /// From how many of the newest keys repeats choose one; so many have to be made at least.
    #[arg(long, default_value = "5000")]
    keys: NonZeroU64,
    /// How often Postgres is restarted in the last part.
    #[arg(long, default_value_t = 10)]
    restarts: u64,
    /// How many faults of Redis there have to be in each part but the first.
    #[arg(long, default_value_t = 30)]
    faults: u64,
}

/// A part of the check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    /// Nothing fails: what does Redis spare?
    Calm,
    /// Redis is killed, paused, flushed, filled with garbage and restarted.
    RedisFails,
    /// And Postgres is restarted meanwhile.
    BothFail,
}

/// What all clients share.
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
    // The services try themselves out when they start.
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
    /// What both processes say about their caches, added up.
    async fn cache(&self) -> Result<service::Cache, Error> {
        let [one, other] = &self.services;
        Ok(one.cache().await? + other.cache().await?)
    }
}
