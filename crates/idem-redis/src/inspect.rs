//! Reads records for operators, by `SCAN`.

use std::num::NonZeroU32;

use async_trait::async_trait;
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use idem_core::{
    CountPage, Inspect, Inspection, RecordCounts, RecordFilter, RecordId, RecordPage, RecordSummary, ScanPosition,
    StoreError, StoreErrorKind, Timestamp,
};
use redis::{Cmd, Value};

use crate::error::Phase;
use crate::info::Info;
use crate::reply;
use crate::seen::{Found, Seen};
use crate::store::RedisStore;

/// How many records are read at once.
const AT_ONCE: usize = 16;

/// A part of the records. An error is a record that cannot be read.
struct Part {
    records: Vec<Result<RecordSummary, StoreError>>,
    next: Option<ScanPosition>,
    now: Timestamp,
}

/// Records have no origin here, so that a filter by namespace, principal or operation is an error.
///
/// `SCAN` goes through all keys of the database. A part may have more records than asked for, and a record may come twice if the server
/// resizes its table of keys meanwhile. The records of a Redis Cluster cannot be listed: name one by its id.
#[async_trait]
impl Inspect for RedisStore {
    async fn inspect(&self, id: &RecordId) -> Result<Inspection, StoreError> {
        let seen = self.look("inspect", id).await?;
        Ok(Inspection { record: seen.record().cloned(), origin: None, runs_in_transaction: false, now: seen.now })
    }

    async fn list(
        &self,
        filter: &RecordFilter,
        from: Option<&ScanPosition>,
        limit: NonZeroU32,
    ) -> Result<RecordPage, StoreError> {
        filter.expect_no_origin("redis")?;
        let Part { records, next, now } = self.part("list records", from, limit).await?;
        let (scanned, read) = (records.len() as u64, records.iter().filter(|record| record.is_ok()).count() as u64);
        let records = records.into_iter().flatten().filter(|record| filter.selects(record, now)).collect();
        Ok(RecordPage { records, scanned, unreadable: scanned - read, next, progress: None, now })
    }

    async fn count(&self, from: Option<&ScanPosition>, limit: NonZeroU32) -> Result<CountPage, StoreError> {
        let Part { records, next, now } = self.part("count records", from, limit).await?;
        let mut counts = RecordCounts::default();
        for record in records {
            match record {
                Ok(record) => counts.add(&record, now),
                Err(_) => counts.unreadable += 1,
            }
        }
        Ok(CountPage { counts, next, progress: None, now })
    }
}

impl RedisStore {
    /// Reads a record without awaiting replicas: nothing is answered by it.
    async fn look(&self, what: &str, id: &RecordId) -> Result<Seen, StoreError> {
        let verb = self.verb(what, id, None);
        loop {
            if let Some(seen) = verb.look().await? {
                return Ok(seen);
            }
        }
    }

    async fn part(&self, what: &str, from: Option<&ScanPosition>, limit: NonZeroU32) -> Result<Part, StoreError> {
        if self.transport.is_cluster() {
            let message =
                format!("could not {what}: the records of a Redis Cluster cannot be listed; name one by its id");
            return Err(StoreError::new(StoreErrorKind::Misconfigured, message));
        }
        // A cursor means something to one server only.
        let run = self.run_of_server(what).await?;
        let (cursor, began_on) = match from.map(ScanPosition::as_bytes) {
            Some(from) => from.split_at(from.iter().position(|byte| *byte == b'@').unwrap_or(from.len())),
            None => (&b"0"[..], run.as_bytes()),
        };
        if began_on != run.as_bytes() {
            let message = format!(
                "could not {what}: another server answers than at the beginning, or it was restarted; begin again"
            );
            return Err(StoreError::new(StoreErrorKind::Unavailable, message));
        }
        let mut scan = redis::cmd("SCAN");
        scan.arg(cursor).arg("MATCH").arg(self.shared.keys.pattern()).arg("COUNT").arg(limit.get());
        let [cursor, keys] = reply::table(self.ask_primary(what, &scan).await?)?;
        let Value::Array(keys) = keys else { return Err(reply::other("something else than a table of keys")) };
        let mut ids = Vec::with_capacity(keys.len());
        for key in keys {
            ids.extend(reply::maybe_bytes(key)?.and_then(|key| self.shared.keys.id(&key)));
        }
        let now = self.now(what).await?;
        let read = stream::iter(ids).map(|id| self.summary(what, id)).buffer_unordered(AT_ONCE);
        let records: Vec<Option<_>> = read.try_collect().await?;
        let cursor = reply::maybe_bytes(cursor)?.unwrap_or_default();
        let next = (*cursor != *b"0").then(|| ScanPosition::from_bytes([&cursor[..], run.as_bytes()].concat()));
        Ok(Part { records: records.into_iter().flatten().collect(), next, now })
    }

    /// The summary of a record; `None` if it is gone.
    async fn summary(&self, what: &str, id: RecordId) -> Result<Option<Result<RecordSummary, StoreError>>, StoreError> {
        match self.look(what, &id).await {
            Ok(Seen { found: Found::Record(stored), .. }) => Ok(Some(Ok(RecordSummary::new(id, None, &stored.record)))),
            Ok(Seen { found: Found::Nothing | Found::Begun, .. }) => Ok(None),
            Err(error) if error.kind() == StoreErrorKind::Corrupt => {
                tracing::warn!(record = %id, error = &error as &dyn std::error::Error, "a record cannot be read");
                Ok(Some(Err(error)))
            }
            Err(error) => Err(error),
        }
    }

    /// Names the process of the server, after an `@`.
    async fn run_of_server(&self, what: &str) -> Result<String, StoreError> {
        let info = Info::read(self.ask_primary(what, redis::cmd("INFO").arg("server")).await?)?;
        Ok(format!("@{}", info.text("run_id")))
    }

    /// The time of a server.
    async fn now(&self, what: &str) -> Result<Timestamp, StoreError> {
        let now = reply::server_time(self.ask_primary(what, &redis::cmd("TIME")).await?)?;
        Ok(Timestamp::from_unix_micros(now.unix_micros().saturating_add(self.shared.offset.micros())))
    }

    async fn ask_primary(&self, what: &str, command: &Cmd) -> Result<Value, StoreError> {
        let answers = self.transport.ask_all(command).await.map_err(|failure| failure.of(what, Phase::Serving))?;
        answers.into_iter().next().ok_or_else(|| reply::other("nothing"))
    }
}
