//! Settlements together with the application's own items.

use std::time::Duration;

use aws_sdk_dynamodb::error::SdkError;
use aws_sdk_dynamodb::operation::transact_write_items::TransactWriteItemsError;
use aws_sdk_dynamodb::types::ReturnValuesOnConditionCheckFailure::AllOld;
use aws_sdk_dynamodb::types::{CancellationReason, Put, TransactWriteItem};
use idem_core::{Command, Lease, Outcome, OwnerAction, OwnerOutcome, Settlement, StoreError, StoreErrorKind, machine};
use tokio::time::sleep;

use crate::error::damaged;
use crate::records::{Change, PAUSE, Records, UNCHANGED, VERSION, Written, again, misanswered, not_written, once};
use crate::store::DynamoStore;

const WHAT: &str = "settle with the items of the application";

/// The most items of a transaction of the service.
const MOST_ITEMS: usize = 100;

impl DynamoStore {
    /// Settles an operation and writes `items` in one transaction of the service: either all of it takes effect, or nothing.
    ///
    /// `items` are at most 99, all in this account and region, and none is this record. `LeaseLost` means that this call wrote nothing:
    /// another owner has the record, or an earlier call of this owner has settled it, with its items. The engine then answers with what the
    /// record says. After a retryable failure the operation runs again, so give `items` that may be written again.
    ///
    /// # Errors
    /// - [`TransactionFailed`](StoreErrorKind::TransactionFailed) when the service refuses one of `items`, as by its condition. Nothing is
    ///   written. The source has the reasons, the first of which is for the record. Also for a release, after which the items would be
    ///   written again, and for more than 99 items.
    /// - Others as of a settlement. After an indeterminate one, repeat the call with the same items: they are written once. `LeaseLost`
    ///   then says that the first call has written them, if no other owner has the record.
    ///
    /// # Cancellation safety
    /// As of a settlement: it took effect as a whole, will, or never does.
    pub async fn settle_with(
        &self,
        lease: &Lease,
        settlement: &Settlement,
        retention: Duration,
        items: Vec<TransactWriteItem>,
    ) -> Result<OwnerOutcome, StoreError> {
        if items.len() >= MOST_ITEMS {
            let message =
                format!("could not {WHAT}: {} are too many; the service takes 99 besides the record", items.len());
            return Err(StoreError::new(StoreErrorKind::TransactionFailed, message));
        }
        if matches!(settlement, Settlement::Released) {
            let message =
                format!("could not {WHAT}: after a release the operation runs again, and would write them again");
            return Err(StoreError::new(StoreErrorKind::TransactionFailed, message));
        }
        self.records.settle_with(lease, settlement, retention, items).await
    }
}

impl Records {
    async fn settle_with(
        &self,
        lease: &Lease,
        settlement: &Settlement,
        retention: Duration,
        items: Vec<TransactWriteItem>,
    ) -> Result<OwnerOutcome, StoreError> {
        let id = &lease.id;
        let mut found = self.read(WHAT, id).await?;
        let mut tries = 0;
        loop {
            let command = Command::Owner(lease.owner, OwnerAction::Settle(settlement, retention));
            let (next, outcome) = machine::transition(found.record(), command, found.now);
            let change = self.change(&found, id, None, next, &outcome)?;
            let Outcome::Owner(outcome) = outcome else { return Err(misanswered()) };
            // If there is nothing to write, another call has done it, with its items.
            let (Some(change), OwnerOutcome::Applied) = (change, outcome) else { return Ok(OwnerOutcome::LeaseLost) };
            let Some(stored) = &found.stored else { return Ok(OwnerOutcome::LeaseLost) };
            let Change::Put(next) = &change else { return Err(misanswered()) };
            if let Some(cut) = &next.cut {
                self.parts().write(WHAT, id, cut).await?;
            }
            let put = Put::builder()
                .table_name(&self.table)
                .set_item(Some(next.item.clone()))
                .condition_expression(UNCHANGED)
                .expression_attribute_names(VERSION.0, VERSION.1)
                .expression_attribute_values(":version", stored.version.value())
                .return_values_on_condition_check_failure(AllOld)
                .build()
                .map_err(|_| damaged("record"))?;
            let ours = TransactWriteItem::builder().put(put).build();
            let all = std::iter::once(ours).chain(items.iter().cloned()).collect();
            let sent = self.clock.elapsed();
            let write = self.client.transact_write_items().set_transact_items(Some(all));
            let written = match write.customize().config_override(once()).send().await {
                Ok(_) => Written::Done,
                Err(SdkError::ServiceError(service)) => match of_the_record(service.err()) {
                    Some(reason) => Written::Changed(reason.item.clone()),
                    None => refused(SdkError::ServiceError(service))?,
                },
                Err(error) => not_written(WHAT, error)?,
            };
            if let (Written::Changed(_) | Written::InTheWay(_), Some(cut)) = (&written, &next.cut) {
                self.parts().remove_quietly(id, cut.parts).await;
            }
            match written {
                Written::Done => {
                    self.after(id, &found, &change).await;
                    return Ok(OwnerOutcome::Applied);
                }
                Written::Changed(Some(item)) => found = self.found(WHAT, id, Some(item), sent).await?,
                Written::Changed(None) => found = self.read(WHAT, id).await?,
                Written::InTheWay(error) => {
                    tries = again(tries, error)?;
                    sleep(PAUSE * tries).await;
                    found = self.read(WHAT, id).await?;
                }
                Written::Unanswered(error) => return Err(error),
            }
        }
    }
}

/// Why the service has refused the record, if it has.
fn of_the_record(error: &TransactWriteItemsError) -> Option<&CancellationReason> {
    let TransactWriteItemsError::TransactionCanceledException(cancelled) = error else { return None };
    cancelled.cancellation_reasons().first().filter(|reason| reason.code() == Some("ConditionalCheckFailed"))
}

/// The codes of the reasons, the first of which is for the record.
fn codes(error: &TransactWriteItemsError) -> Vec<&str> {
    let TransactWriteItemsError::TransactionCanceledException(cancelled) = error else { return Vec::new() };
    cancelled.cancellation_reasons().iter().map(|reason| reason.code().unwrap_or("None")).collect()
}

/// What it means that the service has refused a transaction for an item of the application, or for another reason.
fn refused<R>(error: SdkError<TransactWriteItemsError, R>) -> Result<Written, StoreError>
where
    R: std::fmt::Debug + Send + Sync + 'static,
{
    let codes = error.as_service_error().map(codes).unwrap_or_default();
    if codes.is_empty() {
        return not_written(WHAT, error);
    }
    // Only other transactions, or limits of the service, were in the way.
    let passes = |code: &&str| {
        matches!(*code, "None" | "TransactionConflict" | "ThrottlingError" | "ProvisionedThroughputExceeded")
    };
    let passes = codes.iter().all(passes);
    let message =
        format!("could not {WHAT}: the service has refused them, and nothing was written: {}", codes.join(", "));
    let kind = if passes { StoreErrorKind::Unavailable } else { StoreErrorKind::TransactionFailed };
    let error = StoreError::new(kind, message).with_source(error);
    if passes { Ok(Written::InTheWay(error)) } else { Err(error) }
}
