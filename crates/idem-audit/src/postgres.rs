//! The audit in Postgres: one table.

use std::error::Error;
use std::io;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use sqlx::{AssertSqlSafe, PgPool, Row as _};
use tokio::time::timeout;
use uuid::Uuid;

use crate::entry::AuditEntry;
use crate::sink::AuditSink;

/// The lock under which the table is made: `IF NOT EXISTS` fails if two sessions make the same table at once.
const TABLE_LOCK: i64 = 0x6964_656d_6175_6469;

/// How long a batch may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// Rows are added in the order of their time, so that an index by blocks is enough to find and remove old ones.
const TABLE: &str = "
    CREATE SCHEMA IF NOT EXISTS {schema};
    CREATE TABLE IF NOT EXISTS {schema}.idem_audit (
        batch UUID NOT NULL,
        place INTEGER NOT NULL,
        decided_at TIMESTAMPTZ NOT NULL,
        principal TEXT,
        operation TEXT NOT NULL,
        record BYTEA,
        outcome TEXT NOT NULL,
        trace TEXT,
        PRIMARY KEY (batch, place)
    );
    CREATE INDEX IF NOT EXISTS idem_audit_decided ON {schema}.idem_audit USING brin (decided_at);
    CREATE INDEX IF NOT EXISTS idem_audit_record ON {schema}.idem_audit (record);
    COMMENT ON TABLE {schema}.idem_audit IS 'idem-audit 1';";

/// The comment of a table that this version writes.
const VERSION: &str = "idem-audit 1";

const LOOK: &str = "SELECT pg_catalog.obj_description(audit, 'pg_class') AS version,
        pg_catalog.has_table_privilege(audit, 'INSERT') AND pg_catalog.has_table_privilege(audit, 'SELECT') AS may_write
    FROM pg_catalog.to_regclass($1) AS audit WHERE audit IS NOT NULL";

const WRITE: &str =
    "INSERT INTO {schema}.idem_audit (batch, place, decided_at, principal, operation, record, outcome, trace)
    SELECT $1::UUID, place, timestamptz 'epoch' + decided_at * interval '1 microsecond', principal,
        operation, record, outcome, trace
    FROM unnest($2::BIGINT[], $3::TEXT[], $4::TEXT[], $5::BYTEA[], $6::TEXT[], $7::TEXT[])
        WITH ORDINALITY AS entry (decided_at, principal, operation, record, outcome, trace, place)
    ON CONFLICT (batch, place) DO NOTHING";

/// Writes decisions into the table `idem_audit` of a schema.
///
/// Nothing removes rows: delete them by `decided_at` when your retention of audits is over. `record` has the bytes of the
/// record's id, and `trace` is a `traceparent`. Zero bytes, which Postgres cannot store as text, become U+FFFD.
#[derive(Debug, Clone)]
pub struct PostgresAuditSink {
    pool: PgPool,
    write: String,
}

impl PostgresAuditSink {
    /// Opens the sink, and makes its table if there is none.
    ///
    /// # Errors
    /// [`sqlx::Error`]
    ///
    /// - when the schema has no valid name, or the server cannot be reached;
    /// - when there is no table, and the role may not make it: make it by [`table_sql`](Self::table_sql) then;
    /// - when the table is of another version, or the role may not write it.
    pub async fn open(pool: PgPool, schema: &str) -> Result<Self, sqlx::Error> {
        if schema.is_empty() || schema.len() > 63 || schema.contains('\0') {
            return Err(sqlx::Error::Configuration("the name of a schema has 1 to 63 bytes, none of them zero".into()));
        }
        let mut transaction = pool.begin().await?;
        sqlx::query("SELECT pg_catalog.pg_advisory_xact_lock($1)").bind(TABLE_LOCK).execute(&mut *transaction).await?;
        let look = sqlx::query(LOOK).bind(in_schema("{schema}.idem_audit", schema));
        match look.fetch_optional(&mut *transaction).await? {
            Some(table) => check(table.try_get("version")?, table.try_get("may_write")?)?,
            None => {
                sqlx::raw_sql(AssertSqlSafe(Self::table_sql(schema))).execute(&mut *transaction).await?;
            }
        }
        transaction.commit().await?;
        Ok(Self { pool, write: in_schema(WRITE, schema) })
    }

    /// The statements that make the schema and the table, for services whose role may not. The role of the service then needs
    /// `USAGE` on the schema, and `INSERT` and `SELECT` on the table.
    #[must_use]
    pub fn table_sql(schema: &str) -> String {
        in_schema(TABLE, schema)
    }
}

#[async_trait]
impl AuditSink for PostgresAuditSink {
    async fn write(&self, batch: Uuid, entries: &[AuditEntry]) -> Result<(), Box<dyn Error + Send + Sync>> {
        let write = sqlx::query(AssertSqlSafe(self.write.clone()))
            .bind(batch.to_string())
            .bind(column(entries, |entry| micros(entry.decided_at)))
            .bind(column(entries, |entry| entry.principal.as_deref().map(text)))
            .bind(column(entries, |entry| text(&entry.operation)))
            .bind(column(entries, |entry| entry.record.map(|record| record.as_bytes().to_vec())))
            .bind(column(entries, |entry| entry.outcome))
            .bind(column(entries, |entry| entry.trace.map(|trace| trace.to_string())));
        match timeout(PATIENCE, write.execute(&self.pool)).await {
            Ok(written) => Ok(written.map(drop)?),
            Err(_) => Err(io::Error::new(io::ErrorKind::TimedOut, format!("no answer within {PATIENCE:?}")).into()),
        }
    }

    /// Data that cannot be stored (class 22), and a table or a privilege that is missing (class 42).
    fn is_permanent(&self, error: &(dyn Error + Send + Sync + 'static)) -> bool {
        let error = error.downcast_ref::<sqlx::Error>().and_then(sqlx::Error::as_database_error);
        error.and_then(|error| error.code()).is_some_and(|code| code.starts_with("22") || code.starts_with("42"))
    }
}

/// Refuses a table that this version or this role cannot write.
fn check(version: Option<String>, may_write: bool) -> Result<(), sqlx::Error> {
    let refused = match version.as_deref() {
        Some(VERSION) if may_write => return Ok(()),
        Some(VERSION) => "the role needs the privileges INSERT and SELECT on idem_audit".to_owned(),
        other => {
            let other = other.unwrap_or("no comment");
            format!("the table idem_audit is of another version: it has `{other}`, and this version writes `{VERSION}`")
        }
    };
    Err(sqlx::Error::Configuration(refused.into()))
}

fn column<'a, T>(entries: &'a [AuditEntry], value: impl Fn(&'a AuditEntry) -> T) -> Vec<T> {
    entries.iter().map(value).collect()
}

fn text(text: &str) -> String {
    text.replace('\0', "\u{FFFD}")
}

fn micros(time: SystemTime) -> i64 {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_micros()).unwrap_or(i64::MAX)
}

fn in_schema(statement: &str, schema: &str) -> String {
    statement.replace("{schema}", &format!("\"{}\"", schema.replace('"', "\"\"")))
}
