//! Settlements together with the application's own items.

use std::time::Duration;

use aws_sdk_dynamodb::error::SdkError;
use aws_sdk_dynamodb::operation::transact_write_items::TransactWriteItemsError;
use aws_sdk_dynamodb::types::ReturnValuesOnConditionCheckFailure::AllOld;
use aws_sdk_dynamodb::types::{CancellationReason, Put, TransactWriteItem};
use idem_core::{Command, Lease, Outcome, OwnerAction, OwnerOutcome, Settlement, StoreError, StoreErrorKind, machine};

use crate::error::{damaged, failed};
use crate::records::{Change, Records, UNCHANGED, VERSION, Written, misanswered, written};
use crate::store::DynamoStore;

const WHAT: &str = "settle with the items of the application";

/// The most items of a transaction of the service.
const MOST_ITEMS: usize = 100;

impl DynamoStore {
    /// Settles an operation and writes `items` in one transaction of the service: either all of it takes effect, or nothing.
    ///
    /// `items` are at most 99, all in this account and region, and none is this record. `LeaseLost` means that nothing was written: another
    /// owner has the record, or it is settled already, with the items of that call. The engine then answers with what the record says.
    ///
    /// # Errors
    /// - [`TransactionFailed`](StoreErrorKind::TransactionFailed) when the service refuses one of `items`, as by its condition. Nothing is
    ///   written. The source has the reasons, the first of which is for the record.
    /// - Others as of a settlement. After an indeterminate one, repeat the call with the same items: they are written once.
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
        loop {
            let command = Command::Owner(lease.owner, OwnerAction::Settle(settlement, retention));
            let (next, outcome) = machine::transition(found.record(), command, found.now);
            let change = self.change(&found, id, None, next, &outcome)?;
            let Outcome::Owner(outcome) = outcome else { return Err(misanswered()) };
            // If there is nothing to write, another call has done it, with its items.
            let (Some(change), OwnerOutcome::Applied) = (change, outcome) else { return Ok(OwnerOutcome::LeaseLost) };
            let Some(stored) = &found.stored else { return Ok(OwnerOutcome::LeaseLost) };
            let Change::Put(next) = &change else {
                let message = format!("could not {WHAT}: a release has no answer, so nothing may be written with it");
                return Err(StoreError::new(StoreErrorKind::TransactionFailed, message));
            };
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
            // The client may repeat the request: the service then does not do it twice.
            let (token, sent) = (next.version.to_hex(), self.clock.elapsed());
            let write = self.client.transact_write_items().client_request_token(token).set_transact_items(Some(all));
            let refused = match write.send().await {
                Ok(_) => Written::Done,
                Err(SdkError::ServiceError(service)) => match of_the_record(service.err()) {
                    Some(reason) => written(reason.item.clone(), next.version)?,
                    None => return Err(refused(SdkError::ServiceError(service))),
                },
                Err(error) => return Err(failed(WHAT, true, error)),
            };
            match refused {
                Written::Done => {
                    self.after(id, &found, &change).await;
                    return Ok(OwnerOutcome::Applied);
                }
                Written::Changed(item) => {
                    if let Some(cut) = &next.cut {
                        self.parts().remove_quietly(id, cut.parts).await;
                    }
                    found = self.found(WHAT, id, item, sent).await?;
                }
            }
        }
    }
}

/// Why the service has refused the record, if it has.
fn of_the_record(error: &TransactWriteItemsError) -> Option<&CancellationReason> {
    let TransactWriteItemsError::TransactionCanceledException(cancelled) = error else { return None };
    cancelled.cancellation_reasons().first().filter(|reason| reason.code() == Some("ConditionalCheckFailed"))
}

/// The error of a transaction that was refused for an item of the application, or for another reason.
fn refused<R>(error: SdkError<TransactWriteItemsError, R>) -> StoreError
where
    R: std::fmt::Debug + Send + Sync + 'static,
{
    let codes = match &error {
        SdkError::ServiceError(service) => match service.err() {
            TransactWriteItemsError::TransactionCanceledException(cancelled) => cancelled
                .cancellation_reasons()
                .iter()
                .map(|reason| reason.code().unwrap_or("None").to_owned())
                .collect(),
            _ => Vec::new(),
        },
        _ => Vec::new(),
    };
    if codes.is_empty() {
        return failed(WHAT, true, error);
    }
    // Other transactions and limits of the service pass.
    let passes = |code: &String| {
        matches!(code.as_str(), "None" | "TransactionConflict" | "ThrottlingError" | "ProvisionedThroughputExceeded")
    };
    let kind = match codes.iter().all(passes) {
        true => StoreErrorKind::Unavailable,
        false => StoreErrorKind::TransactionFailed,
    };
    let message =
        format!("could not {WHAT}: the service has refused them, and nothing was written: {}", codes.join(", "));
    StoreError::new(kind, message).with_source(error)
}
