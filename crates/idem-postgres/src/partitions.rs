//! The optional layout of records in partitions by time.

use std::num::NonZeroU32;
use std::time::Duration;

use idem_core::{StoreError, StoreErrorKind};
use sqlx::{PgConnection, Row as _};

use crate::config::micros;
use crate::error::store_error;
use crate::literal::Sql;
use crate::migrate::{is_true, look_for_table};
use crate::schema::Schema;
use crate::store::{BEGIN, PostgresStore, rows};

const PARTITIONS: &str = include_str!("../migrations/partitions.sql");

/// It is there when records are partitioned.
const TABLE: &str = "idem_partitioning";

/// The period that the file is written for, in microseconds: a day.
const PERIOD_OF_FILE: &str = "86400000000";

/// The shortest period: each partition is a table, and every verb looks into all that there are.
const SHORTEST_PERIOD: Duration = Duration::from_secs(1);

/// The longest one: beyond it nothing would ever be dropped.
const LONGEST_PERIOD: Duration = Duration::from_secs(366 * 24 * 3600);

/// How long the server may look whether a partition has a living record; it reads it whole.
const LOOK_FOR_AT_MOST: Duration = Duration::from_secs(600);

/// How long to wait until nobody uses the table. Everybody else waits behind; when it is not to be had the next round
/// tries again.
const WAIT_AT_MOST: Duration = Duration::from_millis(100);

/// The statements that spread records over partitions which cover `period` each, for those who apply migrations by a
/// tool of their own; apply them in one transaction, after [`migrations`](crate::migrations()).
/// [`PostgresConfig::partitioned`](crate::PostgresConfig::partitioned) says what they bring.
///
/// # Errors
/// [`StoreError`] when `schema` cannot be the name of one, or when `period` is not between a second and a year.
pub fn partitioning(schema: &str, period: Duration) -> Result<String, StoreError> {
    statements(&Schema::new(schema)?, period)
}

fn statements(schema: &Schema, period: Duration) -> Result<String, StoreError> {
    if !(SHORTEST_PERIOD..=LONGEST_PERIOD).contains(&period) {
        let message = format!("a partition cannot cover {period:?}: it takes a second to a year");
        return Err(StoreError::new(StoreErrorKind::Misconfigured, message));
    }
    Ok(schema.localise(&PARTITIONS.replace(PERIOD_OF_FILE, &micros(period).to_string())))
}

/// Spreads records over partitions, unless they are. In the transaction in which migrations are applied.
pub(crate) async fn apply(connection: &mut PgConnection, schema: &Schema, period: Duration) -> Result<(), StoreError> {
    let statements = statements(schema, period)?;
    if is_true(&rows(connection, "look for partitions", look_for_table(schema, TABLE).into_text()).await?) {
        return Ok(());
    }
    rows(connection, "spread records over partitions", statements).await.map(drop)
}

/// Makes coming partitions and drops past ones. Says how many records it removed one by one, at most `most`; `None` when
/// records are not in partitions.
pub(crate) async fn maintain(store: &PostgresStore, most: NonZeroU32) -> Result<Option<u32>, StoreError> {
    let (schema, what) = (&store.shared.schema, "look after partitions");
    if !is_true(&store.maintain(what, look_for_table(schema, TABLE), store.shared.patience).await?) {
        return Ok(None);
    }
    let (skew, lock) = (store.shared.offset.micros(), schema.task_lock("partitions"));
    let step = |timeouts: &str, call: &str| {
        let mut sql = Sql::default();
        sql.push(BEGIN).push(&store.shared.prelude).push(timeouts);
        sql.push("SELECT ").push(schema.quoted()).push(call).push("(").number(skew);
        sql
    };
    let mut make = step("", ".idem_make_partitions_v1");
    make.push(",").number(lock).push(",").number(i32::try_from(most.get()).unwrap_or(i32::MAX)).push(");COMMIT");
    let made = store.maintain(what, make, store.shared.patience).await?;
    let removed = made.first().map(|row| row.try_get::<i32, _>(0)).transpose();
    let removed = removed.map_err(|error| store_error(what, error))?.unwrap_or_default().unsigned_abs();
    loop {
        let reading = format!("SET LOCAL statement_timeout={};", LOOK_FOR_AT_MOST.as_millis());
        let mut look = step(&reading, ".idem_past_partition_v1");
        look.push(");COMMIT");
        let past = store.maintain(what, look, LOOK_FOR_AT_MOST).await?;
        let past = past.first().map(|row| row.try_get::<Option<String>, _>(0)).transpose();
        let Some(past) = past.map_err(|error| store_error(what, error))?.flatten() else { return Ok(Some(removed)) };
        let waiting = WAIT_AT_MOST.as_millis();
        // The one limit is for each lock, the other for all of them together.
        let waiting = format!("SET LOCAL lock_timeout={waiting};SET LOCAL statement_timeout={};", 3 * waiting);
        let mut drop_it = step(&waiting, ".idem_drop_partition_v1");
        drop_it.push(",").number(lock).push(",convert_from(").bytes(past.as_bytes()).push(",'UTF8'));COMMIT");
        if !is_true(&store.maintain(what, drop_it, store.shared.patience).await?) {
            return Ok(Some(removed));
        }
    }
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
