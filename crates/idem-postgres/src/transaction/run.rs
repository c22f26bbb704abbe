//! A run inside a transaction: the record before it, and the one that it writes.

use std::sync::Arc;

use idem_core::codec::{FlatRecord, state};
use idem_core::{Origin, OwnerToken, Record, RecordId, State};
use tokio::time::{sleep, timeout};

use crate::batch::verb::{FlatSettlement, Lookup, Presence};
use crate::records::Records;
use crate::sql::{Echo, Sql, readable};
use crate::timeouts::{OUTCOME_POLL_INTERVAL, OUTCOME_TIMEOUT};
use crate::transaction::statements::{Mark, TransactionSettings};

/// A run inside a transaction, which holds an advisory lock for it.
pub(crate) struct TransactionRun {
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

impl TransactionRun {
    /// Adds the statement that writes the settled record, and asks for `echo`. With `discarded` it first proves that none of the
    /// handler's writes are left.
    pub(crate) fn write_record(&self, sql: &mut Sql, settlement: &FlatSettlement, discarded: Option<Mark>, echo: Echo) {
        let schema = &self.records.schema;
        let flat = FlatRecord::from(&self.record);
        let principal = self.origin.scope.principal().map(readable);
        let is_failure = settlement.state != state::COMPLETED;
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
        // After a failure, the next attempt or an operator needs the checkpoint.
        let name = flat.checkpoint_name.as_ref().filter(|_| is_failure);
        sql.push(",").optional_bytes(name.map(String::as_bytes)).push(",");
        sql.optional_bytes(flat.checkpoint_data.as_deref().filter(|_| is_failure))
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
        sql.optional_number(discarded.map(|mark| mark.0)).push("),").push(&echo.sql()).push(";");
    }

    /// Looks up whether the transaction was committed; `None` if that is unknown, after [`OUTCOME_TIMEOUT`] at the latest.
    /// Once its lock is free the transaction has ended, and the record says how.
    pub(crate) async fn find_committed(&self) -> Option<bool> {
        let (records, owner) = (&self.records, self.record.owner);
        let lock = records.schema.lock(&self.id);
        let find = async {
            loop {
                match records.read(self.id, Some(lock)).await {
                    Ok(found) if found.presence == Presence::Running => {}
                    // If the row has changed, the transaction may have been committed, and its record taken over since:
                    // unknown.
                    Ok(found) if !found.is_settled_by(owner) => return self.is_as_before(&found).then_some(false),
                    // It was committed. That counts once no failover can lose it.
                    Ok(_) => match records.read_confirmed(self.id, None).await {
                        Ok(found) if found.is_settled_by(owner) => return Some(true),
                        Ok(_) | Err(_) => {}
                    },
                    Err(_) => {}
                }
                sleep(OUTCOME_POLL_INTERVAL).await;
            }
        };
        timeout(OUTCOME_TIMEOUT, find).await.ok().flatten()
    }

    fn is_as_before(&self, found: &Lookup) -> bool {
        found.row.as_ref().map(|row| row.version) == self.previous.map(|previous| previous.version)
    }
}

impl Lookup {
    fn is_settled_by(&self, owner: OwnerToken) -> bool {
        let record = self.row.as_ref().map(|row| &row.record);
        record.is_some_and(|record| record.owner == owner && !matches!(record.state, State::InProgress { .. }))
    }
}
