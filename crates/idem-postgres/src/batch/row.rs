//! Reading rows.

use bytes::Bytes;
use idem_core::codec::FlatRecord;
use idem_core::{Record, StoreError, Timestamp};
use sqlx::Row as _;
use sqlx::postgres::PgRow;

use crate::batch::verb::{Lookup, Presence, VersionedRecord};
use crate::error::unreadable;

/// The version of a row `known`, and the record in it, in the order in which [`read_lookup`] reads them.
pub(crate) const RECORD_COLUMNS: &str = "known.version::pg_catalog.text::BIGINT, known.format, \
     known.fingerprint_algorithm, known.fingerprint, known.owner, known.attempt, known.state, known.acquisition, \
     known.takeover, known.lease_until, known.not_before, known.checkpoint_name, known.checkpoint_data, known.status, \
     known.headers, known.body, known.created_at, known.updated_at, known.expires_at";

/// Reads what `idem_acquire_v1` and `idem_lookup_v1` return, from the column `first` on.
pub(crate) fn read_lookup(row: &PgRow, first: usize) -> Result<Lookup, StoreError> {
    let column = |offset: usize| first + offset;
    let number: i32 = row.try_get(column(0)).map_err(unreadable)?;
    let now: i64 = row.try_get(column(1)).map_err(unreadable)?;
    let version: Option<i64> = row.try_get(column(2)).map_err(unreadable)?;
    let presence = match number {
        1 => Presence::Created,
        2 => Presence::Present,
        3 => Presence::Running,
        4 => Presence::Absent,
        _ => return Err(unreadable(format!("an answer has the number {number}, which means nothing"))),
    };
    let row = match version {
        Some(version) if presence != Presence::Created => {
            Some(Box::new(VersionedRecord { version, record: read_record(row, column(3))? }))
        }
        _ => None,
    };
    Ok(Lookup { now: Timestamp::from_unix_micros(now), presence, row })
}

/// Reads the record of [`RECORD_COLUMNS`], without the version before it.
pub(crate) fn read_record(row: &PgRow, first: usize) -> Result<Record, StoreError> {
    let flat = flat(row, first).map_err(unreadable)?;
    if flat.lease_until.is_some_and(|lease_until| lease_until > flat.expires_at) {
        // It would count as absent while its owner runs.
        return Err(unreadable("the record ends before its lease"));
    }
    Record::try_from(flat).map_err(unreadable)
}

fn flat(row: &PgRow, first: usize) -> Result<FlatRecord, sqlx::Error> {
    let column = |offset: usize| first + offset;
    let checkpoint_name = row.try_get::<Option<Vec<u8>>, _>(column(10))?.map(String::from_utf8).transpose();
    Ok(FlatRecord {
        format: i64::from(row.try_get::<i16, _>(column(0))?),
        fingerprint_algorithm: i64::from(row.try_get::<i32, _>(column(1))?),
        fingerprint: row.try_get(column(2))?,
        owner: row.try_get(column(3))?,
        attempt: row.try_get(column(4))?,
        state: i64::from(row.try_get::<i16, _>(column(5))?),
        acquisition: row.try_get::<Option<i16>, _>(column(6))?.map(i64::from),
        takeover: row.try_get::<Option<i16>, _>(column(7))?.map(i64::from),
        lease_until: row.try_get(column(8))?,
        not_before: row.try_get(column(9))?,
        checkpoint_name: checkpoint_name.map_err(|error| sqlx::Error::Decode(error.into()))?,
        checkpoint_data: row.try_get(column(11))?,
        status: row.try_get::<Option<i32>, _>(column(12))?.map(i64::from),
        headers: row.try_get(column(13))?,
        body: row.try_get::<Option<Vec<u8>>, _>(column(14))?.map(Bytes::from),
        created_at: row.try_get(column(15))?,
        updated_at: row.try_get(column(16))?,
        expires_at: row.try_get(column(17))?,
    })
}
