//! Business writes outside of the store's transactions, only while the operation is still owned.

use idem_core::{Lease, OwnerOutcome, StoreError};
use sqlx::{AssertSqlSafe, PgConnection, Row as _};

use crate::error::outage;
use crate::records::Records;
use crate::sql::Sql;

/// A fence around business writes of a leased run, in the store's database but not in its transaction.
///
/// A run that stalls may wake up after its lease was taken over, and write late. With the guard in its own transaction
/// it writes only while it still owns the operation: the guard keeps the record as it is until that transaction ends,
/// so that nobody takes over in between. Others wait meanwhile (renewals of the same lease included), at most the
/// store's `lock_timeout`: make the guard the last statement but the writes, and commit soon.
///
/// It fences, it does not remember: a crash after the commit and before the settlement lets an AtLeastOnce operation run
/// again. Where writes may happen only once, use the Transactional contract.
#[derive(Debug, Clone)]
pub struct Guard {
    condition: String,
}

impl Guard {
    pub(crate) fn new(records: &Records, lease: &Lease) -> Self {
        let mut sql = Sql::default();
        sql.push(records.schema.quoted()).push(".idem_owns_v1(").number(records.offset.micros()).push(",");
        sql.number(records.schema.lock(&lease.id)).push(",");
        sql.bytes(lease.id.as_bytes()).push(",").bytes(lease.owner.as_bytes()).push(")");
        Self { condition: sql.into_text() }
    }

    /// An SQL expression that is true while the run owns its operation, for the `WHERE` of a statement:
    /// `INSERT INTO transfers SELECT $1, $2 WHERE …`. No row written means that the lease is lost. It holds nothing but
    /// quoted names and hexadecimal digits.
    #[must_use]
    pub fn condition(&self) -> &str {
        &self.condition
    }

    /// Looks inside the transaction that is open on `connection`, which is the caller's. After `Applied`, what it writes
    /// commits only while the run owns its operation; after `LeaseLost`, roll it back.
    ///
    /// # Errors
    /// [`StoreError`] when the server could not answer; the transaction is then of no use any more.
    pub async fn hold(&self, connection: &mut PgConnection) -> Result<OwnerOutcome, StoreError> {
        let what = "ask whether a lease is still held";
        let ask = sqlx::raw_sql(AssertSqlSafe(format!("SELECT {}", self.condition)));
        let found = ask.fetch_all(connection).await.map_err(|error| outage(what, error))?;
        let owned = found.first().map(|row| row.try_get::<bool, _>(0)).transpose();
        let owned = owned.map_err(|error| outage(what, error))?.unwrap_or_default();
        Ok(if owned { OwnerOutcome::Applied } else { OwnerOutcome::LeaseLost })
    }
}
