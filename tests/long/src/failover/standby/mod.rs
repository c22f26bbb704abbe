//! `standby`: the primary of a Postgres pair fails, and its standby takes its place.
//!
//! In every round, clients of two processes run operations under AtMostOnce and Transactional at one address, and record the
//! answers. Meanwhile the standby is cut off. The primary runs alone for a moment; then it dies, stands still, or becomes
//! unreachable. The failover kills it permanently before it promotes the standby and redirects the address; afterwards a new
//! standby is made. Then everything acknowledged is looked up.
//!
//! The cut widens the window of asynchronous replication. With a synchronous standby, nothing may be acknowledged in it. In
//! every other round, sessions that wait for the standby are terminated in this window. In Postgres their transactions then
//! stay committed and visible, but a client that repeats a verb must not get an acknowledgement.
//!
//! Only the end of what was acknowledged may be lost. The test polls the WAL position of the primary all the time, and later
//! asks the new primary at which position its timeline begins.

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

/// How long the primary runs without its standby: enough to terminate sessions and repeat their verbs.
const ALONE: Duration = Duration::from_millis(400);

/// How often waiting sessions are terminated in that time.
const TERMINATIONS: u32 = 4;

/// OFFSET 0 keeps the planner from terminating sessions that do not wait.
const TERMINATE: &str = "SELECT count(*) FROM (SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep' OFFSET 0) AS waiting \
    WHERE pg_terminate_backend(pid)";

/// How long a primary stands still, or is unreachable, before the failover gives it up.
const GIVEN_UP_AFTER: Duration = Duration::from_millis(500);

/// How long clients work on the new primary before it gets a standby, and after.
const AFTER: Duration = Duration::from_millis(500);

/// How many times, and how far apart, the test checks whether a standby follows.
const LOOKS: u32 = 300;
const LOOK_AGAIN: Duration = Duration::from_millis(100);

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// How often a primary is replaced, in each of the two modes.
    #[arg(long, default_value_t = 10)]
    failovers: u64,
    /// Tests only with a synchronous standby.
    #[arg(long, conflicts_with = "asynchronous")]
    synchronous: bool,
    /// Tests only with an asynchronous standby.
    #[arg(long)]
    asynchronous: bool,
    /// The servers' `synchronous_commit`. With `local` or `off` the primary does not wait for the standby, and the synchronous
    /// check must fail.
    #[arg(long, default_value = "on")]
    commit: String,
    /// Number of clients, each with one operation at a time.
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
    /// The proxy at which clients find the current primary.
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

    /// Waits while nothing is replicated. Returns how many waiting sessions were terminated.
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

    /// Ends the primary permanently. Returns when it began to fail.
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
        // A primary that might come back would accept writes that no other server has.
        wait(|| self.pair.kill_primary())?;
        Ok(failed_at)
    }
}

/// The URL of a server at a local port.
fn url(port: u16) -> String {
    format!("postgres://postgres@127.0.0.1:{port}/postgres")
}

/// Waits until a standby streams from the primary, and is synchronous if it should be.
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
