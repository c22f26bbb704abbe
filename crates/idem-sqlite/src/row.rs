//! One record, read from and written to its row.

use bytes::Bytes;
use idem_core::codec::FlatRecord;
use idem_core::{Origin, Record, RecordId, StoreError};
use sqlx::query::Query;
use sqlx::sqlite::{SqliteArguments, SqliteRow};
use sqlx::{Row, Sqlite, SqliteConnection};

use crate::error::{store_error, unreadable};

const SELECT: &str = "SELECT format, fingerprint_algorithm, fingerprint, owner, attempt, state, acquisition, takeover, \
    lease_until, not_before, checkpoint_name, checkpoint_data, status, headers, body, created_at, updated_at, \
    expires_at FROM idem_records WHERE id = ?";

const UPSERT: &str = "INSERT INTO idem_records (format, fingerprint_algorithm, fingerprint, owner, attempt, state, \
    acquisition, takeover, lease_until, not_before, checkpoint_name, checkpoint_data, status, headers, body, \
    created_at, updated_at, expires_at, id, namespace, principal, operation) \
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) \
    ON CONFLICT (id) DO UPDATE SET format = excluded.format, fingerprint_algorithm = excluded.fingerprint_algorithm, \
    fingerprint = excluded.fingerprint, owner = excluded.owner, attempt = excluded.attempt, state = excluded.state, \
    acquisition = excluded.acquisition, takeover = excluded.takeover, lease_until = excluded.lease_until, \
    not_before = excluded.not_before, checkpoint_name = excluded.checkpoint_name, \
    checkpoint_data = excluded.checkpoint_data, status = excluded.status, headers = excluded.headers, \
    body = excluded.body, created_at = excluded.created_at, updated_at = excluded.updated_at, \
    expires_at = excluded.expires_at";

const UPDATE: &str = "UPDATE idem_records SET format = ?, fingerprint_algorithm = ?, fingerprint = ?, owner = ?, \
    attempt = ?, state = ?, acquisition = ?, takeover = ?, lease_until = ?, not_before = ?, checkpoint_name = ?, \
    checkpoint_data = ?, status = ?, headers = ?, body = ?, created_at = ?, updated_at = ?, expires_at = ? \
    WHERE id = ?";

const DELETE: &str = "DELETE FROM idem_records WHERE id = ?";

/// The record with this id, expired or not.
pub(crate) async fn load(connection: &mut SqliteConnection, id: &RecordId) -> Result<Option<Record>, StoreError> {
    let row = sqlx::query(SELECT).bind(id.as_bytes().as_slice()).fetch_optional(connection).await;
    let Some(row) = row.map_err(|error| store_error("read a record", error))? else { return Ok(None) };
    let flat = read(&row).map_err(unreadable)?;
    Record::try_from(flat).map(Some).map_err(unreadable)
}

/// Makes the row say what `record` says. `origin` is known when the record may be new.
pub(crate) async fn save(
    connection: &mut SqliteConnection,
    id: &RecordId,
    origin: Option<&Origin>,
    record: Option<&Record>,
) -> Result<(), StoreError> {
    let id = id.as_bytes().as_slice();
    let query = match (record, origin) {
        (None, _) => sqlx::query(DELETE).bind(id),
        (Some(record), None) => bind(sqlx::query(UPDATE), record.into()).bind(id),
        (Some(record), Some(origin)) => bind(sqlx::query(UPSERT), record.into())
            .bind(id)
            .bind(origin.namespace.as_ref())
            .bind(origin.scope.principal())
            .bind(origin.scope.operation()),
    };
    query.execute(connection).await.map(drop).map_err(|error| store_error("write a record", error))
}

fn bind(query: Query<'_, Sqlite, SqliteArguments>, flat: FlatRecord) -> Query<'_, Sqlite, SqliteArguments> {
    query
        .bind(flat.format)
        .bind(flat.fingerprint_algorithm)
        .bind(flat.fingerprint)
        .bind(flat.owner)
        .bind(flat.attempt)
        .bind(flat.state)
        .bind(flat.acquisition)
        .bind(flat.takeover)
        .bind(flat.lease_until)
        .bind(flat.not_before)
        .bind(flat.checkpoint_name)
        .bind(flat.checkpoint_data)
        .bind(flat.status)
        .bind(flat.headers)
        .bind(flat.body.map(Vec::from))
        .bind(flat.created_at)
        .bind(flat.updated_at)
        .bind(flat.expires_at)
}

fn read(row: &SqliteRow) -> Result<FlatRecord, sqlx::Error> {
    Ok(FlatRecord {
        format: row.try_get(0)?,
        fingerprint_algorithm: row.try_get(1)?,
        fingerprint: row.try_get(2)?,
        owner: row.try_get(3)?,
        attempt: row.try_get(4)?,
        state: row.try_get(5)?,
        acquisition: row.try_get(6)?,
        takeover: row.try_get(7)?,
        lease_until: row.try_get(8)?,
        not_before: row.try_get(9)?,
        checkpoint_name: row.try_get(10)?,
        checkpoint_data: row.try_get(11)?,
        status: row.try_get(12)?,
        headers: row.try_get(13)?,
        body: row.try_get::<Option<Vec<u8>>, _>(14)?.map(Bytes::from),
        created_at: row.try_get(15)?,
        updated_at: row.try_get(16)?,
        expires_at: row.try_get(17)?,
    })
}
