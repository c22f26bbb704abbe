//! Samples the WAL position of the old primary over time, and finds how much of the WAL the new primary has.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use sqlx::postgres::PgConnectOptions;
use sqlx::{AssertSqlSafe, ConnectOptions, PgConnection, Row as _};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

use super::url;
use crate::Error;

/// How often the primary is sampled. The window in which a loss cannot be judged is twice as long.
const EVERY: Duration = Duration::from_millis(2);

/// The query. Positions are bytes since the beginning of the WAL.
const POSITIONS: &str = "SELECT (pg_current_wal_flush_lsn() - '0/0')::BIGINT, \
    (pg_current_wal_insert_lsn() - '0/0')::BIGINT, \
    (SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep')";

/// Where the timeline of a promoted server begins: the end of what it has of its predecessor's WAL. The last line of the
/// timeline's history file holds it.
const FORK: &str = r"SELECT ((regexp_match(
        pg_read_file('pg_wal/' || substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8) || '.history'),
        '\t([0-9A-F]+/[0-9A-F]+)\t[^\n]*\n*$'))[1]::PG_LSN - '0/0')::BIGINT";

/// One sample of the primary.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sample {
    /// When the query was sent, and when it was answered.
    pub(super) asked: Instant,
    pub(super) told: Instant,
    /// Everything before this position was on its disk, at some time in between.
    pub(super) flushed: i64,
    /// Every later request is after this position.
    pub(super) inserted: i64,
    /// How many sessions waited for the standby.
    pub(super) waiting: i64,
}

/// Samples a primary until it is gone.
#[derive(Debug)]
pub(super) struct Samples {
    taken: Arc<Mutex<Vec<Sample>>>,
    task: JoinHandle<()>,
}

impl Samples {
    /// Samples the server at `port` directly, because the clients' proxy may be cut.
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

    /// Stops sampling and returns all samples.
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

/// Connects outside the store.
pub(super) async fn connect(port: u16) -> Result<PgConnection, Error> {
    let options = url(port).parse::<PgConnectOptions>()?.disable_statement_logging();
    Ok(options.application_name("idem-long").connect().await?)
}

/// Queries one number.
pub(super) async fn number(connection: &mut PgConnection, sql: &str) -> Result<i64, Error> {
    let row = sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).fetch_one(connection).await;
    Ok(row.map_err(|error| format!("{sql}: {error}"))?.try_get(0)?)
}

/// The WAL position where the new primary's timeline forks from the old one's.
pub(super) async fn fork(connection: &mut PgConnection) -> Result<i64, Error> {
    number(connection, FORK).await
}

/// The times that decide what must have lasted, and what cannot have.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cut {
    /// A fact that was answered by then is in the new primary's WAL.
    pub(super) arrived_until: Option<Instant>,
    /// A fact that was requested from then on is not.
    pub(super) lost_from: Option<Instant>,
    /// When the old primary failed. Later answers may come from the new one.
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
