//! An outbox in Postgres: one table, and a transaction for each claim.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use idem_core::{StoreError, StoreErrorKind};
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, PgConnection, PgPool, Postgres, Row as _, Transaction};

use crate::message::MessageToSend;
use crate::outbox::{Backlog, Claim, Outbox, OutboxError, StoredMessage};

/// The lock under which the table is made: `IF NOT EXISTS` fails if two sessions make the same table at once.
const TABLE_LOCK: i64 = 0x6964_656d_6f75_7462;

const TABLE: &str = "
    CREATE SCHEMA IF NOT EXISTS {schema};
    CREATE TABLE IF NOT EXISTS {schema}.idem_outbox (
        sequence BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        topic TEXT NOT NULL,
        ordering_key TEXT,
        headers TEXT NOT NULL,
        payload BYTEA NOT NULL,
        published_at TIMESTAMPTZ NOT NULL DEFAULT pg_catalog.statement_timestamp()
    );
    COMMENT ON TABLE {schema}.idem_outbox IS 'idem-outbox 1';";

/// The place of a message is taken under the lock of its key, so that places of a key are in the order of the commits.
const PUBLISH: &str = "WITH locked AS MATERIALIZED (
        SELECT pg_catalog.pg_advisory_xact_lock(
            pg_catalog.hashtextextended($3, pg_catalog.hashtextextended($6, 0))) WHERE $3 IS NOT NULL)
    INSERT INTO {schema}.idem_outbox (id, topic, ordering_key, headers, payload)
    SELECT $1, $2, $3, $4, $5 FROM (SELECT count(*) FROM locked) AS counted
    ON CONFLICT (id) DO NOTHING";

/// Ends the transaction of a relay whose machine has disappeared.
const LIMIT: &str = "SELECT pg_catalog.set_config('idle_in_transaction_session_timeout', '30s', TRUE),
    pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtextextended('idem_outbox relay', pg_catalog.hashtextextended($1, 0)))
        AS is_alone";

const CLAIM: &str = "SELECT sequence, id, topic, ordering_key, headers, payload FROM {schema}.idem_outbox
    WHERE COALESCE(ordering_key, id) <> ALL($2) ORDER BY sequence LIMIT $1";

const SENT: &str = "DELETE FROM {schema}.idem_outbox WHERE sequence = ANY($1)";

const BACKLOG: &str = "SELECT count(*) AS messages,
        COALESCE((extract(epoch FROM pg_catalog.statement_timestamp() - min(published_at)) * 1000000)::BIGINT, 0) AS lag
    FROM {schema}.idem_outbox";

/// An outbox in the table `idem_outbox` of a schema.
#[derive(Debug, Clone)]
pub struct PostgresOutbox {
    pool: PgPool,
    schema: Arc<str>,
}

#[derive(Debug)]
struct PostgresClaim {
    transaction: Transaction<'static, Postgres>,
    messages: Vec<StoredMessage>,
    delete: String,
}

impl PostgresOutbox {
    /// Opens the outbox, and makes its table if there is none. The relay takes one connection of `pool` while it sends.
    ///
    /// # Errors
    /// [`StoreError`] when the schema has no valid name, the server cannot be reached, or the role may not make the table. Make
    /// it by [`table_sql`](Self::table_sql) then.
    pub async fn open(pool: PgPool, schema: &str) -> Result<Self, StoreError> {
        if schema.is_empty() || schema.len() > 63 || schema.contains('\0') {
            let message = "the name of a schema has 1 to 63 bytes, none of them zero";
            return Err(StoreError::new(StoreErrorKind::Misconfigured, message));
        }
        let outbox = Self { pool, schema: schema.into() };
        let make = async {
            let mut transaction = outbox.pool.begin().await?;
            sqlx::query("SELECT pg_catalog.pg_advisory_xact_lock($1)")
                .bind(TABLE_LOCK)
                .execute(&mut *transaction)
                .await?;
            let there =
                sqlx::query("SELECT pg_catalog.to_regclass($1) IS NOT NULL").bind(outbox.sql("{schema}.idem_outbox"));
            if !there.fetch_one(&mut *transaction).await?.try_get::<bool, _>(0)? {
                sqlx::raw_sql(AssertSqlSafe(outbox.sql(TABLE))).execute(&mut *transaction).await?;
            }
            transaction.commit().await
        };
        make.await.map_err(|error| failed("make its table", error))?;
        Ok(outbox)
    }

    /// The statements that make the schema and the table, for services whose role may not. The role of the service then needs
    /// `USAGE` on the schema, and `SELECT`, `INSERT` and `DELETE` on the table.
    #[must_use]
    pub fn table_sql(schema: &str) -> String {
        in_schema(TABLE, schema)
    }

    /// Publishes a message in the transaction of `connection`, which is of this outbox's database: the relay sends it once the
    /// transaction has committed. A message whose id is in the outbox already is not added again.
    ///
    /// A transaction of a run, from [`Context::transaction`](idem_core::engine::Context::transaction), dereferences to the
    /// connection.
    ///
    /// # Errors
    /// [`OutboxError`].
    ///
    /// # Cancellation safety
    /// Roll the transaction back if the future is dropped.
    pub async fn publish(&self, connection: &mut PgConnection, message: &MessageToSend) -> Result<(), OutboxError> {
        message.check()?;
        let headers = write_headers(message)?;
        let publish = sqlx::query(AssertSqlSafe(self.sql(PUBLISH)))
            .bind(&message.id)
            .bind(&message.topic)
            .bind(message.ordering_key.as_deref())
            .bind(headers)
            .bind(message.payload.as_ref())
            .bind(&*self.schema);
        publish.execute(connection).await.map_err(|error| failed("add a message", error))?;
        Ok(())
    }

    fn sql(&self, statement: &str) -> String {
        in_schema(statement, &self.schema)
    }
}

#[async_trait]
impl Outbox for PostgresOutbox {
    async fn claim(&self, most: NonZeroU32, held_back: &[String]) -> Result<Option<Box<dyn Claim>>, StoreError> {
        let claim = async {
            let mut transaction = self.pool.begin().await?;
            let limit = sqlx::query(LIMIT).bind(&*self.schema).fetch_one(&mut *transaction).await?;
            if !limit.try_get::<bool, _>("is_alone")? {
                return Ok(None);
            }
            let claim = sqlx::query(AssertSqlSafe(self.sql(CLAIM))).bind(i64::from(most.get())).bind(held_back);
            let rows = claim.fetch_all(&mut *transaction).await?;
            // One damaged row must not hold up the others.
            let readable =
                |row| read(row).inspect_err(|error| tracing::error!(%error, "a row of idem_outbox is unreadable")).ok();
            let messages = rows.iter().filter_map(readable).collect();
            let claim: Box<dyn Claim> = Box::new(PostgresClaim { transaction, messages, delete: self.sql(SENT) });
            Ok(Some(claim))
        };
        claim.await.map_err(|error| failed("claim messages", error))
    }

    async fn backlog(&self) -> Result<Backlog, StoreError> {
        let backlog = async {
            let row = sqlx::query(AssertSqlSafe(self.sql(BACKLOG))).fetch_one(&self.pool).await?;
            let (messages, lag): (i64, i64) = (row.try_get("messages")?, row.try_get("lag")?);
            let lag = Duration::from_micros(lag.try_into().unwrap_or(0));
            Ok(Backlog { messages: messages.try_into().unwrap_or(0), lag })
        };
        backlog.await.map_err(|error| failed("count the messages", error))
    }
}

#[async_trait]
impl Claim for PostgresClaim {
    fn messages(&self) -> &[StoredMessage] {
        &self.messages
    }

    async fn finish(mut self: Box<Self>, sent: &[i64]) -> Result<(), StoreError> {
        let finish = async {
            sqlx::query(AssertSqlSafe(self.delete)).bind(sent).execute(&mut *self.transaction).await?;
            self.transaction.commit().await
        };
        finish.await.map_err(|error| failed("remove sent messages", error))
    }
}

fn read(row: &PgRow) -> Result<StoredMessage, sqlx::Error> {
    let (headers, payload): (String, Vec<u8>) = (row.try_get("headers")?, row.try_get("payload")?);
    let headers = serde_json::from_str(&headers)
        .map_err(|error| sqlx::Error::ColumnDecode { index: "headers".to_owned(), source: error.into() })?;
    let topic: String = row.try_get("topic")?;
    let message = MessageToSend {
        id: row.try_get("id")?,
        ordering_key: row.try_get("ordering_key")?,
        headers,
        ..MessageToSend::new(topic, payload)
    };
    Ok(StoredMessage { sequence: row.try_get("sequence")?, message })
}

fn write_headers(message: &MessageToSend) -> Result<String, StoreError> {
    serde_json::to_string(&message.headers)
        .map_err(|error| failed("write the header fields of a message", sqlx::Error::Encode(error.into())))
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
            Some("42501" | "42P01" | "42703" | "3F000" | "28P01" | "28000") => StoreErrorKind::Misconfigured,
            _ => StoreErrorKind::Unavailable,
        },
        _ => StoreErrorKind::Unavailable,
    };
    StoreError::new(kind, format!("the outbox in Postgres could not {what}")).with_source(error)
}
