//! Records, read from and written to their rows.

use std::array::TryFromSliceError;
use std::collections::HashMap;

use bytes::Bytes;
use idem_core::codec::FlatRecord;
use idem_core::{
    Origin, OwnerToken, Record, RecordId, RecordSummary, Repair, RepairNote, Scope, StoreError, Timestamp,
};
use sqlx::query::Query;
use sqlx::sqlite::{SqliteArguments, SqliteRow};
use sqlx::{AssertSqlSafe, Row as _, Sqlite, SqliteConnection};

use crate::error::unreadable;

/// The columns that an update changes, besides the principal: all but the origin of the record.
const CHANGING: [&str; 18] = [
    "format",
    "fingerprint_algorithm",
    "fingerprint",
    "owner",
    "attempt",
    "state",
    "acquisition",
    "takeover",
    "lease_until",
    "not_before",
    "checkpoint_name",
    "checkpoint_data",
    "status",
    "headers",
    "body",
    "created_at",
    "updated_at",
    "expires_at",
];

/// The most rows for which the statement that saves them is kept prepared.
const SMALL: usize = 4;

/// Where a record came from, for operators to read.
#[derive(Debug, Clone)]
pub(crate) struct Source {
    namespace: String,
    principal: Option<String>,
    operation: String,
}

impl Source {
    /// The same without the principal.
    pub(crate) fn erased(self) -> Self {
        Self { principal: self.principal.map(|_| String::new()), ..self }
    }
}

impl From<&Origin> for Source {
    fn from(origin: &Origin) -> Self {
        Self {
            namespace: origin.namespace.to_string(),
            principal: origin.scope.principal().map(str::to_owned),
            operation: origin.scope.operation().to_owned(),
        }
    }
}

impl From<Source> for Origin {
    fn from(source: Source) -> Self {
        let Source { namespace, principal, operation } = source;
        let scope = match principal {
            Some(principal) => Scope::new(principal, operation),
            None => Scope::single_tenant(operation),
        };
        Self { namespace: namespace.into(), scope }
    }
}

/// A record, and where it came from.
#[derive(Debug, Clone)]
pub(crate) struct Row {
    pub(crate) record: Record,
    pub(crate) source: Source,
}

/// What was found, by id.
pub(crate) type Found = HashMap<RecordId, Result<Row, StoreError>>;

/// Loads the records with these ids, expired or not; a record that cannot be read is an error. `before` is SQL that runs
/// first, in the same exchange with the thread of the connection: the exchange costs the time, not SQLite.
pub(crate) async fn load(
    connection: &mut SqliteConnection,
    before: &str,
    ids: &[RecordId],
) -> Result<Found, sqlx::Error> {
    // There are few numbers of placeholders, so that the connection has the statement prepared. The last id fills those left
    // over.
    let count = ids.len().next_power_of_two();
    let (columns, places) = (CHANGING.join(", "), vec!["?"; count].join(", "));
    let sql = format!(
        "{before}SELECT {columns}, id, namespace, principal, operation FROM main.idem_records WHERE id IN ({places})"
    );
    let mut query = sqlx::query(AssertSqlSafe(sql));
    let padding = ids.last().into_iter().cycle().take(count - ids.len());
    for id in ids.iter().chain(padding) {
        query = query.bind(id.as_bytes().as_slice());
    }
    let rows = query.fetch_all(connection).await?;
    let found = rows.iter().map(|row| {
        let (id, found) = (id(row)?, read(row));
        if let Err(error) = &found {
            tracing::warn!(record = %id, error = error as &dyn std::error::Error, "a record cannot be read");
        }
        Ok((id, found))
    });
    found.collect()
}

/// Reads the records after `from` in the order of their ids, at most `limit`, without header fields and bodies. The error of a record
/// that cannot be read comes with its id.
pub(crate) async fn load_part(
    connection: impl sqlx::SqliteExecutor<'_>,
    from: &[u8],
    limit: u32,
) -> Result<Vec<(RecordId, Result<RecordSummary, StoreError>)>, sqlx::Error> {
    let columns = CHANGING.map(|column| match column {
        // Of the headers only the trace: its mark of 4 bytes and 25 of its own.
        "headers" => {
            "CASE WHEN status IS NULL THEN NULL WHEN substr(headers, 1, 4) = x'ffffffff' THEN substr(headers, 1, 29) ELSE x'' END"
        }
        "body" => "NULL",
        "checkpoint_data" => "substr(checkpoint_data, 1, 4)",
        column => column,
    });
    let sql = format!(
        "SELECT {}, id, namespace, principal, operation, length(body) FROM main.idem_records WHERE id > ? ORDER BY id LIMIT ?",
        columns.join(", ")
    );
    let rows = sqlx::query(AssertSqlSafe(sql)).bind(from).bind(limit).fetch_all(connection).await?;
    let summary = |row: &SqliteRow, id: RecordId| {
        let found = read(row)?;
        let body_bytes: Option<i64> = row.try_get(22).map_err(unreadable)?;
        let summary = RecordSummary::new(id, Some(found.source.into()), &found.record);
        Ok(summary.with_body_bytes(body_bytes.map(i64::unsigned_abs)))
    };
    rows.iter().map(|row| id(row).map(|id| (id, summary(row, id)))).collect()
}

/// Where a record came from.
pub(crate) async fn load_origin(
    connection: impl sqlx::SqliteExecutor<'_>,
    id: &RecordId,
) -> Result<Option<Origin>, sqlx::Error> {
    let query = sqlx::query("SELECT namespace, principal, operation FROM main.idem_records WHERE id = ?");
    let row = query.bind(id.as_bytes().as_slice()).fetch_optional(connection).await?;
    let origin = |row: SqliteRow| {
        let source = Source { namespace: row.try_get(0)?, principal: row.try_get(1)?, operation: row.try_get(2)? };
        Ok(source.into())
    };
    row.map(origin).transpose()
}

/// Saves these records and deletes those that are gone, then runs `after` in the same exchange.
pub(crate) async fn save(
    connection: &mut SqliteConnection,
    rows: &[(RecordId, Row)],
    gone: &[RecordId],
    after: &str,
) -> Result<(), sqlx::Error> {
    let mut sql = String::new();
    if !rows.is_empty() {
        let values = vec!["(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"; rows.len()];
        let changes = CHANGING.map(|column| format!("{column} = excluded.{column}"));
        sql = format!(
            "INSERT INTO main.idem_records ({}, id, namespace, principal, operation) VALUES {} \
             ON CONFLICT (id) DO UPDATE SET principal = excluded.principal, {};",
            CHANGING.join(", "),
            values.join(", "),
            changes.join(", "),
        );
    }
    if !gone.is_empty() {
        sql.push_str(&format!("DELETE FROM main.idem_records WHERE id IN ({});", vec!["?"; gone.len()].join(", ")));
    }
    sql.push_str(after);
    if sql.is_empty() {
        return Ok(());
    }
    // Statements of many sizes would evict each other from the prepared statements of the connection.
    let mut query = sqlx::query(AssertSqlSafe(sql)).persistent(rows.len() + gone.len() <= SMALL);
    for (id, Row { record, source }) in rows {
        query = bind(query, record.into())
            .bind(id.as_bytes().as_slice())
            .bind(&source.namespace)
            .bind(&source.principal)
            .bind(&source.operation);
    }
    for id in gone {
        query = query.bind(id.as_bytes().as_slice());
    }
    query.execute(connection).await.map(drop)
}

/// Binds the columns in the order of [`CHANGING`].
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

fn read(row: &SqliteRow) -> Result<Row, StoreError> {
    let record = Record::try_from(flat(row).map_err(unreadable)?).map_err(unreadable)?;
    let source = source(row).map_err(unreadable)?;
    Ok(Row { record, source })
}

fn id(row: &SqliteRow) -> Result<RecordId, sqlx::Error> {
    let bytes: &[u8] = row.try_get(18)?;
    bytes.try_into().map(RecordId::from_bytes).map_err(|error: TryFromSliceError| sqlx::Error::Decode(error.into()))
}

fn source(row: &SqliteRow) -> Result<Source, sqlx::Error> {
    Ok(Source { namespace: row.try_get(19)?, principal: row.try_get(20)?, operation: row.try_get(21)? })
}

fn flat(row: &SqliteRow) -> Result<FlatRecord, sqlx::Error> {
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

/// Reads a note of a repair, and when it was made.
pub(crate) fn repair(row: &SqliteRow) -> Result<Repair, sqlx::Error> {
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
