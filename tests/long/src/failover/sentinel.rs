//! `sentinel`: Sentinels replace a paused primary, which resumes and still considers itself primary.

use std::time::Duration;

use idem_servers::RedisSentinel;
use tokio::time::{Instant, sleep};

use super::alone::Alone;
use super::judge::{Judge, Round};
use super::request::fresh_id;
use super::world::Phase;
use super::{ALONE, Options, Stores, close_links, fall_asleep, judge_round, start_load, wait, warm_up};
use crate::Error;
use crate::report::{Passed, Report};

/// Far above a healthy server's latency, and short enough for many verbs during a failover.
const TIMEOUT: Duration = Duration::from_millis(300);

/// How long clients work on the new primary before the old one resumes, and after all servers are back.
const AFTER: Duration = Duration::from_millis(500);

pub(crate) async fn run(options: &Options) -> Result<Passed, Error> {
    let mut passed = true;
    for min_replicas in options.numbers_of_replicas() {
        passed &= failovers(options, min_replicas).await?.0;
    }
    Ok(Passed(passed))
}

async fn failovers(options: &Options, min_replicas: u32) -> Result<Passed, Error> {
    let mut group = wait(RedisSentinel::start)?;
    println!("{} ({}), min_replicas={min_replicas}, {} clients", group.version(), group.origin(), options.clients);
    let stores = Stores::open(&group.url(), TIMEOUT, min_replicas).await?;
    let mut report = Report::new("sentinel", group.version());
    report.note("min_replicas", min_replicas);
    let mut judge = Judge::default();
    Judge::header();
    for number in 1..=options.rounds {
        failover(&mut group, options, &stores, &mut judge, number).await?;
    }
    judge.finish(&stores.judge, &mut report, min_replicas).await?;
    Ok(report.finish())
}

async fn failover(
    group: &mut RedisSentinel,
    options: &Options,
    stores: &Stores,
    judge: &mut Judge,
    number: u64,
) -> Result<(), Error> {
    let (world, load) = start_load(stores, options, number);
    let facts_before = warm_up(&world).await;
    fall_asleep(&world).await;
    let old = wait(|| group.primary_port())?;
    // In every other round only one replica falls behind: Sentinel must prefer the other one.
    let cut_off = wait(|| group.replica_ports())?.into_iter().take(if number % 2 == 1 { 2 } else { 1 });
    let cut_off: Vec<u16> = cut_off.collect();
    let alone = Alone::begin(stores, fresh_id(number)).await?;
    for replica in &cut_off {
        wait(|| group.pause(*replica))?;
    }
    let told_alone = if cut_off.len() == 2 { alone.go_on().await } else { 0 };
    close_links(old)?;
    sleep(ALONE).await;
    wait(|| group.pause(old))?;
    let failed_at = Instant::now();
    for replica in &cut_off {
        wait(|| group.resume(*replica))?;
    }
    let new = wait(|| group.wait_for_other_primary_than(old))?;
    let took = failed_at.elapsed();
    if new == old {
        return Err(format!("no failover happened in round {number}").into());
    }
    sleep(AFTER).await;
    wait(|| group.resume(old))?;
    world.enter(Phase::Work);
    wait(|| group.wait_until_whole())?;
    sleep(AFTER).await;
    let cut_off = if cut_off.len() == 2 { "all behind" } else { "one behind" };
    let round = Round { story: format!("paused, {cut_off}"), facts_before, took, errors_allowed: None, told_alone };
    judge_round(judge, &world, load, stores, round).await
}
