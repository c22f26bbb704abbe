//! `sentinel` and `cluster`: what Redis acknowledged survives a failover, or its loss is counted. [`standby`] is the same for
//! Postgres, implemented separately.
//!
//! In every round, clients of three processes work on their own keys and record the answers. Meanwhile a primary is cut off
//! from its replicas, runs alone for a moment, and is then replaced. Afterwards every acknowledged fact is compared with what
//! the servers hold:
//!
//! - a lease must still belong to its owner;
//! - a settled record must be replayed byte for byte;
//! - no client may have been allowed to run a key that had an owner.
//!
//! The cut widens the window of asynchronous replication. Pausing replicas alone does not: the primary's writes wait in their
//! connections and are read later. So the replicas are paused *and* the primary closes its connections to them, as when a
//! switch fails. What it acknowledges from then on is on the primary only. When it is paused or killed, the replicas go on, and
//! one of them is promoted without having seen any of it.
//!
//! Before the connections are closed, the replicas stand still and count as connected. A primary acknowledges then what no
//! replica has, even if a repeated verb has nothing left to write: see [`alone`].
//!
//! One of the processes is as if suspended from before the cut until a paused primary resumes. It is connected to that primary,
//! which still considers itself primary. What it acknowledges then is lost too, and second owners come from there.

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

/// How long a primary runs without replicas before it fails.
const ALONE: Duration = Duration::from_millis(200);

/// How long clients work before the failover. The facts of the last second are counted.
const BEFORE: Duration = Duration::from_millis(1500);
const LAST: Duration = Duration::from_secs(1);

/// How long the sleeping process takes to finish its pending verbs.
const FALL_ASLEEP: Duration = Duration::from_millis(300);

/// The least number of facts in that second.
const ENOUGH_FACTS: u64 = 200;

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// How often a primary is replaced, for each number of replicas.
    #[arg(long, default_value_t = 20)]
    rounds: u64,
    /// Tests only with this number of replicas awaited before an acknowledgement; by default first 0, then 1.
    #[arg(long)]
    min_replicas: Option<u32>,
    /// Number of clients, each with one operation at a time, besides the holders of leases.
    #[arg(long, default_value_t = 32)]
    clients: u64,
}

impl Options {
    fn numbers_of_replicas(&self) -> Vec<u32> {
        self.min_replicas.map_or_else(|| vec![0, 1], |only| vec![only])
    }
}

/// The stores of the processes, and one that examines the records afterwards.
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
        // All servers are up when it is used, so it need not wait for replicas.
        let judge = RedisStore::open(config.clone().timeout(Duration::from_secs(5))).await?;
        Ok(Self { config: config.min_replicas(min_replicas), processes, judge, min_replicas })
    }
}

/// Begins a round: lets clients work and returns the number of facts of the last second.
async fn warm_up(world: &World) -> u64 {
    sleep(BEFORE.saturating_sub(LAST)).await;
    let before = world.facts();
    sleep(LAST).await;
    world.facts() - before
}

/// Puts the process to sleep that sleeps through the failover.
async fn fall_asleep(world: &World) {
    world.enter(Phase::Sleep);
    sleep(FALL_ASLEEP).await;
}

/// Closes the primary's connections to its replicas. Replicas that are not paused reconnect at once.
fn close_links(primary: u16) -> Result<(), Error> {
    redis_command(primary, &["CLIENT", "KILL", "TYPE", "replica"])?;
    Ok(())
}

/// Ends the work of a round and examines everything that was acknowledged in it.
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

/// Waits for servers with the blocking functions of the tests.
fn wait<T>(what: impl FnOnce() -> Result<T, idem_servers::Error>) -> Result<T, Error> {
    Ok(block_in_place(what)?)
}

fn start_load(stores: &Stores, options: &Options, round: u64) -> (Arc<World>, Load) {
    let world = Arc::new(World::new(round));
    let load = Load::start(&world, &stores.processes, options.clients);
    (world, load)
}
