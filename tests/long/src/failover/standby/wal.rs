//! How far the old primary's log had come at which time, and how much of it its heir has.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use sqlx::postgres::PgConnectOptions;
use sqlx::{AssertSqlSafe, ConnectOptions, PgConnection, Row as _};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

use super::url;
use crate::Error;

/// How often the primary is asked: the window in which it cannot be told whether something had to be lost is twice as long.
const EVERY: Duration = Duration::from_millis(2);

/// What is asked. Positions are bytes since the beginning of the log.
const POSITIONS: &str = "SELECT (pg_current_wal_flush_lsn() - '0/0')::BIGINT, \
    (pg_current_wal_insert_lsn() - '0/0')::BIGINT, \
    (SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep')";

/// Where the timeline of a server that was promoted begins: the end of what it has of its predecessor's. It stands in the last
/// line of the timeline's history.
const FORK: &str = r"SELECT ((regexp_match(
        pg_read_file('pg_wal/' || substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8) || '.history'),
        '\t([0-9A-F]+/[0-9A-F]+)\t[^\n]*\n*$'))[1]::PG_LSN - '0/0')::BIGINT";

/// One answer of the primary.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sample {
    /// When it was asked, and when it had answered.
    pub(super) asked: Instant,
    pub(super) told: Instant,
    /// Everything before this was on its disk, in between.
    pub(super) flushed: i64,
    /// Whatever was asked of it later is after this.
    pub(super) inserted: i64,
    /// How many sessions waited for the standby.
    pub(super) waiting: i64,
}

/// Asks a primary until it is gone.
#[derive(Debug)]
pub(super) struct Samples {
    taken: Arc<Mutex<Vec<Sample>>>,
    task: JoinHandle<()>,
}

impl Samples {
    /// Asks the server at `port` itself: the way of the clients may be cut.
    pub(super) async fn take(port: u16) -> Result<Self, Error> {
        let mut connection = connect(port).await?;
        let taken = Arc::<Mutex<Vec<Sample>>>::default();
        let to = Arc::clone(&taken);
        let task = tokio::spawn(async move {
            while let Ok(sample) = sample(&mut connection).await {
                to.lock().unwrap_or_else(PoisonError::into_inner).push(sample);
                sleep(EVERY).await;
            }
        });
        Ok(Self { taken, task })
    }

    /// Everything that was told.
    pub(super) fn end(self) -> Vec<Sample> {
        self.task.abort();
        std::mem::take(&mut *self.taken.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

async fn sample(connection: &mut PgConnection) -> Result<Sample, sqlx::Error> {
    let asked = Instant::now();
    let row = sqlx::raw_sql(POSITIONS).fetch_one(connection).await?;
    let told = Instant::now();
    Ok(Sample { asked, told, flushed: row.try_get(0)?, inserted: row.try_get(1)?, waiting: row.try_get(2)? })
}

/// A connection beside the store's.
pub(super) async fn connect(port: u16) -> Result<PgConnection, Error> {
    let options = url(port).parse::<PgConnectOptions>()?.disable_statement_logging();
    Ok(options.application_name("idem-long").connect().await?)
}

/// One number.
pub(super) async fn number(connection: &mut PgConnection, sql: &str) -> Result<i64, Error> {
    let row = sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).fetch_one(connection).await;
    Ok(row.map_err(|error| format!("{sql}: {error}"))?.try_get(0)?)
}

/// Where the old primary's log and its heir's part.
pub(super) async fn fork(connection: &mut PgConnection) -> Result<i64, Error> {
    number(connection, FORK).await
}

/// What has to have lasted, and what cannot have.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cut {
    /// What was told by then is in the heir's part of the log.
    pub(super) arrived_until: Option<Instant>,
    /// What was asked from then on is not.
    pub(super) lost_from: Option<Instant>,
    /// When the old primary failed: what was told later may be the heir's word.
    pub(super) failed_at: Instant,
    /// The most sessions that waited for the standby at once.
    pub(super) waiting: i64,
}

impl Cut {
    pub(super) fn new(samples: &[Sample], fork: i64, failed_at: Instant) -> Self {
        Self {
            arrived_until: samples.iter().filter(|sample| sample.flushed <= fork).map(|sample| sample.asked).max(),
            lost_from: samples.iter().filter(|sample| sample.inserted >= fork).map(|sample| sample.told).min(),
            failed_at,
            waiting: samples.iter().map(|sample| sample.waiting).max().unwrap_or_default(),
        }
    }
}
