//! A run inside a transaction: the record before it, and the one that it writes.

use std::sync::Arc;

use idem_core::codec::{FlatRecord, state};
use idem_core::{Origin, OwnerToken, Record, RecordId, State};
use tokio::time::{sleep, timeout};

use crate::batch::verb::{FlatSettlement, Lookup, Presence};
use crate::records::Records;
use crate::sql::{Echo, Sql, readable};
use crate::timeouts::{OUTCOME_POLL_INTERVAL, OUTCOME_TIMEOUT};
use crate::transaction::statements::{Argument, Connection, Mark, TransactionSettings};

/// The longest time that a settlement adds to the server's, in microseconds: 73,000 years. The sum of two of them and the time
/// is no overflow.
const LONGEST: i64 = i64::MAX / 4;

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
    /// Adds the statements that write the settled record, and ask for `echo`. With `discarded` the first proves that none of the
    /// handler's writes are left.
    pub(crate) fn write_record(
        &self,
        sql: &mut Sql,
        on: Connection,
        settlement: &FlatSettlement,
        discarded: Option<Mark>,
        echo: Echo,
    ) {
        let schema = &self.records.schema;
        let flat = FlatRecord::from(&self.record);
        let origin = &self.origin;
        let [namespace, operation] = [readable(&origin.namespace), readable(origin.scope.operation())];
        let principal = origin.scope.principal().map(readable);
        // After a failure, the next attempt or an operator needs the checkpoint.
        let is_failure = settlement.state != state::COMPLETED;
        let name = flat.checkpoint_name.as_deref().map(str::as_bytes).filter(|_| is_failure);
        let data = flat.checkpoint_data.as_deref().filter(|_| is_failure);
        let [wait, retention] = [settlement.retry_after, Some(settlement.retention)].map(bounded);
        let lock = schema.lock(&self.id);
        if let Some(mark) = discarded {
            sql.push(&mark.expect(schema));
        }
        let arguments = [
            Argument::Bytes(Some(self.id.as_bytes())),
            Argument::Bytes(Some(&namespace)),
            Argument::Bytes(principal.as_deref()),
            Argument::Bytes(Some(&operation)),
            Argument::Number(Some(flat.format)),
            Argument::Number(Some(flat.fingerprint_algorithm)),
            Argument::Bytes(Some(&flat.fingerprint)),
            Argument::Bytes(Some(&flat.owner)),
            Argument::Number(Some(flat.attempt)),
            Argument::Number(Some(settlement.state)),
            Argument::Number(Some(settlement.status)),
            Argument::Bytes(Some(&settlement.headers)),
            Argument::Bytes(settlement.body.as_deref()),
            Argument::Number(Some(flat.created_at)),
            Argument::Number(Some(self.records.offset.micros())),
            Argument::Number(retention),
            Argument::Number(Some(lock)),
            Argument::Echo(echo),
            Argument::Number(wait),
            Argument::Bytes(name),
            Argument::Bytes(data),
        ];
        let was_expired = self.previous.is_some_and(|previous| previous.was_expired);
        match self.previous {
            Some(previous) if !was_expired => self.settings.replace(sql, previous.version, arguments),
            expired => {
                if let Some(previous) = expired {
                    sql.push("SELECT ").push(schema.quoted()).push(".idem_forget_v1(");
                    sql.number(self.settings.lock_timeout)
                        .push(",")
                        .number(lock)
                        .push(",")
                        .bytes(self.id.as_bytes())
                        .push(",")
                        .number(previous.version)
                        .push(");");
                }
                self.settings.insert(sql, on, &arguments);
            }
        }
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

fn bounded(micros: Option<i64>) -> Option<i64> {
    micros.map(|micros| micros.min(LONGEST))
}
