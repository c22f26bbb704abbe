//! The transaction that a handler makes its business writes in.

use std::any::Any;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use idem_core::codec::FlatRecord;
use idem_core::{
    Origin, OwnerOutcome, OwnerToken, Record, RecordId, Settlement, State, StoreError, StoreErrorKind,
    StoreTransaction, Writes,
};
use sqlx::{AssertSqlSafe, PgConnection};
use tokio::time::{sleep, timeout};

use crate::batch::verb::{FlatSettlement, Lookup, Presence};
use crate::connect::handler_connection::{ROLLBACK, roll_back_by};
use crate::connect::sessions::Session;
use crate::error::{is_changed, is_out_of_transaction, is_shadowed, may_be_done, out_of_transaction, outage};
use crate::records::Records;
use crate::sql::{Sql, readable};
use crate::timeouts::{COMMIT_TIMEOUT, OUTCOME_POLL_INTERVAL, OUTCOME_TIMEOUT};
use crate::transaction::statements::{Mark, TransactionSettings};

/// An open transaction; it dereferences to the connection, so `&mut *transaction` (or `&mut **guard`) runs queries, and
/// `begin` on it makes a savepoint.
///
/// The key is held by a lock that lives and dies with the transaction: if this process or its machine disappears, the
/// server rolls everything back and the key is free.
///
/// Do not end it yourself: that is noticed, and the settlement then fails.
///
/// What you `SET` without `LOCAL` and commit stays in the session, which serves other handlers next, as do prepared statements,
/// `LISTEN`, temporary tables and session-level advisory locks; `SET LOCAL` and `pg_advisory_xact_lock` leave nothing behind. The
/// role is reset before the record is written, so deferred triggers run as the store's user.
pub struct PostgresTransaction {
    pub(crate) session: Session,
    pub(crate) mark: Mark,
    pub(crate) records: Arc<Records>,
    pub(crate) settings: Arc<TransactionSettings>,
    pub(crate) id: RecordId,
    pub(crate) origin: Origin,
    /// The record while the operation runs. It is never written.
    pub(crate) record: Record,
    /// The row that was there before, if any.
    pub(crate) previous: Option<PreviousRow>,
}

/// The row that was there before the run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PreviousRow {
    pub(crate) version: i64,
    /// Whether it had expired. It then counted as absent, and a purge may remove it at any time.
    pub(crate) was_expired: bool,
}

impl PostgresTransaction {
    /// Everything that ends the transaction, in one message: the record is there only if the commit is.
    fn end_sql(&self, settlement: Option<&FlatSettlement>, writes: Writes) -> String {
        let mut sql = Sql::default();
        let savepoint = &self.settings.savepoint;
        match writes {
            // RELEASE fails if the handler has ended the transaction, or has overlooked an error: what it wrote is then not what
            // would be committed here. RELEASE also ends a READ ONLY of the handler's. A role that the handler has taken may
            // not write records, and must not reach the next handler.
            Writes::Keep => {
                sql.push("RELEASE SAVEPOINT ").push(savepoint).push(";RESET SESSION AUTHORIZATION;RESET ROLE;");
            }
            Writes::Discard => {
                sql.push("ROLLBACK TO SAVEPOINT ").push(savepoint).push(";");
            }
        }
        if let Some(settlement) = settlement {
            self.write_record(&mut sql, settlement, writes);
        }
        sql.push("COMMIT");
        sql.into_text()
    }

    fn write_record(&self, sql: &mut Sql, settlement: &FlatSettlement, writes: Writes) {
        let schema = &self.records.schema;
        let flat = FlatRecord::from(&self.record);
        let principal = self.origin.scope.principal().map(readable);
        let is_retryable = settlement.retry_after.is_some();
        sql.push("SELECT ").push(schema.quoted()).push(".idem_put_v1(").number(self.settings.lock_timeout).push(",");
        sql.number(self.records.offset.micros()).push(",");
        sql.bytes(self.id.as_bytes()).push(",").number(schema.lock(&self.id)).push(",");
        sql.optional_number(self.previous.map(|previous| previous.version)).push(",");
        sql.bytes(&readable(&self.origin.namespace)).push(",").optional_bytes(principal.as_deref()).push(",");
        sql.bytes(&readable(self.origin.scope.operation())).push(",").number(flat.format).push("::SMALLINT,");
        sql.number(flat.fingerprint_algorithm).push(",").bytes(&flat.fingerprint).push(",").bytes(&flat.owner);
        sql.push(",")
            .number(flat.attempt)
            .push(",")
            .number(settlement.state)
            .push("::SMALLINT,")
            .optional_number(settlement.retry_after);
        // A retry needs the checkpoint.
        let name = flat.checkpoint_name.as_ref().filter(|_| is_retryable);
        sql.push(",").optional_bytes(name.map(String::as_bytes)).push(",");
        sql.optional_bytes(flat.checkpoint_data.as_deref().filter(|_| is_retryable))
            .push(",")
            .number(settlement.status)
            .push(",");
        sql.bytes(&settlement.headers).push(",").optional_bytes(settlement.body.as_deref()).push(",");
        let was_expired = self.previous.is_some_and(|previous| previous.was_expired);
        sql.number(flat.created_at).push(",").number(settlement.retention).push(if was_expired {
            ",TRUE,"
        } else {
            ",FALSE,"
        });
        // Proves that none of the handler's writes are left.
        sql.optional_number((writes == Writes::Discard).then_some(self.mark.0)).push(");");
    }

    /// Looks up how the transaction ended after COMMIT got no answer. Once its lock is free it has ended, and its record says how.
    async fn find_outcome(self, error: StoreError) -> Result<OwnerOutcome, StoreError> {
        let (records, id, owner) = (Arc::clone(&self.records), self.id, self.record.owner);
        let lock = records.schema.lock(&id);
        self.session.close_now();
        let find_outcome = async {
            loop {
                match records.read(id, Some(lock)).await {
                    Ok(found) if found.presence == Presence::Running => {}
                    Ok(found) if !found.is_settled_by(owner) => return false,
                    // It was committed. That counts once no failover can lose it.
                    Ok(_) => match records.read_confirmed(id, None).await {
                        Ok(found) if found.is_settled_by(owner) => return true,
                        Ok(_) | Err(_) => {}
                    },
                    Err(_) => {}
                }
                sleep(OUTCOME_POLL_INTERVAL).await;
            }
        };
        match timeout(OUTCOME_TIMEOUT, find_outcome).await {
            Ok(true) => Ok(OwnerOutcome::Applied),
            Ok(false) => {
                let message = "the connection was lost before COMMIT, and everything was rolled back";
                Err(StoreError::new(StoreErrorKind::Unavailable, message).with_source(error))
            }
            Err(_) => Err(error),
        }
    }
}

impl Lookup {
    fn is_settled_by(&self, owner: OwnerToken) -> bool {
        let record = self.row.as_ref().map(|row| &row.record);
        record.is_some_and(|record| record.owner == owner && !matches!(record.state, State::InProgress { .. }))
    }
}

#[async_trait]
impl StoreTransaction for PostgresTransaction {
    async fn finish(
        self: Box<Self>,
        settlement: &Settlement,
        retention: Duration,
        writes: Writes,
    ) -> Result<OwnerOutcome, StoreError> {
        let mut transaction = *self;
        let settlement = FlatSettlement::of(settlement, retention);
        if settlement.is_none() && writes == Writes::Discard {
            // Fails if the handler has ended it.
            let how = format!("ROLLBACK TO SAVEPOINT {};ROLLBACK", transaction.settings.savepoint);
            transaction.session.roll_back(how).await?;
            return Ok(OwnerOutcome::Applied);
        }
        let sql = transaction.end_sql(settlement.as_ref(), writes);
        let session = &mut *transaction.session;
        let ending = async {
            match writes {
                Writes::Keep => sqlx::raw_sql(AssertSqlSafe(sql)).execute(session).await.map(drop),
                Writes::Discard => roll_back_by(session, &sql).await,
            }
        };
        let Ok(ended) = timeout(COMMIT_TIMEOUT, ending).await else {
            let error = StoreError::new(StoreErrorKind::Timeout, format!("no answer to COMMIT in {COMMIT_TIMEOUT:?}"));
            return if settlement.is_none() { Err(error) } else { transaction.find_outcome(error).await };
        };
        match ended {
            Ok(()) => {
                transaction.session.give_back();
                Ok(OwnerOutcome::Applied)
            }
            Err(error) if may_be_done(&error) => {
                let error = outage("commit", error).indeterminate();
                // Without a record nothing is left by which to tell.
                if settlement.is_none() { Err(error) } else { transaction.find_outcome(error).await }
            }
            // The server refused a statement, or COMMIT. It keeps nothing, and the session can serve again.
            Err(error) => {
                let rolled_back = transaction.session.roll_back(ROLLBACK.to_owned()).await;
                if is_changed(&error) {
                    rolled_back?;
                    return Ok(OwnerOutcome::LeaseLost);
                }
                Err(refused(error))
            }
        }
    }

    fn as_any_mut(&mut self) -> &mut (dyn Any + Send) {
        self
    }
}

/// The error for a transaction that the server refused to commit.
fn refused(error: sqlx::Error) -> StoreError {
    if is_out_of_transaction(&error) {
        return out_of_transaction(error);
    }
    if is_shadowed(&error) {
        let message = "the handler has made a savepoint with the name of the store's; everything was rolled back";
        return StoreError::new(StoreErrorKind::TransactionFailed, message).with_source(error);
    }
    // A deferred constraint says so in the name of the record.
    match outage("commit", error) {
        error if error.is_retryable() => error,
        error => {
            let message = "the server refused to commit, and everything was rolled back";
            StoreError::new(StoreErrorKind::TransactionFailed, message).with_source(error)
        }
    }
}

impl Deref for PostgresTransaction {
    type Target = PgConnection;

    fn deref(&self) -> &PgConnection {
        &self.session
    }
}

impl DerefMut for PostgresTransaction {
    fn deref_mut(&mut self) -> &mut PgConnection {
        &mut self.session
    }
}

impl fmt::Debug for PostgresTransaction {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("PostgresTransaction")
            .field("id", &self.id)
            .field("attempt", &self.record.attempt)
            .finish_non_exhaustive()
    }
}
