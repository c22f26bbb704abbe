//! The optional layout of records in partitions by time.

use std::time::Duration;

use idem_core::{StoreError, StoreErrorKind};
use sqlx::PgConnection;

use crate::schema::name::Schema;
use crate::sql::{in_safe_path, is_true, micros, rows};

const PARTITIONS: &str = include_str!("../../migrations/partitions.sql");

/// The table that exists only if records are partitioned.
pub(crate) const TABLE: &str = "idem_partitioning";

/// The period in `partitions.sql`, in microseconds: a day.
const PERIOD_OF_FILE: &str = "86400000000";

/// The shortest period. Each partition is a table, and every verb searches all of them.
const SHORTEST_PERIOD: Duration = Duration::from_secs(1);

/// The longest period. Beyond it nothing would ever be dropped.
const LONGEST_PERIOD: Duration = Duration::from_secs(366 * 24 * 3600);

/// The statements that spread records over partitions of `period` each, for a migration tool.
///
/// Apply them in one transaction, after [`migrations`](crate::migrations()); outside of a transaction they fail.
/// [`PostgresConfig::partitioned`](crate::PostgresConfig::partitioned) describes their effect.
///
/// # Errors
/// [`StoreError`] when `schema` cannot be the name of a schema, or when `period` is not between a second and a year.
pub fn partitioning(schema: &str, period: Duration) -> Result<String, StoreError> {
    statements(&Schema::new(schema)?, period)
}

fn statements(schema: &Schema, period: Duration) -> Result<String, StoreError> {
    if !(SHORTEST_PERIOD..=LONGEST_PERIOD).contains(&period) {
        let message = format!("a partition cannot cover {period:?}: it takes a second to a year");
        return Err(StoreError::new(StoreErrorKind::Misconfigured, message));
    }
    Ok(in_safe_path(&schema.localise(&PARTITIONS.replace(PERIOD_OF_FILE, &micros(period).to_string()))))
}

/// Spreads records over partitions, unless they are already. Call it in the transaction that applies the migrations.
pub(crate) async fn apply(connection: &mut PgConnection, schema: &Schema, period: Duration) -> Result<(), StoreError> {
    let statements = statements(schema, period)?;
    if is_partitioned(connection, schema).await? {
        return Ok(());
    }
    rows(connection, "spread records over partitions", statements).await.map(drop)
}

pub(crate) async fn is_partitioned(connection: &mut PgConnection, schema: &Schema) -> Result<bool, StoreError> {
    let look = schema.look_for_table(TABLE).into_text();
    Ok(is_true(&rows(connection, "look for partitions", look).await?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_period_is_written_into_the_statements() {
        let hourly = partitioning("x", Duration::from_secs(3600)).unwrap();
        assert!(hourly.contains("(period) VALUES (3600000000)") && !hourly.contains(PERIOD_OF_FILE));
        assert!(hourly.contains("\"x\".idem_records") && !hourly.contains("\"idem\""));
        for period in [Duration::from_millis(999), Duration::MAX] {
            assert!(partitioning("x", period).is_err());
        }
    }
}
