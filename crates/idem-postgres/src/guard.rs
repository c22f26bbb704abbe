//! Business writes outside of the store's transactions, only while the operation is still owned.

use idem_core::{Lease, OwnerOutcome, StoreError};
use sqlx::{PgConnection, Row as _};

use crate::literal::Sql;
use crate::store::{PostgresStore, rows};

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

impl PostgresStore {
    /// The guard of the run that holds `lease`.
    #[must_use]
    pub fn guard(&self, lease: &Lease) -> Guard {
        let mut sql = Sql::default();
        sql.push(self.shared.schema.quoted()).push(".idem_owns_v1(").number(self.shared.offset.micros()).push(",");
        sql.number(self.shared.schema.lock(&lease.id)).push(",");
        sql.bytes(lease.id.as_bytes()).push(",").bytes(lease.owner.as_bytes()).push(")");
        Guard { condition: sql.into_text() }
    }
}

impl Guard {
    /// An SQL expression that is true while the run owns its operation, for the `WHERE` of a statement:
    /// `INSERT INTO transfers SELECT $1, $2 WHERE …`. No row written means that the lease is lost. It holds nothing but
    /// quoted names and hexadecimal digits.
    #[must_use]
    pub fn condition(&self) -> &str {
        &self.condition
    }

    /// Asks inside the transaction that is open on `connection`, which is the caller's. After `Applied`, what it writes
    /// commits only while the run owns its operation; after `LeaseLost`, roll it back.
    ///
    /// # Errors
    /// [`StoreError`] when the server could not answer; the transaction is then of no use any more.
    pub async fn hold(&self, connection: &mut PgConnection) -> Result<OwnerOutcome, StoreError> {
        let what = "ask whether a lease is still held";
        let found = rows(connection, what, format!("SELECT {}", self.condition)).await?;
        let owned = found.first().map(|row| row.try_get::<bool, _>(0)).transpose();
        let owned = owned.map_err(|error| crate::error::store_error(what, error))?.unwrap_or_default();
        Ok(if owned { OwnerOutcome::Applied } else { OwnerOutcome::LeaseLost })
    }
}
