//! The verbs: read the item, let the state machine decide, and write on the condition that it is still the same.

use std::sync::Arc;

use aws_sdk_dynamodb::Client;
use aws_sdk_dynamodb::error::SdkError;
use aws_sdk_dynamodb::operation::delete_item::DeleteItemError;
use aws_sdk_dynamodb::operation::put_item::PutItemError;
use aws_sdk_dynamodb::types::ReturnValuesOnConditionCheckFailure::AllOld;
use idem_core::codec::FlatRecord;
use idem_core::{
    Command, EraseOutcome, Origin, Outcome, Record, RecordId, Scope, StoreError, StoreErrorKind, Timestamp, machine,
};

use crate::clock::ServerClock;
use crate::error::failed;
use crate::item::{self, Item, Stored, Version};
use crate::parts::{Cut, PartItems};
use crate::sightings::{Sighting, Sightings};

/// How far the time of a new record may be behind, because the process was suspended since the answer before.
const MOST_BEHIND_US: i64 = 5_000_000;

/// There is no record yet.
pub(crate) const ABSENT: &str = "attribute_not_exists(pk)";

/// The record is the one that was read.
pub(crate) const UNCHANGED: &str = "#version = :version";

/// The name in [`UNCHANGED`], because the service reserves the word.
pub(crate) const VERSION: (&str, &str) = ("#version", "version");

/// Runs verbs on a table. Clones share what they have seen.
#[derive(Debug, Clone)]
pub(crate) struct Records {
    pub(crate) client: Client,
    pub(crate) table: String,
    pub(crate) clock: Arc<ServerClock>,
    pub(crate) sightings: Arc<Sightings>,
}

/// A record as it was found, expired or not, and the time after that.
pub(crate) struct Found {
    pub(crate) stored: Option<Stored>,
    pub(crate) now: Timestamp,
    /// When the request was sent, by the monotonic clock.
    sent: i64,
}

impl Found {
    pub(crate) fn record(&self) -> Option<&Record> {
        self.stored.as_ref().map(|stored| &stored.record)
    }
}

/// What a decision writes.
pub(crate) enum Change {
    Put(Next),
    Remove,
}

/// A record that is to be written.
pub(crate) struct Next {
    pub(crate) item: Item,
    pub(crate) version: Version,
    pub(crate) cut: Option<Cut>,
    /// Whether later requests depend on how long this version has been seen.
    is_watched: bool,
}

/// How a conditional write ended.
pub(crate) enum Written {
    Done,
    /// The record has changed since it was read. This is its item now.
    Changed(Option<Item>),
}

impl Records {
    pub(crate) fn parts(&self) -> PartItems {
        PartItems { client: self.client.clone(), table: self.table.clone() }
    }

    /// Reads a record.
    pub(crate) async fn read(&self, what: &str, id: &RecordId) -> Result<Found, StoreError> {
        let sent = self.clock.elapsed();
        let item = self.get(what, id).await?;
        self.found(what, id, item, sent).await
    }

    async fn get(&self, what: &str, id: &RecordId) -> Result<Option<Item>, StoreError> {
        let get = self.client.get_item().table_name(&self.table).consistent_read(true).set_key(Some(item::key(id)));
        Ok(get.send().await.map_err(|error| failed(what, false, error))?.item)
    }

    /// Reads the record of an item, with its parts. The request for the item was sent at `sent`.
    pub(crate) async fn found(
        &self,
        what: &str,
        id: &RecordId,
        mut item: Option<Item>,
        sent: i64,
    ) -> Result<Found, StoreError> {
        loop {
            let Some(found) = &item else { return Ok(Found { stored: None, now: self.clock.now()?, sent }) };
            let parts = item::parts(found)?;
            let large = match parts {
                None => None,
                Some(parts) => match self.parts().read(what, id, parts).await? {
                    Some(large) => Some(large),
                    // Another write has replaced the record, and removed its parts.
                    None => {
                        let now = self.get(what, id).await?;
                        let is_same = now.as_ref().map(item::parts).transpose()?.flatten() == Some(parts);
                        if is_same {
                            return Err(crate::error::damaged("parts"));
                        }
                        item = now;
                        continue;
                    }
                },
            };
            return Ok(Found { stored: Some(item::read(found, large)?), now: self.clock.now()?, sent });
        }
    }

    /// One step of the state machine. Only an acquire has an `origin`.
    pub(crate) async fn step(
        &self,
        what: &str,
        id: &RecordId,
        origin: Option<&Origin>,
        command: Command<'_>,
    ) -> Result<Outcome, StoreError> {
        let mut may_be_done = false;
        let done = self.try_step(what, id, origin, command, &mut may_be_done).await;
        // An earlier write may have taken effect, although its answer was lost.
        done.map_err(|error| if may_be_done { error.indeterminate() } else { error })
    }

    async fn try_step(
        &self,
        what: &str,
        id: &RecordId,
        origin: Option<&Origin>,
        command: Command<'_>,
        may_be_done: &mut bool,
    ) -> Result<Outcome, StoreError> {
        let mut found = match command {
            // Most keys are new.
            Command::Acquire(_) => Found { stored: None, now: self.clock.now()?, sent: self.clock.elapsed() },
            _ => self.read(what, id).await?,
        };
        let mut is_sure = false;
        loop {
            let Some((next, outcome)) = self.decide(id, &found, command, is_sure) else {
                found = self.read(what, id).await?;
                is_sure = true;
                continue;
            };
            let Some(change) = self.change(&found, id, origin, next, &outcome)? else { return Ok(outcome) };
            let sent = self.clock.elapsed();
            match self.write(what, id, &found, &change, may_be_done).await? {
                Written::Done => {
                    let is_in_time = found.stored.is_some() || self.is_in_time(found.now)?;
                    if is_in_time {
                        self.after(id, &found, &change).await;
                        return Ok(outcome);
                    }
                    // A record that begins in the past would end early.
                    let again = self.read(what, id).await?;
                    found = self.take_back(what, id, again, &change).await?;
                }
                Written::Changed(item) => found = self.found(what, id, item, sent).await?,
            }
        }
    }

    /// Lets the state machine decide; `None` if the record has to be read once more before.
    ///
    /// For a record that another owner holds, time goes by only while this process sees its version unchanged. If the service says that
    /// the lease is over, and this process has not seen that, another caller may just have replaced the record: it is read once more,
    /// unless it `is_sure`.
    fn decide(
        &self,
        id: &RecordId,
        found: &Found,
        command: Command<'_>,
        is_sure: bool,
    ) -> Option<(Option<Record>, Outcome)> {
        let before = found.record();
        let by_service = machine::transition(before, command, found.now);
        let (Command::Acquire(request), Some(stored)) = (command, &found.stored) else { return Some(by_service) };
        if !stored.is_leased_by_other(request.owner) || by_service.0.as_ref() == before {
            // Also when nothing changes, the version is seen.
            if stored.is_leased() {
                self.sightings.see(id, stored.version, found.sent, self.clock.elapsed());
            }
            return Some(by_service);
        }
        let now = self.clock.elapsed();
        let unchanged_for = match self.sightings.see(id, stored.version, found.sent, now) {
            Sighting::Since(since) => now.saturating_sub(since),
            Sighting::First => 0,
            Sighting::Outdated => return None,
        };
        let by_sight = stored.record.updated_at.unix_micros().saturating_add(unchanged_for);
        let held_back = machine::transition(before, command, found.now.min(Timestamp::from_unix_micros(by_sight)));
        match held_back.0.as_ref() == before {
            true if is_sure => Some(held_back),
            true => None,
            false => Some(by_service),
        }
    }

    /// What has to be written; `None` if nothing has.
    pub(crate) fn change(
        &self,
        found: &Found,
        id: &RecordId,
        origin: Option<&Origin>,
        next: Option<Record>,
        outcome: &Outcome,
    ) -> Result<Option<Change>, StoreError> {
        let before = found.record();
        if next.as_ref() == before {
            return Ok(None);
        }
        let is_over = before.is_some() && machine::current(before, found.now).is_none();
        let Some(next) = next else {
            // It is left to the purge. A settlement under a lease that is over must find nothing to write.
            return Ok(Some(Change::Remove).filter(|_| !is_over));
        };
        let kept = found.stored.as_ref().filter(|_| !is_over).map(|stored| &stored.origin);
        // Only an acquire makes a record, and it has the origin.
        let Some(origin) = kept.or(origin) else { return Ok(None) };
        let erased = matches!(outcome, Outcome::Erase(EraseOutcome::Erased)).then(|| without_principal(origin));
        let (version, flat) = (Version::random(), FlatRecord::from(&next));
        let cut = Cut::of(&flat)?;
        let parts = cut.as_ref().map(|cut| &cut.parts);
        let item = item::write(id, erased.as_ref().unwrap_or(origin), version, flat, parts);
        // Also a record that an acquire has settled: an older answer must not pass for a first sighting.
        let is_watched = item::is_leased(&next) || matches!(outcome, Outcome::Acquire(_));
        Ok(Some(Change::Put(Next { item, version, cut, is_watched })))
    }

    async fn write(
        &self,
        what: &str,
        id: &RecordId,
        found: &Found,
        change: &Change,
        may_be_done: &mut bool,
    ) -> Result<Written, StoreError> {
        let expected = found.stored.as_ref().map(|stored| stored.version);
        let written = match change {
            Change::Put(next) => {
                if let Some(cut) = &next.cut {
                    self.parts().write(what, id, cut).await?;
                }
                let written = self.put(what, next, expected).await;
                if let (Ok(Written::Changed(_)), Some(cut)) = (&written, &next.cut) {
                    self.parts().remove_quietly(id, cut.parts).await;
                }
                written
            }
            Change::Remove => self.remove(what, id, expected).await,
        };
        *may_be_done |= written.as_ref().is_err_and(StoreError::is_indeterminate);
        written
    }

    async fn put(&self, what: &str, next: &Next, expected: Option<Version>) -> Result<Written, StoreError> {
        let mut put = self.client.put_item().table_name(&self.table).set_item(Some(next.item.clone()));
        put = put.return_values_on_condition_check_failure(AllOld);
        put = match expected {
            None => put.condition_expression(ABSENT),
            Some(version) => put
                .condition_expression(UNCHANGED)
                .expression_attribute_names(VERSION.0, VERSION.1)
                .expression_attribute_values(":version", version.value()),
        };
        match put.send().await {
            Ok(_) => Ok(Written::Done),
            Err(SdkError::ServiceError(service)) if service.err().is_conditional_check_failed_exception() => {
                let PutItemError::ConditionalCheckFailedException(refused) = service.into_err() else {
                    return Ok(Written::Changed(None));
                };
                written(refused.item, next.version)
            }
            Err(error) => Err(failed(what, true, error)),
        }
    }

    async fn remove(&self, what: &str, id: &RecordId, expected: Option<Version>) -> Result<Written, StoreError> {
        let Some(version) = expected else { return Ok(Written::Done) };
        let remove = self
            .client
            .delete_item()
            .table_name(&self.table)
            .set_key(Some(item::key(id)))
            .condition_expression(UNCHANGED)
            .expression_attribute_names(VERSION.0, VERSION.1)
            .expression_attribute_values(":version", version.value())
            .return_values_on_condition_check_failure(AllOld);
        match remove.send().await {
            Ok(_) => Ok(Written::Done),
            Err(SdkError::ServiceError(service)) if service.err().is_conditional_check_failed_exception() => {
                match service.into_err() {
                    DeleteItemError::ConditionalCheckFailedException(refused) => Ok(Written::Changed(refused.item)),
                    _ => Ok(Written::Changed(None)),
                }
            }
            Err(error) => Err(failed(what, true, error)),
        }
    }

    /// What is left to do after a write.
    pub(crate) async fn after(&self, id: &RecordId, found: &Found, change: &Change) {
        match change {
            Change::Put(Next { version, is_watched: true, .. }) => {
                // It was there at the latest now. No older answer may hide it.
                let now = self.clock.elapsed();
                self.sightings.see(id, *version, now, now);
            }
            Change::Put(_) | Change::Remove => self.sightings.forget(id),
        }
        if let Some(parts) = found.stored.as_ref().and_then(|stored| stored.parts) {
            self.parts().remove_quietly(id, parts).await;
        }
    }

    /// Whether this time was not behind when a record was made with it.
    fn is_in_time(&self, used: Timestamp) -> Result<bool, StoreError> {
        Ok(self.clock.now()?.unix_micros().saturating_sub(used.unix_micros()) <= MOST_BEHIND_US)
    }

    /// Removes the record that this verb has made, if it is still there, and returns what there is then.
    async fn take_back(&self, what: &str, id: &RecordId, found: Found, change: &Change) -> Result<Found, StoreError> {
        let Change::Put(next) = change else { return Ok(found) };
        if found.stored.as_ref().is_none_or(|stored| stored.version != next.version) {
            return Ok(found);
        }
        match self.remove(what, id, Some(next.version)).await? {
            Written::Done => Ok(Found { stored: None, now: self.clock.now()?, sent: self.clock.elapsed() }),
            Written::Changed(item) => self.found(what, id, item, found.sent).await,
        }
    }
}

/// Whether a write that was refused is there all the same: the client repeats a request whose answer was lost.
pub(crate) fn written(item: Option<Item>, version: Version) -> Result<Written, StoreError> {
    match item {
        Some(item) if Version::of(&item)? == version => Ok(Written::Done),
        item => Ok(Written::Changed(item)),
    }
}

/// The origin without what names a person.
fn without_principal(origin: &Origin) -> Origin {
    let operation = origin.scope.operation();
    let scope = match origin.scope.principal() {
        Some(_) => Scope::new("", operation),
        None => Scope::single_tenant(operation),
    };
    Origin { namespace: Arc::clone(&origin.namespace), scope }
}

pub(crate) fn misanswered() -> StoreError {
    StoreError::new(StoreErrorKind::Corrupt, "the state machine gave the outcome of another command")
}
