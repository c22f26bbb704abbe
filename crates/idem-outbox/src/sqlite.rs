//! An outbox in SQLite: one table, and a row that says which relay sends.

use std::num::NonZeroU32;
use std::time::Duration;

use async_trait::async_trait;
use idem_core::{StoreError, StoreErrorKind};
use sqlx::sqlite::SqliteRow;
use sqlx::{Row as _, SqliteConnection, SqlitePool};
use uuid::Uuid;

use crate::message::MessageToSend;
use crate::outbox::{Backlog, Claim, Outbox, OutboxError, StoredMessage};
use crate::row::{read_headers, write_headers};

/// Times are in microseconds since 1970. `AUTOINCREMENT` gives no number a second time.
const TABLES: &str = "
    CREATE TABLE IF NOT EXISTS idem_outbox (
        sequence INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        topic TEXT NOT NULL,
        ordering_key TEXT,
        headers TEXT NOT NULL,
        payload BLOB NOT NULL,
        published_at INTEGER NOT NULL
    ) STRICT;
    CREATE TABLE IF NOT EXISTS idem_outbox_relay (
        only INTEGER PRIMARY KEY CHECK (only = 1),
        claim TEXT NOT NULL,
        until INTEGER NOT NULL
    ) STRICT;";

/// The clock, as an expression.
macro_rules! now {
    () => {
        "CAST(unixepoch('subsec') * 1000000 AS INTEGER)"
    };
}

const PUBLISH: &str = concat!(
    "INSERT INTO idem_outbox (id, topic, ordering_key, headers, payload, published_at) VALUES (?1, ?2, ?3, ?4, ?5, ",
    now!(),
    ") ON CONFLICT (id) DO NOTHING"
);

/// A claim lasts for 30 seconds. One that ends later than that was made before the clock was set back.
const CLAIM: &str = concat!(
    "INSERT INTO idem_outbox_relay (only, claim, until) VALUES (1, ?1, ",
    now!(),
    " + 30000000) ON CONFLICT (only) DO UPDATE SET claim = excluded.claim, until = excluded.until
    WHERE until <= ",
    now!(),
    " OR until > excluded.until"
);

/// As many messages as fit into 4 MiB, and at least one. Keys that are held back are given as a JSON array.
const MESSAGES: &str = "SELECT sequence, id, topic, ordering_key, headers, payload FROM (
        SELECT *, sum(length(payload)) OVER (ORDER BY sequence) - length(payload) AS bytes_before FROM (
            SELECT * FROM idem_outbox WHERE COALESCE(ordering_key, id) NOT IN (SELECT value FROM json_each(?2))
            ORDER BY sequence LIMIT ?1
        )
    ) WHERE bytes_before < 4194304 ORDER BY sequence";

const IS_EMPTY: &str = "SELECT NOT EXISTS (
        SELECT 1 FROM idem_outbox WHERE COALESCE(ordering_key, id) NOT IN (SELECT value FROM json_each(?1)))";

const IS_SAME: &str =
    "SELECT topic = ?2 AND ordering_key IS ?3 AND headers = ?4 AND payload = ?5 FROM idem_outbox WHERE id = ?1";

const SENT: &str = "DELETE FROM idem_outbox WHERE sequence IN (SELECT value FROM json_each(?1))";

const END: &str = "DELETE FROM idem_outbox_relay WHERE claim = ?1";

const BACKLOG: &str =
    concat!("SELECT count(*) AS messages, COALESCE(", now!(), " - min(published_at), 0) AS lag FROM idem_outbox");

/// An outbox in the table `idem_outbox` of a database file.
#[derive(Debug, Clone)]
pub struct SqliteOutbox {
    pool: SqlitePool,
}

#[derive(Debug)]
struct SqliteClaim {
    pool: SqlitePool,
    id: String,
    messages: Vec<StoredMessage>,
}

impl SqliteOutbox {
    /// Opens the outbox, and makes its tables if there are none. The `busy_timeout` of `pool` limits how long the relay waits for
    /// other writers.
    ///
    /// If the process of a relay dies while it sends, the next relay begins after up to 30 seconds.
    ///
    /// # Errors
    /// [`StoreError`] when the file cannot be written.
    pub async fn open(pool: SqlitePool) -> Result<Self, StoreError> {
        sqlx::raw_sql(TABLES).execute(&pool).await.map_err(|error| failed("make its tables", error))?;
        Ok(Self { pool })
    }

    /// Publishes a message in the transaction of `connection`, which is of this outbox's file: the relay sends it once the transaction
    /// has committed. A message whose id is in the outbox already is not added again.
    ///
    /// A transaction of a run, from [`Context::transaction`](idem_core::engine::Context::transaction), dereferences to the
    /// connection.
    ///
    /// # Errors
    /// [`OutboxError`].
    ///
    /// # Cancellation safety
    /// Roll the transaction back if the future is dropped.
    pub async fn publish(&self, connection: &mut SqliteConnection, message: &MessageToSend) -> Result<(), OutboxError> {
        message.check()?;
        let headers = write_headers(&message.headers)?;
        let about = |statement: &'static str| {
            sqlx::query(statement)
                .bind(message.id.clone())
                .bind(message.topic.clone())
                .bind(message.ordering_key.clone())
                .bind(headers.clone())
                .bind(message.payload.to_vec())
        };
        let publish = about(PUBLISH).execute(&mut *connection).await;
        if publish.map_err(|error| failed("add a message", error))?.rows_affected() == 1 {
            return Ok(());
        }
        let same = about(IS_SAME).fetch_one(connection).await.and_then(|row| row.try_get::<bool, _>(0));
        if same.map_err(|error| failed("compare a message", error))? {
            Ok(())
        } else {
            Err(OutboxError::OtherMessage { id: message.id.clone() })
        }
    }
}

#[async_trait]
impl Outbox for SqliteOutbox {
    async fn claim(&self, most: NonZeroU32, held_back: &[String]) -> Result<Option<Box<dyn Claim>>, StoreError> {
        let claim = async {
            let held_back = serde_json::to_string(held_back).map_err(|error| sqlx::Error::Encode(error.into()))?;
            // A relay that finds nothing must not take the write lock.
            let is_empty = sqlx::query(IS_EMPTY).bind(&held_back).fetch_one(&self.pool).await?;
            if is_empty.try_get(0)? {
                return Ok(None);
            }
            let id = Uuid::new_v4().to_string();
            let mut transaction = self.pool.begin_with("BEGIN IMMEDIATE").await?;
            if sqlx::query(CLAIM).bind(&id).execute(&mut *transaction).await?.rows_affected() == 0 {
                return Ok(None);
            }
            let messages = sqlx::query(MESSAGES).bind(most.get()).bind(held_back).fetch_all(&mut *transaction).await?;
            let messages = messages.iter().map(read).collect::<Result<Vec<_>, sqlx::Error>>()?;
            // Another relay may have sent them meanwhile.
            if messages.is_empty() {
                return Ok(None);
            }
            transaction.commit().await?;
            let claim: Box<dyn Claim> = Box::new(SqliteClaim { pool: self.pool.clone(), id, messages });
            Ok(Some(claim))
        };
        claim.await.map_err(|error| failed("claim messages", error))
    }

    async fn backlog(&self) -> Result<Backlog, StoreError> {
        let backlog = async {
            let row = sqlx::query(BACKLOG).fetch_one(&self.pool).await?;
            let (messages, lag): (i64, i64) = (row.try_get("messages")?, row.try_get("lag")?);
            let lag = Duration::from_micros(lag.try_into().unwrap_or(0));
            Ok(Backlog { messages: messages.try_into().unwrap_or(0), lag })
        };
        backlog.await.map_err(|error| failed("count the messages", error))
    }
}

#[async_trait]
impl Claim for SqliteClaim {
    fn messages(&self) -> &[StoredMessage] {
        &self.messages
    }

    async fn finish(self: Box<Self>, sent: &[i64]) -> Result<(), StoreError> {
        /// Each one waits for the `busy_timeout`. A claim that is not finished keeps relays from sending until it is over.
        const ATTEMPTS: usize = 3;
        let mut attempt = 1;
        loop {
            match self.try_finish(sent).await {
                Err(error) if attempt == ATTEMPTS => return Err(failed("remove sent messages", error)),
                Err(_) => attempt += 1,
                Ok(()) => return Ok(()),
            }
        }
    }
}

impl SqliteClaim {
    async fn try_finish(&self, sent: &[i64]) -> Result<(), sqlx::Error> {
        let sent = serde_json::to_string(sent).map_err(|error| sqlx::Error::Encode(error.into()))?;
        let mut transaction = self.pool.begin_with("BEGIN IMMEDIATE").await?;
        sqlx::query(SENT).bind(sent).execute(&mut *transaction).await?;
        sqlx::query(END).bind(&self.id).execute(&mut *transaction).await?;
        transaction.commit().await
    }
}

fn read(row: &SqliteRow) -> Result<StoredMessage, sqlx::Error> {
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

fn failed(what: &str, error: sqlx::Error) -> StoreError {
    let kind = match &error {
        sqlx::Error::ColumnDecode { .. } | sqlx::Error::ColumnNotFound(_) => StoreErrorKind::Corrupt,
        sqlx::Error::PoolTimedOut => StoreErrorKind::Busy,
        _ => StoreErrorKind::Unavailable,
    };
    StoreError::new(kind, format!("the outbox in SQLite could not {what}")).with_source(error)
}
