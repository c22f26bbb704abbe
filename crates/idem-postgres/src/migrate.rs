//! The schema, and how a database gets it.
//!
//! Applied migrations are kept in a table of our own: sqlx's default table belongs to the application.

use std::time::Duration;

use idem_core::{StoreError, StoreErrorKind};
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row as _};

use crate::literal::Sql;
use crate::partitions;
use crate::planted::with_bugs;
use crate::schema::Schema;
use crate::store::{BEGIN, rows};

/// One step of the schema.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Migration {
    /// Counts from 1.
    pub version: u32,
    /// What it brings.
    pub name: &'static str,
    /// Its statements.
    pub sql: String,
}

/// An explicit list: a file in the folder that is not named here is not applied.
const MIGRATIONS: &[(&str, &str)] = &[
    ("records", include_str!("../migrations/0001_records.sql")),
    ("verbs", include_str!("../migrations/0002_verbs.sql")),
];

/// How long one replica waits for another one to finish: longer than the migrations take, unless they copy many records into partitions.
const OTHERS_TAKE_AT_MOST_MS: i64 = 600_000;

/// The migrations in their order, for those who apply them by a tool of their own, in the schema called `schema`, which
/// has to be there. Each also writes down in `idem_migrations` that it was applied.
///
/// # Errors
/// [`StoreError`] when `schema` cannot be the name of one.
pub fn migrations(schema: &str) -> Result<Vec<Migration>, StoreError> {
    let schema = Schema::new(schema)?;
    Ok(local_migrations(&schema).collect())
}

fn local_migrations(schema: &Schema) -> impl Iterator<Item = Migration> {
    MIGRATIONS.iter().zip(1..).map(|((name, sql), version)| {
        let noted = format!(
            "CREATE TABLE IF NOT EXISTS \"idem\".idem_migrations (\n    version INTEGER NOT NULL PRIMARY KEY,\n    \
             name TEXT NOT NULL,\n    applied_at TIMESTAMPTZ NOT NULL DEFAULT now()\n);\n\
             INSERT INTO \"idem\".idem_migrations (version, name) VALUES ({version}, '{name}');\n"
        );
        Migration { version, name, sql: schema.localise(&format!("{noted}{}", with_bugs(sql))) }
    })
}

/// Brings the schema up to date; any number of processes may do so at once.
pub(crate) async fn migrate(
    connection: &mut PgConnection,
    schema: &Schema,
    partitioned: Option<Duration>,
) -> Result<(), StoreError> {
    // Most starts find it up to date, and then need neither the lock nor the right to change anything.
    if newest(connection, schema).await? == Some(latest()) && partitioned.is_none() {
        return Ok(());
    }
    let what = "bring the schema up to date";
    let mut sql = Sql::default();
    sql.push(BEGIN).push("SET LOCAL client_min_messages=warning;SET LOCAL statement_timeout=0;SET LOCAL lock_timeout=");
    sql.number(OTHERS_TAKE_AT_MOST_MS).push(";SELECT pg_advisory_xact_lock(").number(schema.task_lock("migrate"));
    sql.push(")");
    rows(connection, what, sql.into_text()).await?;
    let applied = apply(connection, schema, partitioned).await;
    let end = if applied.is_ok() { "COMMIT" } else { "ROLLBACK" };
    let ended = rows(connection, what, end).await;
    applied.and(ended.map(drop))
}

async fn apply(
    connection: &mut PgConnection,
    schema: &Schema,
    partitioned: Option<Duration>,
) -> Result<(), StoreError> {
    let what = "bring the schema up to date";
    let applied = match newest(connection, schema).await? {
        Some(applied) => applied,
        None => {
            let mut sql = Sql::default();
            sql.push("SELECT count(*) FROM pg_namespace WHERE nspname = convert_from(");
            sql.bytes(schema.name().as_bytes()).push(",'UTF8')");
            let found = rows(connection, what, sql.into_text()).await?;
            let found: i64 = found.first().and_then(|row| row.try_get(0).ok()).unwrap_or_default();
            if found == 0 {
                rows(connection, what, format!("CREATE SCHEMA {}", schema.quoted())).await?;
            }
            0
        }
    };
    for migration in local_migrations(schema).filter(|migration| migration.version > applied) {
        rows(connection, what, migration.sql).await?;
    }
    match partitioned {
        Some(period) => partitions::apply(connection, schema, period).await,
        None => Ok(()),
    }
}

/// What tells these records from all others.
pub(crate) async fn identity(connection: &mut PgConnection, schema: &Schema) -> Result<[u8; 16], StoreError> {
    let what = "read the identity of the schema";
    // As text, which is read the same way through every proxy.
    let sql = format!("SELECT replace(identity::TEXT, '-', '') FROM {}.idem_identity", schema.quoted());
    let found = rows(connection, what, sql).await?;
    let digits: String = found.first().and_then(|row| row.try_get(0).ok()).unwrap_or_default();
    let identity = u128::from_str_radix(&digits, 16).map_err(|error| {
        let message = format!("the table idem_identity of the schema {} is empty; restore its row", schema.quoted());
        StoreError::new(StoreErrorKind::Misconfigured, message).with_source(error)
    })?;
    Ok(identity.to_be_bytes())
}

/// Refuses a database whose schema is not there or not this version's.
pub(crate) async fn expect_current(connection: &mut PgConnection, schema: &Schema) -> Result<(), StoreError> {
    let found = newest(connection, schema).await?;
    if found == Some(latest()) {
        return Ok(());
    }
    let message = format!(
        "the schema {} has version {} of idem-postgres's tables, and version {} is needed; apply the migrations",
        schema.quoted(),
        found.map_or("none".to_owned(), |found| found.to_string()),
        latest(),
    );
    Err(StoreError::new(StoreErrorKind::Misconfigured, message))
}

fn latest() -> u32 {
    u32::try_from(MIGRATIONS.len()).unwrap_or(u32::MAX)
}

/// The newest migration that was applied; `None` when there is none.
async fn newest(connection: &mut PgConnection, schema: &Schema) -> Result<Option<u32>, StoreError> {
    let what = "look for the version of the schema";
    if !is_true(&rows(connection, what, look_for_table(schema, "idem_migrations").into_text()).await?) {
        return Ok(None);
    }
    let newest = format!("SELECT coalesce(max(version), 0) FROM {}.idem_migrations", schema.quoted());
    let newest = rows(connection, what, newest).await?;
    let newest: i32 = newest.first().and_then(|row| row.try_get(0).ok()).unwrap_or_default();
    let newest = newest.unsigned_abs();
    if newest > latest() {
        let message = format!(
            "the schema {} has version {newest}, and this version of idem-postgres knows {}; upgrade idem-postgres",
            schema.quoted(),
            latest(),
        );
        return Err(StoreError::new(StoreErrorKind::Misconfigured, message));
    }
    Ok(Some(newest))
}

/// Asks the catalog whether there is a table. A name that is resolved may be resolved from a cache, in which a table that
/// another replica made a moment ago is not there yet.
pub(crate) fn look_for_table(schema: &Schema, table: &str) -> Sql {
    let mut sql = Sql::default();
    sql.push(
        "SELECT EXISTS (SELECT FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace WHERE nspname = ",
    );
    sql.push("convert_from(").bytes(schema.name().as_bytes()).push(",'UTF8') AND relname = convert_from(");
    sql.bytes(table.as_bytes()).push(",'UTF8'))");
    sql
}

pub(crate) fn is_true(rows: &[PgRow]) -> bool {
    rows.first().and_then(|row| row.try_get(0).ok()).unwrap_or_default()
}
