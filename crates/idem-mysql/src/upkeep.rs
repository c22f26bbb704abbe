//! What operators need: purges, notes of repairs, lists of records, health.

use std::num::NonZeroU32;

use idem_core::{
    MissingPrivilege, Origin, RecordId, RecordSummary, Repair, RepairNote, ScanPosition, StoreError, StoreErrorKind,
    Timestamp,
};
use sqlx::Row as _;
use tokio::time::timeout;

use crate::error::{is_connection_useless, is_contended, is_denied, may_be_done, store_error, unreadable};
use crate::records::{Records, misanswered};
use crate::row::{ORIGIN_COLUMNS, REPAIR_COLUMNS, origin, privilege_probes, repair, summary, summary_columns};
use crate::server::{MySqlHealth, SETTINGS, Settings};
use crate::session::Session;
use crate::sql::{BEGIN, NOW, Sql};
use crate::timeouts::VERB_TIMEOUT;

/// The most records that one transaction of a purge removes: a few milliseconds of work.
const PURGE_BATCH: u32 = 500;

/// The next records, where the part after them begins, and the time.
pub(crate) struct Part {
    pub(crate) records: Vec<Result<RecordSummary, StoreError>>,
    pub(crate) next: Option<ScanPosition>,
    pub(crate) now: Timestamp,
}

impl Records {
    /// Removes at most `limit` expired records, and returns how many.
    pub(crate) async fn purge(&self, limit: NonZeroU32) -> Result<u32, StoreError> {
        let mut purged = 0;
        loop {
            let batch = PURGE_BATCH.min(limit.get() - purged);
            let removed = timeout(VERB_TIMEOUT, self.purge_batch(batch)).await.unwrap_or_else(|_| {
                Err(StoreError::new(StoreErrorKind::Timeout, format!("could not purge within {VERB_TIMEOUT:?}")))
            })?;
            purged += removed;
            if removed < batch || purged >= limit.get() {
                return Ok(purged);
            }
        }
    }

    /// A record never expires before its lease ends (a constraint of the table), so no live lease is deleted. Rows that verbs
    /// or other purges have locked are skipped.
    async fn purge_batch(&self, limit: u32) -> Result<u32, StoreError> {
        let failed = |error| store_error("purge", error);
        let mut session = Session::of(&self.pool).await.map_err(failed)?;
        let mut sql = Sql::new(BEGIN);
        sql.push("SELECT id FROM ").push(&self.tables.records).push(" WHERE expires_at<=").push(NOW).push("+");
        sql.number(self.offset.micros())
            .push(" ORDER BY expires_at LIMIT ")
            .number(limit)
            .push(" FOR UPDATE SKIP LOCKED");
        let rows = session.run(sql).await.map_err(failed)?;
        // One statement for all would read a small table as a whole, and wait for each locked row.
        let mut sql = Sql::default();
        for row in &rows {
            let id: Vec<u8> = row.try_get(0).map_err(unreadable)?;
            sql.push("DELETE FROM ").push(&self.tables.records).push(" WHERE id=").bytes(&id).push(";");
        }
        sql.push("COMMIT");
        let sql = if rows.is_empty() { Sql::new("ROLLBACK") } else { sql };
        session.run(sql).await.map_err(failed)?;
        session.give_back();
        u32::try_from(rows.len()).map_err(|_| misanswered())
    }

    /// Reads the records after `from` in the order of their ids, without header fields and bodies.
    pub(crate) async fn part(
        &self,
        what: &str,
        from: Option<&ScanPosition>,
        limit: NonZeroU32,
    ) -> Result<Part, StoreError> {
        let from = from.map_or(&[][..], ScanPosition::as_bytes);
        let mut sql = Sql::new(format!("SELECT {} FROM {} WHERE id>", summary_columns(), self.tables.records));
        sql.bytes(from).push(" ORDER BY id LIMIT ").number(limit.get()).push(";SELECT ").push(NOW);
        let rows = self.fetch(what, sql).await?;
        let (time, rows) = rows.split_last().ok_or_else(misanswered)?;
        let now: i64 = time.try_get(0).map_err(unreadable)?;
        let part = rows.iter().map(summary).collect::<Result<Vec<_>, _>>().map_err(unreadable)?;
        for (id, record) in &part {
            if let Err(error) = record {
                tracing::warn!(record = %id, error = error as &dyn std::error::Error, "a record cannot be read");
            }
        }
        let is_last = part.len() < limit.get() as usize;
        Ok(Part {
            next: part.last().filter(|_| !is_last).map(|(id, _)| ScanPosition::after(id)),
            records: part.into_iter().map(|(_, record)| record).collect(),
            now: Timestamp::from_unix_micros(now.saturating_add(self.offset.micros())),
        })
    }

    /// Where a record came from.
    pub(crate) async fn origin(&self, id: &RecordId) -> Result<Option<Origin>, StoreError> {
        let mut sql = Sql::new(format!("SELECT {ORIGIN_COLUMNS} FROM {} WHERE id=", self.tables.records));
        let rows = self
            .fetch("look where a record came from", {
                sql.bytes(id.as_bytes());
                sql
            })
            .await?;
        rows.first().map(|row| origin(row, 0)).transpose().map_err(unreadable)
    }

    pub(crate) async fn note(&self, note: &RepairNote) -> Result<(), StoreError> {
        for _ in 0..self.rounds() {
            let noted = timeout(VERB_TIMEOUT, self.try_note(note)).await.unwrap_or_else(|_| {
                let message = format!("could not note a repair within {VERB_TIMEOUT:?}");
                Err(StoreError::new(StoreErrorKind::Timeout, message))
            })?;
            if noted {
                return Ok(());
            }
        }
        let message =
            "could not note a repair: connections were lost, or other sessions noted it at the same time; repeat it";
        Err(StoreError::new(StoreErrorKind::Unavailable, message))
    }

    /// False if another session was in the way, and nothing was done.
    async fn try_note(&self, note: &RepairNote) -> Result<bool, StoreError> {
        let what = "note a repair";
        let mut session = Session::of(&self.pool).await.map_err(|error| store_error(what, error))?;
        let mut sql = Sql::new(format!("{BEGIN}SELECT {REPAIR_COLUMNS} FROM {} WHERE action=", self.tables.repairs));
        sql.bytes(note.action.as_bytes()).push(" FOR UPDATE");
        let rows = match session.run(sql).await {
            Ok(rows) => rows,
            Err(error) => {
                session.recover(&error).await;
                let again = is_contended(&error) || is_connection_useless(&error);
                return if again { Ok(false) } else { Err(store_error(what, error)) };
            }
        };
        let known = rows.first().map(repair).transpose().map_err(unreadable)?.map(|repair| repair.note);
        let mut sql = Sql::default();
        match known {
            None => self.insert_note(&mut sql, note),
            Some(known) if !known.is_of_the_same_repair(note) => return Err(RepairNote::action_is_taken()),
            Some(known) => {
                let outcome = RepairNote::outcome_after(known.outcome, note.outcome.clone());
                sql.push("UPDATE ").push(&self.tables.repairs).push(" SET outcome=");
                sql.optional(outcome.as_deref(), |sql, outcome| {
                    sql.text(outcome);
                });
                sql.push(" WHERE action=").bytes(note.action.as_bytes()).push(";");
            }
        }
        self.tables.expect_fits(&sql)?;
        sql.push("COMMIT");
        match session.run(sql).await {
            Ok(_) => {
                session.give_back();
                Ok(true)
            }
            Err(error) => {
                session.recover(&error).await;
                if is_contended(&error) {
                    return Ok(false);
                }
                let is_unknown = may_be_done(&error);
                let error = store_error(what, error);
                Err(if is_unknown { error.indeterminate() } else { error })
            }
        }
    }

    fn insert_note(&self, sql: &mut Sql, note: &RepairNote) {
        sql.push("INSERT INTO ").push(&self.tables.repairs);
        sql.push(" (action,record,actor,reason,resolution,outcome,at) VALUES (");
        sql.bytes(note.action.as_bytes()).push(",").bytes(note.record.as_bytes());
        for text in [&note.actor, &note.reason, &note.resolution] {
            sql.push(",").text(text);
        }
        sql.push(",").optional(note.outcome.as_deref(), |sql, outcome| {
            sql.text(outcome);
        });
        sql.push(",").push(NOW).push("+").number(self.offset.micros()).push(");");
    }

    pub(crate) async fn repairs(&self, limit: NonZeroU32) -> Result<Vec<Repair>, StoreError> {
        let mut sql =
            Sql::new(format!("SELECT {REPAIR_COLUMNS} FROM {} ORDER BY number DESC LIMIT ", self.tables.repairs));
        sql.number(limit.get());
        let rows = self.fetch("list repairs", sql).await?;
        rows.iter().map(repair).collect::<Result<_, _>>().map_err(unreadable)
    }

    pub(crate) async fn settings(&self) -> Result<Settings, StoreError> {
        let rows = self.fetch("ask for the settings of the server", Sql::new(SETTINGS)).await?;
        let settings = Settings::of(&rows).map_err(unreadable)?;
        self.tables.set_max_packet(settings.max_packet());
        Ok(settings)
    }

    /// The privileges that the user lacks. The server has no function that tells.
    pub(crate) async fn missing_privileges(&self) -> Result<Vec<MissingPrivilege>, StoreError> {
        let look = async {
            let failed = |error| store_error("ask for the privileges of the user", error);
            let mut session = Session::of(&self.pool).await.map_err(failed)?;
            let mut missing = Vec::new();
            for (privilege, table, statement) in privilege_probes(&self.tables.records, &self.tables.repairs) {
                match session.run(Sql::new(statement)).await {
                    Ok(_) => {}
                    Err(error) if is_denied(&error) => missing.push(MissingPrivilege::new(privilege, table)),
                    Err(error) => return Err(failed(error)),
                }
            }
            session.give_back();
            Ok(missing)
        };
        timeout(VERB_TIMEOUT, look).await.unwrap_or_else(|_| {
            let message = format!("could not ask for the privileges of the user within {VERB_TIMEOUT:?}");
            Err(StoreError::new(StoreErrorKind::Timeout, message))
        })
    }

    pub(crate) async fn renew_identity(&self) -> Result<(), StoreError> {
        let renew = async {
            let failed = |error| store_error("give the records a new identity", error);
            let mut session = Session::of(&self.pool).await.map_err(failed)?;
            let sql = Sql::new(format!("UPDATE {} SET identity=RANDOM_BYTES(16)", self.tables.identity));
            session.run(sql).await.map_err(failed)?;
            session.give_back();
            Ok(())
        };
        timeout(VERB_TIMEOUT, renew).await.unwrap_or_else(|_| {
            let message = format!("could not give the records a new identity within {VERB_TIMEOUT:?}");
            Err(StoreError::new(StoreErrorKind::Timeout, message))
        })
    }

    pub(crate) async fn health(&self) -> Result<MySqlHealth, StoreError> {
        let settings = self.settings().await?;
        let mut sql = Sql::new("SELECT CAST(table_rows AS SIGNED) FROM information_schema.tables WHERE table_schema=");
        sql.text(&self.tables.database).push(" AND table_name='idem_records'");
        let rows = self.fetch("ask for the health of the server", sql).await?;
        let records: Option<i64> = rows.first().map(|row| row.try_get(0)).transpose().map_err(unreadable)?.flatten();
        Ok(MySqlHealth {
            version: settings.version().to_owned(),
            records: records.unwrap_or_default().unsigned_abs(),
            durability: settings.durability(),
        })
    }
}
