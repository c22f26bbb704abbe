//! `standby`: the primary of a Postgres pair fails, and its standby takes its place.
//!
//! In every round clients of two processes run operations under AtMostOnce and under Transactional at one address, and note what
//! they are told. In the midst of it the standby is cut off, the primary goes on alone for a moment, and then it dies, stands
//! still, or cannot be reached. Whoever fails over ends it for good before the standby is promoted and the address leads
//! there; afterwards a new standby is made. Then everything acknowledged is looked for.
//!
//! The cut makes the window of asynchronous replication wide enough to be seen. Where the standby is awaited, nothing may be
//! acknowledged in it; in every other round sessions that wait for the standby are terminated there, which in Postgres leaves
//! their transactions committed and visible: whoever repeats a verb may not take that for an acknowledgement.
//!
//! What is lost has to be the end of what was acknowledged, and no more: the primary is asked all the time how far its log is,
//! and its heir at which place its own begins.

mod load;
mod operation;
mod verdict;
mod wal;

use std::sync::Arc;
use std::time::Duration;

use idem_postgres::{PostgresConfig, PostgresStore};
use idem_proxy::{Partition, Proxy};
use idem_servers::PostgresPair;
use sqlx::PgConnection;
use tokio::time::{Instant, sleep};

use self::load::Load;
use self::verdict::{Round, Trial};
use self::wal::{Cut, Samples, connect, number};
use super::world::{Phase, World};
use super::{wait, warm_up};
use crate::Error;
use crate::report::{Passed, Report};

/// How long the primary goes on without its standby: enough for sessions to be told to end, and to be asked again.
const ALONE: Duration = Duration::from_millis(400);

/// How often sessions that wait are terminated in that time.
const TERMINATIONS: u32 = 4;

/// The planner must not try first what only those are to meet who wait.
const TERMINATE: &str = "SELECT count(*) FROM (SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep' OFFSET 0) AS waiting \
    WHERE pg_terminate_backend(pid)";

/// How long a primary stands still, or cannot be reached, before whoever fails over gives it up.
const GIVEN_UP_AFTER: Duration = Duration::from_millis(500);

/// How long clients work on the new primary before it gets a standby, and after.
const AFTER: Duration = Duration::from_millis(500);

/// How often is looked whether a standby follows.
const LOOKS: u32 = 300;
const LOOK_AGAIN: Duration = Duration::from_millis(100);

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// How often a primary is replaced, in each of the two.
    #[arg(long, default_value_t = 10)]
    failovers: u64,
    /// Only with a standby that is awaited before anything is acknowledged.
    #[arg(long, conflicts_with = "asynchronous")]
    synchronous: bool,
    /// Only with a standby that nobody waits for.
    #[arg(long)]
    asynchronous: bool,
    /// The servers' `synchronous_commit`. With `local` or `off` the standby is not awaited, and the check of a synchronous one
    /// has to fail.
    #[arg(long, default_value = "on")]
    commit: String,
    /// How many clients there are, each with one operation at a time.
    #[arg(long, default_value_t = 32)]
    clients: u64,
}

pub(crate) async fn run(options: &Options) -> Result<Passed, Error> {
    let mut passed = true;
    for is_synchronous in [true, false] {
        let is_left_out = if is_synchronous { options.asynchronous } else { options.synchronous };
        if !is_left_out {
            passed &= failovers(options, is_synchronous).await?.0;
        }
    }
    Ok(Passed(passed))
}

async fn failovers(options: &Options, is_synchronous: bool) -> Result<Passed, Error> {
    let commit = format!("synchronous_commit={}", options.commit);
    let mut settings = vec![commit.as_str()];
    if is_synchronous {
        settings.push(PostgresPair::SYNCHRONOUS);
    }
    let mut pair = wait(|| PostgresPair::start_with(&settings))?;
    println!("{} ({}), {} clients, {}", pair.version(), pair.origin(), options.clients, settings.join(", "));
    until_followed(pair.primary_port(), is_synchronous).await?;
    let address = Proxy::<Partition>::to_port(pair.primary_port()).await?;
    let open = || PostgresStore::open(PostgresConfig::new(url(address.port())));
    let processes = [open().await?, open().await?];
    println!("{}", processes[0].self_test().await?);
    sqlx::raw_sql(load::TABLE).execute(&mut connect(pair.primary_port()).await?).await?;
    let mut trial = Trial::new(open().await?, is_synchronous);
    let mut report = Report::new("standby", pair.version());
    report.note("synchronous", is_synchronous);
    report.note("synchronous_commit", options.commit.as_str());
    Trial::header();
    for number in 1..=options.failovers {
        let mut failover = Failover { pair: &mut pair, address: &address, number, is_synchronous };
        failover.run(&processes, options.clients, &mut trial).await?;
    }
    trial.finish(&mut report, options.failovers, &mut connect(pair.primary_port()).await?).await?;
    Ok(report.finish())
}

/// What happens to the primary.
#[derive(Debug, Clone, Copy)]
enum Failure {
    Killed,
    StoodStill,
    CutOff,
}

struct Failover<'a> {
    pair: &'a mut PostgresPair,
    /// Where clients find the primary, whichever server that is.
    address: &'a Proxy<Partition>,
    number: u64,
    is_synchronous: bool,
}

impl Failover<'_> {
    async fn run(&mut self, processes: &[PostgresStore; 2], clients: u64, trial: &mut Trial) -> Result<(), Error> {
        let world = Arc::new(World::new(self.number));
        let load = Load::start(&world, processes, clients);
        let facts_before = warm_up(&world).await;
        let samples = Samples::take(self.pair.primary_port()).await?;
        let mut beside = connect(self.pair.primary_port()).await?;
        wait(|| self.pair.cut_off_standby())?;
        let terminated = self.alone(&mut beside).await?;
        let failure = [Failure::Killed, Failure::StoodStill, Failure::CutOff][self.number as usize % 3];
        let failed_at = self.fail(failure).await?;
        let samples = samples.end();
        let promoting = Instant::now();
        wait(|| self.pair.promote())?;
        self.address.fail_over(self.pair.primary_port());
        let took = promoting.elapsed();
        sleep(AFTER).await;
        wait(|| self.pair.rebuild())?;
        until_followed(self.pair.primary_port(), self.is_synchronous).await?;
        sleep(AFTER).await;
        world.enter(Phase::Over);
        let operations = load.end().await?;
        let mut beside = connect(self.pair.primary_port()).await?;
        let cut = Cut::new(&samples, wal::fork(&mut beside).await?, failed_at);
        let story = match failure {
            Failure::Killed => "killed",
            Failure::StoodStill => "stood still",
            Failure::CutOff => "cut off",
        };
        let round = Round { number: self.number, story, facts_before, took, terminated, cut };
        trial.round(&world, operations, round, &mut beside).await
    }

    /// The time in which nothing is replicated: how many sessions were terminated that waited for it.
    async fn alone(&self, beside: &mut PgConnection) -> Result<i64, Error> {
        let mut terminated = 0;
        for _ in 0..TERMINATIONS {
            sleep(ALONE / TERMINATIONS).await;
            if self.is_synchronous && self.number.is_multiple_of(2) {
                terminated += number(beside, TERMINATE).await?;
            }
        }
        Ok(terminated)
    }

    /// Ends the primary, for good, and says when it began to fail.
    async fn fail(&mut self, failure: Failure) -> Result<Instant, Error> {
        let failed_at = Instant::now();
        match failure {
            Failure::Killed => {}
            Failure::StoodStill => {
                wait(|| self.pair.freeze_primary())?;
                sleep(GIVEN_UP_AFTER).await;
            }
            Failure::CutOff => {
                self.address.cut();
                sleep(GIVEN_UP_AFTER).await;
            }
        }
        // A primary that might come back would take writes that nobody else has.
        wait(|| self.pair.kill_primary())?;
        Ok(failed_at)
    }
}

/// How a server at a port of this machine is reached.
fn url(port: u16) -> String {
    format!("postgres://postgres@127.0.0.1:{port}/postgres")
}

/// Waits until the primary sends its log to a standby, and awaits it where it should.
async fn until_followed(primary: u16, is_awaited: bool) -> Result<(), Error> {
    let states = if is_awaited { "sync_state = 'sync'" } else { "true" };
    let sql = format!("SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming' AND {states}");
    let mut beside = connect(primary).await?;
    for _ in 0..LOOKS {
        if number(&mut beside, &sql).await? > 0 {
            return Ok(());
        }
        sleep(LOOK_AGAIN).await;
    }
    Err("the standby does not follow its primary".into())
}
