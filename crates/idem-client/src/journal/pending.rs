//! Operations without a final answer, and how they go on.

use std::fmt;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use http::{HeaderMap, StatusCode};
use idem_core::IdempotencyKey;
use reqwest::{Request, Response};
use reqwest_middleware::ClientWithMiddleware;
use sqlx::Row;
use sqlx::sqlite::SqliteRow;

use super::entry::{Entry, damaged, decode_headers};
use super::error::{JournalError, JournalErrorKind, of_sqlite};
use super::kept::KeptOperation;
use super::time::{Stamp, of_millis};
use super::{Journal, Running, begin, commit, owners};
use crate::keep::{Resumed, Rules};
use crate::operation::header_value;

/// An operation without a final answer.
///
/// `Debug` hides the key and the query of the URL.
#[derive(Clone)]
#[non_exhaustive]
pub struct PendingOperation {
    /// Its id in the journal.
    pub id: String,
    /// The method.
    pub method: String,
    /// The URL.
    pub url: String,
    /// The key.
    pub key: String,
    /// What [`Operation::label`](crate::Operation::label) was given.
    pub label: Option<String>,
    /// When it was stored, before its first send.
    pub first_sent: SystemTime,
    /// Whether the clock was ahead at that time, as [`Journal::trust_clock`] was told. Then nothing says how long ago it was
    /// sent, and it is not sent again.
    pub is_age_unknown: bool,
    /// Why it has no final answer, such as `outcome-unknown`; `None` if its process did not come to say so.
    pub stopped: Option<String>,
    /// Whether a process sends it now.
    pub is_running: bool,
}

/// The final answer to an operation.
///
/// `Debug` hides the key, the query of the URL, header values and the body.
#[derive(Clone)]
#[non_exhaustive]
pub struct JournaledAnswer {
    /// The id of the operation in the journal.
    pub id: String,
    /// Its place in the order of arrival. Numbers rise, are not used again, and have gaps.
    pub number: u64,
    /// The method of the operation.
    pub method: String,
    /// The URL of the operation.
    pub url: String,
    /// The key of the operation.
    pub key: String,
    /// The status.
    pub status: StatusCode,
    /// The header fields, without `Set-Cookie`.
    pub headers: HeaderMap,
    /// The body. Of a body over [`Settings::body_limit`](crate::Settings::body_limit), only the beginning.
    pub body: Bytes,
    /// When it arrived.
    pub answered_at: SystemTime,
}

/// Why an operation was not resumed, or has no final answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ResumeError {
    /// The journal did not give it; nothing was sent.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// It was sent, and has no final answer. [`Error::of`](crate::Error::of) says why.
    #[error(transparent)]
    Client(#[from] reqwest_middleware::Error),
}

impl Journal {
    /// The operations without a final answer, the oldest first.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub async fn pending(&self) -> Result<Vec<PendingOperation>, JournalError> {
        let query =
            "SELECT id, owner, method, url, key, label, first_sent_ms, doubt, stopped FROM operations WHERE answered_ms IS NULL
            ORDER BY first_sent_ms, id";
        let rows = sqlx::query(query).fetch_all(&self.shared.pool).await;
        let rows = rows.map_err(|error| of_sqlite("list its operations", error))?;
        rows.iter().map(|row| self.pending_of(row)).collect()
    }

    fn pending_of(&self, row: &SqliteRow) -> Result<PendingOperation, JournalError> {
        let failed = |error| of_sqlite("read an operation", error);
        let id: String = row.try_get("id").map_err(failed)?;
        let owner: String = row.try_get("owner").map_err(failed)?;
        let stamp = Stamp::read(row)?;
        Ok(PendingOperation {
            is_running: self.is_running(&id, &owner)?,
            method: row.try_get("method").map_err(failed)?,
            url: row.try_get("url").map_err(failed)?,
            key: row.try_get("key").map_err(failed)?,
            label: row.try_get("label").map_err(failed)?,
            first_sent: UNIX_EPOCH + of_millis(stamp.first_sent_ms()),
            is_age_unknown: stamp.is_age_unknown(),
            stopped: row.try_get("stopped").map_err(failed)?,
            id,
        })
    }

    /// Whether a task of this process, or another process, sends an operation.
    ///
    /// If the caller in another process dropped the operation, it counts as running until that process ends or resumes it.
    fn is_running(&self, id: &str, owner: &str) -> Result<bool, JournalError> {
        if owner == self.shared.owner.id {
            let running = self.shared.running.lock().unwrap_or_else(PoisonError::into_inner);
            return Ok(running.contains(id));
        }
        owners::is_alive(&self.shared.path, owner).map_err(|error| {
            let message =
                "the journal cannot tell whether the operation's process lives; check the modes of its folder";
            JournalError::new(JournalErrorKind::Unavailable, message).with_source(error)
        })
    }

    /// Sends an operation again, with the same key and the same bytes, until it has a final answer. It has its own deadline anew.
    ///
    /// `client` must be one that [`client`](crate::client()) made. `add_credentials` gets the request before it is sent, and adds
    /// what the journal does not keep, such as `Authorization`. They have to be credentials of the same account as before: under
    /// another one the key is new, and the server runs the operation again. [`PendingOperation::label`] helps to choose. Nothing
    /// else may change: with another body, the server answers that the key belongs to another request.
    ///
    /// # Errors
    /// If the operation is not pending, is sent by another process, or is damaged; if the clock was found behind, until
    /// [`trust_clock`](Self::trust_clock); and if there is no final answer, for example because the server's retention is over.
    ///
    /// # Cancellation safety
    /// Dropping the future stops the sending. The operation stays in the journal.
    pub async fn resume(
        &self,
        id: &str,
        client: &ClientWithMiddleware,
        add_credentials: impl FnOnce(&mut Request),
    ) -> Result<Response, ResumeError> {
        let (entry, resumed) = self.claim(id).await?;
        let mut request = entry.request()?;
        // A client without this crate's middleware sends the key as well.
        if let Some(key) = header_value(&resumed.key, resumed.rules.bare_key) {
            request.headers_mut().insert("idempotency-key", key);
        }
        add_credentials(&mut request);
        let mut extensions = http::Extensions::new();
        extensions.insert(resumed);
        Ok(client.execute_with_extensions(request, &mut extensions).await?)
    }

    /// Makes this process the one that sends an operation.
    async fn claim(&self, id: &str) -> Result<(Entry, Resumed), JournalError> {
        let failed = |error| of_sqlite("take an operation over", error);
        let running = || {
            JournalError::new(
                JournalErrorKind::Running,
                "the operation is being sent by another task or process; wait for it",
            )
        };
        let marked = Running::mark(&self.shared, id).ok_or_else(running)?;
        let mut transaction = begin(&self.shared.pool).await?;
        let row = sqlx::query("SELECT * FROM operations WHERE id = ? AND answered_ms IS NULL")
            .bind(id)
            .fetch_optional(&mut *transaction)
            .await
            .map_err(failed)?;
        let Some(row) = row else {
            let message = "the journal has no such operation, or it has its final answer";
            return Err(JournalError::new(JournalErrorKind::NotPending, message));
        };
        let owner: String = row.try_get("owner").map_err(failed)?;
        if owner != self.shared.owner.id && self.is_running(id, &owner)? {
            return Err(running());
        }
        let entry = Entry::read(&row)?;
        let sent_before = match Stamp::read(&row)?.age(&mut transaction).await {
            Ok(age) => age,
            Err(error) => {
                // What the journal has learned of the clock stays.
                commit(transaction).await?;
                return Err(error);
            }
        };
        let retention_s: Option<i64> = row.try_get("retention_s").map_err(failed)?;
        let trusted_ms: Option<i64> = row.try_get("trusted_retention_ms").map_err(failed)?;
        let deadline = of_millis(row.try_get("deadline_ms").map_err(failed)?);
        let claimed = sqlx::query("UPDATE operations SET owner = ?, stopped = NULL WHERE id = ?")
            .bind(&self.shared.owner.id)
            .bind(id)
            .execute(&mut *transaction)
            .await;
        claimed.map_err(failed)?;
        commit(transaction).await?;
        let resumed = Resumed {
            key: IdempotencyKey::new(&entry.key).map_err(|_| damaged())?,
            kept: Arc::new(KeptOperation { running: marked }),
            sent_before,
            stated_retention: retention_s
                .map(|seconds| Duration::from_secs(u64::try_from(seconds).unwrap_or_default())),
            rules: Rules { bare_key: entry.bare_key, retention: trusted_ms.map(of_millis) },
            deadline,
        };
        Ok((entry, resumed))
    }

    /// The final answers that are still kept, in the order of their arrival: at most `limit` of them, from the first one on whose
    /// [`number`](JournaledAnswer::number) is higher than `after`. 0 is before all.
    ///
    /// All together take [`JournalConfig::keep_bytes`](crate::JournalConfig::keep_bytes) at most.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub async fn answers(&self, after: u64, limit: u32) -> Result<Vec<JournaledAnswer>, JournalError> {
        let query = "SELECT id, method, url, key, status, answer_headers, answer_body, answered_ms, answer_number FROM operations
            WHERE answer_bytes > 0 AND answer_number > ? ORDER BY answer_number LIMIT ?";
        let after = i64::try_from(after).unwrap_or(i64::MAX);
        let rows = sqlx::query(query).bind(after).bind(limit).fetch_all(&self.shared.pool).await;
        let rows = rows.map_err(|error| of_sqlite("list its answers", error))?;
        rows.iter().map(answer_of).collect()
    }

    /// Removes an operation, with its answer if it has one: once the answer is used, or if the operator of the server has said
    /// what became of the operation.
    ///
    /// # Errors
    /// If a process sends the operation now, the journal does not have it, or the file cannot be written.
    pub async fn forget(&self, id: &str) -> Result<(), JournalError> {
        let failed = |error| of_sqlite("remove an operation", error);
        let mut transaction = begin(&self.shared.pool).await?;
        let row = sqlx::query("SELECT owner, answered_ms IS NULL FROM operations WHERE id = ?").bind(id);
        let row = row.fetch_optional(&mut *transaction).await.map_err(failed)?;
        let Some(row) = row else {
            return Err(JournalError::new(JournalErrorKind::NotPending, "the journal has no such operation"));
        };
        let (owner, is_pending): (String, bool) = (row.try_get(0).map_err(failed)?, row.try_get(1).map_err(failed)?);
        if is_pending && self.is_running(id, &owner)? {
            let message = "the operation is being sent by another task or process; wait for it";
            return Err(JournalError::new(JournalErrorKind::Running, message));
        }
        let removed = sqlx::query("DELETE FROM operations WHERE id = ?").bind(id).execute(&mut *transaction).await;
        removed.map_err(failed)?;
        commit(transaction).await
    }
}

fn answer_of(row: &SqliteRow) -> Result<JournaledAnswer, JournalError> {
    let failed = |error| of_sqlite("read an answer", error);
    let status: u16 = row.try_get("status").map_err(failed)?;
    let headers: Vec<u8> = row.try_get("answer_headers").map_err(failed)?;
    let body: Vec<u8> = row.try_get("answer_body").map_err(failed)?;
    Ok(JournaledAnswer {
        id: row.try_get("id").map_err(failed)?,
        number: row.try_get::<i64, _>("answer_number").map_err(failed)?.unsigned_abs(),
        method: row.try_get("method").map_err(failed)?,
        url: row.try_get("url").map_err(failed)?,
        key: row.try_get("key").map_err(failed)?,
        status: StatusCode::from_u16(status).map_err(|_| damaged())?,
        headers: decode_headers(&headers).ok_or_else(damaged)?,
        body: body.into(),
        answered_at: UNIX_EPOCH + of_millis(row.try_get("answered_ms").map_err(failed)?),
    })
}

impl fmt::Debug for PendingOperation {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("PendingOperation")
            .field("id", &self.id)
            .field("method", &self.method)
            .field("url", &without_query(&self.url))
            .field("first_sent", &self.first_sent)
            .field("is_age_unknown", &self.is_age_unknown)
            .field("stopped", &self.stopped)
            .field("is_running", &self.is_running)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for JournaledAnswer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("JournaledAnswer")
            .field("id", &self.id)
            .field("number", &self.number)
            .field("method", &self.method)
            .field("url", &without_query(&self.url))
            .field("status", &self.status)
            .field("body_bytes", &self.body.len())
            .field("answered_at", &self.answered_at)
            .finish_non_exhaustive()
    }
}

fn without_query(url: &str) -> &str {
    url.split(['?', '#']).next().unwrap_or_default()
}
