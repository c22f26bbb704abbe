//! Cuts connections and ends processes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use sqlx::{AssertSqlSafe, ConnectOptions, PgConnection, Row};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

use super::World;
use super::process::SESSIONS;
use crate::Error;
use crate::database::Database;
use crate::random::Random;

/// What was sabotaged.
#[derive(Debug, Default)]
pub(super) struct Sabotage {
    /// The number of terminated sessions, by their state at the time.
    pub(super) terminations: BTreeMap<String, u64>,
    pub(super) deaths: u64,
}

pub(super) struct Saboteur {
    stop: oneshot::Sender<()>,
    task: JoinHandle<Result<Sabotage, Error>>,
}

impl Saboteur {
    /// Cuts a connection every 20 to 200 ms, and ends a process at the interval `deaths`.
    pub(super) async fn start(database: &Database, world: &Arc<World>, deaths: Duration) -> Result<Self, Error> {
        let connection = database.options("saboteur")?.connect().await?;
        let (stop, stopped) = oneshot::channel();
        let task = tokio::spawn(work(connection, Arc::clone(world), deaths, stopped));
        Ok(Self { stop, task })
    }

    pub(super) async fn stop(self) -> Result<Sabotage, Error> {
        drop(self.stop);
        self.task.await?
    }
}

async fn work(
    mut connection: PgConnection,
    world: Arc<World>,
    deaths: Duration,
    mut stopped: oneshot::Receiver<()>,
) -> Result<Sabotage, Error> {
    let mut random = Random::new();
    let mut done = Sabotage::default();
    let mut next_death = Instant::now() + deaths;
    loop {
        tokio::select! {
            () = sleep(Duration::from_millis(20 + random.below(181))) => {}
            _ = &mut stopped => return Ok(done),
        }
        if !deaths.is_zero() && Instant::now() >= next_death {
            world.processes.die(done.deaths).await?;
            done.deaths += 1;
            next_death = Instant::now() + deaths;
        }
        // Most sessions are idle at any time, but those that are busy matter.
        let busy = random.chance(75);
        if let Some(state) = terminate(&mut connection, busy).await? {
            *done.terminations.entry(state).or_default() += 1;
        }
    }
}

/// Terminates a random session and returns its state.
async fn terminate(connection: &mut PgConnection, busy: bool) -> Result<Option<String>, Error> {
    let sql = format!(
        "SELECT state FROM (
            SELECT pid, state FROM pg_stat_activity
            WHERE application_name IN ('{}') AND state IS NOT NULL {}
            ORDER BY random() LIMIT 1
        ) AS victim WHERE pg_terminate_backend(pid)",
        SESSIONS.join("', '"),
        if busy { "AND state <> 'idle'" } else { "" },
    );
    let rows = sqlx::raw_sql(AssertSqlSafe(sql)).fetch_all(connection).await?;
    Ok(rows.first().map(|row| row.try_get(0)).transpose()?)
}
