//! A queue in SQLite: one table.
//!
//! apalis 1.0 was tried first, with `apalis-sqlite`. Its setup sets `PRAGMA synchronous = OFF`, so that a crash of the machine
//! loses committed jobs, and it uses the application's table `_sqlx_migrations`.

use std::num::NonZeroU32;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use idem_core::engine::{Context, TransactionError};
use idem_core::{OwnerToken, StoreError, StoreErrorKind};
use idem_sqlite::SqliteTransaction;
use sqlx::sqlite::SqliteRow;
use sqlx::{Row as _, SqliteConnection, SqlitePool};

use crate::job::{Delivery, EnqueuedBefore, Job, JobId, QueuedJob, SUSPECT_FROM, Standing, Times};
use crate::queue::{EnqueueError, JobQueue};

/// Times are in milliseconds since 1970. A row is claimed until `due_at`, unless it was put back.
const TABLE: &str = "
    CREATE TABLE IF NOT EXISTS idem_jobs (
        id TEXT PRIMARY KEY,
        name TEXT NOT NULL,
        principal TEXT,
        payload BLOB NOT NULL,
        trace TEXT,
        enqueued_by BLOB NOT NULL,
        created_at INTEGER NOT NULL,
        deadline_at INTEGER NOT NULL,
        due_at INTEGER NOT NULL,
        delivered INTEGER NOT NULL DEFAULT 0,
        lost INTEGER NOT NULL DEFAULT 0,
        is_claimed INTEGER NOT NULL DEFAULT 0,
        is_parked INTEGER NOT NULL DEFAULT 0,
        keep_until INTEGER
    ) STRICT, WITHOUT ROWID;
    CREATE INDEX IF NOT EXISTS idem_jobs_due ON idem_jobs (due_at) WHERE keep_until IS NULL AND lost < 2;
    CREATE INDEX IF NOT EXISTS idem_jobs_suspect ON idem_jobs (due_at) WHERE keep_until IS NULL AND lost >= 2;
    CREATE INDEX IF NOT EXISTS idem_jobs_ended ON idem_jobs (keep_until) WHERE keep_until IS NOT NULL;";

/// The limit stands in the indexes, where SQLite takes no parameter.
const _: () = assert!(SUSPECT_FROM == 2, "the statements and indexes name it");

/// The clock, as an expression.
macro_rules! now {
    () => {
        "CAST(unixepoch('subsec') * 1000 AS INTEGER)"
    };
}

/// What a report is about: a delivery that nobody has reported yet.
macro_rules! of_delivery {
    () => {
        " WHERE id = ?1 AND delivered = ?2 AND is_claimed AND keep_until IS NULL"
    };
}

/// Takes the place of a job that was kept for its time.
const ENQUEUE: &str = concat!(
    "INSERT INTO idem_jobs (id, name, principal, payload, enqueued_by, trace, created_at, due_at, deadline_at) VALUES (?1, ?2, ?3, ?4, ?5, ?7, ",
    now!(),
    ",",
    now!(),
    ",",
    now!(),
    "+ ?6) ON CONFLICT (id) DO UPDATE SET name = excluded.name, principal = excluded.principal, payload = excluded.payload,
        enqueued_by = excluded.enqueued_by, created_at = excluded.created_at, deadline_at = excluded.deadline_at,
        trace = excluded.trace, due_at = excluded.due_at, lost = 0, is_claimed = 0, is_parked = 0, keep_until = NULL
    WHERE keep_until <= ",
    now!()
);

/// One statement is one transaction, and SQLite has one writer, so two workers claim no job together.
const CLAIM: &str = concat!(
    "UPDATE idem_jobs SET due_at = ",
    now!(),
    "+ ?3, is_claimed = 1, delivered = delivered + 1, lost = CASE WHEN lost < 2 THEN lost + 1 ELSE lost END WHERE id IN (
        SELECT id FROM idem_jobs WHERE keep_until IS NULL AND lost < 2 AND due_at <= ",
    now!(),
    " ORDER BY due_at LIMIT ?1) OR id IN (
        SELECT id FROM idem_jobs WHERE keep_until IS NULL AND lost >= 2 AND due_at <= ",
    now!(),
    " ORDER BY due_at LIMIT ?2)
    RETURNING id, name, principal, payload, trace, delivered, lost, deadline_at - ",
    now!(),
    " AS remaining, ",
    now!(),
    " - created_at AS age"
);

/// The suspect among those that a claim would get.
const SUSPECT: &str = concat!(
    "SELECT id FROM idem_jobs WHERE ?1 AND keep_until IS NULL AND lost >= 2 AND due_at <= ",
    now!(),
    " ORDER BY due_at LIMIT 1"
);

const IS_ANY_DUE: &str =
    concat!("SELECT EXISTS (SELECT 1 FROM idem_jobs WHERE keep_until IS NULL AND lost < 2 AND due_at <= ", now!(), ")");

const BEGIN: &str = concat!("UPDATE idem_jobs SET lost = ?3", of_delivery!());

const HOLD: &str = concat!("UPDATE idem_jobs SET due_at = ", now!(), "+ ?3", of_delivery!());

const PUT_BACK: &str =
    concat!("UPDATE idem_jobs SET due_at = ", now!(), "+ ?3, is_claimed = 0, lost = ?4", of_delivery!());

const END: &str =
    concat!("UPDATE idem_jobs SET keep_until = ", now!(), "+ ?3, is_parked = ?2 WHERE id = ?1 AND keep_until IS NULL");

const FIND: &str = concat!(
    "SELECT id, name, principal, payload, trace, deadline_at - ",
    now!(),
    " AS remaining, ",
    now!(),
    " - created_at AS age, CASE WHEN keep_until IS NULL THEN is_claimed AND due_at > ",
    now!(),
    " ELSE is_parked END AS flag, keep_until IS NOT NULL AS has_ended
    FROM idem_jobs WHERE id = ?1 AND (keep_until IS NULL OR keep_until > ",
    now!(),
    ")"
);

const PURGE: &str =
    concat!("DELETE FROM idem_jobs WHERE id IN (SELECT id FROM idem_jobs WHERE keep_until <= ", now!(), " LIMIT ?1)");

/// A queue in the table `idem_jobs` of a database file.
#[derive(Debug, Clone)]
pub struct SqliteQueue {
    pool: SqlitePool,
}

impl SqliteQueue {
    /// Opens the queue, and makes its table if there is none.
    ///
    /// `pool` leads to the file of the [`SqliteStore`](idem_sqlite::SqliteStore) that protects the requests. Its `busy_timeout`
    /// limits how long the queue waits for other writers, and its `synchronous` decides whether a job that was added
    /// outside of a transaction survives a crash of the machine.
    ///
    /// # Errors
    /// [`StoreError`] when the file cannot be written.
    pub async fn open(pool: SqlitePool) -> Result<Self, StoreError> {
        sqlx::raw_sql(TABLE).execute(&pool).await.map_err(|error| failed("make the table", error))?;
        Ok(Self { pool })
    }

    async fn insert(
        connection: &mut SqliteConnection,
        job: &Job,
        by: OwnerToken,
        deadline: Duration,
    ) -> Result<Option<EnqueuedBefore>, sqlx::Error> {
        let insert = sqlx::query(ENQUEUE)
            .bind(job.id.as_str())
            .bind(&job.name)
            .bind(job.principal.as_deref())
            .bind(job.payload.as_ref())
            .bind(by.as_bytes().as_slice())
            .bind(millis(deadline))
            .bind(job.trace.map(|trace| trace.to_string()));
        if insert.execute(&mut *connection).await?.rows_affected() == 1 {
            return Ok(None);
        }
        // The insert has taken the write lock, so the row is there.
        let find = sqlx::query("SELECT name, payload, enqueued_by FROM idem_jobs WHERE id = ?1").bind(job.id.as_str());
        let row = find.fetch_one(&mut *connection).await?;
        let note = sqlx::query("UPDATE idem_jobs SET enqueued_by = ?2 WHERE id = ?1").bind(job.id.as_str());
        note.bind(by.as_bytes().as_slice()).execute(connection).await?;
        let (payload, by): (Vec<u8>, Vec<u8>) = (row.try_get("payload")?, row.try_get("enqueued_by")?);
        let by = by.try_into().map_err(|_| unreadable("enqueued_by", "it has not 16 bytes"))?;
        Ok(Some(EnqueuedBefore::new(row.try_get("name")?, payload.into(), OwnerToken::from_bytes(by))))
    }
}

#[async_trait]
impl JobQueue for SqliteQueue {
    async fn enqueue(
        &self,
        run: &Context,
        job: &Job,
        by: OwnerToken,
        deadline: Duration,
    ) -> Result<Option<EnqueuedBefore>, EnqueueError> {
        let enqueued = match run.transaction::<SqliteTransaction>() {
            Ok(mut transaction) => Self::insert(&mut transaction, job, by, deadline).await,
            Err(TransactionError::NotTransactional) => match self.pool.begin_with("BEGIN IMMEDIATE").await {
                Ok(mut transaction) => match Self::insert(&mut transaction, job, by, deadline).await {
                    Ok(enqueued) => transaction.commit().await.map(|()| enqueued),
                    Err(error) => Err(error),
                },
                Err(error) => Err(error),
            },
            Err(error) => return Err(error.into()),
        };
        enqueued.map_err(|error| failed("enqueue", error).into())
    }

    async fn claim(&self, most: NonZeroU32, with_suspect: bool, hold: Duration) -> Result<Vec<Delivery>, StoreError> {
        let claim = async {
            let suspect = sqlx::query(SUSPECT).bind(with_suspect).fetch_optional(&self.pool).await?;
            // A claim that finds nothing must not take the write lock.
            if suspect.is_none() && !sqlx::query(IS_ANY_DUE).fetch_one(&self.pool).await?.try_get::<bool, _>(0)? {
                return Ok(Vec::new());
            }
            let mut transaction = self.pool.begin_with("BEGIN IMMEDIATE").await?;
            // Again, as another worker may have claimed it since.
            let suspect = sqlx::query(SUSPECT).bind(with_suspect).fetch_optional(&mut *transaction).await?;
            let suspect: Option<String> = suspect.map(|row| row.try_get("id")).transpose()?;
            let claim =
                sqlx::query(CLAIM).bind(i64::from(most.get())).bind(i64::from(suspect.is_some())).bind(millis(hold));
            let claimed = claim.fetch_all(&mut *transaction).await?;
            transaction.commit().await?;
            let read = |row: &SqliteRow| -> Result<Delivery, sqlx::Error> {
                let (job, times) = read_job(row)?;
                let is_suspect = suspect.as_deref() == Some(job.id.as_str());
                let lost: i64 = row.try_get("lost")?;
                let lost = u32::try_from(lost - i64::from(!is_suspect)).unwrap_or(0);
                Ok(Delivery::new(job, row.try_get("delivered")?, lost, is_suspect, times))
            };
            // One damaged row must not cost the others their delivery.
            let readable =
                |row| read(row).inspect_err(|error| tracing::error!(%error, "a row of idem_jobs is unreadable")).ok();
            Ok(claimed.iter().filter_map(readable).collect())
        };
        claim.await.map_err(|error| failed("claim", error))
    }

    async fn begin(&self, suspect: &Delivery) -> Result<bool, StoreError> {
        let begin = sqlx::query(BEGIN).bind(suspect.job.id.as_str()).bind(suspect.number);
        let begin = begin.bind(i64::from(suspect.lost) + 1);
        let begun = begin.execute(&self.pool).await.map_err(|error| failed("begin", error))?;
        Ok(begun.rows_affected() == 1)
    }

    async fn hold(&self, delivery: &Delivery, hold: Duration) -> Result<bool, StoreError> {
        let update = sqlx::query(HOLD).bind(delivery.job.id.as_str()).bind(delivery.number).bind(millis(hold));
        let held = update.execute(&self.pool).await.map_err(|error| failed("hold", error))?;
        Ok(held.rows_affected() == 1)
    }

    async fn put_back(&self, delivery: &Delivery, delay: Duration, lost: u32) -> Result<(), StoreError> {
        let update = sqlx::query(PUT_BACK).bind(delivery.job.id.as_str()).bind(delivery.number);
        let update = update.bind(millis(delay)).bind(i64::from(lost));
        update.execute(&self.pool).await.map(drop).map_err(|error| failed("put back", error))
    }

    async fn end(&self, ids: &[JobId], is_parked: bool, keep: Duration) -> Result<Vec<JobId>, StoreError> {
        let end = async {
            let mut transaction = self.pool.begin_with("BEGIN IMMEDIATE").await?;
            for id in ids {
                let end = sqlx::query(END).bind(id.as_str()).bind(is_parked).bind(millis(keep));
                end.execute(&mut *transaction).await?;
            }
            transaction.commit().await
        };
        end.await.map(|()| Vec::new()).map_err(|error| failed("end", error))
    }

    async fn find(&self, id: &JobId) -> Result<Option<QueuedJob>, StoreError> {
        let read = |row: SqliteRow| -> Result<QueuedJob, sqlx::Error> {
            let (job, times) = read_job(&row)?;
            let standing = match (row.try_get("has_ended")?, row.try_get("flag")?) {
                (false, false) => Standing::Waiting,
                (false, true) => Standing::Claimed,
                (true, false) => Standing::Ended,
                (true, true) => Standing::Parked,
            };
            Ok(QueuedJob::new(job, times, standing))
        };
        let found = sqlx::query(FIND).bind(id.as_str()).fetch_optional(&self.pool).await;
        found.and_then(|row| row.map(read).transpose()).map_err(|error| failed("find", error))
    }

    async fn purge(&self, most: NonZeroU32) -> Result<u32, StoreError> {
        let purged = sqlx::query(PURGE).bind(i64::from(most.get())).execute(&self.pool).await;
        let purged = purged.map_err(|error| failed("purge", error))?;
        Ok(u32::try_from(purged.rows_affected()).unwrap_or(u32::MAX))
    }
}

fn read_job(row: &SqliteRow) -> Result<(Job, Times), sqlx::Error> {
    let id: String = row.try_get("id")?;
    let id = id.parse().map_err(|error| unreadable("id", error))?;
    let payload: Vec<u8> = row.try_get("payload")?;
    let millis = |millis: i64| Duration::from_millis(millis.try_into().unwrap_or(0));
    let times = Times { remaining: millis(row.try_get("remaining")?), age: millis(row.try_get("age")?) };
    let (name, principal) = (row.try_get("name")?, row.try_get("principal")?);
    let trace: Option<&str> = row.try_get("trace")?;
    let job = Job::new(id, name, principal, Bytes::from(payload)).trace(trace.and_then(|trace| trace.parse().ok()));
    Ok((job, times))
}

fn millis(duration: Duration) -> i64 {
    const CENTURY: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);
    i64::try_from(duration.min(CENTURY).as_millis()).unwrap_or(i64::MAX)
}

fn unreadable(column: &str, why: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> sqlx::Error {
    sqlx::Error::ColumnDecode { index: column.to_owned(), source: why.into() }
}

fn failed(what: &str, error: sqlx::Error) -> StoreError {
    let kind = match &error {
        sqlx::Error::ColumnDecode { .. } | sqlx::Error::ColumnNotFound(_) => StoreErrorKind::Corrupt,
        sqlx::Error::PoolTimedOut => StoreErrorKind::Busy,
        _ => StoreErrorKind::Unavailable,
    };
    StoreError::new(kind, format!("the job queue in SQLite could not {what}")).with_source(error)
}
