//! The health of the server, and what the self-test reports.

use std::fmt;

use idem_core::{StoreError, StoreErrorKind};
use sqlx::Row as _;

use crate::connect::server::{DurabilityReport, SETTINGS};
use crate::error::store_error;
use crate::sql::{BEGIN, Sql};
use crate::upkeep::pool::Upkeep;
use crate::upkeep::privileges::OpenSchema;

/// What [`PostgresStore::self_test`](crate::PostgresStore::self_test) found out.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct SelfTestReport {
    /// What an acknowledged record survives.
    pub durability: DurabilityReport,
    /// The schemas that the store's role uses and in which other roles may create objects; there should be none.
    pub open_schemas: Vec<OpenSchema>,
    /// Whether handlers' transactions come from a pool of the application
    /// ([`from_pool`](crate::PostgresConfig::from_pool)).
    pub is_from_pool: bool,
    /// Whether the configuration declares a transaction pooler
    /// ([`through_transaction_pooler`](crate::PostgresConfig::through_transaction_pooler)), where one protection is missing.
    pub is_pooled: bool,
}

const FROM_POOL: &str = "handlers' transactions come from the application's pool: while one is open, its session refuses writes \
    outside of it; the pool's log of statements contains stored answers";

const POOLED: &str = "through a transaction pooler, Postgres accepts what a handler writes after it has ended its transaction: such a write \
    commits without a record, and the client gets 500";

const FROM_POOL_AND_POOLED: &str = "in the application's pool, a `begin` of the handler that fails or is cancelled also ends the \
    transaction";

/// What the origin of handlers' sessions weakens.
pub(crate) fn weaknesses(is_from_pool: bool, is_pooled: bool) -> &'static [&'static str] {
    match (is_from_pool, is_pooled) {
        (false, false) => &[],
        (true, false) => &[FROM_POOL],
        (false, true) => &[POOLED],
        (true, true) => &[POOLED, FROM_POOL_AND_POOLED],
    }
}

/// Sentences for a log at start-up.
impl fmt::Display for SelfTestReport {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.durability.fmt(formatter)?;
        self.open_schemas.iter().try_for_each(|open| write!(formatter, "; {open}"))?;
        weaknesses(self.is_from_pool, self.is_pooled).iter().try_for_each(|weakness| write!(formatter, "; {weakness}"))
    }
}

/// The report of [`PostgresStore::health`](crate::PostgresStore::health).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct PostgresHealth {
    /// The server's version, as in `15.4`.
    pub version: String,
    /// About how many records there are, expired ones included: as many as the last `ANALYZE` or `VACUUM` saw. Counting
    /// them would take minutes on a large table.
    pub records: u64,
    /// What an acknowledged record survives.
    pub durability: DurabilityReport,
}

impl Upkeep {
    /// Reports what an acknowledged record survives, and which schemas are open to other roles. Logs a warning for each such
    /// schema.
    pub(crate) async fn self_test_report(&self) -> Result<SelfTestReport, StoreError> {
        let durability = self.health().await?.durability;
        let open_schemas = self.open_schemas().await?;
        for open in &open_schemas {
            tracing::warn!("{open}");
        }
        let (is_from_pool, is_pooled) = (self.is_from_pool, self.pooled);
        Ok(SelfTestReport { durability, open_schemas, is_from_pool, is_pooled })
    }

    pub(crate) async fn health(&self) -> Result<PostgresHealth, StoreError> {
        let what = "ask for the health of the server";
        let table = format!("{}.idem_records", self.records.schema.quoted());
        let mut sql = Sql::default();
        sql.push(BEGIN).push(&self.local_settings).push(SETTINGS);
        sql.push(", (SELECT coalesce(pg_catalog.sum(greatest(reltuples, 0)), 0)::BIGINT FROM pg_catalog.pg_class ");
        sql.push("JOIN pg_catalog.pg_partition_tree(").text(&table).push("::pg_catalog.regclass) ");
        sql.push("ON oid OPERATOR(pg_catalog.=) relid WHERE isleaf);COMMIT");
        let rows = self.run(what, sql, self.client_timeout).await?;
        let row = rows.first().ok_or_else(|| StoreError::new(StoreErrorKind::Corrupt, format!("could not {what}")))?;
        let failed = |error| store_error(what, error);
        let records: i64 = row.try_get(9).map_err(failed)?;
        Ok(PostgresHealth {
            version: row.try_get(0).map_err(failed)?,
            records: records.unsigned_abs(),
            durability: DurabilityReport::of(row).map_err(failed)?,
        })
    }
}
