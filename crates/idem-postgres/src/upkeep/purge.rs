//! Removes expired records one by one.

use std::num::NonZeroU32;

use idem_core::StoreError;
use sqlx::Row as _;

use crate::error::outage;
use crate::sql::{BEGIN, Sql};
use crate::upkeep::pool::{LOCAL_COMMIT, Upkeep};

impl Upkeep {
    /// Removes at most `limit` expired records, and returns how many.
    pub(crate) async fn purge(&self, limit: NonZeroU32) -> Result<u32, StoreError> {
        let mut sql = Sql::default();
        let most = i32::try_from(limit.get()).unwrap_or(i32::MAX);
        sql.push(BEGIN).push(&self.local_settings).push(LOCAL_COMMIT).push("SELECT ");
        sql.push(self.records.schema.quoted()).push(".idem_purge_v1(").number(self.records.offset.micros()).push(",");
        sql.number(most).push(");COMMIT");
        let rows = self.run("purge", sql, self.client_timeout).await?;
        let removed = rows.first().map(|row| row.try_get::<i32, _>(0)).transpose();
        let removed = removed.map_err(|error| outage("purge", error))?.unwrap_or_default();
        Ok(removed.unsigned_abs())
    }
}
