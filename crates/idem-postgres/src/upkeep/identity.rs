//! The identity of the records, and the history of the server that has them.

use idem_core::{StoreError, StoreErrorKind};
use sqlx::Row as _;

use crate::error::outage;
use crate::sql::{BEGIN, Sql};
use crate::upkeep::pool::Upkeep;

/// Where the server's write-ahead log comes from: what was remembered, and what it is now.
///
/// Each is the identifier of the cluster and the number of the timeline, as in `7301234567890123456/1`. A promoted standby and a
/// recovery to a point in time begin a new timeline. A dump that is restored elsewhere has another cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ServerHistory {
    /// What was remembered. `None` before the first time.
    pub remembered: Option<String>,
    /// What it is now.
    pub current: String,
}

impl ServerHistory {
    /// Whether the server has another history than the remembered one, so that records may be missing that it had acknowledged.
    #[must_use]
    pub fn has_changed(&self) -> bool {
        self.remembered.as_ref().is_some_and(|remembered| *remembered != self.current)
    }
}

/// The history as an expression. The timeline is that of the last checkpoint, so a promotion shows after its first one.
const CURRENT: &str = "((SELECT system_identifier::pg_catalog.text FROM pg_catalog.pg_control_system()) OPERATOR(pg_catalog.||) '/' \
    OPERATOR(pg_catalog.||) (SELECT timeline_id::pg_catalog.text FROM pg_catalog.pg_control_checkpoint()))";

impl Upkeep {
    pub(crate) async fn history(&self) -> Result<ServerHistory, StoreError> {
        let what = "read the history of the server";
        let mut sql = Sql::default();
        sql.push(BEGIN).push(&self.local_settings).push("SELECT history,").push(CURRENT).push(" FROM ");
        sql.push(self.records.schema.quoted()).push(".idem_identity;COMMIT");
        let rows = self.run(what, sql, self.client_timeout).await?;
        let row = rows.first().ok_or_else(|| StoreError::new(StoreErrorKind::Corrupt, "idem_identity is empty"))?;
        let read = || Ok(ServerHistory { remembered: row.try_get(0)?, current: row.try_get(1)? });
        read().map_err(|error| outage(what, error))
    }

    pub(crate) async fn remember_history(&self) -> Result<(), StoreError> {
        let mut sql = Sql::default();
        sql.push(BEGIN).push(&self.local_settings).push("UPDATE ").push(self.records.schema.quoted());
        sql.push(".idem_identity SET history=").push(CURRENT).push(";COMMIT");
        self.run("remember the history of the server", sql, self.client_timeout).await.map(drop)
    }

    pub(crate) async fn renew_identity(&self) -> Result<(), StoreError> {
        let what = "give the records a new identity";
        let identity = format!("{}.idem_identity", self.records.schema.quoted());
        let mut sql = Sql::default();
        sql.push(BEGIN).push(&self.local_settings);
        // A process that opens its store after the count waits for the new identity.
        sql.push("LOCK TABLE ").push(&identity).push(" IN ACCESS EXCLUSIVE MODE;");
        // A role that may not see the activity of another one gets no backend_type. Workers of the server have no role.
        sql.push(&format!(
            "WITH others AS MATERIALIZED (\
             SELECT pg_catalog.count(*) AS number, pg_catalog.string_agg(DISTINCT application_name, ', ') AS names \
             FROM pg_catalog.pg_stat_activity WHERE datname OPERATOR(pg_catalog.=) pg_catalog.current_database() \
             AND usesysid IS NOT NULL AND (backend_type IS NULL OR backend_type OPERATOR(pg_catalog.=) 'client backend') \
             AND application_name OPERATOR(pg_catalog.<>) pg_catalog.current_setting('application_name')), \
             renewed AS (UPDATE {identity} SET identity = pg_catalog.gen_random_uuid(), history = {CURRENT} \
             WHERE (SELECT number FROM others) OPERATOR(pg_catalog.=) 0) \
             SELECT number, names FROM others;COMMIT"
        ));
        let rows = self.run(what, sql, self.client_timeout).await?;
        let others = rows.first().map(|row| Ok((row.try_get(0)?, row.try_get(1)?))).transpose();
        let (count, names): (i64, Option<String>) = others.map_err(|error| outage(what, error))?.unwrap_or_default();
        if count > 0 {
            let names = names.unwrap_or_default();
            let message = format!(
                "could not {what}: {count} other sessions use this database ({names}). A process that keeps the old identity takes \
                 other locks than one with the new identity, and both could run one operation. Stop all of them, and try it again"
            );
            return Err(StoreError::new(StoreErrorKind::Busy, message));
        }
        Ok(())
    }
}
