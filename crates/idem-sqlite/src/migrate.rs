//! The schema and its migrations.
//!
//! sqlx's `Migrator` takes no lock in SQLite: if two processes open a new file at once, one of them fails. Here the write
//! lock comes first. Applied migrations are kept in a table of this crate, because sqlx's default table belongs to the
//! application.

use idem_core::{StoreError, StoreErrorKind};
use sqlx::{Row, SqliteConnection};

use crate::error::opening_error;

/// One step of the schema.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Migration {
    /// Counts from 1.
    pub version: u32,
    /// What it adds.
    pub name: &'static str,
    /// Its statements.
    pub sql: &'static str,
}

/// An explicit list: a file in the folder that is not named here is not applied.
const MIGRATIONS: &[Migration] =
    &[Migration { version: 1, name: "records", sql: include_str!("../migrations/0001_records.sql") }];

/// The migrations in their order, for operators who apply them with another tool.
#[must_use]
pub fn migrations() -> &'static [Migration] {
    MIGRATIONS
}

/// Brings the schema up to date, in one transaction. Any number of processes may do so at once.
pub(crate) async fn migrate(connection: &mut SqliteConnection) -> Result<(), StoreError> {
    let failed = |error| opening_error("bring the schema up to date", error);
    // The write lock comes first, so that only one process at a time checks the version and applies migrations.
    sqlx::raw_sql("BEGIN IMMEDIATE").execute(&mut *connection).await.map_err(failed)?;
    apply(connection).await?;
    sqlx::raw_sql("COMMIT").execute(&mut *connection).await.map_err(failed)?;
    Ok(())
}

async fn apply(connection: &mut SqliteConnection) -> Result<(), StoreError> {
    let failed = |error| opening_error("bring the schema up to date", error);
    let table = "CREATE TABLE IF NOT EXISTS main.idem_migrations (
        version INTEGER NOT NULL PRIMARY KEY,
        name TEXT NOT NULL,
        applied_at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP
    ) STRICT";
    sqlx::raw_sql(table).execute(&mut *connection).await.map_err(failed)?;
    let newest = sqlx::query("SELECT coalesce(max(version), 0) FROM main.idem_migrations");
    let newest: u32 = newest.fetch_one(&mut *connection).await.and_then(|row| row.try_get(0)).map_err(failed)?;
    if newest as usize > MIGRATIONS.len() {
        let message = format!(
            "the database has schema version {newest}, and this version of idem-sqlite knows {}; upgrade idem-sqlite",
            MIGRATIONS.len(),
        );
        return Err(StoreError::new(StoreErrorKind::Misconfigured, message));
    }
    for migration in MIGRATIONS.iter().filter(|migration| migration.version > newest) {
        sqlx::raw_sql(migration.sql).execute(&mut *connection).await.map_err(failed)?;
        sqlx::query("INSERT INTO main.idem_migrations (version, name) VALUES (?, ?)")
            .bind(migration.version)
            .bind(migration.name)
            .execute(&mut *connection)
            .await
            .map_err(failed)?;
    }
    Ok(())
}

/// Refuses a database whose schema is missing, or of another version.
pub(crate) async fn expect_current(connection: &mut SqliteConnection) -> Result<(), StoreError> {
    let failed = |error| opening_error("look at the schema", error);
    let table = "SELECT count(*) FROM main.sqlite_schema WHERE name = 'idem_migrations'";
    let tables: u32 = sqlx::query_scalar(table).fetch_one(&mut *connection).await.map_err(failed)?;
    let newest: u32 = match tables {
        0 => 0,
        _ => {
            let newest = "SELECT coalesce(max(version), 0) FROM main.idem_migrations";
            sqlx::query_scalar(newest).fetch_one(&mut *connection).await.map_err(failed)?
        }
    };
    if newest as usize == MIGRATIONS.len() {
        return Ok(());
    }
    let message = format!(
        "the database has schema version {newest} of idem-sqlite, and version {} is needed; apply the migrations, or use the \
         version of idem-sqlite that made it",
        MIGRATIONS.len()
    );
    Err(StoreError::new(StoreErrorKind::Misconfigured, message))
}
