//! An outbox in Postgres: one table, and a transaction for each claim.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use idem_core::{StoreError, StoreErrorKind};
use sqlx::pool::PoolConnection;
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, PgConnection, PgPool, Postgres, Row as _};
use tokio::time::timeout;

use crate::message::MessageToSend;
use crate::outbox::{Backlog, Claim, Outbox, OutboxError, StoredMessage};
use crate::row::{read_headers, write_headers};

/// The lock under which the table is made: `IF NOT EXISTS` fails if two sessions make the same table at once.
const TABLE_LOCK: i64 = 0x6964_656d_6f75_7462;

/// How long to wait for the server.
const PATIENCE: Duration = Duration::from_secs(8);

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

/// Limits how long a relay whose machine has disappeared keeps its claim, and says whether it may claim. The lock is none of a key.
const LIMIT: &str = "SELECT pg_catalog.set_config('idle_in_transaction_session_timeout', '30s', TRUE),
    pg_catalog.set_config('tcp_user_timeout', '30s', TRUE),
    pg_catalog.pg_is_in_recovery() OR pg_catalog.current_setting('transaction_read_only')::BOOLEAN AS is_read_only,
    pg_catalog.has_table_privilege($2, 'DELETE') AS may_delete,
    pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtextextended('relay', pg_catalog.hashtextextended($1, 1)))
        AS is_alone";

/// As many messages as fit into 4 MiB, and at least one.
const CLAIM: &str = "SELECT sequence, id, topic, ordering_key, headers, payload FROM (
        SELECT *, sum(octet_length(payload)) OVER (ORDER BY sequence) - octet_length(payload) AS bytes_before FROM (
            SELECT * FROM {schema}.idem_outbox WHERE COALESCE(ordering_key, id) <> ALL($2) ORDER BY sequence LIMIT $1
        ) AS first
    ) AS sized WHERE bytes_before < 4194304 ORDER BY sequence";

const SENT: &str = "DELETE FROM {schema}.idem_outbox WHERE sequence = ANY($1)";

const IS_SAME: &str = "SELECT topic = $2 AND ordering_key IS NOT DISTINCT FROM $3 AND headers = $4 AND payload = $5
    FROM {schema}.idem_outbox WHERE id = $1";

const BACKLOG: &str = "SELECT count(*) AS messages,
        COALESCE((extract(epoch FROM pg_catalog.statement_timestamp() - min(published_at)) * 1000000)::BIGINT, 0) AS lag
    FROM {schema}.idem_outbox";

/// An outbox in the table `idem_outbox` of a schema.
#[derive(Debug, Clone)]
pub struct PostgresOutbox {
    pool: PgPool,
    schema: Arc<str>,
}

/// The connection has an open transaction with the relay's lock. If the claim is not finished, it is closed: a rollback would wait
/// for a server that may be gone.
#[derive(Debug)]
struct PostgresClaim {
    connection: Option<PoolConnection<Postgres>>,
    messages: Vec<StoredMessage>,
    delete: String,
}

impl Drop for PostgresClaim {
    fn drop(&mut self) {
        if let Some(mut connection) = self.connection.take() {
            connection.close_on_drop();
        }
    }
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
        let headers = write_headers(&message.headers)?;
        let about = |statement: &str| {
            sqlx::query(AssertSqlSafe(self.sql(statement)))
                .bind(message.id.clone())
                .bind(message.topic.clone())
                .bind(message.ordering_key.clone())
                .bind(headers.clone())
                .bind(message.payload.to_vec())
        };
        let publish = about(PUBLISH).bind(self.schema.to_string()).execute(&mut *connection).await;
        if publish.map_err(|error| failed("add a message", error))?.rows_affected() == 1 {
            return Ok(());
        }
        let same = about(IS_SAME).fetch_optional(connection).await;
        let same = same.and_then(|row| row.map(|row| row.try_get::<bool, _>(0)).transpose());
        match same.map_err(|error| failed("compare a message", error))? {
            Some(false) => Err(OutboxError::OtherMessage { id: message.id.clone() }),
            // Without a row, another transaction has added the message after this one began.
            Some(true) | None => Ok(()),
        }
    }

    /// Fills a claim. False if another relay has one, or if there is nothing to send.
    async fn fill(
        &self,
        claim: &mut PostgresClaim,
        most: NonZeroU32,
        held_back: &[String],
    ) -> Result<bool, StoreError> {
        let Some(connection) = &mut claim.connection else { return Ok(false) };
        let fill = async {
            sqlx::raw_sql("BEGIN").execute(&mut **connection).await?;
            let limit = sqlx::query(LIMIT).bind(&*self.schema).bind(self.sql("{schema}.idem_outbox"));
            let limit = limit.fetch_one(&mut **connection).await?;
            let (is_read_only, may_delete): (bool, bool) =
                (limit.try_get("is_read_only")?, limit.try_get("may_delete")?);
            let is_alone: bool = limit.try_get("is_alone")?;
            let rows = if is_alone && !is_read_only && may_delete {
                let claim = sqlx::query(AssertSqlSafe(self.sql(CLAIM))).bind(i64::from(most.get())).bind(held_back);
                claim.fetch_all(&mut **connection).await?
            } else {
                Vec::new()
            };
            let messages = rows.iter().map(read).collect::<Result<Vec<_>, sqlx::Error>>()?;
            Ok((is_read_only, may_delete, messages))
        };
        let (is_read_only, may_delete, messages) = fill.await.map_err(|error| failed("claim messages", error))?;
        let refused = match (is_read_only, may_delete) {
            (true, _) => {
                "the relay needs a server that can be written; sent messages could not be removed from this one"
            }
            (_, false) => {
                "the role of the relay may not delete from idem_outbox, so that sent messages could not be removed"
            }
            _ => {
                claim.messages = messages;
                return Ok(!claim.messages.is_empty());
            }
        };
        Err(StoreError::new(StoreErrorKind::Misconfigured, refused))
    }

    fn sql(&self, statement: &str) -> String {
        in_schema(statement, &self.schema)
    }
}

#[async_trait]
impl Outbox for PostgresOutbox {
    async fn claim(&self, most: NonZeroU32, held_back: &[String]) -> Result<Option<Box<dyn Claim>>, StoreError> {
        let connection = self.pool.acquire().await.map_err(|error| failed("claim messages", error))?;
        // Closes the connection, unless it is finished.
        let mut claim =
            Box::new(PostgresClaim { connection: Some(connection), messages: Vec::new(), delete: self.sql(SENT) });
        match timeout(PATIENCE, self.fill(&mut claim, most, held_back)).await {
            Err(_) => Err(late("claim messages")),
            Ok(Err(error)) => Err(error),
            Ok(Ok(true)) => Ok(Some(claim)),
            Ok(Ok(false)) => claim.finish(&[]).await.map(|()| None),
        }
    }

    async fn backlog(&self) -> Result<Backlog, StoreError> {
        let backlog = async {
            let row = sqlx::query(AssertSqlSafe(self.sql(BACKLOG))).fetch_one(&self.pool).await?;
            let (messages, lag): (i64, i64) = (row.try_get("messages")?, row.try_get("lag")?);
            let lag = Duration::from_micros(lag.try_into().unwrap_or(0));
            Ok(Backlog { messages: messages.try_into().unwrap_or(0), lag })
        };
        match timeout(PATIENCE, backlog).await {
            Err(_) => Err(late("count the messages")),
            Ok(backlog) => backlog.map_err(|error| failed("count the messages", error)),
        }
    }
}

#[async_trait]
impl Claim for PostgresClaim {
    fn messages(&self) -> &[StoredMessage] {
        &self.messages
    }

    async fn finish(mut self: Box<Self>, sent: &[i64]) -> Result<(), StoreError> {
        let Some(connection) = &mut self.connection else { return Ok(()) };
        let finish = async {
            if !sent.is_empty() {
                sqlx::query(AssertSqlSafe(self.delete.clone())).bind(sent).execute(&mut **connection).await?;
            }
            sqlx::raw_sql("COMMIT").execute(&mut **connection).await
        };
        match timeout(PATIENCE, finish).await {
            Err(_) => return Err(late("remove sent messages")),
            Ok(Err(error)) => return Err(failed("remove sent messages", error)),
            Ok(Ok(_)) => {}
        }
        // Back to the pool.
        drop(self.connection.take());
        Ok(())
    }
}

fn read(row: &PgRow) -> Result<StoredMessage, sqlx::Error> {
    let (id, ordering_key): (String, Option<String>) = (row.try_get("id")?, row.try_get("ordering_key")?);
    let (topic, headers, payload): (String, String, Vec<u8>) =
        (row.try_get("topic")?, row.try_get("headers")?, row.try_get("payload")?);
    let key = ordering_key.clone().unwrap_or_else(|| id.clone());
    let message = read_headers(&headers).map(|headers| {
        let message = MessageToSend::new(topic, payload);
        MessageToSend { id, ordering_key, headers, ..message }
    });
    Ok(StoredMessage { sequence: row.try_get("sequence")?, key, message })
}

fn in_schema(sql: &str, schema: &str) -> String {
    sql.replace("{schema}", &format!("\"{}\"", schema.replace('"', "\"\"")))
}

fn late(what: &str) -> StoreError {
    StoreError::new(StoreErrorKind::Timeout, format!("the outbox in Postgres could not {what} within {PATIENCE:?}"))
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
