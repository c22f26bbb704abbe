//! The journal as the middleware uses it.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use http::{HeaderMap, StatusCode};
use sqlx::{Row as _, Sqlite, Transaction};
use uuid::Uuid;

use super::entry::{Entry, encode_headers};
use super::error::{JournalError, JournalErrorKind, of_sqlite};
use super::time::{Stamp, millis, now_ms};
use super::{Journal, Running, begin, commit};
use crate::keep::{Beginning, Begun, Keep, KeepError, Kept};
use crate::operation::bytes_of;

#[async_trait]
impl Keep for Journal {
    async fn begin(&self, operation: Beginning<'_>) -> Result<Begun, KeepError> {
        let Beginning { request, deadline, rules, .. } = operation;
        let id = Uuid::new_v4().to_string();
        let entry = Entry::of(&operation, bytes_of(request).ok_or("the body is not in memory")?)?;
        let digest = entry.digest();
        // Before the row, so that no other task of this process takes the operation over.
        let running = Running::mark(&self.shared, &id).ok_or("the random id of the operation is taken")?;
        let mut transaction = begin(&self.shared.pool).await?;
        let earlier = sent_earlier(&mut transaction, &entry).await?;
        let sent_before = match &earlier {
            Some(earlier) => match earlier.age(&mut transaction).await {
                Ok(age) => age,
                Err(error) => {
                    // What the journal has learned of the clock stays.
                    commit(transaction).await?;
                    return Err(error.into());
                }
            },
            None => Duration::ZERO,
        };
        let Entry { method, url, headers, body, key, bare_key, label } = entry;
        let insert = "INSERT INTO operations
            (id, owner, method, url, headers, body, key, bare_key, label, digest, first_sent_ms, deadline_ms,
            trusted_retention_ms)
            VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)";
        let inserted = sqlx::query(insert)
            .bind(&id)
            .bind(&self.shared.owner.id)
            .bind(method)
            .bind(url)
            .bind(headers)
            .bind(body)
            .bind(key)
            .bind(bare_key)
            .bind(label)
            .bind(&digest[..])
            .bind(earlier.map_or_else(now_ms, |earlier| earlier.first_sent_ms()))
            .bind(millis(deadline))
            .bind(rules.retention.map(millis))
            .execute(&mut *transaction)
            .await;
        inserted.map_err(|error| of_sqlite("store an operation", error))?;
        commit(transaction).await?;
        Ok(Begun { kept: Arc::new(KeptOperation { running }), sent_before })
    }
}

/// When the same operation was sent first, if its answer is still kept. The server counts its retention from then.
async fn sent_earlier(transaction: &mut Transaction<'_, Sqlite>, entry: &Entry) -> Result<Option<Stamp>, JournalError> {
    let failed = |error| of_sqlite("look for the key of an operation", error);
    let same = "SELECT id, answered_ms IS NULL, first_sent_ms, doubt FROM operations
        WHERE key = ? AND method = ? AND url = ? AND label IS ? ORDER BY answered_ms IS NULL DESC, first_sent_ms LIMIT 1";
    let row = sqlx::query(same).bind(&entry.key).bind(&entry.method).bind(&entry.url).bind(&entry.label);
    let Some(row) = row.fetch_optional(&mut **transaction).await.map_err(failed)? else { return Ok(None) };
    if row.try_get(1).map_err(failed)? {
        let id: String = row.try_get(0).map_err(failed)?;
        let message = format!(
            "operation {id} of the journal has the same key, and no final answer yet; resume it, or forget it once you know what \
             became of it"
        );
        return Err(JournalError::new(JournalErrorKind::Pending, message));
    }
    Stamp::read(&row).map(Some)
}

/// One operation that this process sends.
#[derive(Debug)]
pub(super) struct KeptOperation {
    pub(super) running: Running,
}

impl KeptOperation {
    /// Begins a change of the operation. It has to be this process's, and without an answer.
    async fn change(&self) -> Result<Transaction<'static, Sqlite>, JournalError> {
        let shared = &self.running.shared;
        let mut transaction = begin(&shared.pool).await?;
        let mine = "SELECT count(*) FROM operations WHERE id = ? AND owner = ? AND answered_ms IS NULL";
        let mine: i64 = sqlx::query_scalar(mine)
            .bind(&self.running.id)
            .bind(&shared.owner.id)
            .fetch_one(&mut *transaction)
            .await
            .map_err(|error| of_sqlite("find an operation", error))?;
        if mine != 1 {
            return Err(JournalError::new(
                JournalErrorKind::NotPending,
                "the operation is not in the journal any more",
            ));
        }
        Ok(transaction)
    }
}

#[async_trait]
impl Kept for KeptOperation {
    fn id(&self) -> &str {
        &self.running.id
    }

    async fn retention_is(&self, retention: Duration) -> Result<(), KeepError> {
        let mut transaction = self.change().await?;
        let updated = sqlx::query("UPDATE operations SET retention_s = ? WHERE id = ?")
            .bind(i64::try_from(retention.as_secs()).unwrap_or(i64::MAX))
            .bind(&self.running.id)
            .execute(&mut *transaction)
            .await;
        updated.map_err(|error| of_sqlite("store a retention", error))?;
        Ok(commit(transaction).await?)
    }

    async fn answered(&self, status: StatusCode, headers: &HeaderMap, body: &[u8]) -> Result<(), KeepError> {
        let failed = |error| of_sqlite("store an answer", error);
        let mut transaction = self.change().await?;
        let number = "UPDATE answers SET last_number = last_number + 1 RETURNING last_number";
        let number: i64 = sqlx::query_scalar(number).fetch_one(&mut *transaction).await.map_err(failed)?;
        let headers = encode_headers(headers)?;
        let answer =
            "UPDATE operations SET status = ?, answer_headers = ?, answer_body = ?, answered_ms = ?, answer_number = ?,
            answered_used_ms = (SELECT used_ms FROM clock), stopped = NULL,
            answer_bytes = length(headers) + length(body) + ? WHERE id = ?";
        let answered = sqlx::query(answer)
            .bind(status.as_u16())
            .bind(&headers)
            .bind(body)
            .bind(now_ms())
            .bind(number)
            .bind(i64::try_from(headers.len().saturating_add(body.len())).unwrap_or(i64::MAX))
            .bind(&self.running.id)
            .execute(&mut *transaction)
            .await;
        answered.map_err(failed)?;
        self.running.shared.limits.enforce(&mut transaction).await?;
        Ok(commit(transaction).await?)
    }

    async fn stopped(&self, why: &str) -> Result<(), KeepError> {
        // Without an owner, so that any process can resume it.
        let mut transaction = self.change().await?;
        let stopped = sqlx::query("UPDATE operations SET stopped = ?, owner = '' WHERE id = ?")
            .bind(why)
            .bind(&self.running.id)
            .execute(&mut *transaction)
            .await;
        stopped.map_err(|error| of_sqlite("note why an operation stopped", error))?;
        Ok(commit(transaction).await?)
    }
}
