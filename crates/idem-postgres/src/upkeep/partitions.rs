//! Makes coming partitions and drops past ones.

use std::num::NonZeroU32;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use idem_core::{StoreError, StoreErrorKind};
use sqlx::Row as _;
use sqlx::postgres::PgRow;

use crate::error::{is_of_lock_timeout, store_error};
use crate::schema::partitions::TABLE;
use crate::sql::{BEGIN, Sql, is_true};
use crate::upkeep::pool::{LOCAL_COMMIT, Upkeep};

/// How long the server may search a partition for a live record. It reads the whole partition.
const SEARCH_TIMEOUT: Duration = Duration::from_secs(600);

/// How long to wait for the lock of a table. All other sessions wait behind it; the next round tries again.
const LOCK_TIMEOUT: Duration = Duration::from_millis(100);

/// How long it may take to make partitions. Sessions that make or look for records wait meanwhile, and less than their own
/// `statement_timeout`.
const MAKE_TIMEOUT: Duration = Duration::from_secs(1);

/// How long to wait after that was not enough: each try makes other sessions wait again.
const MAKE_PAUSE: Duration = Duration::from_secs(60);

/// What an error could not do.
const WHAT: &str = "look after partitions";

impl Upkeep {
    /// Makes coming partitions and drops past ones. Returns how many records it removed one by one, at most `most`; `None` if
    /// records are not partitioned.
    pub(crate) async fn maintain_partitions(&self, most: NonZeroU32) -> Result<Option<u32>, StoreError> {
        if !is_true(&self.run(WHAT, self.records.schema.look_for_table(TABLE), self.client_timeout).await?) {
            return Ok(None);
        }
        // Each step is done, whatever becomes of the others.
        let removed = self.purge_rest(most).await;
        let made = self.make_partitions().await;
        let dropped = self.drop_past_partitions().await;
        made.and(dropped)?;
        removed.map(Some)
    }

    async fn purge_rest(&self, most: NonZeroU32) -> Result<u32, StoreError> {
        let most = i32::try_from(most.get()).unwrap_or(i32::MAX);
        let number = |sql: &mut Sql| {
            sql.push(",").number(most);
        };
        let rows = self.step(&[], ".idem_purge_rest_v1", number, self.client_timeout).await?;
        let removed = rows.first().map(|row| row.try_get::<i32, _>(0)).transpose();
        Ok(removed.map_err(|error| store_error(WHAT, error))?.unwrap_or_default().unsigned_abs())
    }

    /// Makes the coming partitions. If it takes too long, it logs a warning, and this process does not try again for a while.
    async fn make_partitions(&self) -> Result<(), StoreError> {
        let paused_until = || self.make_paused_until.lock().unwrap_or_else(PoisonError::into_inner);
        if paused_until().is_some_and(|until| Instant::now() < until) {
            return Ok(());
        }
        let limits = [("lock_timeout", LOCK_TIMEOUT), ("statement_timeout", MAKE_TIMEOUT)];
        match self.step(&limits, ".idem_make_partitions_v1", |_| {}, self.client_timeout).await {
            Err(error) if is_of_lock_timeout(&error) => {
                tracing::warn!(
                    error = &error as &dyn std::error::Error,
                    "the coming partitions could not be made; the next round tries again"
                );
                Ok(())
            }
            Err(error) if error.kind() == StoreErrorKind::Timeout => {
                *paused_until() = Some(Instant::now() + MAKE_PAUSE);
                let schema = self.records.schema.quoted();
                tracing::warn!(
                    error = &error as &dyn std::error::Error,
                    "the coming partitions could not be made within {MAKE_TIMEOUT:?}; if {schema}.idem_records_rest is large, run \
                     SELECT {schema}.idem_make_partitions_v1(0) without a statement_timeout while there are few requests, which \
                     wait until it has read the table"
                );
                Ok(())
            }
            made => made.map(drop),
        }
    }

    async fn drop_past_partitions(&self) -> Result<(), StoreError> {
        loop {
            let limit = [("statement_timeout", SEARCH_TIMEOUT)];
            let past = self.step(&limit, ".idem_past_partition_v1", |_| {}, SEARCH_TIMEOUT).await?;
            let past = past.first().map(|row| row.try_get::<Option<String>, _>(0)).transpose();
            let Some(past) = past.map_err(|error| store_error(WHAT, error))?.flatten() else {
                return Ok(());
            };
            // One limit is for each lock, the other for all locks together.
            let limits = [("lock_timeout", LOCK_TIMEOUT), ("statement_timeout", 3 * LOCK_TIMEOUT)];
            let name = |sql: &mut Sql| {
                sql.push(",").text(&past);
            };
            if !is_true(&self.step(&limits, ".idem_drop_partition_v1", name, self.client_timeout).await?) {
                return Ok(());
            }
        }
    }

    /// Calls a function of the schema in a separate transaction with `limits`. `arguments` follow the skew of the clock.
    async fn step(
        &self,
        limits: &[(&str, Duration)],
        function: &str,
        arguments: impl FnOnce(&mut Sql),
        client_timeout: Duration,
    ) -> Result<Vec<PgRow>, StoreError> {
        let mut sql = Sql::default();
        sql.push(BEGIN).push(&self.local_settings).push(LOCAL_COMMIT);
        for (setting, limit) in limits {
            sql.push("SET LOCAL ").push(setting).push("=").push(&limit.as_millis().to_string()).push(";");
        }
        sql.push("SELECT ").push(self.records.schema.quoted()).push(function).push("(");
        arguments(sql.number(self.records.offset.micros()));
        sql.push(");COMMIT");
        self.run(WHAT, sql, client_timeout).await
    }
}
