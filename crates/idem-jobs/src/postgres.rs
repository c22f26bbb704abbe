//! A queue in Postgres: one table, and workers that skip each other's rows.
//!
//! apalis 1.0 was tried first, with `apalis-postgres`. It keeps its jobs in a fixed schema, needs the extension `hstore`, gives
//! orphaned jobs out again without a limit, and a second job with one id aborts the transaction of the request.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use idem_core::engine::{Context, TransactionError};
use idem_core::{OwnerToken, StoreError, StoreErrorKind};
use idem_postgres::PostgresTransaction;
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, PgConnection, PgPool, Row as _};

use crate::job::{Delivery, EnqueuedBefore, Job, JobId, QueuedJob, SUSPECT_FROM, Standing, Times};
use crate::queue::{EnqueueError, JobQueue};

/// The lock under which the table is made: `IF NOT EXISTS` fails if two sessions make the same table at once.
const TABLE_LOCK: i64 = 0x6964_656d_6a6f_6273;

/// A row is claimed until `due_at`, unless it was put back.
const TABLE: &str = "
    CREATE SCHEMA IF NOT EXISTS {schema};
    CREATE TABLE IF NOT EXISTS {schema}.idem_jobs (
        id TEXT PRIMARY KEY,
        name TEXT NOT NULL,
        principal BYTEA,
        payload BYTEA NOT NULL,
        trace TEXT,
        enqueued_by BYTEA NOT NULL,
        created_at TIMESTAMPTZ NOT NULL DEFAULT pg_catalog.statement_timestamp(),
        deadline_at TIMESTAMPTZ NOT NULL,
        due_at TIMESTAMPTZ NOT NULL DEFAULT pg_catalog.statement_timestamp(),
        delivered BIGINT NOT NULL DEFAULT 0,
        lost INTEGER NOT NULL DEFAULT 0,
        is_claimed BOOLEAN NOT NULL DEFAULT FALSE,
        is_parked BOOLEAN NOT NULL DEFAULT FALSE,
        keep_until TIMESTAMPTZ
    );
    CREATE INDEX IF NOT EXISTS idem_jobs_due ON {schema}.idem_jobs (due_at) WHERE keep_until IS NULL AND lost < {suspect};
    CREATE INDEX IF NOT EXISTS idem_jobs_suspect ON {schema}.idem_jobs (due_at)
        WHERE keep_until IS NULL AND lost >= {suspect};
    CREATE INDEX IF NOT EXISTS idem_jobs_ended ON {schema}.idem_jobs (keep_until) WHERE keep_until IS NOT NULL;
    COMMENT ON TABLE {schema}.idem_jobs IS 'idem-jobs 1';";

/// Takes the place of a job that was kept for its time.
const ENQUEUE: &str = "INSERT INTO {schema}.idem_jobs AS job (id, name, principal, payload, enqueued_by, deadline_at, trace)
    VALUES ($1, $2, $3, $4, $5, {now} + $6 * interval '1 microsecond', $7)
    ON CONFLICT (id) DO UPDATE SET name = excluded.name, principal = excluded.principal, payload = excluded.payload,
        enqueued_by = excluded.enqueued_by, created_at = excluded.created_at, deadline_at = excluded.deadline_at,
        trace = excluded.trace, due_at = excluded.due_at, lost = 0, is_claimed = FALSE, is_parked = FALSE, keep_until = NULL
    WHERE job.keep_until <= {now}";

const BEFORE: &str = "SELECT name, payload, enqueued_by FROM {schema}.idem_jobs WHERE id = $1";

const NOTE_CALLER: &str = "UPDATE {schema}.idem_jobs SET enqueued_by = $2 WHERE id = $1";

const CLAIM: &str = "WITH ordinary AS MATERIALIZED (
        SELECT id, FALSE AS is_suspect FROM {schema}.idem_jobs
        WHERE keep_until IS NULL AND lost < {suspect} AND due_at <= {now}
        ORDER BY due_at LIMIT $1 FOR UPDATE SKIP LOCKED),
    suspect AS MATERIALIZED (
        SELECT id, TRUE AS is_suspect FROM {schema}.idem_jobs
        WHERE keep_until IS NULL AND lost >= {suspect} AND due_at <= {now}
        ORDER BY due_at LIMIT $2 FOR UPDATE SKIP LOCKED)
    UPDATE {schema}.idem_jobs AS job SET due_at = {now} + $3 * interval '1 microsecond', is_claimed = TRUE,
        delivered = delivered + 1, lost = CASE WHEN is_suspect THEN lost ELSE lost + 1 END
    FROM (SELECT * FROM ordinary UNION ALL SELECT * FROM suspect) AS due WHERE job.id = due.id
    RETURNING job.id, job.name, job.principal, job.payload, job.trace, job.delivered, due.is_suspect, {times},
        CASE WHEN due.is_suspect THEN job.lost ELSE job.lost - 1 END AS lost";

/// What a report is about: a delivery that nobody has reported yet.
macro_rules! of_delivery {
    () => {
        " WHERE id = $1 AND delivered = $2 AND is_claimed AND keep_until IS NULL"
    };
}

const BEGIN: &str = concat!("UPDATE {schema}.idem_jobs SET lost = $3", of_delivery!());

const HOLD: &str =
    concat!("UPDATE {schema}.idem_jobs SET due_at = {now} + $3 * interval '1 microsecond'", of_delivery!());

const PUT_BACK: &str = concat!(
    "UPDATE {schema}.idem_jobs SET due_at = {now} + $3 * interval '1 microsecond', is_claimed = FALSE, lost = $4",
    of_delivery!()
);

/// Returns the jobs that another session has locked.
const END: &str = "WITH open AS MATERIALIZED (
        SELECT id FROM {schema}.idem_jobs WHERE id = ANY($1) AND keep_until IS NULL),
    mine AS MATERIALIZED (
        SELECT id FROM {schema}.idem_jobs WHERE id = ANY($1) AND keep_until IS NULL FOR UPDATE SKIP LOCKED),
    ended AS (
        UPDATE {schema}.idem_jobs AS job SET keep_until = {now} + $3 * interval '1 microsecond', is_parked = $2
        FROM mine WHERE job.id = mine.id)
    SELECT id FROM open EXCEPT SELECT id FROM mine";

const FIND: &str = "SELECT job.id, job.name, job.principal, job.payload, job.trace, {times},
        CASE WHEN job.keep_until IS NULL THEN job.is_claimed AND job.due_at > {now} ELSE job.is_parked END AS flag,
        job.keep_until IS NOT NULL AS has_ended
    FROM {schema}.idem_jobs AS job WHERE job.id = $1 AND (job.keep_until IS NULL OR job.keep_until > {now})";

const PURGE: &str = "DELETE FROM {schema}.idem_jobs WHERE id IN (
        SELECT id FROM {schema}.idem_jobs WHERE keep_until <= {now} LIMIT $1 FOR UPDATE SKIP LOCKED)";

/// A queue in the table `idem_jobs` of a schema.
#[derive(Debug, Clone)]
pub struct PostgresQueue {
    pool: PgPool,
    schema: Arc<str>,
}

impl PostgresQueue {
    /// Opens the queue, and makes its table if there is none.
    ///
    /// `pool` leads to the database of the [`PostgresStore`](idem_postgres::PostgresStore) that protects the requests. A
    /// transaction-pooling proxy in between has to keep prepared statements.
    ///
    /// # Errors
    /// [`StoreError`] when the schema has no valid name, the server cannot be reached, or the role may not make the table. Make
    /// it by [`table_sql`](Self::table_sql) then.
    pub async fn open(pool: PgPool, schema: &str) -> Result<Self, StoreError> {
        if schema.is_empty() || schema.len() > 63 || schema.contains('\0') {
            let message = "the name of a schema has 1 to 63 bytes, none of them zero";
            return Err(StoreError::new(StoreErrorKind::Misconfigured, message));
        }
        let queue = Self { pool, schema: schema.into() };
        let make = async {
            let mut transaction = queue.pool.begin().await?;
            sqlx::query("SELECT pg_catalog.pg_advisory_xact_lock($1)")
                .bind(TABLE_LOCK)
                .execute(&mut *transaction)
                .await?;
            let there =
                sqlx::query("SELECT pg_catalog.to_regclass($1) IS NOT NULL").bind(queue.sql("{schema}.idem_jobs"));
            if !there.fetch_one(&mut *transaction).await?.try_get::<bool, _>(0)? {
                sqlx::raw_sql(AssertSqlSafe(queue.sql(TABLE))).execute(&mut *transaction).await?;
            }
            transaction.commit().await
        };
        make.await.map_err(|error| failed("make the table", error))?;
        Ok(queue)
    }

    /// The statements that make the schema and the table, for services whose role may not. The role of the service then needs
    /// `USAGE` on the schema, and `SELECT`, `INSERT`, `UPDATE` and `DELETE` on the table.
    #[must_use]
    pub fn table_sql(schema: &str) -> String {
        in_schema(TABLE, schema)
    }

    fn sql(&self, statement: &str) -> String {
        in_schema(statement, &self.schema)
    }

    async fn insert(
        &self,
        connection: &mut PgConnection,
        job: &Job,
        by: OwnerToken,
        deadline: Duration,
    ) -> Result<Option<EnqueuedBefore>, sqlx::Error> {
        let insert = sqlx::query(AssertSqlSafe(self.sql(ENQUEUE)))
            .bind(job.id.as_str())
            .bind(&job.name)
            .bind(job.principal.as_ref().map(|principal| principal.as_bytes()))
            .bind(job.payload.as_ref())
            .bind(by.as_bytes().as_slice())
            .bind(micros(deadline))
            .bind(job.trace.map(|trace| trace.to_string()));
        if insert.execute(&mut *connection).await?.rows_affected() == 1 {
            return Ok(None);
        }
        // The conflict has locked the row, so it is there.
        let row =
            sqlx::query(AssertSqlSafe(self.sql(BEFORE))).bind(job.id.as_str()).fetch_one(&mut *connection).await?;
        let note = sqlx::query(AssertSqlSafe(self.sql(NOTE_CALLER)));
        note.bind(job.id.as_str()).bind(by.as_bytes().as_slice()).execute(connection).await?;
        let (payload, by): (Vec<u8>, Vec<u8>) = (row.try_get("payload")?, row.try_get("enqueued_by")?);
        let by = by.try_into().map_err(|_| unreadable("enqueued_by", "it has not 16 bytes"))?;
        Ok(Some(EnqueuedBefore::new(row.try_get("name")?, payload.into(), OwnerToken::from_bytes(by))))
    }
}

#[async_trait]
impl JobQueue for PostgresQueue {
    async fn enqueue(
        &self,
        run: &Context,
        job: &Job,
        by: OwnerToken,
        deadline: Duration,
    ) -> Result<Option<EnqueuedBefore>, EnqueueError> {
        let enqueued = match run.transaction::<PostgresTransaction>() {
            Ok(mut transaction) => self.insert(&mut transaction, job, by, deadline).await,
            Err(TransactionError::NotTransactional) => match self.pool.begin().await {
                Ok(mut transaction) => match self.insert(&mut transaction, job, by, deadline).await {
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
        let claim = sqlx::query(AssertSqlSafe(self.sql(CLAIM)));
        let claim = claim.bind(i64::from(most.get())).bind(i64::from(with_suspect)).bind(micros(hold));
        let read = |row: PgRow| -> Result<Delivery, sqlx::Error> {
            let (job, times) = read_job(&row)?;
            let lost: i32 = row.try_get("lost")?;
            let (number, is_suspect) = (row.try_get("delivered")?, row.try_get("is_suspect")?);
            Ok(Delivery::new(job, number, lost.try_into().unwrap_or(0), is_suspect, times))
        };
        let claimed = claim.fetch_all(&self.pool).await.map_err(|error| failed("claim", error))?;
        // One damaged row must not cost the others their delivery.
        let readable =
            |row| read(row).inspect_err(|error| tracing::error!(%error, "a row of idem_jobs is unreadable")).ok();
        Ok(claimed.into_iter().filter_map(readable).collect())
    }

    async fn begin(&self, suspect: &Delivery) -> Result<bool, StoreError> {
        let begin = sqlx::query(AssertSqlSafe(self.sql(BEGIN))).bind(suspect.job.id.as_str()).bind(suspect.number);
        let begin = begin.bind(count(suspect.lost.saturating_add(1)));
        let begun = begin.execute(&self.pool).await.map_err(|error| failed("begin", error))?;
        Ok(begun.rows_affected() == 1)
    }

    async fn hold(&self, delivery: &Delivery, hold: Duration) -> Result<bool, StoreError> {
        let update = sqlx::query(AssertSqlSafe(self.sql(HOLD)));
        let update = update.bind(delivery.job.id.as_str()).bind(delivery.number).bind(micros(hold));
        let held = update.execute(&self.pool).await.map_err(|error| failed("hold", error))?;
        Ok(held.rows_affected() == 1)
    }

    async fn put_back(&self, delivery: &Delivery, delay: Duration, lost: u32) -> Result<(), StoreError> {
        let update = sqlx::query(AssertSqlSafe(self.sql(PUT_BACK)));
        let update = update.bind(delivery.job.id.as_str()).bind(delivery.number).bind(micros(delay)).bind(count(lost));
        update.execute(&self.pool).await.map(drop).map_err(|error| failed("put back", error))
    }

    async fn end(&self, ids: &[JobId], is_parked: bool, keep: Duration) -> Result<Vec<JobId>, StoreError> {
        let ids: Vec<&str> = ids.iter().map(JobId::as_str).collect();
        let end = sqlx::query(AssertSqlSafe(self.sql(END))).bind(ids).bind(is_parked).bind(micros(keep));
        let locked = end.fetch_all(&self.pool).await.map_err(|error| failed("end", error))?;
        let locked: Result<_, _> = locked.iter().map(read_id).collect();
        locked.map_err(|error| failed("end", error))
    }

    async fn find(&self, id: &JobId) -> Result<Option<QueuedJob>, StoreError> {
        let find = sqlx::query(AssertSqlSafe(self.sql(FIND))).bind(id.as_str());
        let read = |row: PgRow| -> Result<QueuedJob, sqlx::Error> {
            let (job, times) = read_job(&row)?;
            let standing = match (row.try_get("has_ended")?, row.try_get("flag")?) {
                (false, false) => Standing::Waiting,
                (false, true) => Standing::Claimed,
                (true, false) => Standing::Ended,
                (true, true) => Standing::Parked,
            };
            Ok(QueuedJob::new(job, times, standing))
        };
        let found = find.fetch_optional(&self.pool).await;
        found.and_then(|row| row.map(read).transpose()).map_err(|error| failed("find", error))
    }

    async fn purge(&self, most: NonZeroU32) -> Result<u32, StoreError> {
        let purge = sqlx::query(AssertSqlSafe(self.sql(PURGE))).bind(i64::from(most.get()));
        let purged = purge.execute(&self.pool).await.map_err(|error| failed("purge", error))?;
        Ok(u32::try_from(purged.rows_affected()).unwrap_or(u32::MAX))
    }
}

fn read_id(row: &PgRow) -> Result<JobId, sqlx::Error> {
    let id: String = row.try_get("id")?;
    id.parse().map_err(|error| unreadable("id", error))
}

fn read_job(row: &PgRow) -> Result<(Job, Times), sqlx::Error> {
    let id = read_id(row)?;
    let principal: Option<Vec<u8>> = row.try_get("principal")?;
    let principal = principal.map(String::from_utf8).transpose().map_err(|error| unreadable("principal", error))?;
    let payload: Vec<u8> = row.try_get("payload")?;
    let micros = |micros: i64| Duration::from_micros(micros.try_into().unwrap_or(0));
    let times = Times { remaining: micros(row.try_get("remaining")?), age: micros(row.try_get("age")?) };
    let trace: Option<&str> = row.try_get("trace")?;
    let job = Job::new(id, row.try_get("name")?, principal, Bytes::from(payload));
    let job = job.trace(trace.and_then(|trace| trace.parse().ok()));
    Ok((job, times))
}

/// Fills the places of a statement. The time is that of the statement, which an index can be searched for.
fn in_schema(sql: &str, schema: &str) -> String {
    /// In microseconds. Negative after the deadline.
    const TIMES: &str = "(extract(epoch FROM job.deadline_at - {now}) * 1000000)::BIGINT AS remaining,
        (extract(epoch FROM {now} - job.created_at) * 1000000)::BIGINT AS age";
    let schema = format!("\"{}\"", schema.replace('"', "\"\""));
    let sql = sql.replace("{times}", TIMES).replace("{now}", "pg_catalog.statement_timestamp()");
    sql.replace("{suspect}", &SUSPECT_FROM.to_string()).replace("{schema}", &schema)
}

/// As much as Postgres can add to a time.
fn micros(duration: Duration) -> i64 {
    const CENTURY: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);
    i64::try_from(duration.min(CENTURY).as_micros()).unwrap_or(i64::MAX)
}

fn count(lost: u32) -> i32 {
    i32::try_from(lost).unwrap_or(i32::MAX)
}

fn unreadable(column: &str, why: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> sqlx::Error {
    sqlx::Error::ColumnDecode { index: column.to_owned(), source: why.into() }
}

fn failed(what: &str, error: sqlx::Error) -> StoreError {
    let kind = match &error {
        sqlx::Error::ColumnDecode { .. } | sqlx::Error::ColumnNotFound(_) => StoreErrorKind::Corrupt,
        sqlx::Error::PoolTimedOut => StoreErrorKind::Busy,
        sqlx::Error::Database(database) => match database.code().as_deref() {
            // Privileges, and what does not exist.
            Some("42501" | "42P01" | "42703" | "3F000" | "28P01" | "28000") => StoreErrorKind::Misconfigured,
            _ => StoreErrorKind::Unavailable,
        },
        _ => StoreErrorKind::Unavailable,
    };
    StoreError::new(kind, format!("the job queue in Postgres could not {what}")).with_source(error)
}
