//! The transaction that a handler makes its business writes in.

use std::any::Any;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::time::Duration;

use async_trait::async_trait;
use idem_core::codec::FlatRecord;
use idem_core::{
    Origin, OwnerOutcome, OwnerToken, Record, RecordId, Settlement, State, StoreError, StoreErrorKind,
    StoreTransaction, Writes,
};
use sqlx::{AssertSqlSafe, PgConnection};
use tokio::time::{sleep, timeout};

use crate::connection::{FAILED, UNTOUCHED, out_of_transaction, roll_back};
use crate::error::{is_changed, is_connection_lost, is_out_of_transaction, store_error};
use crate::literal::{Sql, readable};
use crate::sessions::Session;
use crate::store::PostgresStore;
use crate::verb::{End, Presence, Seen};

/// How long a COMMIT may take, and how long to find out how a transaction ended whose COMMIT got no answer: together less
/// than the engine waits for the end.
const COMMIT_WITHIN: Duration = Duration::from_secs(5);
const FIND_OUT_WITHIN: Duration = Duration::from_secs(4);

/// The pause between two looks at how it ended.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// An open transaction; it dereferences to the connection, so `&mut *transaction` (or `&mut **guard`) runs queries, and
/// `begin` on it makes a savepoint.
///
/// The key is held by a lock that lives and dies with the transaction: if this process or its machine disappears, the
/// server rolls everything back and the key is free.
///
/// Do not end it yourself: that is noticed, and the settlement then fails.
pub struct PostgresTransaction {
    pub(crate) session: Session,
    pub(crate) store: PostgresStore,
    pub(crate) id: RecordId,
    pub(crate) origin: Origin,
    /// The record as the state machine would have it while the operation runs. Nobody writes it.
    pub(crate) record: Record,
    /// The row that it was decided on, if there was one.
    pub(crate) version: Option<i64>,
}

impl PostgresTransaction {
    /// Everything that ends the transaction, in one message: the record is there only if the commit is.
    fn end(&self, end: Option<&End>, writes: Writes) -> String {
        let mut sql = Sql::default();
        // Fails when the handler has ended the transaction, or an error that it overlooked has: then what it wrote is
        // not what would be committed here.
        sql.push(match writes {
            Writes::Keep => "RELEASE SAVEPOINT idem;",
            Writes::Discard => "ROLLBACK TO SAVEPOINT idem;RELEASE SAVEPOINT idem;",
        });
        if let Some(end) = end {
            self.write_record(&mut sql, end);
        }
        sql.push("COMMIT");
        sql.into_text()
    }

    fn write_record(&self, sql: &mut Sql, end: &End) {
        let shared = &self.store.shared;
        let flat = FlatRecord::from(&self.record);
        let principal = self.origin.scope.principal().map(readable);
        let again = end.wait.is_some();
        sql.push("SELECT ").push(shared.schema.quoted()).push(".idem_put_v1(").number(shared.lock_timeout).push(",");
        sql.number(shared.offset.micros()).push(",");
        sql.bytes(self.id.as_bytes()).push(",").number(shared.schema.lock(&self.id)).push(",");
        sql.optional_number(self.version).push(",");
        sql.bytes(&readable(&self.origin.namespace)).push(",").optional_bytes(principal.as_deref()).push(",");
        sql.bytes(&readable(self.origin.scope.operation())).push(",").number(flat.format).push("::SMALLINT,");
        sql.number(flat.fingerprint_algorithm).push(",").bytes(&flat.fingerprint).push(",").bytes(&flat.owner);
        sql.push(",").number(flat.attempt).push(",").number(end.state).push("::SMALLINT,").optional_number(end.wait);
        // What is to run again needs what it left behind.
        let name = flat.checkpoint_name.as_ref().filter(|_| again);
        sql.push(",").optional_bytes(name.map(String::as_bytes)).push(",");
        sql.optional_bytes(flat.checkpoint_data.as_deref().filter(|_| again)).push(",").number(end.status).push(",");
        sql.bytes(&end.headers).push(",").optional_bytes(end.body.as_deref()).push(",");
        sql.number(flat.created_at).push(",").number(end.retention).push(");");
    }

    /// Finds out how the transaction ended, after COMMIT got no answer. Its lock tells when it has ended, and only then
    /// the record tells how.
    async fn find_out(self, error: StoreError) -> Result<OwnerOutcome, StoreError> {
        let (store, id, owner) = (self.store.clone(), self.id, self.record.owner);
        let lock = store.shared.schema.lock(&id);
        // The server is to notice at once that nobody is there any more.
        drop(self);
        let find_out = async {
            loop {
                match store.read(id, Some(lock)).await {
                    Ok(seen) if seen.presence == Presence::Held => {}
                    Ok(seen) if !seen.is_settled_by(owner) => return false,
                    // It was committed. That counts once no failover can take it back.
                    Ok(_) => match store.read_confirmed(id, None).await {
                        Ok(seen) if seen.is_settled_by(owner) => return true,
                        Ok(_) | Err(_) => {}
                    },
                    Err(_) => {}
                }
                sleep(LOOK_AGAIN).await;
            }
        };
        match timeout(FIND_OUT_WITHIN, find_out).await {
            Ok(true) => Ok(OwnerOutcome::Applied),
            Ok(false) => {
                let message = "the connection was lost before COMMIT, and everything was rolled back";
                Err(StoreError::new(StoreErrorKind::Unavailable, message).with_source(error))
            }
            Err(_) => Err(error),
        }
    }
}

impl Seen {
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
        // Only after what was kept is it certain that sqlx believes the same of the connection as before.
        let reusable = writes == Writes::Keep;
        let end = End::of(settlement, retention);
        if end.is_none() && writes == Writes::Discard {
            roll_back(transaction.session, UNTOUCHED, reusable).await?;
            return Ok(OwnerOutcome::Applied);
        }
        let sql = transaction.end(end.as_ref(), writes);
        let ending = sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut *transaction.session);
        let Ok(ended) = timeout(COMMIT_WITHIN, ending).await else {
            let error = StoreError::new(StoreErrorKind::Timeout, format!("no answer to COMMIT in {COMMIT_WITHIN:?}"));
            return if end.is_none() { Err(error) } else { transaction.find_out(error).await };
        };
        match ended {
            Ok(_) => {
                if reusable {
                    transaction.session.give_back();
                }
                Ok(OwnerOutcome::Applied)
            }
            Err(error) if is_changed(&error) => {
                roll_back(transaction.session, FAILED, reusable).await?;
                Ok(OwnerOutcome::LeaseLost)
            }
            Err(error) if is_connection_lost(&error) => {
                let error = store_error("commit", error).indeterminate();
                // Without a record nothing is left by which to tell.
                if end.is_none() { Err(error) } else { transaction.find_out(error).await }
            }
            Err(error) if is_out_of_transaction(&error) => Err(out_of_transaction(error)),
            // Whatever the server refused, it kept nothing: a deferred constraint says so in the name of the record.
            Err(error) => match store_error("commit", error) {
                error if error.is_retryable() => Err(error),
                error => {
                    let message = "the server refused to commit, and everything was rolled back";
                    Err(StoreError::new(StoreErrorKind::Unavailable, message).with_source(error))
                }
            },
        }
    }

    fn as_any_mut(&mut self) -> &mut (dyn Any + Send) {
        self
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
