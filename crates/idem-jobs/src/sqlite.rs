//! A queue in SQLite: one table.
//!
//! apalis 1.0 was tried first, with `apalis-sqlite`. Its setup sets `PRAGMA synchronous = OFF`, so that a crash of the machine
//! loses committed jobs, and it uses the application's table `_sqlx_migrations`.

use std::num::NonZeroU32;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use idem_core::engine::{Context, TransactionError};
use idem_core::{StoreError, StoreErrorKind};
use idem_sqlite::SqliteTransaction;
use sqlx::sqlite::SqliteRow;
use sqlx::{Row as _, SqliteConnection, SqlitePool};

use crate::job::{Delivery, Job, JobId, QueuedJob, SUSPECT_FROM};
use crate::queue::{EnqueueError, JobQueue};

/// Times are in milliseconds since 1970.
const TABLE: &str = "
    CREATE TABLE IF NOT EXISTS idem_jobs (
        id TEXT PRIMARY KEY,
        name TEXT NOT NULL,
        principal TEXT,
        payload BLOB NOT NULL,
        created_at INTEGER NOT NULL,
        deadline_at INTEGER NOT NULL,
        due_at INTEGER NOT NULL,
        delivered INTEGER NOT NULL DEFAULT 0,
        unreported INTEGER NOT NULL DEFAULT 0,
        is_parked INTEGER NOT NULL DEFAULT 0,
        keep_until INTEGER
    ) STRICT, WITHOUT ROWID;
    CREATE INDEX IF NOT EXISTS idem_jobs_due ON idem_jobs (due_at) WHERE keep_until IS NULL AND unreported < 2;
    CREATE INDEX IF NOT EXISTS idem_jobs_suspect ON idem_jobs (due_at) WHERE keep_until IS NULL AND unreported >= 2;
    CREATE INDEX IF NOT EXISTS idem_jobs_ended ON idem_jobs (keep_until) WHERE keep_until IS NOT NULL;";

/// The clock, as an expression.
macro_rules! now {
    () => {
        "CAST(unixepoch('subsec') * 1000 AS INTEGER)"
    };
}

const ENQUEUE: &str = concat!(
    "INSERT INTO idem_jobs (id, name, principal, payload, created_at, due_at, deadline_at) VALUES (?1, ?2, ?3, ?4, ",
    now!(),
    ",",
    now!(),
    ",",
    now!(),
    "+ ?5) ON CONFLICT (id) DO NOTHING"
);

/// Suspects are delivered one by one. The limit stands in the indexes, where SQLite takes no parameter.
const _: () = assert!(SUSPECT_FROM == 2, "the statements and indexes name it");

/// One statement is one transaction, and SQLite has one writer, so two workers claim no job together.
const CLAIM: &str = concat!(
    "UPDATE idem_jobs SET due_at = ",
    now!(),
    "+ ?3, delivered = delivered + 1, unreported = unreported + 1 WHERE id IN (
        SELECT id FROM idem_jobs WHERE keep_until IS NULL AND unreported < 2 AND due_at <= ",
    now!(),
    " ORDER BY due_at LIMIT ?1) OR id IN (
        SELECT id FROM idem_jobs WHERE keep_until IS NULL AND unreported >= 2 AND due_at <= ",
    now!(),
    " ORDER BY due_at LIMIT ?2)
    RETURNING id, name, principal, payload, delivered, unreported, deadline_at - ",
    now!(),
    " AS remaining"
);

/// Whether any job is due: a claim that finds none must not take the write lock.
const IS_ANY_DUE: &str = concat!(
    "SELECT EXISTS (SELECT 1 FROM idem_jobs WHERE keep_until IS NULL AND unreported < 2 AND due_at <= ",
    now!(),
    ") OR ?1 AND EXISTS (SELECT 1 FROM idem_jobs WHERE keep_until IS NULL AND unreported >= 2 AND due_at <= ",
    now!(),
    ")"
);

const HOLD: &str =
    concat!("UPDATE idem_jobs SET due_at = ", now!(), "+ ?3 WHERE id = ?1 AND delivered = ?2 AND keep_until IS NULL");

const PUT_BACK: &str = concat!(
    "UPDATE idem_jobs SET due_at = ",
    now!(),
    "+ ?3, unreported = unreported - 1 WHERE id = ?1 AND delivered = ?2 AND keep_until IS NULL"
);

const END: &str =
    concat!("UPDATE idem_jobs SET keep_until = ", now!(), "+ ?3, is_parked = ?2 WHERE id = ?1 AND keep_until IS NULL");

const FIND: &str = concat!(
    "SELECT id, name, principal, payload, is_parked, deadline_at - ",
    now!(),
    " AS remaining FROM idem_jobs WHERE id = ?1"
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

    async fn insert(connection: &mut SqliteConnection, job: &Job, deadline: Duration) -> Result<(), EnqueueError> {
        let failed = |error| failed("enqueue", error);
        let insert = sqlx::query(ENQUEUE)
            .bind(job.id.as_str())
            .bind(&job.name)
            .bind(job.principal.as_deref())
            .bind(job.payload.as_ref())
            .bind(millis(deadline));
        if insert.execute(&mut *connection).await.map_err(failed)?.rows_affected() == 1 {
            return Ok(());
        }
        let find = sqlx::query("SELECT name FROM idem_jobs WHERE id = ?1").bind(job.id.as_str());
        let row = find.fetch_optional(connection).await.map_err(failed)?;
        let name: Option<String> = row.map(|row| row.try_get(0)).transpose().map_err(failed)?;
        match name {
            Some(name) if name != job.name => Err(EnqueueError::OtherJob { name }),
            _ => Ok(()),
        }
    }

    /// Executes a statement about one job.
    async fn execute(
        &self,
        what: &str,
        statement: &'static str,
        (id, number, duration): (&JobId, i64, Duration),
    ) -> Result<u64, StoreError> {
        let query = sqlx::query(statement).bind(id.as_str()).bind(number).bind(millis(duration));
        Ok(query.execute(&self.pool).await.map_err(|error| failed(what, error))?.rows_affected())
    }
}

#[async_trait]
impl JobQueue for SqliteQueue {
    async fn enqueue(&self, run: &Context, job: &Job, deadline: Duration) -> Result<(), EnqueueError> {
        match run.transaction::<SqliteTransaction>() {
            Ok(mut transaction) => Self::insert(&mut transaction, job, deadline).await,
            Err(TransactionError::NotTransactional) => {
                let mut connection = self.pool.acquire().await.map_err(|error| failed("enqueue", error))?;
                Self::insert(&mut connection, job, deadline).await
            }
            Err(error) => Err(error.into()),
        }
    }

    async fn claim(&self, most: NonZeroU32, with_suspect: bool, hold: Duration) -> Result<Vec<Delivery>, StoreError> {
        let failed = |error| failed("claim", error);
        let row = sqlx::query(IS_ANY_DUE).bind(with_suspect).fetch_one(&self.pool).await.map_err(failed)?;
        if !row.try_get::<bool, _>(0).map_err(failed)? {
            return Ok(Vec::new());
        }
        let claim = sqlx::query(CLAIM).bind(i64::from(most.get())).bind(with_suspect).bind(millis(hold));
        let claimed = claim.fetch_all(&self.pool).await.map_err(failed)?;
        let read = |row: &SqliteRow| -> Result<Delivery, sqlx::Error> {
            let unreported: i64 = row.try_get("unreported")?;
            let (job, remaining) = read_job(row)?;
            let unreported = u32::try_from(unreported).unwrap_or(0);
            Ok(Delivery { job, number: row.try_get("delivered")?, unreported, remaining })
        };
        claimed.iter().map(|row| read(row).map_err(failed)).collect()
    }

    async fn hold(&self, delivery: &Delivery, hold: Duration) -> Result<bool, StoreError> {
        Ok(self.execute("hold", HOLD, (&delivery.job.id, delivery.number, hold)).await? == 1)
    }

    async fn put_back(&self, delivery: &Delivery, delay: Duration) -> Result<(), StoreError> {
        self.execute("put back", PUT_BACK, (&delivery.job.id, delivery.number, delay)).await.map(drop)
    }

    async fn end(&self, id: &JobId, is_parked: bool, keep: Duration) -> Result<(), StoreError> {
        self.execute("end", END, (id, i64::from(is_parked), keep)).await.map(drop)
    }

    async fn find(&self, id: &JobId) -> Result<Option<QueuedJob>, StoreError> {
        let read = |row: SqliteRow| -> Result<QueuedJob, sqlx::Error> {
            let (job, remaining) = read_job(&row)?;
            Ok(QueuedJob { job, is_overdue: remaining.is_zero(), is_parked: row.try_get("is_parked")? })
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

fn read_job(row: &SqliteRow) -> Result<(Job, Duration), sqlx::Error> {
    let id: String = row.try_get("id")?;
    let id = id.parse().map_err(|error| sqlx::Error::ColumnDecode { index: "id".into(), source: Box::new(error) })?;
    let payload: Vec<u8> = row.try_get("payload")?;
    let remaining: i64 = row.try_get("remaining")?;
    let (name, principal) = (row.try_get("name")?, row.try_get("principal")?);
    Ok((
        Job { id, name, principal, payload: Bytes::from(payload) },
        Duration::from_millis(remaining.try_into().unwrap_or(0)),
    ))
}

fn millis(duration: Duration) -> i64 {
    const CENTURY: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);
    i64::try_from(duration.min(CENTURY).as_millis()).unwrap_or(i64::MAX)
}

fn failed(what: &str, error: sqlx::Error) -> StoreError {
    let kind = match &error {
        sqlx::Error::ColumnDecode { .. } | sqlx::Error::ColumnNotFound(_) => StoreErrorKind::Corrupt,
        sqlx::Error::PoolTimedOut => StoreErrorKind::Busy,
        _ => StoreErrorKind::Unavailable,
    };
    StoreError::new(kind, format!("the job queue in SQLite could not {what}")).with_source(error)
}
