//! Reads records for operators.

use std::num::NonZeroU32;

use idem_core::{
    CountPage, Inspection, Origin, Record, RecordCounts, RecordFilter, RecordId, RecordPage, RecordSummary,
    ScanPosition, Scope, StoreError, Timestamp, machine,
};
use sqlx::Row as _;
use sqlx::postgres::PgRow;

use crate::batch::row::read_record;
use crate::batch::verb::{Lookup, Presence};
use crate::error::{outage, unreadable};
use crate::sql::{BEGIN, Sql, micros, readable};
use crate::upkeep::place::{Place, Progress};
use crate::upkeep::pool::Upkeep;

impl Upkeep {
    pub(crate) async fn inspect(&self, id: &RecordId) -> Result<Inspection, StoreError> {
        let lock = self.records.schema.lock(id);
        let Lookup { now, presence, row } = self.records.read(*id, Some(lock)).await?;
        let record = row.map(|row| row.record).filter(|record| machine::current(Some(record), now).is_some());
        let origin = if record.is_some() { self.origin(id).await? } else { None };
        Ok(Inspection { record, origin, runs_in_transaction: presence == Presence::Running, now })
    }

    async fn origin(&self, id: &RecordId) -> Result<Option<Origin>, StoreError> {
        let what = "look where a record came from";
        let mut sql = Sql::default();
        sql.push(BEGIN).push(&self.local_settings).push("SELECT namespace, principal, operation FROM ");
        sql.push(self.records.schema.quoted()).push(".idem_records WHERE id OPERATOR(pg_catalog.=) ");
        sql.bytes(id.as_bytes()).push(";COMMIT");
        let rows = self.run(what, sql, self.client_timeout).await?;
        rows.first().map(|row| origin(row, 0)).transpose().map_err(|error| outage(what, error))
    }

    pub(crate) async fn list(
        &self,
        filter: &RecordFilter,
        from: Option<&ScanPosition>,
        limit: NonZeroU32,
    ) -> Result<RecordPage, StoreError> {
        /// The first column of the record itself.
        const RECORD: usize = 13;
        let what = "list records";
        let place = Place::of(from)?;
        let mut sql = self.call(".idem_list_v1(", place, limit);
        if filter.states.is_empty() {
            sql.push("NULL,");
        } else {
            sql.numbers(filter.states.iter().map(|name| Some(name.number()))).push(",");
        }
        sql.optional_number(filter.older_than.map(micros)).push(if filter.abandoned { ",TRUE" } else { ",FALSE" });
        for text in [&filter.namespace, &filter.principal, &filter.operation] {
            sql.push(",").optional_bytes(text.as_deref().map(readable).as_deref());
        }
        sql.push(",").optional_bytes(filter.trace.as_ref().map(|trace| trace.as_bytes().as_slice()));
        sql.push(");COMMIT");
        let rows = self.run(what, sql, self.client_timeout).await?;
        let failed = |error| outage(what, error);
        let (now, Progress { scanned, next, done }) = whole(&rows, place, limit).map_err(failed)?;
        let records = Vec::with_capacity(rows.len());
        let mut page = RecordPage { records, scanned, unreadable: 0, progress: Some(done), next, now };
        for row in &rows {
            let Some(id) = row.try_get::<Option<Vec<u8>>, _>(6).map_err(failed)? else { continue };
            let id = RecordId::from_bytes(id.try_into().map_err(|_| unreadable("the id has not 32 bytes"))?);
            match read_record(row, RECORD) {
                Ok(record) => page.records.push(summary(row, id, &record).map_err(failed)?),
                Err(error) => {
                    tracing::warn!(record = %id, error = &error as &dyn std::error::Error, "a record cannot be read");
                    page.unreadable += 1;
                }
            }
        }
        Ok(page)
    }

    pub(crate) async fn count(&self, from: Option<&ScanPosition>, limit: NonZeroU32) -> Result<CountPage, StoreError> {
        let what = "count records";
        let place = Place::of(from)?;
        let mut sql = self.call(".idem_count_v1(", place, limit);
        sql.number(idem_core::RECORD_FORMAT).push(");COMMIT");
        let rows = self.run(what, sql, self.client_timeout).await?;
        let failed = |error| outage(what, error);
        let (now, Progress { next, done, .. }) = whole(&rows, place, limit).map_err(failed)?;
        let row = rows.first().ok_or(sqlx::Error::RowNotFound).map_err(failed)?;
        let number = |column: usize| row.try_get::<i64, _>(column).map(i64::unsigned_abs).map_err(failed);
        let time = |column: usize| {
            let micros = row.try_get::<Option<i64>, _>(column).map_err(failed)?;
            Ok::<_, StoreError>(micros.map(Timestamp::from_unix_micros))
        };
        let counts = RecordCounts {
            unreadable: number(6)?,
            in_progress: number(7)?,
            abandoned: number(8)?,
            completed: number(9)?,
            failed: number(10)?,
            outcome_unknown: number(11)?,
            retryable: number(12)?,
            expired: number(13)?,
            body_bytes: number(14)?,
            oldest_in_progress: time(15)?,
            oldest_expired: time(16)?,
            made_last_hour: number(17)?,
            unsuccessful_last_hour: number(18)?,
        };
        Ok(CountPage { counts, progress: Some(done), next, now })
    }

    /// Begins the call of a function on the rows behind a place.
    fn call(&self, function: &str, from: Place, limit: NonZeroU32) -> Sql {
        let mut sql = Sql::default();
        sql.push(BEGIN).push(&self.local_settings).push("SELECT * FROM ").push(self.records.schema.quoted());
        sql.push(function).number(self.records.offset.micros()).push(",");
        for number in [from.block, u32::from(from.line), from.relation, limit.get()] {
            sql.number(number).push(",");
        }
        sql
    }
}

/// The store's time, and how far the scan has come.
fn whole(rows: &[PgRow], from: Place, limit: NonZeroU32) -> Result<(Timestamp, Progress), sqlx::Error> {
    let row = rows.first().ok_or(sqlx::Error::RowNotFound)?;
    Ok((Timestamp::from_unix_micros(row.try_get(0)?), Progress::read(row, from, limit.get())?))
}

fn summary(row: &PgRow, id: RecordId, record: &Record) -> Result<RecordSummary, sqlx::Error> {
    let body_bytes: Option<i64> = row.try_get(10)?;
    let summary = RecordSummary::new(id, Some(origin(row, 7)?), record);
    Ok(summary.with_body_bytes(body_bytes.map(i64::unsigned_abs)))
}

fn origin(row: &PgRow, first: usize) -> Result<Origin, sqlx::Error> {
    let (namespace, operation): (String, String) = (row.try_get(first)?, row.try_get(first + 2)?);
    let scope = match row.try_get::<Option<String>, _>(first + 1)? {
        Some(principal) => Scope::new(principal, operation),
        None => Scope::single_tenant(operation),
    };
    Ok(Origin { namespace: namespace.into(), scope })
}
