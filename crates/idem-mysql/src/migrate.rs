//! The schema and its migrations.
//!
//! sqlx's `Migrator` locks by `GET_LOCK`, which belongs to a session and stays behind in a pooler, and calls a migration that was
//! cut off in its middle "dirty", for an operator to repair. The server commits each CREATE TABLE by itself. So here each
//! statement can be repeated, and a row lock on one connection admits one process at a time, while another connection makes
//! the tables.

use idem_core::{StoreError, StoreErrorKind};
use sqlx::mysql::{MySqlConnectOptions, MySqlRow};
use sqlx::{ConnectOptions as _, Connection as _, MySqlConnection, Row as _};

use crate::error::{is_no_table, opening_error};
use crate::session::run;
use crate::sql::{Sql, quoted};
use crate::timeouts::MIGRATION_WAIT;

/// One step of the schema.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Migration {
    /// Counts from 1.
    pub version: u32,
    /// What it adds.
    pub name: &'static str,
    /// Its statements, each of which may be repeated.
    pub sql: &'static str,
}

/// An explicit list: a file in the folder that is not named here is not applied.
const MIGRATIONS: &[Migration] =
    &[Migration { version: 1, name: "records", sql: include_str!("../migrations/0001_records.sql") }];

/// The row with version 0 is the lock of those who migrate.
const TABLE: &str = "CREATE TABLE IF NOT EXISTS idem_migrations (version INT NOT NULL PRIMARY KEY, name VARCHAR(100) NOT NULL,
    applied_at DATETIME(6) NOT NULL) ENGINE = InnoDB;INSERT IGNORE INTO idem_migrations VALUES (0, 'lock', UTC_TIMESTAMP(6))";

/// The migrations in their order, for operators who apply them with another tool, in the database that the store is opened in.
/// Then open the store with [`without_migrating`](crate::MySqlConfig::without_migrating), which does not look at the table
/// `idem_migrations`.
#[must_use]
pub fn migrations() -> &'static [Migration] {
    MIGRATIONS
}

fn failed(error: sqlx::Error) -> StoreError {
    opening_error("bring the schema up to date", error)
}

/// Brings the schema up to date. Any number of processes may do so at once.
pub(crate) async fn migrate(connection: &mut MySqlConnection, options: &MySqlConnectOptions) -> Result<(), StoreError> {
    // A user who may not make tables can open a store whose tables are there.
    match newest(connection).await {
        Ok(newest) if expect_known(newest)? == MIGRATIONS.len() => return Ok(()),
        Err(error) if !is_no_table(&error) => return Err(failed(error)),
        _ => {}
    }
    let wait = MIGRATION_WAIT.as_secs();
    let patience = format!("SET SESSION innodb_lock_wait_timeout={wait},lock_wait_timeout={wait};");
    run(connection, Sql::new(patience.clone() + TABLE)).await.map_err(failed)?;
    let lock = "START TRANSACTION READ WRITE;SELECT version FROM idem_migrations WHERE version=0 FOR UPDATE";
    run(connection, Sql::new(lock)).await.map_err(failed)?;
    let newest = expect_known(newest(connection).await.map_err(failed)?)?;
    // Making tables would commit the transaction that holds the lock.
    let mut worker = options.connect().await.map_err(failed)?;
    run(&mut worker, Sql::new(patience)).await.map_err(failed)?;
    for migration in MIGRATIONS.iter().skip(newest) {
        run(&mut worker, Sql::new(migration.sql)).await.map_err(failed)?;
        let mut note = Sql::new("INSERT INTO idem_migrations VALUES (");
        note.number(migration.version).push(",").text(migration.name).push(",UTC_TIMESTAMP(6))");
        run(connection, note).await.map_err(failed)?;
    }
    run(connection, Sql::new("COMMIT")).await.map_err(failed)?;
    // It has nothing open; closing it only says goodbye.
    let _ = worker.close().await;
    Ok(())
}

async fn newest(connection: &mut MySqlConnection) -> Result<i64, sqlx::Error> {
    let rows =
        run(connection, Sql::new("SELECT CAST(COALESCE(MAX(version),0) AS SIGNED) FROM idem_migrations")).await?;
    rows.first().map_or(Ok(0), |row| row.try_get(0))
}

fn expect_known(newest: i64) -> Result<usize, StoreError> {
    let known = usize::try_from(newest).ok().filter(|newest| *newest <= MIGRATIONS.len());
    known.ok_or_else(|| {
        let message = format!(
            "the database has schema version {newest}, and this version of idem-mysql knows {}; upgrade idem-mysql",
            MIGRATIONS.len(),
        );
        StoreError::new(StoreErrorKind::Misconfigured, message)
    })
}

/// The name of the database, and what distinguishes it from every other one.
pub(crate) async fn place(connection: &mut MySqlConnection) -> Result<(String, [u8; 16]), StoreError> {
    let failed = |error| opening_error("look at the schema", error);
    let text = |row: &MySqlRow| row.try_get::<Option<Vec<u8>>, _>(0).map_err(failed);
    let rows = run(connection, Sql::new("SELECT CAST(DATABASE() AS BINARY)")).await.map_err(failed)?;
    let name = rows.first().map(text).transpose()?.flatten().and_then(|name| String::from_utf8(name).ok());
    let Some(name) = name else {
        let message = "the URL names no database; write mysql://user:password@host/database";
        return Err(StoreError::new(StoreErrorKind::Misconfigured, message));
    };
    let question = format!("SELECT identity FROM {}.idem_identity", quoted(&name));
    let rows = run(connection, Sql::new(question)).await.map_err(failed)?;
    let identity = rows.first().map(text).transpose()?.flatten().and_then(|identity| identity.try_into().ok());
    identity.map(|identity| (name, identity)).ok_or_else(|| {
        let message = "the table idem_identity has no row; apply the migrations of idem-mysql again";
        StoreError::new(StoreErrorKind::Misconfigured, message)
    })
}
