//! `cluster`: slots move under load, and primaries are killed or paused and replaced.

use std::collections::BTreeMap;
use std::time::Duration;

use idem_servers::{RedisCluster, Reply, redis_command};
use serde_json::json;
use tokio::time::{Instant, sleep};

use super::alone::Alone;
use super::judge::{Judge, Round};
use super::request::{fresh_id, hot_slots, slot};
use super::world::Phase;
use super::{ALONE, Options, Stores, close_links, fall_asleep, judge_round, start_load, wait, warm_up};
use crate::Error;
use crate::random::Random;
use crate::report::{Passed, Report};

/// The default timeout of the store. Clients ask other nodes after parts of it.
const TIMEOUT: Duration = Duration::from_secs(1);

/// How many slots move per round.
const MOVES: usize = 16;

/// How long after a failover errors may still come. Clients learn of it within a second, and a verb that began by then may take
/// its whole timeout to fail.
const AFTERMATH: Duration = Duration::from_secs(1).saturating_add(TIMEOUT);

/// How long clients work after that without errors.
const CALM: Duration = Duration::from_millis(500);

/// How many times, and how far apart, the test checks whether the old primary follows the new one.
const REJOIN_LOOKS: u32 = 50;
const REJOIN_PAUSE: Duration = Duration::from_millis(100);

pub(crate) async fn run(options: &Options) -> Result<Passed, Error> {
    let mut passed = true;
    for min_replicas in options.numbers_of_replicas() {
        passed &= failovers(options, min_replicas).await?.0;
    }
    Ok(Passed(passed))
}

async fn failovers(options: &Options, min_replicas: u32) -> Result<Passed, Error> {
    let mut cluster = wait(RedisCluster::start)?;
    println!("{} ({}), min_replicas={min_replicas}, {} clients", cluster.version(), cluster.origin(), options.clients);
    expect_same_slots(&cluster)?;
    let stores = Stores::open(&cluster.url(), TIMEOUT, min_replicas).await?;
    let mut report = Report::new("cluster", cluster.version());
    report.note("min_replicas", min_replicas);
    let (mut judge, mut moves) = (Judge::default(), Moves::default());
    Judge::header();
    for number in 1..=options.rounds {
        failover(&mut cluster, options, &stores, &mut judge, number, &mut moves).await?;
    }
    report.fact("keys_moved_between_primaries", moves.keys);
    report.fact("redirections_while_slots_moved", json!(moves.redirections));
    report.expect(moves.keys > 0, "no slot with keys was moved");
    let asked = moves.redirections.get("ASK").copied().unwrap_or_default();
    report.expect(asked > 0, "no client met a slot that was moving");
    judge.finish(&stores.judge, &mut report, min_replicas).await?;
    Ok(report.finish())
}

/// The effects of moving slots.
#[derive(Debug, Default)]
struct Moves {
    /// Keys that were in the slots.
    keys: u64,
    /// How often servers redirected clients or told them to retry, by the server's error code.
    redirections: BTreeMap<&'static str, u64>,
}

async fn failover(
    cluster: &mut RedisCluster,
    options: &Options,
    stores: &Stores,
    judge: &mut Judge,
    number: u64,
    moves: &mut Moves,
) -> Result<(), Error> {
    let (world, load) = start_load(stores, options, number);
    move_slots(cluster, number, moves).await?;
    let facts_before = warm_up(&world).await;
    fall_asleep(&world).await;
    let id = fresh_id(number);
    let slot = slot(&id);
    let old = wait(|| cluster.owner_of_slot(slot))?;
    let replica = wait(|| cluster.replica_of(old))?;
    let alone = Alone::begin(stores, id).await?;
    let cut_off_at = Instant::now();
    wait(|| cluster.pause(replica))?;
    let told_alone = alone.go_on().await;
    close_links(old)?;
    sleep(ALONE).await;
    let is_killed = number % 2 == 1;
    wait(|| if is_killed { cluster.kill(old) } else { cluster.pause(old) })?;
    let failed_at = Instant::now();
    wait(|| cluster.resume(replica))?;
    wait(|| cluster.wait_until_served())?;
    let (took, served_at) = (failed_at.elapsed(), Instant::now());
    if wait(|| cluster.owner_of_slot(slot))? == old {
        return Err(format!("no failover happened in round {number}").into());
    }
    sleep(AFTERMATH + CALM).await;
    wait(|| if is_killed { cluster.start_again(old) } else { cluster.resume(old) })?;
    world.enter(Phase::Work);
    rejoin(cluster, old, slot).await?;
    wait(|| cluster.wait_until_ok())?;
    // Until the old primary is back, the new one has no replica to wait for.
    let complete_at = if stores.min_replicas == 0 { served_at } else { Instant::now() };
    sleep(AFTERMATH + CALM).await;
    let story = if is_killed { "killed" } else { "paused" };
    let errors_allowed = Some((cut_off_at, complete_at + AFTERMATH));
    let round = Round { story: story.into(), facts_before, took, errors_allowed, told_alone };
    judge_round(judge, &world, load, stores, round).await
}

/// Waits until the old primary follows the new one.
///
/// After slots have moved, a returning node sometimes stays a primary without slots, because its replicas are configured not to
/// migrate. The test then makes it follow, as an operator would.
async fn rejoin(cluster: &RedisCluster, old: u16, slot: u16) -> Result<(), Error> {
    for _ in 0..REJOIN_LOOKS {
        let role = redis_command(old, &["ROLE"])?;
        if role.items().first().and_then(Reply::text) == Some("slave") {
            return Ok(());
        }
        sleep(REJOIN_PAUSE).await;
    }
    let heir = wait(|| cluster.owner_of_slot(slot))?;
    if wait(|| cluster.primaries())?.iter().any(|primary| primary.port == old) {
        return Err(format!("{old} came back and kept slots").into());
    }
    println!("      {old} came back as a primary without slots, and is told to follow {heir}");
    let id = redis_command(heir, &["CLUSTER", "MYID"])?;
    redis_command(old, &["FLUSHALL"])?;
    redis_command(old, &["CLUSTER", "REPLICATE", id.text().unwrap_or_default()])?;
    Ok(())
}

/// Moves slots to other primaries, one after another.
async fn move_slots(cluster: &RedisCluster, round: u64, moves: &mut Moves) -> Result<(), Error> {
    // First let clients write keys into the slots.
    sleep(CALM).await;
    let before = redirections(cluster)?;
    let mut random = Random::new();
    for _ in 0..MOVES {
        let slot = some_slot(round)?;
        let from = wait(|| cluster.owner_of_slot(slot))?;
        let others = wait(|| cluster.primaries())?.into_iter().map(|primary| primary.port).filter(|port| *port != from);
        let others: Vec<u16> = others.collect();
        let to = others.get(random.below(others.len() as u64) as usize).ok_or("there is no other primary")?;
        let count = redis_command(from, &["CLUSTER", "COUNTKEYSINSLOT", &slot.to_string()])?;
        wait(|| cluster.migrate_slot(slot, from, *to))?;
        // Check the cluster before the next step, as an operator would. Two errors would leave the moved slots without a node:
        //
        // - A primary that has not heard of the last move may give the slot that it receives an epoch that is too low.
        // - A replica that has not heard of it before its promotion claims the slots that its primary had before.
        wait(|| cluster.wait_until_ok())?;
        moves.keys += count.integer().and_then(|count| u64::try_from(count).ok()).unwrap_or_default();
    }
    for ((word, count), before) in redirections(cluster)?.into_iter().zip(before.into_values()) {
        *moves.redirections.entry(word).or_default() += count - before;
    }
    Ok(())
}

/// How often all nodes have redirected clients since they started.
fn redirections(cluster: &RedisCluster) -> Result<BTreeMap<&'static str, u64>, Error> {
    let mut counts = BTreeMap::new();
    for port in cluster.ports() {
        let info = redis_command(port, &["INFO", "errorstats"])?;
        for word in ["ASK", "MOVED", "TRYAGAIN"] {
            let count = info.field(&format!("errorstat_{word}")).and_then(|count| count.strip_prefix("count="));
            *counts.entry(word).or_default() += count.map_or(Ok(0), str::parse::<u64>)?;
        }
    }
    Ok(counts)
}

/// A random slot among those with keys.
fn some_slot(round: u64) -> Result<u16, Error> {
    let slots: Vec<u16> = hot_slots(round).collect();
    let at = Random::new().below(slots.len() as u64) as usize;
    Ok(*slots.get(at).ok_or("there are no slots")?)
}

/// Checks that the servers compute the same slots as this test, which chooses keys by slot.
fn expect_same_slots(cluster: &RedisCluster) -> Result<(), Error> {
    let id = fresh_id(1);
    let port = cluster.ports().into_iter().next().ok_or("the cluster has no nodes")?;
    let theirs = redis_command(port, &["CLUSTER", "KEYSLOT", &format!("idem:{{{id}}}")])?.integer();
    if theirs != Some(i64::from(slot(&id))) {
        return Err(format!("the slot of {id} is {theirs:?} and not {}", slot(&id)).into());
    }
    Ok(())
}
