//! A queue in Postgres: one table, and workers that skip each other's rows.
//!
//! apalis 1.0 was tried first, with `apalis-postgres`. It keeps its jobs in a fixed schema, needs the extension `hstore`, gives
//! orphaned jobs out again without a limit, and a second job with one id aborts the transaction of the request.

use std::num::NonZeroU32;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use idem_core::engine::{Context, TransactionError};
use idem_core::{StoreError, StoreErrorKind};
use idem_postgres::PostgresTransaction;
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, PgConnection, PgPool, Row as _};

use crate::job::{Delivery, Job, JobId, QueuedJob, SUSPECT_FROM};
use crate::queue::{EnqueueError, JobQueue};

/// The lock under which the table is made: `IF NOT EXISTS` fails if two sessions make the same table at once.
const TABLE_LOCK: i64 = 0x6964_656d_6a6f_6273;

const TABLE: &str = "
    CREATE SCHEMA IF NOT EXISTS {schema};
    CREATE TABLE IF NOT EXISTS {schema}.idem_jobs (
        id TEXT PRIMARY KEY,
        name TEXT NOT NULL,
        principal BYTEA,
        payload BYTEA NOT NULL,
        created_at TIMESTAMPTZ NOT NULL DEFAULT pg_catalog.clock_timestamp(),
        deadline_at TIMESTAMPTZ NOT NULL,
        due_at TIMESTAMPTZ NOT NULL DEFAULT pg_catalog.clock_timestamp(),
        delivered BIGINT NOT NULL DEFAULT 0,
        unreported INTEGER NOT NULL DEFAULT 0,
        is_parked BOOLEAN NOT NULL DEFAULT FALSE,
        keep_until TIMESTAMPTZ
    );
    CREATE INDEX IF NOT EXISTS idem_jobs_due ON {schema}.idem_jobs (due_at)
        WHERE keep_until IS NULL AND unreported < {suspect};
    CREATE INDEX IF NOT EXISTS idem_jobs_suspect ON {schema}.idem_jobs (due_at)
        WHERE keep_until IS NULL AND unreported >= {suspect};
    CREATE INDEX IF NOT EXISTS idem_jobs_ended ON {schema}.idem_jobs (keep_until) WHERE keep_until IS NOT NULL;
    COMMENT ON TABLE {schema}.idem_jobs IS 'idem-jobs 1';";

const ENQUEUE: &str = "INSERT INTO {schema}.idem_jobs (id, name, principal, payload, deadline_at)
    VALUES ($1, $2, $3, $4, pg_catalog.clock_timestamp() + $5 * interval '1 microsecond')
    ON CONFLICT (id) DO NOTHING";

const CLAIM: &str = "WITH ordinary AS MATERIALIZED (
        SELECT id FROM {schema}.idem_jobs
        WHERE keep_until IS NULL AND unreported < {suspect} AND due_at <= pg_catalog.clock_timestamp()
        ORDER BY due_at LIMIT $1 FOR UPDATE SKIP LOCKED),
    suspect AS MATERIALIZED (
        SELECT id FROM {schema}.idem_jobs
        WHERE keep_until IS NULL AND unreported >= {suspect} AND due_at <= pg_catalog.clock_timestamp()
        ORDER BY due_at LIMIT $2 FOR UPDATE SKIP LOCKED)
    UPDATE {schema}.idem_jobs AS job SET due_at = pg_catalog.clock_timestamp() + $3 * interval '1 microsecond',
        delivered = delivered + 1, unreported = unreported + 1
    FROM (SELECT id FROM ordinary UNION ALL SELECT id FROM suspect) AS due WHERE job.id = due.id
    RETURNING job.id, job.name, job.principal, job.payload, job.delivered, job.unreported, {remaining}";

/// How long until the deadline, in microseconds; negative after it.
const REMAINING: &str =
    "(extract(epoch FROM job.deadline_at - pg_catalog.clock_timestamp()) * 1000000)::BIGINT AS remaining";

const HOLD: &str = "UPDATE {schema}.idem_jobs SET due_at = pg_catalog.clock_timestamp() + $3 * interval '1 microsecond'
    WHERE id = $1 AND delivered = $2 AND keep_until IS NULL";

const PUT_BACK: &str = "UPDATE {schema}.idem_jobs
    SET due_at = pg_catalog.clock_timestamp() + $3 * interval '1 microsecond', unreported = unreported - 1
    WHERE id = $1 AND delivered = $2 AND keep_until IS NULL";

const END: &str = "UPDATE {schema}.idem_jobs
    SET keep_until = pg_catalog.clock_timestamp() + $3 * interval '1 microsecond', is_parked = $2
    WHERE id = $1 AND keep_until IS NULL";

const FIND: &str = "SELECT job.id, job.name, job.principal, job.payload, job.is_parked, {remaining}
    FROM {schema}.idem_jobs AS job WHERE job.id = $1";

const PURGE: &str = "DELETE FROM {schema}.idem_jobs WHERE id IN (
        SELECT id FROM {schema}.idem_jobs WHERE keep_until <= pg_catalog.clock_timestamp()
        LIMIT $1 FOR UPDATE SKIP LOCKED)";

/// A queue in the table `idem_jobs` of a schema.
#[derive(Debug, Clone)]
pub struct PostgresQueue {
    pool: PgPool,
    statements: std::sync::Arc<Statements>,
}

#[derive(Debug)]
struct Statements {
    enqueue: String,
    name: String,
    claim: String,
    hold: String,
    put_back: String,
    end: String,
    find: String,
    purge: String,
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
        let in_schema = |sql: &str| in_schema(sql, schema);
        if schema.is_empty() || schema.len() > 63 || schema.contains('\0') {
            let message = "the name of a schema has 1 to 63 bytes, none of them zero";
            return Err(StoreError::new(StoreErrorKind::Misconfigured, message));
        }
        let make = async {
            let mut transaction = pool.begin().await?;
            sqlx::query("SELECT pg_catalog.pg_advisory_xact_lock($1)")
                .bind(TABLE_LOCK)
                .execute(&mut *transaction)
                .await?;
            let there: bool = sqlx::query("SELECT pg_catalog.to_regclass($1) IS NOT NULL")
                .bind(in_schema("{schema}.idem_jobs"))
                .fetch_one(&mut *transaction)
                .await?
                .try_get(0)?;
            if !there {
                sqlx::raw_sql(AssertSqlSafe(Self::table_sql(schema))).execute(&mut *transaction).await?;
            }
            transaction.commit().await
        };
        make.await.map_err(|error| failed("make the table", error))?;
        let statements = Statements {
            enqueue: in_schema(ENQUEUE),
            name: in_schema("SELECT name FROM {schema}.idem_jobs WHERE id = $1"),
            claim: in_schema(CLAIM),
            hold: in_schema(HOLD),
            put_back: in_schema(PUT_BACK),
            end: in_schema(END),
            find: in_schema(FIND),
            purge: in_schema(PURGE),
        };
        Ok(Self { pool, statements: statements.into() })
    }

    /// The statements that make the table, for services whose role may not.
    #[must_use]
    pub fn table_sql(schema: &str) -> String {
        in_schema(TABLE, schema)
    }

    async fn insert(&self, connection: &mut PgConnection, job: &Job, deadline: Duration) -> Result<(), EnqueueError> {
        let failed = |error| failed("enqueue", error);
        let statements = &self.statements;
        let insert = sqlx::query(AssertSqlSafe(statements.enqueue.clone()))
            .bind(job.id.as_str())
            .bind(&job.name)
            .bind(job.principal.as_ref().map(|principal| principal.as_bytes()))
            .bind(job.payload.as_ref())
            .bind(micros(deadline));
        if insert.execute(&mut *connection).await.map_err(failed)?.rows_affected() == 1 {
            return Ok(());
        }
        let find = sqlx::query(AssertSqlSafe(statements.name.clone())).bind(job.id.as_str());
        let row = find.fetch_optional(connection).await.map_err(failed)?;
        let name: Option<String> = row.map(|row| row.try_get(0)).transpose().map_err(failed)?;
        match name {
            Some(name) if name != job.name => Err(EnqueueError::OtherJob { name }),
            _ => Ok(()),
        }
    }

    async fn execute(&self, what: &str, statement: &str, bind: Bound<'_>) -> Result<u64, StoreError> {
        let Bound { id, number, duration } = bind;
        let query = sqlx::query(AssertSqlSafe(statement.to_owned())).bind(id.as_str());
        let query = query.bind(number).bind(micros(duration));
        Ok(query.execute(&self.pool).await.map_err(|error| failed(what, error))?.rows_affected())
    }
}

/// What names a delivery, and for how long something is to be.
struct Bound<'a> {
    id: &'a JobId,
    number: i64,
    duration: Duration,
}

#[async_trait]
impl JobQueue for PostgresQueue {
    async fn enqueue(&self, run: &Context, job: &Job, deadline: Duration) -> Result<(), EnqueueError> {
        match run.transaction::<PostgresTransaction>() {
            Ok(mut transaction) => self.insert(&mut transaction, job, deadline).await,
            Err(TransactionError::NotTransactional) => {
                let mut connection = self.pool.acquire().await.map_err(|error| failed("enqueue", error))?;
                self.insert(&mut connection, job, deadline).await
            }
            Err(error) => Err(error.into()),
        }
    }

    async fn claim(&self, most: NonZeroU32, with_suspect: bool, hold: Duration) -> Result<Vec<Delivery>, StoreError> {
        let failed = |error| failed("claim", error);
        let claim = sqlx::query(AssertSqlSafe(self.statements.claim.clone()));
        let claim = claim.bind(i64::from(most.get())).bind(i64::from(with_suspect)).bind(micros(hold));
        let claimed = claim.fetch_all(&self.pool).await.map_err(failed)?;
        let read = |row: &PgRow| -> Result<Delivery, sqlx::Error> {
            let unreported: i32 = row.try_get("unreported")?;
            let (job, remaining) = read_job(row)?;
            let number = row.try_get("delivered")?;
            Ok(Delivery { job, number, unreported: unreported.unsigned_abs(), remaining })
        };
        claimed.iter().map(|row| read(row).map_err(failed)).collect()
    }

    async fn hold(&self, delivery: &Delivery, hold: Duration) -> Result<bool, StoreError> {
        let bound = Bound { id: &delivery.job.id, number: delivery.number, duration: hold };
        Ok(self.execute("hold", &self.statements.hold, bound).await? == 1)
    }

    async fn put_back(&self, delivery: &Delivery, delay: Duration) -> Result<(), StoreError> {
        let bound = Bound { id: &delivery.job.id, number: delivery.number, duration: delay };
        self.execute("put back", &self.statements.put_back, bound).await.map(drop)
    }

    async fn end(&self, id: &JobId, is_parked: bool, keep: Duration) -> Result<(), StoreError> {
        let end = sqlx::query(AssertSqlSafe(self.statements.end.clone()));
        let end = end.bind(id.as_str()).bind(is_parked).bind(micros(keep));
        end.execute(&self.pool).await.map(drop).map_err(|error| failed("end", error))
    }

    async fn find(&self, id: &JobId) -> Result<Option<QueuedJob>, StoreError> {
        let find = sqlx::query(AssertSqlSafe(self.statements.find.clone())).bind(id.as_str());
        let read = |row: PgRow| -> Result<QueuedJob, sqlx::Error> {
            let (job, remaining) = read_job(&row)?;
            Ok(QueuedJob { job, is_overdue: remaining.is_zero(), is_parked: row.try_get("is_parked")? })
        };
        let found = find.fetch_optional(&self.pool).await;
        found.and_then(|row| row.map(read).transpose()).map_err(|error| failed("find", error))
    }

    async fn purge(&self, most: NonZeroU32) -> Result<u32, StoreError> {
        let purge = sqlx::query(AssertSqlSafe(self.statements.purge.clone())).bind(i64::from(most.get()));
        let purged = purge.execute(&self.pool).await.map_err(|error| failed("purge", error))?;
        Ok(u32::try_from(purged.rows_affected()).unwrap_or(u32::MAX))
    }
}

fn read_job(row: &PgRow) -> Result<(Job, Duration), sqlx::Error> {
    let id: String = row.try_get("id")?;
    let id = id.parse().map_err(|error| sqlx::Error::ColumnDecode { index: "id".into(), source: Box::new(error) })?;
    let principal: Option<Vec<u8>> = row.try_get("principal")?;
    let principal = principal.map(String::from_utf8).transpose();
    let principal =
        principal.map_err(|error| sqlx::Error::ColumnDecode { index: "principal".into(), source: Box::new(error) })?;
    let payload: Vec<u8> = row.try_get("payload")?;
    let remaining: i64 = row.try_get("remaining")?;
    let job = Job { id, name: row.try_get("name")?, principal, payload: Bytes::from(payload) };
    Ok((job, Duration::from_micros(remaining.try_into().unwrap_or(0))))
}

/// Fills the places of a statement.
fn in_schema(sql: &str, schema: &str) -> String {
    let schema = format!("\"{}\"", schema.replace('"', "\"\""));
    sql.replace("{remaining}", REMAINING).replace("{suspect}", &SUSPECT_FROM.to_string()).replace("{schema}", &schema)
}

/// As much as Postgres can add to a time.
fn micros(duration: Duration) -> i64 {
    const CENTURY: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);
    i64::try_from(duration.min(CENTURY).as_micros()).unwrap_or(i64::MAX)
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
