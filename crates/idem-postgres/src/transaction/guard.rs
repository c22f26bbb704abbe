//! Business writes outside of the store's transactions, only while the operation is still owned.

use idem_core::{Lease, OwnerOutcome, StoreError};
use sqlx::{PgConnection, Row as _};

use crate::error::outage;
use crate::records::Records;
use crate::sql::{Sql, own_rows};

/// A fence around business writes of a leased run, in the store's database but not in its transaction.
///
/// A run that stalls may wake up after its lease was taken over, and write late. A guard in the transaction of those writes
/// prevents that. It locks the record until that transaction ends, so that no other owner takes over in between. Meanwhile
/// other sessions wait for the record, at most for the store's `lock_timeout`; renewals of the same lease wait too. Make the
/// guard the last statement before the writes, and commit soon.
///
/// A guard does not record that the writes happened. After a crash between the commit and the settlement, an AtLeastOnce
/// operation runs again. If writes may happen only once, use the Transactional contract.
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
    /// `INSERT INTO transfers SELECT $1, $2 WHERE …`. If no row is written, the lease is lost. It contains only quoted names,
    /// numbers and hexadecimal digits.
    #[must_use]
    pub fn condition(&self) -> &str {
        &self.condition
    }

    /// Checks and locks the record inside the caller's transaction, which is open on `connection`. After `Applied`, the run
    /// owns its operation until that transaction ends. After `LeaseLost`, roll it back.
    ///
    /// # Errors
    /// [`StoreError`] when the server could not answer; the transaction is then of no use any more.
    pub async fn hold(&self, connection: &mut PgConnection) -> Result<OwnerOutcome, StoreError> {
        let what = "ask whether a lease is still held";
        let found =
            own_rows(connection, format!("SELECT {}", self.condition)).await.map_err(|error| outage(what, error))?;
        let owned = found.first().map(|row| row.try_get::<bool, _>(0)).transpose();
        let owned = owned.map_err(|error| outage(what, error))?.unwrap_or_default();
        Ok(if owned { OwnerOutcome::Applied } else { OwnerOutcome::LeaseLost })
    }
}
