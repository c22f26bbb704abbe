//! Reads records for operators, in the order of their ids.
//!
//! Ids never change, and the primary key finds where a part begins. Ids are digests, so the rows of a part are spread over the
//! whole table: a scan of a table that does not fit into memory reads the disk for each row.

use std::num::NonZeroU32;

use idem_core::codec::state;
use idem_core::{
    CountPage, Inspection, Origin, Record, RecordCounts, RecordFilter, RecordId, RecordPage, RecordSummary,
    ScanPosition, Scope, StoreError, StoreErrorKind, Timestamp, machine,
};
use sqlx::Row as _;
use sqlx::postgres::PgRow;

use crate::batch::row::{RECORD_COLUMNS, read_record};
use crate::batch::verb::{Lookup, Presence};
use crate::error::{outage, unreadable};
use crate::sql::{BEGIN, Sql, micros, readable};
use crate::upkeep::pool::Upkeep;

/// The columns of a part, without what may be large. `shown` is the state that [`RecordState::of`](idem_core::RecordState::of) names: a
/// released record is no more in progress.
const PART: &str = "WITH part AS MATERIALIZED (SELECT one.xmin AS version, one.id, one.namespace, one.principal, one.operation,
    one.format, one.fingerprint_algorithm, one.fingerprint, one.owner, one.attempt, one.state, one.acquisition, one.takeover,
    one.lease_until, one.not_before, one.checkpoint_name, substring(one.checkpoint_data, 1, 4) AS checkpoint_data, one.status,
    CASE WHEN one.status IS NOT NULL THEN ''::bytea END AS headers, NULL::bytea AS body,
    octet_length(one.body) AS body_bytes,
    CASE WHEN one.state = 1 AND one.owner = decode(repeat('00', 16), 'hex') THEN 5 ELSE one.state END AS shown, one.created_at, one.updated_at, one.expires_at FROM ";

/// The time, the number of rows and the last id of the part.
const WHOLE: &str = " AS at, (SELECT count(*) FROM part) AS scanned,
    (SELECT id FROM part ORDER BY id DESC LIMIT 1) AS last OFFSET 0) AS whole ";

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
        sql.push(self.records.schema.quoted()).push(".idem_records WHERE id = ").bytes(id.as_bytes()).push(";COMMIT");
        let rows = self.run(what, sql, self.client_timeout).await?;
        rows.first().map(|row| origin(row, 0)).transpose().map_err(|error| outage(what, error))
    }

    pub(crate) async fn list(
        &self,
        filter: &RecordFilter,
        from: Option<&ScanPosition>,
        limit: NonZeroU32,
    ) -> Result<RecordPage, StoreError> {
        const FIRST_OF_RECORD: usize = 9;
        let what = "list records";
        let mut sql = self.part(from, limit);
        sql.push(
            "SELECT whole.at, whole.scanned, whole.last, known.id, known.namespace, known.principal, known.operation, ",
        );
        sql.push("known.body_bytes::BIGINT, ").push(RECORD_COLUMNS).push(" FROM (SELECT ");
        self.push_now(&mut sql);
        sql.push(WHOLE).push("LEFT JOIN part AS known ON known.expires_at > whole.at");
        write_filter(&mut sql, filter);
        sql.push(" ORDER BY known.id;COMMIT");
        let rows = self.run(what, sql, self.client_timeout).await?;
        let failed = |error| outage(what, error);
        let (now, scanned, next) = whole(&rows, limit).map_err(failed)?;
        let mut page = RecordPage {
            records: Vec::with_capacity(rows.len()),
            scanned,
            unreadable: 0,
            progress: Some(next.as_ref().map_or(1.0, ScanPosition::progress)),
            next,
            now,
        };
        for row in &rows {
            let Some(id) = row.try_get::<Option<Vec<u8>>, _>(3).map_err(failed)? else { continue };
            let id = RecordId::from_bytes(id.try_into().map_err(|_| unreadable("the id has not 32 bytes"))?);
            match read_record(row, FIRST_OF_RECORD) {
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
        let mut sql = self.part(from, limit);
        sql.push("SELECT whole.at, whole.scanned, whole.last, count(*) FILTER (WHERE NOT is_known)");
        let live = |condition: String| format!(", count(*) FILTER (WHERE is_known AND NOT is_expired AND {condition})");
        let running = state::IN_PROGRESS;
        sql.push(&live(format!("shown = {running} AND lease_until > whole.at")));
        sql.push(&live(format!("shown = {running} AND lease_until <= whole.at")));
        for settled in
            [state::COMPLETED, state::FAILED_TERMINAL, state::FAILED_OUTCOME_UNKNOWN, state::FAILED_RETRYABLE]
        {
            sql.push(&live(format!("shown = {settled}")));
        }
        sql.push(", count(*) FILTER (WHERE is_known AND is_expired), coalesce(sum(body_bytes), 0)::BIGINT");
        sql.push(&format!(", min(created_at) FILTER (WHERE is_known AND NOT is_expired AND shown = {running})"));
        sql.push(", min(expires_at) FILTER (WHERE is_known AND is_expired) FROM (SELECT ");
        self.push_now(&mut sql);
        sql.push(WHOLE)
            .push("LEFT JOIN LATERAL (SELECT part.*, part.expires_at <= whole.at AS is_expired, part.format = ");
        sql.number(idem_core::RECORD_FORMAT).push(" AS is_known FROM part) AS known ON TRUE ");
        sql.push("GROUP BY whole.at, whole.scanned, whole.last;COMMIT");
        let rows = self.run(what, sql, self.client_timeout).await?;
        let failed = |error| outage(what, error);
        let (now, _, next) = whole(&rows, limit).map_err(failed)?;
        let row = rows.first().ok_or_else(|| no_answer(what))?;
        let number = |column: usize| row.try_get::<i64, _>(column).map(i64::unsigned_abs).map_err(failed);
        let time = |column: usize| {
            let micros = row.try_get::<Option<i64>, _>(column).map_err(failed)?;
            Ok::<_, StoreError>(micros.map(Timestamp::from_unix_micros))
        };
        let counts = RecordCounts {
            unreadable: number(3)?,
            in_progress: number(4)?,
            abandoned: number(5)?,
            completed: number(6)?,
            failed: number(7)?,
            outcome_unknown: number(8)?,
            retryable: number(9)?,
            expired: number(10)?,
            body_bytes: number(11)?,
            oldest_in_progress: time(12)?,
            oldest_expired: time(13)?,
        };
        Ok(CountPage { counts, progress: Some(next.as_ref().map_or(1.0, ScanPosition::progress)), next, now })
    }

    /// Begins a statement about the rows after `from`.
    fn part(&self, from: Option<&ScanPosition>, limit: NonZeroU32) -> Sql {
        let mut sql = Sql::default();
        sql.push(BEGIN).push(&self.local_settings).push(PART).push(self.records.schema.quoted());
        sql.push(".idem_records AS one WHERE ");
        match from {
            Some(from) => sql.push("one.id > ").bytes(from.as_bytes()),
            None => sql.push("TRUE"),
        };
        sql.push(" ORDER BY one.id LIMIT ").number(limit.get()).push(") ");
        sql
    }

    fn push_now(&self, sql: &mut Sql) {
        sql.push(self.records.schema.quoted()).push(".idem_now_v1(").number(self.records.offset.micros()).push(")");
    }
}

/// Writes the conditions of [`RecordFilter::selects`].
fn write_filter(sql: &mut Sql, filter: &RecordFilter) {
    if !filter.states.is_empty() {
        sql.push(" AND known.shown = ANY (").numbers(filter.states.iter().map(|name| Some(name.number())));
        sql.push("::INTEGER[])");
    }
    if let Some(age) = filter.older_than {
        sql.push(" AND known.created_at <= whole.at - ").number(micros(age));
    }
    if filter.abandoned {
        sql.push(" AND known.shown = 1 AND known.lease_until <= whole.at");
    }
    let wanted = [
        (" AND known.namespace = ", &filter.namespace),
        (" AND known.principal = ", &filter.principal),
        (" AND known.operation = ", &filter.operation),
    ];
    for (condition, text) in wanted {
        if let Some(text) = text {
            sql.push(condition).push("convert_from(").bytes(&readable(text)).push(",'UTF8')");
        }
    }
}

/// The store's time, how many rows the part has, and where the next one begins.
fn whole(rows: &[PgRow], limit: NonZeroU32) -> Result<(Timestamp, u64, Option<ScanPosition>), sqlx::Error> {
    let row = rows.first().ok_or(sqlx::Error::RowNotFound)?;
    let (now, scanned): (i64, i64) = (row.try_get(0)?, row.try_get(1)?);
    let last: Option<Vec<u8>> = row.try_get(2)?;
    let next = last.filter(|_| scanned >= i64::from(limit.get())).map(ScanPosition::from_bytes);
    Ok((Timestamp::from_unix_micros(now), scanned.unsigned_abs(), next))
}

fn summary(row: &PgRow, id: RecordId, record: &Record) -> Result<RecordSummary, sqlx::Error> {
    let body_bytes: Option<i64> = row.try_get(7)?;
    let summary = RecordSummary::new(id, Some(origin(row, 4)?), record);
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

fn no_answer(what: &str) -> StoreError {
    StoreError::new(StoreErrorKind::Corrupt, format!("could not {what}: the server answered nothing"))
}
