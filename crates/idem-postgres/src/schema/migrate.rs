//! Applies the migrations of the schema.
//!
//! sqlx's `Migrator` is not used, for three reasons:
//!
//! - It sends `CREATE TABLE IF NOT EXISTS` at every start. That fails for a role without CREATE on the schema, even when no
//!   migration is pending.
//! - It serialises processes by a session-level advisory lock on the name of the database. Every role can take that lock, and
//!   a transaction pooler may release it in another session.
//! - Its default table belongs to the application.

use std::time::{Duration, Instant};

use idem_core::{StoreError, StoreErrorKind};
use sqlx::{AssertSqlSafe, PgConnection, Row as _};

use crate::error::{state, store_error};
use crate::schema::name::Schema;
use crate::schema::partitions;
use crate::sql::{Sql, in_safe_path, is_true, milliseconds, own_rows, rows};

/// One migration of the schema.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Migration {
    /// Counts from 1.
    pub version: u32,
    /// Its name, such as `records`.
    pub name: &'static str,
    /// Its statements.
    pub sql: String,
}

/// The functions of the store.
pub(crate) const VERBS: &str = include_str!("../../migrations/0002_verbs.sql");

/// An explicit list: a file in the folder that is not named here is not applied.
const MIGRATIONS: &[(&str, &str)] = &[("records", include_str!("../../migrations/0001_records.sql")), ("verbs", VERBS)];

/// Begins the transaction in which the store is opened. The caller appends the `lock_timeout` in milliseconds.
const BEGIN_SAFELY: &str = "BEGIN ISOLATION LEVEL READ COMMITTED NOT DEFERRABLE;SET LOCAL search_path=pg_catalog,pg_temp;\
    SET LOCAL client_min_messages=warning;SET LOCAL statement_timeout=0;SET LOCAL lock_timeout=";

/// The SQLSTATEs when another process creates the same object at the same moment: a row in a catalog's unique index, a
/// schema, and a table.
const CREATED_CONCURRENTLY: [&str; 3] = ["23505", "42P06", "42P07"];

/// The migrations in their order, for an application that applies them with a migration tool.
///
/// The schema called `schema` must exist. Each migration also records in `idem_migrations` that it was applied.
///
/// Apply each in one transaction, and stop at the first error (`psql --single-transaction --set ON_ERROR_STOP=1`). A
/// migration sets the search path, so that no object of another role takes the place of a built-in one, and restores it at
/// its end. Outside of a transaction that setting has no effect, and the migration fails.
///
/// # Errors
/// [`StoreError`] when `schema` cannot be the name of a schema.
pub fn migrations(schema: &str) -> Result<Vec<Migration>, StoreError> {
    let schema = Schema::new(schema)?;
    Ok(local_migrations(&schema).collect())
}

fn local_migrations(schema: &Schema) -> impl Iterator<Item = Migration> {
    MIGRATIONS.iter().zip(1..).map(|((name, sql), version)| {
        let noted = format!(
            "{TABLE_OF_MIGRATIONS};\nINSERT INTO \"idem\".idem_migrations (version, name) VALUES ({version}, '{name}');\n"
        );
        Migration { version, name, sql: schema.localise(&in_safe_path(&format!("{noted}{sql}"))) }
    })
}

const TABLE_OF_MIGRATIONS: &str = "CREATE TABLE IF NOT EXISTS \"idem\".idem_migrations (
    version INTEGER NOT NULL PRIMARY KEY,
    name TEXT NOT NULL,
    applied_at TIMESTAMPTZ NOT NULL DEFAULT now()
)";

/// Begins a transaction that waits for a lock at most `lock_timeout`, and returns the process id of its server session.
pub(crate) async fn begin(connection: &mut PgConnection, lock_timeout: Duration) -> Result<i32, sqlx::Error> {
    let mut sql = Sql::default();
    sql.push(BEGIN_SAFELY);
    sql.number(milliseconds(lock_timeout));
    sql.push(";SELECT pg_catalog.pg_backend_pid()");
    let begun = own_rows(connection, sql.into_text()).await?;
    Ok(begun.first().and_then(|row| row.try_get(0).ok()).unwrap_or_default())
}

/// Brings the schema up to date, in the transaction that [`begin`] opened with `lock_timeout`. Any number of processes may do
/// so at once.
pub(crate) async fn migrate(
    connection: &mut PgConnection,
    schema: &Schema,
    partitioned: Option<Duration>,
    lock_timeout: Duration,
) -> Result<(), StoreError> {
    let deadline = Instant::now() + lock_timeout;
    loop {
        if is_current(connection, schema, partitioned).await? {
            return Ok(());
        }
        match apply(connection, schema, partitioned).await {
            Err(ApplyError::CreatedConcurrently(error)) if Instant::now() > deadline => return Err(error),
            Err(ApplyError::CreatedConcurrently(_)) => {
                rows(connection, MIGRATE, "ROLLBACK").await?;
                begin(connection, lock_timeout).await.map_err(|error| store_error(MIGRATE, error))?;
            }
            Err(ApplyError::Other(error)) => return Err(error),
            Ok(()) => return Ok(()),
        }
    }
}

/// Whether the schema needs no migration. Most starts find it so. They need neither a lock nor a privilege to change it.
pub(crate) async fn is_current(
    connection: &mut PgConnection,
    schema: &Schema,
    partitioned: Option<Duration>,
) -> Result<bool, StoreError> {
    Ok(newest(connection, schema).await? == Some(latest())
        && (partitioned.is_none() || partitions::is_partitioned(connection, schema).await?))
}

const MIGRATE: &str = "bring the schema up to date";

enum ApplyError {
    /// Another process has created the schema or its first table.
    CreatedConcurrently(StoreError),
    Other(StoreError),
}

impl From<StoreError> for ApplyError {
    fn from(error: StoreError) -> Self {
        Self::Other(error)
    }
}

async fn apply(
    connection: &mut PgConnection,
    schema: &Schema,
    partitioned: Option<Duration>,
) -> Result<(), ApplyError> {
    let mut sql = Sql::default();
    sql.push("SELECT EXISTS (SELECT FROM pg_catalog.pg_namespace WHERE nspname OPERATOR(pg_catalog.=) ");
    sql.text(schema.name()).push(")");
    let exists = is_true(&rows(connection, MIGRATE, sql.into_text()).await?);
    // Locks a table of the schema. Unlike an advisory lock, only a role with a privilege on the table can take it. Until the
    // table exists, the catalog's unique indexes serialise the processes that create it.
    let mut sql = if exists { String::new() } else { format!("CREATE SCHEMA {};", schema.quoted()) };
    sql += &schema.localise(TABLE_OF_MIGRATIONS);
    sql += &schema.localise(";LOCK TABLE \"idem\".idem_migrations IN SHARE ROW EXCLUSIVE MODE");
    if newest(connection, schema).await?.is_some() {
        sql = schema.localise("LOCK TABLE \"idem\".idem_migrations IN SHARE ROW EXCLUSIVE MODE");
    }
    if let Err(error) = sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut *connection).await {
        let created = state(&error).is_some_and(|state| CREATED_CONCURRENTLY.contains(&state.as_str()));
        let error = store_error(MIGRATE, error);
        return Err(if created { ApplyError::CreatedConcurrently(error) } else { ApplyError::Other(error) });
    }
    let applied = newest(connection, schema).await?.unwrap_or_default();
    for migration in local_migrations(schema).filter(|migration| migration.version > applied) {
        rows(connection, MIGRATE, migration.sql).await?;
    }
    if let Some(period) = partitioned {
        partitions::apply(connection, schema, period).await?;
    }
    Ok(())
}

/// Reads the random identity of the schema, which distinguishes its records from all others.
pub(crate) async fn identity(connection: &mut PgConnection, schema: &Schema) -> Result<([u8; 16], String), StoreError> {
    let what = "read the identity of the schema";
    // As text, which is read the same way through every proxy.
    let sql = format!(
        "SELECT pg_catalog.replace(identity::pg_catalog.text, '-', ''), pg_catalog.current_database()::pg_catalog.text FROM {}.idem_identity",
        schema.quoted()
    );
    let found = rows(connection, what, sql).await?;
    let digits: String = found.first().and_then(|row| row.try_get(0).ok()).unwrap_or_default();
    let identity = u128::from_str_radix(&digits, 16).map_err(|error| {
        let message = format!("the table idem_identity of the schema {} is empty; restore its row", schema.quoted());
        StoreError::new(StoreErrorKind::Misconfigured, message).with_source(error)
    })?;
    let database = found.first().and_then(|row| row.try_get(1).ok()).unwrap_or_default();
    Ok((identity.to_be_bytes(), database))
}

/// Refuses a database whose schema is missing or has another version.
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
    if !is_true(&rows(connection, what, schema.look_for_table("idem_migrations").into_text()).await?) {
        return Ok(None);
    }
    let newest = format!("SELECT coalesce(pg_catalog.max(version), 0) FROM {}.idem_migrations", schema.quoted());
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
