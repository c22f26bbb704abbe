//! The optional layout of records in partitions by time.

use std::time::Duration;

use idem_core::{StoreError, StoreErrorKind};
use sqlx::{PgConnection, Row as _};

use crate::config::micros;
use crate::error::store_error;
use crate::literal::Sql;
use crate::schema::Schema;
use crate::store::{PostgresStore, rows};

const PARTITIONS: &str = include_str!("../migrations/partitions.sql");

/// The period that the file is written for, in microseconds: a day.
const PERIOD_OF_FILE: &str = "86400000000";

/// The shortest period: each partition is a table, and every verb looks into all that there are.
const SHORTEST_PERIOD: Duration = Duration::from_secs(1);

/// How long the server may look whether a partition has a living record; it reads it whole.
const LOOK_FOR_AT_MOST: Duration = Duration::from_secs(600);

/// The statements that spread records over partitions which cover `period` each, for those who apply migrations by a
/// tool of their own; apply them in one transaction, after [`migrations`](crate::migrations()).
/// [`PostgresConfig::partitioned`](crate::PostgresConfig::partitioned) says what they bring.
///
/// # Errors
/// [`StoreError`] when `schema` cannot be the name of one, or when `period` is less than a second.
pub fn partitioning(schema: &str, period: Duration) -> Result<String, StoreError> {
    statements(&Schema::new(schema)?, period)
}

fn statements(schema: &Schema, period: Duration) -> Result<String, StoreError> {
    if period < SHORTEST_PERIOD {
        let message = format!("a partition cannot cover {period:?}: the shortest period is {SHORTEST_PERIOD:?}");
        return Err(StoreError::new(StoreErrorKind::Misconfigured, message));
    }
    Ok(schema.localise(&PARTITIONS.replace(PERIOD_OF_FILE, &micros(period).to_string())))
}

/// Spreads records over partitions, unless they are. In the transaction in which migrations are applied.
pub(crate) async fn apply(connection: &mut PgConnection, schema: &Schema, period: Duration) -> Result<(), StoreError> {
    let statements = statements(schema, period)?;
    if is_partitioned(&rows(connection, "look for partitions", look(schema).into_text()).await?) {
        return Ok(());
    }
    rows(connection, "spread records over partitions", statements).await.map(drop)
}

/// Makes coming partitions and drops past ones, if there are any. Says whether records are partitioned.
pub(crate) async fn maintain(store: &PostgresStore) -> Result<bool, StoreError> {
    let (schema, what) = (&store.shared.schema, "look after partitions");
    if !is_partitioned(&store.maintain(what, look(schema), store.shared.patience).await?) {
        return Ok(false);
    }
    loop {
        let mut sql = Sql::default();
        sql.push("BEGIN ISOLATION LEVEL READ COMMITTED;").push(&store.shared.prelude).push("SET LOCAL ");
        sql.push("statement_timeout=").number(micros(LOOK_FOR_AT_MOST) / 1000).push(";SELECT ").push(schema.quoted());
        sql.push(".idem_partitions_v1(").number(store.shared.offset.micros()).push(",");
        sql.number(schema.task_lock("partitions")).push(");COMMIT");
        let done = store.maintain(what, sql, LOOK_FOR_AT_MOST).await?;
        let dropped = done.first().map(|row| row.try_get::<bool, _>(0)).transpose();
        if !dropped.map_err(|error| store_error(what, error))?.unwrap_or_default() {
            return Ok(true);
        }
    }
}

fn look(schema: &Schema) -> Sql {
    let mut sql = Sql::default();
    sql.push("SELECT to_regclass(convert_from(");
    sql.bytes(format!("{}.idem_partitioning", schema.quoted()).as_bytes()).push(",'UTF8')) IS NOT NULL");
    sql
}

fn is_partitioned(rows: &[sqlx::postgres::PgRow]) -> bool {
    rows.first().and_then(|row| row.try_get(0).ok()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_period_is_written_into_the_statements() {
        let hourly = partitioning("x", Duration::from_secs(3600)).unwrap();
        assert!(hourly.contains("(period) VALUES (3600000000)") && !hourly.contains(PERIOD_OF_FILE));
        assert!(hourly.contains("\"x\".idem_records") && !hourly.contains("\"idem\""));
        assert!(partitioning("x", Duration::from_millis(999)).is_err());
    }
}
