//! Notes of repairs.

use std::num::NonZeroU32;

use idem_core::{OwnerToken, RecordId, Repair, RepairNote, StoreError, Timestamp};
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
        sql.push(")) ON CONFLICT (action) DO UPDATE SET outcome = COALESCE(known.outcome, excluded.outcome) WHERE ");
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
