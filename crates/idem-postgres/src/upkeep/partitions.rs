//! Makes coming partitions and drops past ones.

use std::num::NonZeroU32;
use std::time::Duration;

use idem_core::StoreError;
use sqlx::Row as _;

use crate::error::store_error;
use crate::schema::partitions::TABLE;
use crate::sql::{BEGIN, Sql, is_true};
use crate::upkeep::pool::Upkeep;

/// How long the server may search a partition for a live record. It reads the whole partition.
const SEARCH_TIMEOUT: Duration = Duration::from_secs(600);

/// How long to wait for the lock of the table. All other sessions wait behind it; the next round tries again.
const DROP_LOCK_TIMEOUT: Duration = Duration::from_millis(100);

impl Upkeep {
    /// Makes coming partitions and drops past ones. Returns how many records it removed one by one, at most `most`; `None` if
    /// records are not partitioned.
    pub(crate) async fn maintain_partitions(&self, most: NonZeroU32) -> Result<Option<u32>, StoreError> {
        let (schema, what) = (&self.records.schema, "look after partitions");
        if !is_true(&self.run(what, schema.look_for_table(TABLE), self.client_timeout).await?) {
            return Ok(None);
        }
        let skew = self.records.offset.micros();
        let step = |timeouts: &str, call: &str| {
            let mut sql = Sql::default();
            sql.push(BEGIN).push(&self.local_settings).push(timeouts);
            sql.push("SELECT ").push(schema.quoted()).push(call).push("(").number(skew);
            sql
        };
        let mut make = step("", ".idem_make_partitions_v1");
        make.push(",").number(i32::try_from(most.get()).unwrap_or(i32::MAX)).push(");COMMIT");
        let made = self.run(what, make, self.client_timeout).await?;
        let removed = made.first().map(|row| row.try_get::<i32, _>(0)).transpose();
        let removed = removed.map_err(|error| store_error(what, error))?.unwrap_or_default().unsigned_abs();
        loop {
            let reading = format!("SET LOCAL statement_timeout={};", SEARCH_TIMEOUT.as_millis());
            let mut look = step(&reading, ".idem_past_partition_v1");
            look.push(");COMMIT");
            let past = self.run(what, look, SEARCH_TIMEOUT).await?;
            let past = past.first().map(|row| row.try_get::<Option<String>, _>(0)).transpose();
            let Some(past) = past.map_err(|error| store_error(what, error))?.flatten() else {
                return Ok(Some(removed));
            };
            let waiting = DROP_LOCK_TIMEOUT.as_millis();
            // One limit is for each lock, the other for all locks together.
            let waiting = format!("SET LOCAL lock_timeout={waiting};SET LOCAL statement_timeout={};", 3 * waiting);
            let mut drop_it = step(&waiting, ".idem_drop_partition_v1");
            drop_it.push(",").text(&past).push(");COMMIT");
            if !is_true(&self.run(what, drop_it, self.client_timeout).await?) {
                return Ok(Some(removed));
            }
        }
    }
}
