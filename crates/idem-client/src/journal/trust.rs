//! What an operator says about a clock that the journal found behind.

use std::time::{SystemTime, UNIX_EPOCH};

use super::error::{JournalError, JournalErrorKind, of_sqlite};
use super::time::{DOUBTED, TOLERANCE_MS, UNKNOWN, millis, now_ms};
use super::{Journal, begin, commit};

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
