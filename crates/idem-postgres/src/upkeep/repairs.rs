//! Notes of repairs.

use std::num::NonZeroU32;

use idem_core::{Erase, OwnerToken, Record, RecordId, Repair, RepairNote, StoreError, Timestamp};
use sqlx::Row as _;
use sqlx::postgres::PgRow;

use crate::error::outage;
use crate::sql::{BEGIN, Sql, readable};
use crate::upkeep::pool::Upkeep;

impl Upkeep {
    pub(crate) async fn note(&self, note: &RepairNote) -> Result<(), StoreError> {
        let mut sql = Sql::default();
        sql.push(BEGIN).push(&self.local_settings).push("INSERT INTO ").push(self.records.schema.quoted());
        sql.push(".idem_repairs AS known (action, record, actor, reason, resolution, outcome, at) VALUES (");
        sql.bytes(note.action.as_bytes()).push(",").bytes(note.record.as_bytes());
        for text in [Some(&note.actor), Some(&note.reason), Some(&note.resolution), note.outcome.as_ref()] {
            match text {
                Some(text) => sql.push(",pg_catalog.convert_from(").bytes(&readable(text)).push(",'UTF8')"),
                None => sql.push(",NULL"),
            };
        }
        sql.push(",").push(self.records.schema.quoted()).push(".idem_now_v1(").number(self.records.offset.micros());
        sql.push(")) ON CONFLICT (action) DO UPDATE SET outcome = CASE WHEN ");
        for (at, effective) in RepairNote::EFFECTIVE.into_iter().enumerate() {
            let or = if at == 0 { "" } else { " OR " };
            sql.push(or).push("known.outcome OPERATOR(pg_catalog.=) ").text(effective);
        }
        sql.push(" THEN known.outcome ELSE COALESCE(excluded.outcome, known.outcome) END WHERE ");
        for (at, column) in ["record", "actor", "reason", "resolution"].into_iter().enumerate() {
            let and = if at == 0 { "" } else { " AND " };
            sql.push(and).push("known.").push(column).push(" OPERATOR(pg_catalog.=) excluded.").push(column);
        }
        sql.push(" RETURNING 1;COMMIT");
        match self.run("note a repair", sql, self.client_timeout).await?.is_empty() {
            true => Err(RepairNote::action_is_taken()),
            false => Ok(()),
        }
    }

    /// Replaces a row by what is left of it after an erasure, takes its principal away, and that of the request from the notes; `false`
    /// if the row has changed. No transaction runs an operation that has its final answer, so no lock is needed.
    pub(crate) async fn erase(&self, request: &Erase, version: i64, next: &Record) -> Result<bool, StoreError> {
        let schema = self.records.schema.quoted();
        let mut sql = Sql::default();
        sql.push(BEGIN).push(&self.local_settings).push("WITH erased AS (UPDATE ").push(schema);
        sql.push(".idem_records AS known SET principal=CASE WHEN known.principal IS NOT NULL THEN '' END");
        sql.push(",owner=").bytes(next.owner.as_bytes()).push(",headers=").bytes(b"");
        sql.push(",body=NULL,checkpoint_name=NULL,checkpoint_data=NULL,updated_at=")
            .number(next.updated_at.unix_micros());
        sql.push(" WHERE known.id OPERATOR(pg_catalog.=) ").bytes(request.id.as_bytes());
        sql.push(" AND known.xmin::pg_catalog.text::pg_catalog.int8 OPERATOR(pg_catalog.=) ").number(version);
        sql.push(" AND ").push(schema).push(".idem_now_v1(").number(self.records.offset.micros());
        sql.push(") OPERATOR(pg_catalog.<) known.expires_at RETURNING known.id)");
        if let Some(principal) = request.principal.as_deref().filter(|principal| !principal.is_empty()) {
            let principal = readable(principal);
            sql.push(",noted AS (UPDATE ")
                .push(schema)
                .push(".idem_repairs AS note SET reason=pg_catalog.replace(reason,");
            sql.push("pg_catalog.convert_from(").bytes(&principal).push(",'UTF8'),").text(RepairNote::ERASED);
            sql.push(") FROM ").push("erased WHERE note.record OPERATOR(pg_catalog.=) erased.id)");
        }
        sql.push("SELECT 1 FROM ").push("erased;COMMIT");
        Ok(!self.run("erase a record", sql, self.client_timeout).await?.is_empty())
    }

    pub(crate) async fn repairs(&self, limit: NonZeroU32) -> Result<Vec<Repair>, StoreError> {
        let what = "list repairs";
        let mut sql = Sql::default();
        sql.push(BEGIN)
            .push(&self.local_settings)
            .push("SELECT action, record, actor, reason, resolution, outcome, at FROM ");
        sql.push(self.records.schema.quoted()).push(".idem_repairs ORDER BY number DESC LIMIT ").number(limit.get());
        sql.push(";COMMIT");
        let rows = self.run(what, sql, self.client_timeout).await?;
        rows.iter().map(repair).collect::<Result<_, _>>().map_err(|error| outage(what, error))
    }
}

fn repair(row: &PgRow) -> Result<Repair, sqlx::Error> {
    let wrong = |_| sqlx::Error::Decode("a token or an id has another length".into());
    let (action, record): (Vec<u8>, Vec<u8>) = (row.try_get(0)?, row.try_get(1)?);
    Ok(Repair {
        at: Timestamp::from_unix_micros(row.try_get(6)?),
        note: RepairNote {
            action: OwnerToken::from_bytes(action.try_into().map_err(wrong)?),
            record: RecordId::from_bytes(record.try_into().map_err(wrong)?),
            actor: row.try_get(2)?,
            reason: row.try_get(3)?,
            resolution: row.try_get(4)?,
            outcome: row.try_get(5)?,
        },
    })
}
