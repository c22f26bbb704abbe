//! Runs in transactions that this service opens, as a unit-of-work middleware does.
//!
//! Most services let the store open the transactions, or call [`PostgresStore::join`] where their own unit of work begins. Here
//! the unit of work is behind the storage port, so that the same handlers and tests serve both.

use std::any::Any;
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use idem_core::{
    Acquire, AcquireOutcome, Begin, Capabilities, Checkpoint, DurableStore, IdempotencyStore, Lease, LeaseRenewer,
    LiveRecord, OwnerOutcome, OwnerToken, Record, RecordId, Settlement, SettlementListener, StoreError, StoreErrorKind,
    StoreTransaction, Term, TransactionalStore, Writes,
};
use idem_postgres::{Join, JoinedRun, PostgresStore};
use sqlx::{AssertSqlSafe, PgPool, Postgres, Transaction};
use tokio::time::timeout;

/// How long COMMIT may take. The ticket needs up to 4 s after it, and the engine waits for 10 s in all.
const COMMIT_TIMEOUT: Duration = Duration::from_secs(5);

/// Begins the application's transactions. If this process is gone, the server ends a statement that waits within half a second, and
/// a transaction that stands still after `idle`. Then their keys are free.
fn begin_sql(idle: Duration) -> String {
    let idle = idle.as_millis();
    format!(
        "BEGIN;SET LOCAL search_path=pg_catalog,pg_temp;SET LOCAL client_connection_check_interval=500;\
         SET LOCAL idle_in_transaction_session_timeout={idle}"
    )
}

/// A store whose runs join transactions of the application's pool.
#[derive(Debug, Clone)]
pub(crate) struct JoinedStore {
    pub(crate) store: PostgresStore,
    pub(crate) pool: PgPool,
    /// How long a transaction may stand still.
    pub(crate) idle: Duration,
}

/// A transaction of the application, with the run that has joined it.
#[derive(Debug)]
pub(crate) struct JoinedTransaction {
    pub(crate) transaction: Transaction<'static, Postgres>,
    run: JoinedRun,
    /// `SAVEPOINT` and its name.
    savepoint: String,
}

#[async_trait]
impl TransactionalStore for JoinedStore {
    async fn begin(&self, request: &Acquire) -> Result<Begin, StoreError> {
        let mut transaction = self
            .pool
            .begin_with(AssertSqlSafe(begin_sql(self.idle)))
            .await
            .map_err(|error| unavailable("begin", error))?;
        Ok(match self.store.join(&mut transaction, request).await? {
            Join::Answered(outcome) => Begin::Answered(outcome),
            Join::Acquired(run) => {
                // What the handler writes can be discarded while its answer is kept. The name is random: after a savepoint of
                // the handler's with this name, only the writes since then would be discarded.
                let writes: String = OwnerToken::random().as_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
                let savepoint = format!("SAVEPOINT writes_{writes}");
                let made = sqlx::raw_sql(AssertSqlSafe(savepoint.clone())).execute(&mut *transaction).await;
                made.map_err(|error| unavailable("begin", error))?;
                let lease = run.lease().clone();
                let transaction = Box::new(JoinedTransaction { transaction, run, savepoint });
                Begin::Acquired { lease, transaction, renew: false }
            }
        })
    }
}

#[async_trait]
impl StoreTransaction for JoinedTransaction {
    async fn finish(
        self: Box<Self>,
        settlement: &Settlement,
        retention: Duration,
        writes: Writes,
    ) -> Result<OwnerOutcome, StoreError> {
        let Self { mut transaction, run, savepoint } = *self;
        if (settlement, writes) == (&Settlement::Released, Writes::Discard) {
            transaction.rollback().await.map_err(|error| unavailable("roll back", error))?;
            return Ok(OwnerOutcome::Applied);
        }
        let end = match writes {
            Writes::Keep => format!("RELEASE {savepoint}"),
            Writes::Discard => format!("ROLLBACK TO {savepoint};RELEASE {savepoint}"),
        };
        if let Err(error) = sqlx::raw_sql(AssertSqlSafe(end)).execute(&mut *transaction).await {
            return Err(match error {
                error @ sqlx::Error::Database(_) => {
                    let message =
                        "the handler has overlooked an error, or ended the transaction; nothing can be committed";
                    StoreError::new(StoreErrorKind::TransactionFailed, message).with_source(error)
                }
                error => unavailable("end", error),
            });
        }
        // A release leaves no record, so nothing can tell later whether it was committed.
        let ticket = match settlement {
            Settlement::Released => None,
            _ => Some(run.settle(&mut transaction, settlement, retention).await?),
        };
        let error = match timeout(COMMIT_TIMEOUT, transaction.commit()).await {
            Ok(Ok(())) => return Ok(OwnerOutcome::Applied),
            Ok(Err(error)) => unavailable("commit", error),
            Err(_) => StoreError::new(StoreErrorKind::Timeout, "no answer to COMMIT"),
        };
        match ticket {
            Some(ticket) if ticket.is_committed().await? => Ok(OwnerOutcome::Applied),
            Some(_) => Err(error),
            None => Err(error.indeterminate()),
        }
    }

    fn as_any_mut(&mut self) -> &mut (dyn Any + Send) {
        self
    }
}

fn unavailable(what: &str, error: sqlx::Error) -> StoreError {
    let message = format!("a transaction of the application's pool could not {what}");
    StoreError::new(StoreErrorKind::Unavailable, message).with_source(error)
}

#[async_trait]
impl IdempotencyStore for JoinedStore {
    async fn acquire(&self, request: &Acquire) -> Result<AcquireOutcome, StoreError> {
        self.store.acquire(request).await
    }

    async fn renew(&self, lease: &Lease, term: Term) -> Result<OwnerOutcome, StoreError> {
        self.store.renew(lease, term).await
    }

    async fn checkpoint(&self, lease: &Lease, checkpoint: &Checkpoint) -> Result<OwnerOutcome, StoreError> {
        self.store.checkpoint(lease, checkpoint).await
    }

    async fn settle(
        &self,
        lease: &Lease,
        settlement: &Settlement,
        retention: Duration,
    ) -> Result<OwnerOutcome, StoreError> {
        self.store.settle(lease, settlement, retention).await
    }

    async fn peek(&self, id: &RecordId) -> Result<Option<Record>, StoreError> {
        self.store.peek(id).await
    }

    fn on_settled(&self, listener: Weak<dyn SettlementListener>) {
        self.store.on_settled(listener);
    }

    fn renewer(&self) -> Option<Arc<dyn LeaseRenewer>> {
        self.store.renewer()
    }

    fn capabilities(&self) -> Capabilities {
        self.store.capabilities()
    }
}

#[async_trait]
impl DurableStore for JoinedStore {
    async fn live_record(&self, id: &RecordId) -> Result<Option<LiveRecord>, StoreError> {
        self.store.live_record(id).await
    }

    fn identity(&self) -> [u8; 16] {
        self.store.identity()
    }

    fn may_be_copied(&self) -> bool {
        self.store.may_be_copied()
    }
}
