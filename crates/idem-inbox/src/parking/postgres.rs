//! Parking in Postgres: one table.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use idem_core::{StoreError, StoreErrorKind};
use sqlx::postgres::{PgArguments, PgRow};
use sqlx::query::Query;
use sqlx::{AssertSqlSafe, PgPool, Postgres, Row as _};

use super::row::{envelope, micros, read_message};
use super::{LIST_TIMEOUT, ParkedMessage, Parking, within};
use crate::message::Message;

/// The lock under which the table is made: `IF NOT EXISTS` fails if two sessions make the same table at once.
const TABLE_LOCK: i64 = 0x6964_656d_696e_626f;

const TABLE: &str = "
    CREATE SCHEMA IF NOT EXISTS {schema};
    CREATE TABLE IF NOT EXISTS {schema}.idem_inbox (
        subscriber TEXT NOT NULL,
        key TEXT NOT NULL,
        state TEXT NOT NULL CHECK (state IN ('running', 'parked', 'requested', 'replayed')),
        lost_runs INTEGER NOT NULL DEFAULT 0,
        replays INTEGER NOT NULL DEFAULT 0,
        reason TEXT,
        envelope TEXT,
        payload BYTEA,
        parked_at TIMESTAMPTZ,
        changed_at TIMESTAMPTZ NOT NULL DEFAULT pg_catalog.statement_timestamp(),
        PRIMARY KEY (subscriber, key)
    );
    CREATE INDEX IF NOT EXISTS idem_inbox_parked ON {schema}.idem_inbox (subscriber, parked_at, key)
        WHERE state IN ('parked', 'requested');
    CREATE INDEX IF NOT EXISTS idem_inbox_ended ON {schema}.idem_inbox (subscriber, changed_at)
        WHERE state IN ('running', 'replayed');
    COMMENT ON TABLE {schema}.idem_inbox IS 'idem-inbox 1';";

const BEGIN: &str =
    "INSERT INTO {schema}.idem_inbox AS entry (subscriber, key, state, lost_runs) VALUES ($1, $2, 'running', 1)
    ON CONFLICT (subscriber, key) DO UPDATE SET lost_runs = entry.lost_runs + 1, changed_at = excluded.changed_at
    RETURNING lost_runs";

const REPORT: &str = "WITH gone AS (
        DELETE FROM {schema}.idem_inbox WHERE subscriber = $1 AND key = $2 AND state = 'running' AND $3 = 0)
    UPDATE {schema}.idem_inbox SET lost_runs = $3
    WHERE subscriber = $1 AND key = $2 AND (state <> 'running' OR $3 > 0)";

const PARK: &str =
    "INSERT INTO {schema}.idem_inbox AS entry (subscriber, key, state, reason, envelope, payload, parked_at)
    VALUES ($1, $2, 'parked', $3, $4, $5, pg_catalog.statement_timestamp())
    ON CONFLICT (subscriber, key) DO UPDATE SET state = 'parked', lost_runs = 0, reason = excluded.reason,
        envelope = excluded.envelope, payload = excluded.payload, parked_at = excluded.parked_at,
        changed_at = excluded.changed_at
    WHERE entry.state = 'running'";

const LIST: &str = "SELECT key, reason, envelope, payload, replays, state = 'requested' AS is_requested,
        (extract(epoch FROM parked_at) * 1000000)::BIGINT AS parked_at
    FROM {schema}.idem_inbox
    WHERE subscriber = $1 AND (state = 'requested' OR state = 'parked' AND NOT $2)
        AND (parked_at, key) > (timestamptz 'epoch' + $3 * interval '1 microsecond', $4)
    ORDER BY idem_inbox.parked_at, key LIMIT $5";

const REQUEST: &str = "UPDATE {schema}.idem_inbox SET state = 'requested', lost_runs = 0, replays = replays + 1,
        changed_at = pg_catalog.statement_timestamp()
    WHERE subscriber = $1 AND key = $2 AND state = 'parked'";

const REPLAYED: &str =
    "UPDATE {schema}.idem_inbox SET state = CASE WHEN $4::TEXT IS NULL THEN 'replayed' ELSE 'parked' END,
        reason = COALESCE($4, reason), lost_runs = 0, payload = CASE WHEN $4::TEXT IS NULL THEN '' ELSE payload END,
        changed_at = pg_catalog.statement_timestamp()
    WHERE subscriber = $1 AND key = $2 AND state = 'requested' AND replays = $3";

const PURGE: &str = "DELETE FROM {schema}.idem_inbox WHERE (subscriber, key) IN (
        SELECT subscriber, key FROM {schema}.idem_inbox
        WHERE subscriber = $3 AND state IN ('running', 'replayed') AND changed_at <= pg_catalog.statement_timestamp() - $1 * interval '1 microsecond'
        LIMIT $2 FOR UPDATE SKIP LOCKED)";

/// Parks messages in the table `idem_inbox` of a schema.
#[derive(Debug, Clone)]
pub struct PostgresParking {
    pool: PgPool,
    schema: Arc<str>,
}

impl PostgresParking {
    /// Opens the parking, and makes its table if there is none.
    ///
    /// # Errors
    /// [`StoreError`] when the schema has no valid name, the server cannot be reached, or the role may not make the table. Make
    /// it by [`table_sql`](Self::table_sql) then.
    pub async fn open(pool: PgPool, schema: &str) -> Result<Self, StoreError> {
        if schema.is_empty() || schema.len() > 63 || schema.contains('\0') {
            let message = "the name of a schema has 1 to 63 bytes, none of them zero";
            return Err(StoreError::new(StoreErrorKind::Misconfigured, message));
        }
        let parking = Self { pool, schema: schema.into() };
        let make = async {
            let mut transaction = parking.pool.begin().await?;
            sqlx::query("SELECT pg_catalog.pg_advisory_xact_lock($1)")
                .bind(TABLE_LOCK)
                .execute(&mut *transaction)
                .await?;
            let there =
                sqlx::query("SELECT pg_catalog.to_regclass($1) IS NOT NULL").bind(parking.sql("{schema}.idem_inbox"));
            if !there.fetch_one(&mut *transaction).await?.try_get::<bool, _>(0)? {
                sqlx::raw_sql(AssertSqlSafe(parking.sql(TABLE))).execute(&mut *transaction).await?;
            }
            transaction.commit().await
        };
        make.await.map_err(|error| failed("make its table", error))?;
        Ok(parking)
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

    /// A statement about one entry.
    fn about(&self, statement: &str, subscriber: &str, key: &str) -> Query<'static, Postgres, PgArguments> {
        sqlx::query(AssertSqlSafe(self.sql(statement))).bind(subscriber.to_owned()).bind(key.to_owned())
    }

    async fn read_list(
        &self,
        subscriber: &str,
        only_requested: bool,
        after: Option<&ParkedMessage>,
        most: NonZeroU32,
    ) -> Result<Vec<ParkedMessage>, sqlx::Error> {
        let mut key = after.map(|parked| parked.message.parking_key()).unwrap_or_default();
        let mut parked_at = after.map_or(0, |parked| parked.parked_at_micros);
        // One damaged row must not hide the others.
        let readable = |row: &PgRow| {
            read(row).inspect_err(|error| tracing::error!(%error, "a row of idem_inbox is unreadable")).ok()
        };
        let mut transaction = self.pool.begin().await?;
        let limit = LIST_TIMEOUT.as_millis();
        sqlx::raw_sql(AssertSqlSafe(format!("SET LOCAL statement_timeout = {limit}")))
            .execute(&mut *transaction)
            .await?;
        loop {
            let list = sqlx::query(AssertSqlSafe(self.sql(LIST)))
                .bind(subscriber)
                .bind(only_requested)
                .bind(parked_at)
                .bind(&key)
                .bind(i64::from(most.get()));
            let rows = list.fetch_all(&mut *transaction).await?;
            let messages: Vec<_> = rows.iter().filter_map(readable).collect();
            match rows.last() {
                // All of them are damaged, and others may follow.
                Some(last) if messages.is_empty() => {
                    (key, parked_at) = (last.try_get("key")?, last.try_get("parked_at")?);
                }
                _ => {
                    transaction.commit().await?;
                    return Ok(messages);
                }
            }
        }
    }
}

#[async_trait]
impl Parking for PostgresParking {
    async fn begin(&self, subscriber: &str, key: &str) -> Result<u32, StoreError> {
        let row = self.about(BEGIN, subscriber, key).fetch_one(&self.pool).await;
        let begun: i32 = row.and_then(|row| row.try_get(0)).map_err(|error| failed("count a run", error))?;
        Ok(begun.try_into().unwrap_or(0))
    }

    async fn report(&self, subscriber: &str, key: &str, lost: u32) -> Result<(), StoreError> {
        let lost = i32::try_from(lost).unwrap_or(i32::MAX);
        let report = self.about(REPORT, subscriber, key).bind(lost).execute(&self.pool).await;
        report.map(drop).map_err(|error| failed("report a run", error))
    }

    async fn park(&self, subscriber: &str, message: &Message, reason: &str) -> Result<(), StoreError> {
        let envelope =
            envelope(message).map_err(|error| failed("write a message", sqlx::Error::Encode(error.into())))?;
        let park = self.about(PARK, subscriber, &message.parking_key()).bind(reason.to_owned()).bind(envelope);
        let park = park.bind(message.payload.to_vec()).execute(&self.pool).await;
        park.map(drop).map_err(|error| failed("park a message", error))
    }

    async fn list(
        &self,
        subscriber: &str,
        only_requested: bool,
        after: Option<&ParkedMessage>,
        most: NonZeroU32,
    ) -> Result<Vec<ParkedMessage>, StoreError> {
        let list = self.read_list(subscriber, only_requested, after, most);
        within(async { list.await.map_err(|error| failed("list the messages", error)) }).await
    }

    async fn request_replay(&self, subscriber: &str, key: &str) -> Result<bool, StoreError> {
        let request = self.about(REQUEST, subscriber, key).execute(&self.pool).await;
        Ok(request.map_err(|error| failed("request a replay", error))?.rows_affected() == 1)
    }

    async fn replayed(
        &self,
        subscriber: &str,
        parked: &ParkedMessage,
        failure: Option<&str>,
    ) -> Result<(), StoreError> {
        let replays = i32::try_from(parked.replays).unwrap_or(i32::MAX);
        let report = self.about(REPLAYED, subscriber, &parked.message.parking_key()).bind(replays);
        let report = report.bind(failure.map(str::to_owned)).execute(&self.pool).await;
        report.map(drop).map_err(|error| failed("report a replay", error))
    }

    async fn purge(&self, subscriber: &str, keep: Duration, most: NonZeroU32) -> Result<u32, StoreError> {
        let purge =
            sqlx::query(AssertSqlSafe(self.sql(PURGE))).bind(micros(keep)).bind(i64::from(most.get())).bind(subscriber);
        let purged = purge.execute(&self.pool).await.map_err(|error| failed("purge", error))?;
        Ok(u32::try_from(purged.rows_affected()).unwrap_or(u32::MAX))
    }
}

fn read(row: &PgRow) -> Result<ParkedMessage, sqlx::Error> {
    let (envelope, payload): (String, Vec<u8>) = (row.try_get("envelope")?, row.try_get("payload")?);
    let message = read_message(&envelope, payload)
        .map_err(|error| sqlx::Error::ColumnDecode { index: "envelope".to_owned(), source: error.into() })?;
    let replays: i32 = row.try_get("replays")?;
    let (reason, parked_at) = (row.try_get("reason")?, row.try_get("parked_at")?);
    let is_requested = row.try_get("is_requested")?;
    Ok(ParkedMessage::new(message, reason, parked_at, replays.try_into().unwrap_or(0), is_requested))
}

fn in_schema(sql: &str, schema: &str) -> String {
    sql.replace("{schema}", &format!("\"{}\"", schema.replace('"', "\"\"")))
}

fn failed(what: &str, error: sqlx::Error) -> StoreError {
    let kind = match &error {
        sqlx::Error::ColumnDecode { .. } | sqlx::Error::ColumnNotFound(_) => StoreErrorKind::Corrupt,
        sqlx::Error::PoolTimedOut => StoreErrorKind::Busy,
        sqlx::Error::Database(database) => match database.code().as_deref() {
            // Privileges, and what does not exist.
            // The statement_timeout of a list.
            Some("57014") => StoreErrorKind::Timeout,
            Some("42501" | "42P01" | "42703" | "3F000" | "28P01" | "28000") => StoreErrorKind::Misconfigured,
            _ => StoreErrorKind::Unavailable,
        },
        _ => StoreErrorKind::Unavailable,
    };
    StoreError::new(kind, format!("the parking in Postgres could not {what}")).with_source(error)
}
