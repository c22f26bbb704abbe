//! Settlements together with the application's own items.

use std::time::Duration;

use aws_sdk_dynamodb::error::SdkError;
use aws_sdk_dynamodb::operation::transact_write_items::TransactWriteItemsError;
use aws_sdk_dynamodb::types::ReturnValuesOnConditionCheckFailure::AllOld;
use aws_sdk_dynamodb::types::{CancellationReason, Put, TransactWriteItem};
use idem_core::{Command, Lease, Outcome, OwnerAction, OwnerOutcome, Settlement, StoreError, StoreErrorKind, machine};
use tokio::time::sleep;

use crate::attempts::Attempts;
use crate::error::{damaged, failed};
use crate::records::{CONFLICT_PAUSE, Change, Records, UNCHANGED, VERSION, Written, misanswered, unanswered, written};
use crate::store::DynamoStore;

const WHAT: &str = "settle with the items of the application";

/// The most items of a transaction of the service.
const MOST_ITEMS: usize = 100;

/// How often other transactions may be in the way before the caller is told so. The pauses between grow to 200 ms.
const MOST_CONFLICTS: u32 = 10;

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
        let (mut conflicts, mut may_be_done) = (0, false);
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
            // The client may repeat the request: the service then does not do it twice.
            let (token, sent) = (next.version.to_hex(), self.clock.elapsed());
            let write = self.client.transact_write_items().client_request_token(token).set_transact_items(Some(all));
            let attempts = Attempts::default();
            let written = match write.customize().interceptor(attempts.clone()).send().await {
                Ok(_) => Ok(Written::Done),
                Err(SdkError::ServiceError(service)) => match of_the_record(service.err()) {
                    Some(reason) => written(reason.item.clone(), next.version),
                    None if passes(service.err()) && conflicts < MOST_CONFLICTS => Ok(Written::InTheWay),
                    None => Err(refused(SdkError::ServiceError(service))),
                },
                Err(error) => Err(unanswered(WHAT, &attempts, error)),
            };
            // What an earlier attempt has written is found by its version, and without one nothing was written.
            may_be_done |= attempts.may_be_done();
            let settled = written.map_err(|error| if may_be_done { error.indeterminate() } else { error })?;
            if let (Written::Changed(_) | Written::InTheWay, Some(cut)) = (&settled, &next.cut) {
                self.parts().remove_quietly(id, cut.parts).await;
            }
            match settled {
                Written::Done => {
                    self.after(id, &found, &change).await;
                    return Ok(OwnerOutcome::Applied);
                }
                Written::Changed(item) => found = self.found(WHAT, id, item, sent).await?,
                Written::InTheWay => {
                    conflicts += 1;
                    sleep(CONFLICT_PAUSE * conflicts).await;
                    found = self.read(WHAT, id).await?;
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

/// The codes of the reasons, the first of which is for the record.
fn codes(error: &TransactWriteItemsError) -> Vec<&str> {
    let TransactWriteItemsError::TransactionCanceledException(cancelled) = error else { return Vec::new() };
    cancelled.cancellation_reasons().iter().map(|reason| reason.code().unwrap_or("None")).collect()
}

/// Whether only other transactions, or limits of the service, were in the way.
fn passes(error: &TransactWriteItemsError) -> bool {
    let codes = codes(error);
    let passes = |code: &&str| {
        matches!(*code, "None" | "TransactionConflict" | "ThrottlingError" | "ProvisionedThroughputExceeded")
    };
    !codes.is_empty() && codes.iter().all(passes)
}

/// The error of a transaction that was refused for an item of the application, or for another reason.
fn refused<R>(error: SdkError<TransactWriteItemsError, R>) -> StoreError
where
    R: std::fmt::Debug + Send + Sync + 'static,
{
    let reasons = error.as_service_error().map(|error| (codes(error).join(", "), passes(error)));
    match reasons.filter(|(codes, _)| !codes.is_empty()) {
        None => failed(WHAT, true, error),
        Some((codes, passes)) => {
            let kind = if passes { StoreErrorKind::Unavailable } else { StoreErrorKind::TransactionFailed };
            let message = format!("could not {WHAT}: the service has refused them, and nothing was written: {codes}");
            StoreError::new(kind, message).with_source(error)
        }
    }
}
