//! `sentinel` and `cluster`: what Redis acknowledged is there after a failover, or is counted. [`standby`] is the same for
//! Postgres, in a way of its own.
//!
//! In every round clients of three processes work on keys of their own and write down what they are told. In the midst of
//! it a primary is cut off from its replicas, goes on alone for a moment, and is then replaced. Afterwards every
//! acknowledged fact is compared with what the servers hold: a lease must still be its owner's, a settled record must be
//! replayed byte for byte, and nobody may have been told to run a key that had an owner.
//!
//! The cut is what makes the window of asynchronous replication wide enough to be seen. Pausing replicas alone does not:
//! what the primary has written to their connections waits there and is read later. So the replicas are paused *and* the
//! primary's connections to them are closed, as by a switch that fails; what is acknowledged from then on is on the primary
//! only. When it is paused or killed, the replicas go on, and one of them takes its place without having seen any of it.
//!
//! Before the connections are closed, the replicas stand still and count as connected. Whatever a primary acknowledges then
//! is acknowledged by nobody else, also where a verb is repeated and has nothing left to write: see [`alone`].
//!
//! One of the processes is as if suspended from before the cut until a paused primary goes on. Its connections lead to that
//! primary, which still believes in itself: whatever it acknowledges then is lost too, and second owners come from there.

mod alone;
mod judge;
mod key;
mod load;
mod request;
mod world;

pub(crate) mod cluster;
pub(crate) mod sentinel;
pub(crate) mod standby;

use std::sync::Arc;
use std::time::Duration;

use idem_redis::{RedisConfig, RedisStore};
use idem_servers::redis_command;
use tokio::task::block_in_place;
use tokio::time::sleep;

use crate::Error;
use judge::Judge;
use load::Load;
use world::{Phase, World};

/// How long a primary goes on without replicas before it fails.
const ALONE: Duration = Duration::from_millis(200);

/// How long clients work before anything happens. The facts of the last second of it are counted.
const BEFORE: Duration = Duration::from_millis(1500);
const LAST: Duration = Duration::from_secs(1);

/// How long the process that is to sleep takes to fall asleep: to end what it does.
const FALL_ASLEEP: Duration = Duration::from_millis(300);

/// How many facts there have to be in that second.
const ENOUGH_FACTS: u64 = 200;

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// How often a primary is replaced, with each number of replicas.
    #[arg(long, default_value_t = 20)]
    rounds: u64,
    /// Only with so many replicas awaited before anything is acknowledged; default first 0, then 1.
    #[arg(long)]
    min_replicas: Option<u32>,
    /// How many clients there are, each with one operation at a time, besides holders of leases.
    #[arg(long, default_value_t = 32)]
    clients: u64,
}

impl Options {
    fn numbers_of_replicas(&self) -> Vec<u32> {
        self.min_replicas.map_or_else(|| vec![0, 1], |only| vec![only])
    }
}

/// The processes, and one that asks when all is over.
struct Stores {
    config: RedisConfig,
    processes: [RedisStore; 3],
    judge: RedisStore,
    min_replicas: u32,
}

impl Stores {
    async fn open(url: &str, timeout: Duration, min_replicas: u32) -> Result<Self, Error> {
        let config = RedisConfig::new(url).timeout(timeout);
        let open = || RedisStore::open(config.clone().min_replicas(min_replicas));
        let processes = [open().await?, open().await?, open().await?];
        // It looks when everybody is there, so nobody has to be awaited.
        let judge = RedisStore::open(config.clone().timeout(Duration::from_secs(5))).await?;
        Ok(Self { config: config.min_replicas(min_replicas), processes, judge, min_replicas })
    }
}

/// The beginning of every round: work, and how many facts the last second brought.
async fn warm_up(world: &World) -> u64 {
    sleep(BEFORE.saturating_sub(LAST)).await;
    let before = world.facts();
    sleep(LAST).await;
    world.facts() - before
}

/// Lets the process fall asleep that sleeps through the failover.
async fn fall_asleep(world: &World) {
    world.enter(Phase::Sleep);
    sleep(FALL_ASLEEP).await;
}

/// Ends what the primary sends to its replicas. Those that are not paused come back at once.
fn close_links(primary: u16) -> Result<(), Error> {
    redis_command(primary, &["CLIENT", "KILL", "TYPE", "replica"])?;
    Ok(())
}

/// Ends a round: no more work, and a look at everything that was acknowledged in it.
async fn judge_round(
    judge: &mut Judge,
    world: &World,
    load: Load,
    stores: &Stores,
    round: judge::Round,
) -> Result<(), Error> {
    world.enter(Phase::Over);
    let keys = load.end().await?;
    judge.round(&stores.judge, world, keys, round).await
}

/// Servers are waited for in the way of tests, which block.
fn wait<T>(what: impl FnOnce() -> Result<T, idem_servers::Error>) -> Result<T, Error> {
    Ok(block_in_place(what)?)
}

fn start_load(stores: &Stores, options: &Options, round: u64) -> (Arc<World>, Load) {
    let world = Arc::new(World::new(round));
    let load = Load::start(&world, &stores.processes, options.clients);
    (world, load)
}
