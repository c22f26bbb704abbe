//! Records, read from and written to their rows.

use bytes::Bytes;
use idem_core::codec::FlatRecord;
use idem_core::{
    Erase, Origin, OwnerToken, Record, RecordId, RecordSummary, Repair, RepairNote, Scope, StoreError, Timestamp,
};
use sqlx::Row as _;
use sqlx::mysql::MySqlRow;

use crate::error::unreadable;
use crate::sql::Sql;

/// The columns that a change writes, in the order of [`values`]: all but the origin of the record.
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
    // A word of the language in the mode ORACLE.
    "`body`",
    "created_at",
    "updated_at",
    "expires_at",
];

/// Those of them that only a new record changes.
const STAYING: [&str; 4] = ["format", "fingerprint_algorithm", "fingerprint", "created_at"];

/// Where the columns after those begin.
const ID: usize = CHANGING.len();
const ORIGIN: usize = ID + 1;
const BODY_BYTES: usize = ORIGIN + 3;

/// What [`read`] reads. Text is read as bytes, because a handler may have set another character set for its session.
pub(crate) fn columns() -> String {
    CHANGING
        .map(|column| if column == "checkpoint_name" { "CAST(checkpoint_name AS BINARY)" } else { column })
        .join(",")
}

/// The most bytes of an answer that a batch reads.
const LARGE: usize = 32 * 1024;

/// What a batch reads: no large bodies. The id and whether the answer is whole follow.
pub(crate) fn columns_of_many() -> String {
    let is_whole = format!("COALESCE(LENGTH(`body`)<={LARGE},1)");
    let columns = CHANGING.map(|column| match column {
        "`body`" => format!("IF({is_whole},`body`,NULL)"),
        "checkpoint_name" => "CAST(checkpoint_name AS BINARY)".to_owned(),
        column => column.to_owned(),
    });
    format!("{},id,{is_whole}", columns.join(","))
}

/// What [`summary`] reads: no bodies, and of the headers only the trace, which has a mark of 4 bytes and 25 of its own.
pub(crate) fn summary_columns() -> String {
    let columns = CHANGING.map(|column| match column {
        "headers" => "IF(status IS NULL,NULL,IF(LEFT(headers,4)=x'ffffffff',LEFT(headers,29),x''))",
        "`body`" => "NULL",
        "checkpoint_name" => "CAST(checkpoint_name AS BINARY)",
        "checkpoint_data" => "LEFT(checkpoint_data,4)",
        column => column,
    });
    format!("{},id,{ORIGIN_COLUMNS},LENGTH(`body`)", columns.join(","))
}

/// What [`origin`] reads.
pub(crate) const ORIGIN_COLUMNS: &str = "CAST(namespace AS BINARY),CAST(principal AS BINARY),CAST(operation AS BINARY)";

/// Writes the statement that inserts new records, at least one, into `table`.
pub(crate) fn insert<'a>(
    sql: &mut Sql,
    table: &str,
    records: impl IntoIterator<Item = (&'a RecordId, &'a Origin, &'a Record)>,
) {
    insert_rows(sql, table, records);
    sql.push(";");
}

/// Writes one statement that updates records, at least one, which are there and are locked. Each comes with the record before.
///
/// For the server this is much less work than a statement for each. It never inserts, so that columns do not matter which stay as they
/// are.
pub(crate) fn update_all(sql: &mut Sql, table: &str, records: &[(RecordId, Record, Record)]) {
    let nowhere = Origin { namespace: "".into(), scope: Scope::single_tenant("") };
    // A checkpoint may be large, and few verbs change it.
    let keeps_checkpoints = records.iter().all(|(_, before, next)| before.checkpoint == next.checkpoint);
    let sent: Vec<Record> = records
        .iter()
        .map(|(_, _, next)| match keeps_checkpoints {
            true => Record { checkpoint: None, ..next.clone() },
            false => next.clone(),
        })
        .collect();
    let rows = records.iter().zip(&sent).map(|((id, ..), record)| (id, &nowhere, record));
    let is_written = insert_rows(sql, table, rows);
    sql.push(" ON DUPLICATE KEY UPDATE ");
    let stays = |column: &str| {
        STAYING.contains(&column) || (keeps_checkpoints && ["checkpoint_name", "checkpoint_data"].contains(&column))
    };
    let changing = CHANGING.iter().zip(is_written).filter(|(column, _)| !stays(column));
    for (at, (column, is_written)) in changing.enumerate() {
        sql.push(if at == 0 { "" } else { "," }).push(column).push("=");
        match is_written {
            true => sql.push("VALUES(").push(column).push(")"),
            false => sql.push("NULL"),
        };
    }
    sql.push(";");
}

/// Writes INSERT with these rows, without its end. Columns that are NULL in all of them are left out, because the server spends most of its
/// time on the number of values. Returns which columns are written.
fn insert_rows<'a>(
    sql: &mut Sql,
    table: &str,
    records: impl IntoIterator<Item = (&'a RecordId, &'a Origin, &'a Record)>,
) -> [bool; CHANGING.len()] {
    let rows: Vec<_> = records.into_iter().map(|(id, origin, record)| (id, origin, values(record))).collect();
    let mut is_written = [false; CHANGING.len()];
    for (_, _, values) in &rows {
        is_written.iter_mut().zip(values).for_each(|(is_written, value)| *is_written |= *value != Value::Null);
    }
    sql.push("INSERT INTO ").push(table).push(" (");
    for (column, _) in CHANGING.iter().zip(is_written).filter(|(_, is_written)| *is_written) {
        sql.push(column).push(",");
    }
    sql.push("id,namespace,principal,operation) VALUES ");
    for (row, (id, origin, values)) in rows.iter().enumerate() {
        sql.push(if row == 0 { "(" } else { ",(" });
        for (value, _) in values.iter().zip(is_written).filter(|(_, is_written)| *is_written) {
            value.write(sql);
            sql.push(",");
        }
        sql.bytes(id.as_bytes()).push(",").text(&origin.namespace).push(",");
        sql.optional(origin.scope.principal(), |sql, principal| {
            sql.text(principal);
        });
        sql.push(",").text(origin.scope.operation()).push(")");
    }
    is_written
}

/// Writes the statement that updates a record. Columns that have not changed are not sent, as a body may be large.
pub(crate) fn update(sql: &mut Sql, table: &str, id: &RecordId, before: &Record, record: &Record) {
    sql.push("UPDATE ").push(table).push(" SET ");
    let values = values(before).into_iter().zip(values(record));
    let changed = CHANGING.iter().zip(values).filter(|(_, (old, new))| old != new);
    for (at, (column, (_, value))) in changed.enumerate() {
        sql.push(if at == 0 { "" } else { "," }).push(column).push("=");
        value.write(sql);
    }
    sql.push(" WHERE id=").bytes(id.as_bytes()).push(";");
}

/// Writes the statement that deletes a record.
pub(crate) fn delete(sql: &mut Sql, table: &str, id: &RecordId) {
    sql.push("DELETE FROM ").push(table).push(" WHERE id=").bytes(id.as_bytes()).push(";");
}

/// Statements that change nothing, each with the privilege and the table that it is about. The server checks privileges, also those on
/// single columns, before it explains a statement.
pub(crate) fn privilege_probes(records: &str, repairs: &str) -> [(&'static str, &'static str, String); 7] {
    let added = CHANGING.into_iter().chain(["id", "namespace", "principal", "operation"]).collect::<Vec<_>>().join(",");
    let changed =
        CHANGING.into_iter().chain(["principal"]).map(|column| format!("{column}=0")).collect::<Vec<_>>().join(",");
    let insert = |table: &str, columns: &str| {
        let nulls = vec!["NULL"; columns.split(',').count()].join(",");
        format!("EXPLAIN INSERT INTO {table} ({columns}) SELECT {nulls} FROM DUAL WHERE FALSE")
    };
    // Notes of repairs are never removed.
    [
        ("SELECT", "idem_records", format!("SELECT * FROM {records} LIMIT 0")),
        ("INSERT", "idem_records", insert(records, &added)),
        ("UPDATE", "idem_records", format!("EXPLAIN UPDATE {records} SET {changed} WHERE FALSE")),
        ("DELETE", "idem_records", format!("EXPLAIN DELETE FROM {records} WHERE FALSE")),
        ("SELECT", "idem_repairs", format!("SELECT * FROM {repairs} LIMIT 0")),
        ("INSERT", "idem_repairs", insert(repairs, "action,record,actor,reason,resolution,outcome,at")),
        ("UPDATE", "idem_repairs", format!("EXPLAIN UPDATE {repairs} SET outcome=0,reason=0 WHERE FALSE")),
    ]
}

/// Writes the statements that replace the principal of a record by the empty text, and remove the one that the request names from
/// the reasons of earlier repairs of the record.
pub(crate) fn erase_principal(sql: &mut Sql, records: &str, repairs: &str, request: &Erase) {
    sql.push("UPDATE ").push(records).push(" SET principal=").text("").push(" WHERE id=");
    sql.bytes(request.id.as_bytes()).push(" AND principal IS NOT NULL;");
    if let Some(principal) = request.principal.as_deref().filter(|principal| !principal.is_empty()) {
        sql.push("UPDATE ").push(repairs).push(" SET reason=REPLACE(reason,").text(principal).push(",");
        sql.text(RepairNote::ERASED).push(") WHERE record=").bytes(request.id.as_bytes()).push(";");
    }
}

#[derive(PartialEq)]
enum Value {
    Null,
    Number(i64),
    Bytes(Bytes),
    Text(String),
}

impl Value {
    fn write(&self, sql: &mut Sql) {
        match self {
            Self::Null => sql.push("NULL"),
            Self::Number(number) => sql.number(*number),
            Self::Bytes(bytes) => sql.bytes(bytes),
            Self::Text(text) => sql.text(text),
        };
    }

    fn number(number: Option<i64>) -> Self {
        number.map_or(Self::Null, Self::Number)
    }

    fn bytes(bytes: Option<impl Into<Bytes>>) -> Self {
        bytes.map_or(Self::Null, |bytes| Self::Bytes(bytes.into()))
    }
}

fn values(record: &Record) -> [Value; CHANGING.len()] {
    let flat = FlatRecord::from(record);
    [
        Value::Number(flat.format),
        Value::Number(flat.fingerprint_algorithm),
        Value::Bytes(flat.fingerprint.into()),
        Value::Bytes(flat.owner.into()),
        Value::Number(flat.attempt),
        Value::Number(flat.state),
        Value::number(flat.acquisition),
        Value::number(flat.takeover),
        Value::number(flat.lease_until),
        Value::number(flat.not_before),
        flat.checkpoint_name.map_or(Value::Null, Value::Text),
        Value::bytes(flat.checkpoint_data),
        Value::number(flat.status),
        Value::bytes(flat.headers),
        Value::bytes(flat.body),
        Value::Number(flat.created_at),
        Value::Number(flat.updated_at),
        Value::Number(flat.expires_at),
    ]
}

/// Reads a record, expired or not.
pub(crate) fn read(row: &MySqlRow) -> Result<Record, StoreError> {
    Record::try_from(flat(row).map_err(unreadable)?).map_err(unreadable)
}

/// Whether the answer of a record was read with it.
pub(crate) fn is_whole(row: &MySqlRow) -> Result<bool, sqlx::Error> {
    row.try_get::<i64, _>(ID + 1).map(|is_whole| is_whole == 1)
}

/// Reads the id of a record.
pub(crate) fn id(row: &MySqlRow) -> Result<RecordId, sqlx::Error> {
    let id: Vec<u8> = row.try_get(ID)?;
    let id = id.try_into().map_err(|_| sqlx::Error::Decode("an id has another length".into()))?;
    Ok(RecordId::from_bytes(id))
}

/// Reads the id of a record and what there is to say about it. The error of a record that cannot be read comes with its id.
pub(crate) fn summary(row: &MySqlRow) -> Result<(RecordId, Result<RecordSummary, StoreError>), sqlx::Error> {
    let id = id(row)?;
    let summary = || {
        let record = read(row)?;
        let body_bytes: Option<i64> = row.try_get(BODY_BYTES).map_err(unreadable)?;
        let summary = RecordSummary::new(id, Some(origin(row, ORIGIN).map_err(unreadable)?), &record);
        Ok(summary.with_body_bytes(body_bytes.map(i64::unsigned_abs)))
    };
    Ok((id, summary()))
}

/// Reads where a record came from.
pub(crate) fn origin(row: &MySqlRow, from: usize) -> Result<Origin, sqlx::Error> {
    let operation = required(text(row, from + 2)?)?;
    let scope = match text(row, from + 1)? {
        Some(principal) => Scope::new(principal, operation),
        None => Scope::single_tenant(operation),
    };
    Ok(Origin { namespace: required(text(row, from)?)?.into(), scope })
}

fn required(text: Option<String>) -> Result<String, sqlx::Error> {
    text.ok_or_else(|| sqlx::Error::Decode("a column is NULL that must not be".into()))
}

fn text(row: &MySqlRow, column: usize) -> Result<Option<String>, sqlx::Error> {
    let bytes: Option<Vec<u8>> = row.try_get(column)?;
    bytes.map(String::from_utf8).transpose().map_err(|error| sqlx::Error::Decode(error.into()))
}

fn flat(row: &MySqlRow) -> Result<FlatRecord, sqlx::Error> {
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
        checkpoint_name: text(row, 10)?,
        checkpoint_data: row.try_get(11)?,
        status: row.try_get(12)?,
        headers: row.try_get(13)?,
        body: row.try_get::<Option<Vec<u8>>, _>(14)?.map(Bytes::from),
        created_at: row.try_get(15)?,
        updated_at: row.try_get(16)?,
        expires_at: row.try_get(17)?,
    })
}

/// What [`repair`] reads.
pub(crate) const REPAIR_COLUMNS: &str = "action,record,CAST(actor AS BINARY),CAST(reason AS BINARY),CAST(resolution AS BINARY),\
    CAST(outcome AS BINARY),at";

/// Reads a note of a repair, and when it was made.
pub(crate) fn repair(row: &MySqlRow) -> Result<Repair, sqlx::Error> {
    let wrong = |_| sqlx::Error::Decode("a token or an id has another length".into());
    let (action, record): (Vec<u8>, Vec<u8>) = (row.try_get(0)?, row.try_get(1)?);
    Ok(Repair {
        at: Timestamp::from_unix_micros(row.try_get(6)?),
        note: RepairNote {
            action: OwnerToken::from_bytes(action.try_into().map_err(wrong)?),
            record: RecordId::from_bytes(record.try_into().map_err(wrong)?),
            actor: required(text(row, 2)?)?,
            reason: required(text(row, 3)?)?,
            resolution: required(text(row, 4)?)?,
            outcome: text(row, 5)?,
        },
    })
}
