//! Settlements and checkpoints in a transaction that the caller opened.

use idem_core::{Command, Lease, OwnerAction, OwnerOutcome, StoreError, StoreErrorKind};
use sqlx::{MySqlConnection, Row as _};

use crate::error::{has_ended, is_no_table, is_read_only_transaction, out_of_transaction, store_error, unreadable};
use crate::records::{FOR_UPDATE, Found, Records, misanswered, owner_outcome};
use crate::session::run;
use crate::sql::{REAL_TIME, Sql};

/// Fails if there is no transaction, because a savepoint outside of one is gone at once. With `autocommit` off it would stay.
const EXPECT_OPEN: &str = "SAVEPOINT idem_within;RELEASE SAVEPOINT idem_within;";

impl Records {
    /// Does what only the owner of a record may do, in the caller's transaction. `LeaseLost` also if it was done before.
    pub(crate) async fn act_within(
        &self,
        identity: &[u8; 16],
        connection: &mut MySqlConnection,
        lease: &Lease,
        action: OwnerAction<'_>,
    ) -> Result<OwnerOutcome, StoreError> {
        let mut sql = Sql::new(EXPECT_OPEN);
        sql.push(REAL_TIME).push("SELECT identity,@@autocommit FROM ").push(&self.tables.identity).push(";");
        self.tables.read(&mut sql, &lease.id, FOR_UPDATE);
        let rows = run(connection, sql).await.map_err(|error| match error {
            error if has_ended(&error) => out_of_transaction(error),
            error if is_no_table(&error) => elsewhere(),
            error if is_read_only_transaction(&error) => read_only(error),
            error => store_error("lock a record in the caller's transaction", error),
        })?;
        let (place, rows) = rows.split_first().ok_or_else(misanswered)?;
        if place.try_get::<Vec<u8>, _>(0).map_err(unreadable)? != identity {
            return Err(elsewhere());
        }
        if place.try_get::<i64, _>(1).map_err(unreadable)? == 0 {
            let message = "the session has autocommit off, so that a transaction that was ended, as by a deadlock, cannot be told from \
                an open one; set autocommit to 1, and begin by START TRANSACTION";
            return Err(StoreError::new(StoreErrorKind::TransactionFailed, message));
        }
        let found = Found::of(rows, &self.offset)?;
        let (sql, outcome) = found.decide(&self.tables, &lease.id, None, Command::Owner(lease.owner, action))?;
        // If there is nothing to write, another transaction has done it: its writes are committed already.
        let (Some(sql), OwnerOutcome::Applied) = (sql, owner_outcome(outcome)?) else {
            return Ok(OwnerOutcome::LeaseLost);
        };
        self.tables.expect_fits(&sql)?;
        let written = run(connection, sql).await;
        written.map_err(|error| store_error("write a record in the caller's transaction", error))?;
        Ok(OwnerOutcome::Applied)
    }
}

fn read_only(error: sqlx::Error) -> StoreError {
    StoreError::new(StoreErrorKind::TransactionFailed, "the caller's transaction is READ ONLY").with_source(error)
}

fn elsewhere() -> StoreError {
    let message = "the caller's transaction is in another server than the store, so that they cannot commit together; or the records \
        got a new identity since the store was opened: open it again";
    StoreError::new(StoreErrorKind::Misconfigured, message)
}
