//! Notes of repairs. All are in one partition, in the order of their times. A second item for each finds it by its action.

use std::num::NonZeroU32;

use aws_sdk_dynamodb::error::SdkError;
use aws_sdk_dynamodb::operation::transact_write_items::TransactWriteItemsError;
use aws_sdk_dynamodb::operation::update_item::UpdateItemError;
use aws_sdk_dynamodb::types::ReturnValuesOnConditionCheckFailure::AllOld;
use aws_sdk_dynamodb::types::{Put, TransactWriteItem};
use idem_core::{OwnerToken, RecordId, Repair, RepairNote, StoreError, Timestamp};
use tokio::time::sleep;

use crate::attributes::{Item, bytes, bytes_of, hex, key_of, number, number_of, text, text_of};
use crate::error::{damaged, failed};
use crate::records::{ABSENT, PAUSE, Records};

/// The partition of the notes.
const NOTES: &[u8] = b"repairs";

const WHAT: &str = "note a repair";

impl Records {
    pub(crate) async fn note(&self, note: &RepairNote) -> Result<(), StoreError> {
        let action = note.action.as_bytes();
        let by_action = key_of(&[&b"repair/"[..], action].concat(), "action");
        loop {
            let get = self.client.get_item().table_name(&self.table).consistent_read(true);
            let known =
                get.set_key(Some(by_action.clone())).send().await.map_err(|error| failed(WHAT, false, error))?;
            if let Some(known) = known.item {
                let place = text_of(&known, "note")?.ok_or_else(|| damaged("note"))?;
                return self.add_outcome(place, note).await;
            }
            let now = self.clock.now()?.unix_micros();
            // As many digits for each, so that texts sort as times do.
            let place = format!("{now:020}/{}", hex(action));
            let mut pointer = by_action.clone();
            pointer.insert("note".to_owned(), text(&place));
            let items = [pointer, item(&place, now, note)].map(|item| {
                let put = Put::builder().table_name(&self.table).set_item(Some(item)).condition_expression(ABSENT);
                put.build().map(|put| TransactWriteItem::builder().put(put).build())
            });
            let items = items.into_iter().collect::<Result<Vec<_>, _>>().map_err(|_| damaged("note"))?;
            match self.client.transact_write_items().set_transact_items(Some(items)).send().await {
                Ok(_) => return Ok(()),
                // It was noted meanwhile, or is being noted.
                Err(SdkError::ServiceError(service)) if is_refused(service.err()) => sleep(PAUSE).await,
                Err(error) => return Err(failed(WHAT, true, error)),
            }
        }
    }

    async fn add_outcome(&self, place: &str, note: &RepairNote) -> Result<(), StoreError> {
        loop {
            let get = self.client.get_item().table_name(&self.table).consistent_read(true);
            let known =
                get.set_key(Some(key_of(NOTES, place))).send().await.map_err(|error| failed(WHAT, false, error))?;
            let known = read(&known.item.ok_or_else(|| damaged("note"))?)?.note;
            if !known.is_of_the_same_repair(note) {
                return Err(RepairNote::action_is_taken());
            }
            let seen = known.outcome.clone();
            let outcome = RepairNote::outcome_after(known.outcome, note.outcome.clone());
            let Some(outcome) = outcome.filter(|outcome| seen.as_ref() != Some(outcome)) else { return Ok(()) };
            let is_as_seen = if seen.is_some() { "#outcome = :seen" } else { "attribute_not_exists(#outcome)" };
            let update = self
                .client
                .update_item()
                .table_name(&self.table)
                .set_key(Some(key_of(NOTES, place)))
                .update_expression("SET #outcome = :outcome")
                .condition_expression(format!("attribute_exists(pk) AND {is_as_seen}"))
                .expression_attribute_names("#outcome", "outcome")
                .expression_attribute_values(":outcome", text(&outcome));
            let update = match &seen {
                Some(seen) => update.expression_attribute_values(":seen", text(seen)),
                None => update,
            };
            match update.send().await {
                Ok(_) => return Ok(()),
                // Another try has noted its outcome meanwhile.
                Err(SdkError::ServiceError(service)) if service.err().is_conditional_check_failed_exception() => {}
                Err(error) => return Err(failed(WHAT, true, error)),
            }
        }
    }

    pub(crate) async fn repairs(&self, limit: NonZeroU32) -> Result<Vec<Repair>, StoreError> {
        let (mut repairs, mut from) = (Vec::new(), None);
        loop {
            let left = i32::try_from(limit.get() as usize - repairs.len()).unwrap_or(i32::MAX);
            let page = self.page_of_notes("list repairs", from, false, Some(left)).await?;
            let (items, next) = page;
            for item in &items {
                match read(item) {
                    Ok(repair) => repairs.push(repair),
                    Err(error) => tracing::warn!(
                        error = &error as &dyn std::error::Error,
                        "a note of a repair cannot be read, perhaps because a newer version wrote it"
                    ),
                }
            }
            from = next;
            if from.is_none() || repairs.len() >= limit.get() as usize {
                return Ok(repairs);
            }
        }
    }

    /// Removes a principal from the reasons of the repairs of a record.
    pub(crate) async fn erase_from_notes(&self, id: &RecordId, principal: &str) -> Result<(), StoreError> {
        let what = "erase from the notes";
        let mut from = None;
        loop {
            let (items, next) = self.page_of_notes(what, from, true, None).await?;
            for item in items.iter().filter(|item| bytes_of(item, "record").ok().flatten() == Some(id.as_bytes())) {
                let Some(place) = text_of(item, "sk")? else { continue };
                let mut note = read(item)?.note;
                while let Some(reason) = note.reason_without(principal) {
                    match self.replace_reason(what, place, &note.reason, &reason).await? {
                        None => break,
                        // Another erasure has changed it meanwhile.
                        Some(newer) => note = read(&newer)?.note,
                    }
                }
            }
            from = next;
            if from.is_none() {
                return Ok(());
            }
        }
    }

    /// Replaces the reason of a note. Returns the note if its reason is another one.
    async fn replace_reason(&self, what: &str, place: &str, old: &str, new: &str) -> Result<Option<Item>, StoreError> {
        let update = self
            .client
            .update_item()
            .table_name(&self.table)
            .set_key(Some(key_of(NOTES, place)))
            .update_expression("SET #reason = :new")
            .condition_expression("#reason = :old")
            .expression_attribute_names("#reason", "reason")
            .expression_attribute_values(":old", text(old))
            .expression_attribute_values(":new", text(new))
            .return_values_on_condition_check_failure(AllOld);
        match update.send().await {
            Ok(_) => Ok(None),
            Err(SdkError::ServiceError(service)) => match service.err() {
                UpdateItemError::ConditionalCheckFailedException(refused) => Ok(refused.item.clone()),
                _ => Err(failed(what, true, SdkError::ServiceError(service))),
            },
            Err(error) => Err(failed(what, true, error)),
        }
    }

    async fn page_of_notes(
        &self,
        what: &str,
        from: Option<Item>,
        oldest_first: bool,
        limit: Option<i32>,
    ) -> Result<(Vec<Item>, Option<Item>), StoreError> {
        let query = self
            .client
            .query()
            .table_name(&self.table)
            .consistent_read(true)
            .scan_index_forward(oldest_first)
            .set_limit(limit)
            .set_exclusive_start_key(from)
            .key_condition_expression("pk = :pk")
            .expression_attribute_values(":pk", bytes(NOTES));
        let page = query.send().await.map_err(|error| failed(what, false, error))?;
        Ok((page.items.unwrap_or_default(), page.last_evaluated_key.filter(|key| !key.is_empty())))
    }
}

/// Whether one of the items was there, or another transaction had it.
fn is_refused(error: &TransactWriteItemsError) -> bool {
    let TransactWriteItemsError::TransactionCanceledException(cancelled) = error else { return false };
    let is_there = |code| matches!(code, Some("ConditionalCheckFailed" | "TransactionConflict"));
    cancelled.cancellation_reasons().iter().any(|reason| is_there(reason.code()))
}

fn item(place: &str, at: i64, note: &RepairNote) -> Item {
    let mut item = key_of(NOTES, place);
    item.insert("at".to_owned(), number(at));
    item.insert("action".to_owned(), bytes(*note.action.as_bytes()));
    item.insert("record".to_owned(), bytes(*note.record.as_bytes()));
    item.insert("actor".to_owned(), text(&note.actor));
    item.insert("reason".to_owned(), text(&note.reason));
    item.insert("resolution".to_owned(), text(&note.resolution));
    if let Some(outcome) = &note.outcome {
        item.insert("outcome".to_owned(), text(outcome));
    }
    item
}

fn read(item: &Item) -> Result<Repair, StoreError> {
    let required = |name: &'static str| text_of(item, name)?.map(str::to_owned).ok_or_else(|| damaged(name));
    let action = bytes_of(item, "action")?.and_then(|action| action.try_into().ok());
    let record = bytes_of(item, "record")?.and_then(|record| record.try_into().ok());
    Ok(Repair {
        at: Timestamp::from_unix_micros(number_of(item, "at")?.ok_or_else(|| damaged("at"))?),
        note: RepairNote {
            action: OwnerToken::from_bytes(action.ok_or_else(|| damaged("action"))?),
            record: RecordId::from_bytes(record.ok_or_else(|| damaged("record"))?),
            actor: required("actor")?,
            reason: required("reason")?,
            resolution: required("resolution")?,
            outcome: text_of(item, "outcome")?.map(str::to_owned),
        },
    })
}
