//! Business writes outside of the store's transactions, only while the operation is still owned.

use idem_core::codec::{decode_sequence, encode_checkpoint};
use idem_core::{Checkpoint, Lease, OwnerOutcome, StoreError, StoreErrorKind, machine};
use sqlx::{PgConnection, Row as _};

use crate::error::{is_out_of_transaction, outage, unreadable};
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
/// operation runs again. If writes may happen only once, use the Transactional contract, or make them in a step whose
/// [`checkpoint`](Self::checkpoint) commits with them.
#[derive(Debug, Clone)]
pub struct Guard {
    condition: String,
    schema: String,
    skew: i64,
    lease: Lease,
}

impl Guard {
    pub(crate) fn new(records: &Records, lease: &Lease) -> Self {
        let mut sql = Sql::default();
        sql.push(records.schema.quoted()).push(".idem_owns_v1(").number(records.offset.micros()).push(",");
        sql.number(records.schema.lock(&lease.id)).push(",");
        sql.bytes(lease.id.as_bytes()).push(",").bytes(lease.owner.as_bytes()).push(")");
        let schema = records.schema.quoted().to_owned();
        Self { condition: sql.into_text(), schema, skew: records.offset.micros(), lease: lease.clone() }
    }

    /// An SQL expression that is true while the run owns its operation, for the `WHERE` of a statement:
    /// `INSERT INTO transfers SELECT $1, $2 WHERE …`. If no row is written, the lease is lost. It contains only quoted names,
    /// numbers and hexadecimal digits. It limits how long the transaction may be idle, like [`hold`](Self::hold).
    #[must_use]
    pub fn condition(&self) -> &str {
        &self.condition
    }

    /// Checks and locks the record inside the caller's transaction, which is open on `connection`. After `Applied`, the run
    /// owns its operation until that transaction ends. After `LeaseLost`, roll it back.
    ///
    /// If the transaction is idle for 10 s after that, the server ends it, unless it has an `idle_in_transaction_session_timeout`
    /// already. Otherwise a process that has vanished would keep the operation.
    ///
    /// # Errors
    /// [`StoreError`] when the server could not answer; the transaction is then of no use any more. The kind is
    /// [`TransactionFailed`](StoreErrorKind::TransactionFailed) if there is none, because it has ended or was never begun.
    pub async fn hold(&self, connection: &mut PgConnection) -> Result<OwnerOutcome, StoreError> {
        let what = "ask whether a lease is still held";
        // A savepoint fails outside of a transaction, where the lock would be gone at once.
        let hold = format!("SAVEPOINT idem_guard;RELEASE SAVEPOINT idem_guard;SELECT {}", self.condition);
        let found = own_rows(connection, hold).await.map_err(|error| match is_out_of_transaction(&error) {
            true => not_in_transaction(error),
            false => outage(what, error),
        })?;
        let owned = found.first().map(|row| row.try_get::<bool, _>(0)).transpose();
        let owned = owned.map_err(|error| outage(what, error))?.unwrap_or_default();
        Ok(if owned { OwnerOutcome::Applied } else { OwnerOutcome::LeaseLost })
    }

    /// Holds the record like [`hold`](Self::hold), and writes `checkpoint` into it, in the caller's transaction. Both commit or
    /// neither does, as `Step::run_with_record` of the engine needs it.
    ///
    /// After `LeaseLost`, roll the transaction back. It also says that the record has this checkpoint already: then an earlier
    /// transaction of the run was committed although its COMMIT got no answer, and this one would make its writes again.
    ///
    /// Begin no other transaction inside of it: if that fails or is cancelled, sqlx ends the outer one unnoticed.
    ///
    /// The isolation level must be READ COMMITTED: at others a renewal during the transaction fails it.
    ///
    /// # Errors
    /// Like [`hold`](Self::hold).
    pub async fn checkpoint(
        &self,
        connection: &mut PgConnection,
        checkpoint: &Checkpoint,
    ) -> Result<OwnerOutcome, StoreError> {
        if self.hold(connection).await? == OwnerOutcome::LeaseLost {
            return Ok(OwnerOutcome::LeaseLost);
        }
        let what = "write a checkpoint";
        let mut sql = Sql::default();
        // In the form of bytea_output = hex, because the caller's session may have the other one.
        sql.push("SELECT E'\\\\x' OPERATOR(pg_catalog.||) pg_catalog.encode(pg_catalog.substr(checkpoint_data, 1, 4), 'hex') ");
        sql.push("FROM ").push(&self.schema);
        sql.push(".idem_records WHERE id OPERATOR(pg_catalog.=) ").bytes(self.lease.id.as_bytes());
        let found = own_rows(connection, sql.into_text()).await.map_err(|error| outage(what, error))?;
        let stored = found.first().map(|row| row.try_get_unchecked::<Option<Vec<u8>>, _>(0)).transpose();
        let stored = stored.map_err(|error| outage(what, error))?.flatten();
        let stored = stored.as_deref().map(decode_sequence).transpose().map_err(unreadable)?;
        if !machine::follows(checkpoint, stored) {
            return Ok(OwnerOutcome::LeaseLost);
        }
        let mut sql = Sql::default();
        sql.push("SELECT item FROM ").push(&self.schema).push(".idem_checkpoint_v1(").number(self.skew).push(",ARRAY[");
        sql.bytes(self.lease.id.as_bytes()).push("],ARRAY[").bytes(self.lease.owner.as_bytes()).push("],ARRAY[");
        sql.bytes(checkpoint.name.as_bytes()).push("],ARRAY[").bytes(&encode_checkpoint(checkpoint)).push("])");
        let written = own_rows(connection, sql.into_text()).await.map_err(|error| outage(what, error))?;
        Ok(if written.is_empty() { OwnerOutcome::LeaseLost } else { OwnerOutcome::Applied })
    }
}

fn not_in_transaction(error: sqlx::Error) -> StoreError {
    let message = "there is no transaction, or it has failed, so that the lease cannot be held in it; begin one again";
    StoreError::new(StoreErrorKind::TransactionFailed, message).with_source(error)
}
