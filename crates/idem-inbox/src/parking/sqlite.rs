//! Parking in SQLite: one table.

use std::num::NonZeroU32;
use std::time::Duration;

use async_trait::async_trait;
use idem_core::{StoreError, StoreErrorKind};
use sqlx::sqlite::SqliteRow;
use sqlx::{Row as _, SqlitePool};

use super::row::{envelope, micros, read_message};
use super::{ParkedMessage, Parking, within};
use crate::message::Message;

/// Times are in microseconds since 1970.
const TABLE: &str = "
    CREATE TABLE IF NOT EXISTS idem_inbox (
        subscriber TEXT NOT NULL,
        key TEXT NOT NULL,
        state TEXT NOT NULL CHECK (state IN ('running', 'parked', 'requested', 'replayed')),
        lost_runs INTEGER NOT NULL DEFAULT 0,
        replays INTEGER NOT NULL DEFAULT 0,
        reason TEXT,
        envelope TEXT,
        payload BLOB,
        parked_at INTEGER,
        changed_at INTEGER NOT NULL,
        PRIMARY KEY (subscriber, key)
    ) STRICT, WITHOUT ROWID;
    CREATE INDEX IF NOT EXISTS idem_inbox_parked ON idem_inbox (subscriber, parked_at, key)
        WHERE state IN ('parked', 'requested');
    CREATE INDEX IF NOT EXISTS idem_inbox_ended ON idem_inbox (subscriber, changed_at) WHERE state IN ('running', 'replayed');";

/// The clock, as an expression.
macro_rules! now {
    () => {
        "CAST(unixepoch('subsec') * 1000000 AS INTEGER)"
    };
}

const BEGIN: &str = concat!(
    "INSERT INTO idem_inbox (subscriber, key, state, lost_runs, changed_at) VALUES (?1, ?2, 'running', 1, ",
    now!(),
    ") ON CONFLICT DO UPDATE SET lost_runs = lost_runs + 1, changed_at = excluded.changed_at RETURNING lost_runs"
);

const FORGET: &str = "DELETE FROM idem_inbox WHERE subscriber = ?1 AND key = ?2 AND state = 'running'";

const REPORT: &str = "UPDATE idem_inbox SET lost_runs = ?3 WHERE subscriber = ?1 AND key = ?2";

const PARK: &str = concat!(
    "INSERT INTO idem_inbox (subscriber, key, state, reason, envelope, payload, parked_at, changed_at)
    VALUES (?1, ?2, 'parked', ?3, ?4, ?5, ",
    now!(),
    ", ",
    now!(),
    ") ON CONFLICT DO UPDATE SET state = 'parked', lost_runs = 0, reason = excluded.reason, envelope = excluded.envelope,
        payload = excluded.payload, parked_at = excluded.parked_at, changed_at = excluded.changed_at
    WHERE state = 'running'"
);

const LIST: &str =
    "SELECT key, reason, envelope, payload, replays, state = 'requested' AS is_requested, parked_at FROM idem_inbox
    WHERE subscriber = ?1 AND (state = 'requested' OR state = 'parked' AND NOT ?2) AND (parked_at, key) > (?3, ?4)
    ORDER BY parked_at, key LIMIT ?5";

const REQUEST: &str = concat!(
    "UPDATE idem_inbox SET state = 'requested', lost_runs = 0, replays = replays + 1, changed_at = ",
    now!(),
    " WHERE subscriber = ?1 AND key = ?2 AND state = 'parked'"
);

const REPLAYED: &str = concat!(
    "UPDATE idem_inbox SET state = CASE WHEN ?4 IS NULL THEN 'replayed' ELSE 'parked' END, reason = COALESCE(?4, reason),
        lost_runs = 0, payload = CASE WHEN ?4 IS NULL THEN x'' ELSE payload END, changed_at = ",
    now!(),
    " WHERE subscriber = ?1 AND key = ?2 AND state = 'requested' AND replays = ?3"
);

const PURGE: &str = concat!(
    "DELETE FROM idem_inbox WHERE (subscriber, key) IN (
        SELECT subscriber, key FROM idem_inbox WHERE subscriber = ?3 AND state IN ('running', 'replayed') AND changed_at <= ",
    now!(),
    "- ?1 LIMIT ?2)"
);

/// Parks messages in the table `idem_inbox` of a database file.
#[derive(Debug, Clone)]
pub struct SqliteParking {
    pool: SqlitePool,
}

impl SqliteParking {
    /// Opens the parking, and makes its table if there is none. The `busy_timeout` of `pool` limits how long it waits for other
    /// writers.
    ///
    /// # Errors
    /// [`StoreError`] when the file cannot be written.
    pub async fn open(pool: SqlitePool) -> Result<Self, StoreError> {
        sqlx::raw_sql(TABLE).execute(&pool).await.map_err(|error| failed("make its table", error))?;
        Ok(Self { pool })
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
        let readable = |row: &SqliteRow| {
            read(row).inspect_err(|error| tracing::error!(%error, "a row of idem_inbox is unreadable")).ok()
        };
        loop {
            let list = sqlx::query(LIST).bind(subscriber).bind(only_requested).bind(parked_at).bind(&key);
            let rows = list.bind(i64::from(most.get())).fetch_all(&self.pool).await?;
            let messages: Vec<_> = rows.iter().filter_map(readable).collect();
            match rows.last() {
                // All of them are damaged, and others may follow.
                Some(last) if messages.is_empty() => {
                    (key, parked_at) = (last.try_get("key")?, last.try_get("parked_at")?);
                }
                _ => return Ok(messages),
            }
        }
    }
}

#[async_trait]
impl Parking for SqliteParking {
    async fn begin(&self, subscriber: &str, key: &str) -> Result<u32, StoreError> {
        let row = sqlx::query(BEGIN).bind(subscriber).bind(key).fetch_one(&self.pool).await;
        let begun: i64 = row.and_then(|row| row.try_get(0)).map_err(|error| failed("count a run", error))?;
        Ok(begun.try_into().unwrap_or(0))
    }

    async fn report(&self, subscriber: &str, key: &str, lost: u32) -> Result<(), StoreError> {
        let report = async {
            if lost == 0 {
                let forgotten = sqlx::query(FORGET).bind(subscriber).bind(key).execute(&self.pool).await?;
                if forgotten.rows_affected() == 1 {
                    return Ok(());
                }
            }
            let report = sqlx::query(REPORT).bind(subscriber).bind(key).bind(i64::from(lost));
            report.execute(&self.pool).await.map(drop)
        };
        report.await.map_err(|error| failed("report a run", error))
    }

    async fn park(&self, subscriber: &str, message: &Message, reason: &str) -> Result<(), StoreError> {
        let envelope =
            envelope(message).map_err(|error| failed("write a message", sqlx::Error::Encode(error.into())))?;
        let park = sqlx::query(PARK).bind(subscriber).bind(message.parking_key()).bind(reason);
        let park = park.bind(envelope).bind(message.payload.as_ref()).execute(&self.pool).await;
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
        let request = sqlx::query(REQUEST).bind(subscriber).bind(key).execute(&self.pool).await;
        Ok(request.map_err(|error| failed("request a replay", error))?.rows_affected() == 1)
    }

    async fn replayed(
        &self,
        subscriber: &str,
        parked: &ParkedMessage,
        failure: Option<&str>,
    ) -> Result<(), StoreError> {
        let report = sqlx::query(REPLAYED).bind(subscriber).bind(parked.message.parking_key());
        let report = report.bind(i64::from(parked.replays)).bind(failure).execute(&self.pool).await;
        report.map(drop).map_err(|error| failed("report a replay", error))
    }

    async fn purge(&self, subscriber: &str, keep: Duration, most: NonZeroU32) -> Result<u32, StoreError> {
        let purge = sqlx::query(PURGE).bind(micros(keep)).bind(i64::from(most.get())).bind(subscriber);
        let purged = purge.execute(&self.pool).await;
        let purged = purged.map_err(|error| failed("purge", error))?;
        Ok(u32::try_from(purged.rows_affected()).unwrap_or(u32::MAX))
    }
}

fn read(row: &SqliteRow) -> Result<ParkedMessage, sqlx::Error> {
    let (envelope, payload): (String, Vec<u8>) = (row.try_get("envelope")?, row.try_get("payload")?);
    let message = read_message(&envelope, payload)
        .map_err(|error| sqlx::Error::ColumnDecode { index: "envelope".to_owned(), source: error.into() })?;
    let replays: i64 = row.try_get("replays")?;
    let (reason, parked_at) = (row.try_get("reason")?, row.try_get("parked_at")?);
    let is_requested = row.try_get("is_requested")?;
    Ok(ParkedMessage::new(message, reason, parked_at, replays.try_into().unwrap_or(0), is_requested))
}

fn failed(what: &str, error: sqlx::Error) -> StoreError {
    let kind = match &error {
        sqlx::Error::ColumnDecode { .. } | sqlx::Error::ColumnNotFound(_) => StoreErrorKind::Corrupt,
        sqlx::Error::PoolTimedOut => StoreErrorKind::Busy,
        _ => StoreErrorKind::Unavailable,
    };
    StoreError::new(kind, format!("the parking in SQLite could not {what}")).with_source(error)
}
