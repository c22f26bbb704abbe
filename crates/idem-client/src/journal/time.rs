//! How much time has passed, by a machine's clock that may be wrong.
//!
//! Nothing is sent after the server's retention, so an operation must never look younger than it is. It does if the clock was ahead
//! when the operation was stored, or if the clock is behind now. Both look the same: the clock is behind the latest time that the
//! journal has seen. From then on the journal resumes nothing, until an operator says what was wrong.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use sqlx::sqlite::SqliteRow;
use sqlx::{Row as _, Sqlite, Transaction};

use super::error::{JournalError, JournalErrorKind, of_sqlite};
use super::{Journal, begin, commit};

/// How far the clock may be behind the journal. Time services correct a clock by less.
const TOLERANCE_MS: i64 = 60_000;

/// By how much an answer ages between two uses of the journal, at most. So a clock that jumps ahead removes no answers.
const LONGEST_STEP_MS: i64 = 10 * 60 * 1000;

/// What was wrong with the machine's clock. See [`Journal::trust_clock`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ClockFault {
    /// It was behind. The times at which operations were stored are right.
    WasBehind,
    /// It was ahead. The times of operations that were stored meanwhile are wrong.
    WasAhead {
        /// Since when, at the earliest. If this is not known, `UNIX_EPOCH`: then no operation that was stored before the fault
        /// was noticed is sent.
        since: SystemTime,
    },
}

/// What an operation's age depends on.
pub(super) struct Stamp {
    first_sent_ms: i64,
    doubt: i64,
}

/// The clock was found behind after the operation was stored, and no operator has said why.
const DOUBTED: i64 = 1;
/// The clock was ahead when the operation was stored.
const UNKNOWN: i64 = 2;

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

impl Journal {
    /// Says that the machine's clock is right, after it was found behind ([`JournalErrorKind::ClockSetBack`]), and what was
    /// wrong. From now on operations can be resumed again.
    ///
    /// - After [`ClockFault::WasBehind`], all operations can be resumed.
    /// - After [`ClockFault::WasAhead`], those can be resumed that were stored after the fault was noticed, or whose
    ///   [`first_sent`](crate::PendingOperation::first_sent) is before `since`. The others have an unknown age and are never sent
    ///   again: find out from the resource itself, and forget them.
    ///
    /// # Errors
    /// If the clock is still behind, although it is said that it was behind; and if the file cannot be written.
    pub async fn trust_clock(&self, fault: ClockFault) -> Result<(), JournalError> {
        let failed = |error| of_sqlite("note that the clock is right", error);
        let mut transaction = begin(&self.shared.pool).await?;
        let now = now_ms();
        match fault {
            ClockFault::WasBehind => {
                let latest: i64 = sqlx::query_scalar("SELECT latest_ms FROM clock")
                    .fetch_one(&mut *transaction)
                    .await
                    .map_err(failed)?;
                if now < latest.saturating_sub(TOLERANCE_MS) {
                    let message = format!(
                        "the clock is still {} s behind the journal; set it right, or say that it was ahead before",
                        (latest - now) / 1000
                    );
                    return Err(JournalError::new(JournalErrorKind::ClockSetBack, message));
                }
            }
            ClockFault::WasAhead { since } => {
                let since_ms = millis(since.duration_since(UNIX_EPOCH).unwrap_or_default());
                let unknown = sqlx::query("UPDATE operations SET doubt = ? WHERE doubt = ? AND first_sent_ms >= ?")
                    .bind(UNKNOWN)
                    .bind(DOUBTED)
                    .bind(since_ms)
                    .execute(&mut *transaction)
                    .await;
                unknown.map_err(failed)?;
            }
        }
        let trusted = sqlx::query("UPDATE operations SET doubt = 0 WHERE doubt = ?").bind(DOUBTED);
        trusted.execute(&mut *transaction).await.map_err(failed)?;
        let noted = sqlx::query("UPDATE clock SET latest_ms = ?, behind_ms = NULL").bind(now);
        noted.execute(&mut *transaction).await.map_err(failed)?;
        commit(transaction).await
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
