//! How much time has passed, by a machine's clock that may be wrong.
//!
//! Nothing is sent after the server's retention, so an operation must never look younger than it is. It does if the clock was ahead
//! when the operation was stored, or if the clock is behind now. Both look the same: the clock is behind the latest time that the
//! journal has seen. From then on the journal resumes nothing, until an operator says what was wrong.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use sqlx::sqlite::SqliteRow;
use sqlx::{Row as _, Sqlite, Transaction};

use super::error::{JournalError, JournalErrorKind, of_sqlite};

/// How far the clock may be behind the journal. Time services correct a clock by less.
pub(super) const TOLERANCE_MS: i64 = 60_000;

/// By how much an answer ages between two uses of the journal, at most. So a clock that jumps ahead removes no answers.
const LONGEST_STEP_MS: i64 = 10 * 60 * 1000;

/// What an operation's age depends on.
pub(super) struct Stamp {
    first_sent_ms: i64,
    doubt: i64,
}

/// The clock was found behind after the operation was stored, and no operator has said why.
pub(super) const DOUBTED: i64 = 1;
/// The clock was ahead when the operation was stored.
pub(super) const UNKNOWN: i64 = 2;

impl Stamp {
    /// Reads the columns `first_sent_ms` and `doubt`.
    pub(super) fn read(row: &SqliteRow) -> Result<Self, JournalError> {
        let failed = |error| of_sqlite("read when an operation was stored", error);
        Ok(Self {
            first_sent_ms: row.try_get("first_sent_ms").map_err(failed)?,
            doubt: row.try_get("doubt").map_err(failed)?,
        })
    }

    pub(super) fn first_sent_ms(&self) -> i64 {
        self.first_sent_ms
    }

    pub(super) fn is_age_unknown(&self) -> bool {
        self.doubt == UNKNOWN
    }

    /// How long ago the operation was stored; an error if that is not known.
    pub(super) async fn age(&self, transaction: &mut Transaction<'_, Sqlite>) -> Result<Duration, JournalError> {
        let failed = |error| of_sqlite("read the time", error);
        let row = sqlx::query("SELECT latest_ms, behind_ms FROM clock").fetch_one(&mut **transaction).await;
        let row = row.map_err(failed)?;
        let (latest, behind): (i64, Option<i64>) = (row.try_get(0).map_err(failed)?, row.try_get(1).map_err(failed)?);
        if let Some(behind) = behind {
            let message = format!(
                "the clock was found {} s behind the journal, so nothing says how long ago the operation was sent; set the clock \
                 right, and say by Journal::trust_clock what was wrong with it",
                behind / 1000
            );
            return Err(JournalError::new(JournalErrorKind::ClockSetBack, message));
        }
        if self.is_age_unknown() {
            let message = "the clock was ahead when the operation was stored, so nothing says how long ago it was sent; find out \
                           from the resource itself, and forget it";
            return Err(JournalError::new(JournalErrorKind::AgeUnknown, message));
        }
        Ok(of_millis(latest.saturating_sub(self.first_sent_ms)))
    }
}

/// Notes the present time, and whether the clock is behind.
pub(super) async fn tick(transaction: &mut Transaction<'_, Sqlite>) -> Result<(), JournalError> {
    let failed = |error| of_sqlite("note the time", error);
    let now = now_ms();
    let row = sqlx::query("SELECT latest_ms, behind_ms IS NULL FROM clock").fetch_one(&mut **transaction).await;
    let row = row.map_err(failed)?;
    let (latest, is_trusted): (i64, bool) = (row.try_get(0).map_err(failed)?, row.try_get(1).map_err(failed)?);
    if now < latest.saturating_sub(TOLERANCE_MS) {
        // All operations until now, and later ones only if they are stored at a time in the future.
        let doubted = sqlx::query("UPDATE operations SET doubt = ? WHERE doubt = 0 AND (? OR first_sent_ms > ?)");
        let doubted = doubted.bind(DOUBTED).bind(is_trusted).bind(now).execute(&mut **transaction).await;
        doubted.map_err(failed)?;
        let behind = sqlx::query("UPDATE clock SET behind_ms = max(coalesce(behind_ms, 0), ?)").bind(latest - now);
        behind.execute(&mut **transaction).await.map_err(failed)?;
    }
    let noted = "UPDATE clock SET used_ms = used_ms + min(max(?1 - latest_ms, 0), ?2), latest_ms = max(latest_ms, ?1)";
    let noted = sqlx::query(noted).bind(now).bind(LONGEST_STEP_MS).execute(&mut **transaction).await;
    noted.map(drop).map_err(failed)
}

pub(super) fn now_ms() -> i64 {
    millis(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default())
}

pub(super) fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

pub(super) fn of_millis(millis: i64) -> Duration {
    Duration::from_millis(u64::try_from(millis).unwrap_or_default())
}
