//! The verbs: read the item, let the state machine decide, and write on the condition that it is still the same.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use aws_sdk_dynamodb::Client;
use aws_sdk_dynamodb::config::Builder;
use aws_sdk_dynamodb::config::retry::RetryConfig;
use aws_sdk_dynamodb::error::{ProvideErrorMetadata, SdkError};
use aws_sdk_dynamodb::operation::delete_item::DeleteItemError;
use aws_sdk_dynamodb::operation::put_item::PutItemError;
use aws_sdk_dynamodb::types::ReturnValuesOnConditionCheckFailure::AllOld;
use idem_core::codec::FlatRecord;
use idem_core::{
    Command, EraseOutcome, Origin, Outcome, OwnerAction, Record, RecordId, Scope, State, StoreError, StoreErrorKind,
    Timestamp, machine,
};
use tokio::time::sleep;

use crate::attributes::{Item, bytes_of};
use crate::clock::ServerClock;
use crate::error::{failed, passes};
use crate::item::{self, Stored, Version};
use crate::parts::{Cut, PartItems, Parts};
use crate::sightings::{Sighting, Sightings};

/// How far the time of a new record may be behind, because the process was suspended since the answer before.
const MOST_BEHIND_US: i64 = 5_000_000;

/// How much longer than its lease a record has to be seen unchanged. The end of its lease may be early by [`MOST_BEHIND_US`], and by the
/// second that the service's times are rounded by; one second is to spare. A checkpoint moves the time of the last change, and not the end of the lease.
const CLOCK_ERROR_US: i64 = MOST_BEHIND_US + 2_000_000;

/// The pause before a write is tried again; each further one is longer by as much.
pub(crate) const PAUSE: Duration = Duration::from_millis(20);

/// How often a write is tried again that transactions or limits of the service were in the way of, or that got no answer.
pub(crate) const MOST_TRIES: u32 = 8;

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

/// A record as it was found, and the time after that.
pub(crate) struct Found {
    /// `None` if there is none, or its retention is over.
    pub(crate) stored: Option<Stored>,
    /// The item that is there, also if its retention is over.
    pub(crate) there: Option<There>,
    pub(crate) now: Timestamp,
    /// When the request was sent, by the monotonic clock.
    sent: i64,
}

/// An item that a write replaces.
#[derive(Debug, Clone, Copy)]
pub(crate) struct There {
    pub(crate) version: Version,
    pub(crate) parts: Option<Parts>,
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
    /// The record has changed since it was read. This is its item now, if the service says so.
    Changed(Option<Item>),
    /// A transaction of the service has the item, or a limit of the service is reached. Nothing was written.
    InTheWay(StoreError),
    /// There was no answer: it may have been written, or may be later.
    Unanswered(StoreError),
}

/// What an error of a verb has to say.
#[derive(Default)]
struct Known {
    /// A write may have taken effect, although its answer was lost.
    may_be_done: bool,
    /// There is a record of another run, so the operation must not run without protection.
    has_other_run: bool,
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

    /// The parts of a record that is there.
    pub(crate) async fn parts_there(&self, what: &str, id: &RecordId) -> Result<Option<Parts>, StoreError> {
        Ok(self.get(what, id).await?.as_ref().map(item::parts).transpose()?.flatten())
    }

    /// Reads the record of an item, with its parts. The request for the item was sent at `sent`.
    ///
    /// The parts of an expired record are not read: the service may have removed some of them already.
    pub(crate) async fn found(
        &self,
        what: &str,
        id: &RecordId,
        mut item: Option<Item>,
        sent: i64,
    ) -> Result<Found, StoreError> {
        loop {
            let now = self.clock.now()?;
            let Some(found) = &item else { return Ok(Found { stored: None, there: None, now, sent }) };
            let there = There { version: Version::of(found)?, parts: item::parts(found)? };
            if item::expires_at(found)? <= now {
                return Ok(Found { stored: None, there: Some(there), now, sent });
            }
            let large = match there.parts {
                None => None,
                Some(parts) => match self.parts().read(what, id, parts).await? {
                    Some(large) => Some(large),
                    // Another write has replaced the record, and removed its parts.
                    None => {
                        let newer = self.get(what, id).await?;
                        let is_same = newer.as_ref().map(item::parts).transpose()?.flatten() == Some(parts);
                        if is_same {
                            return Err(crate::error::damaged("parts"));
                        }
                        item = newer;
                        continue;
                    }
                },
            };
            let stored = Some(item::read(found, large)?);
            return Ok(Found { stored, there: Some(there), now, sent });
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
        let mut known = Known::default();
        let done = self.try_step(what, id, origin, command, &mut known).await;
        done.map_err(|error| {
            let error = if known.may_be_done { error.indeterminate() } else { error };
            if known.has_other_run { error.with_existing_record() } else { error }
        })
    }

    async fn try_step(
        &self,
        what: &str,
        id: &RecordId,
        origin: Option<&Origin>,
        command: Command<'_>,
        known: &mut Known,
    ) -> Result<Outcome, StoreError> {
        let mut found = match command {
            // Most keys are new.
            Command::Acquire(_) => self.nothing()?,
            _ => self.read(what, id).await?,
        };
        let (mut is_sure, mut tries) = (false, 0);
        loop {
            let Some((next, outcome)) = self.decide(id, &found, command, is_sure) else {
                found = self.read(what, id).await?;
                is_sure = true;
                continue;
            };
            let Some(change) = self.change(&found, id, origin, next, &outcome)? else { return Ok(outcome) };
            let sent = self.clock.elapsed();
            match self.write(what, id, &found, &change).await? {
                Written::Done if self.is_in_time(found.now)? => {
                    self.after(id, &found, &change).await;
                    return Ok(outcome);
                }
                Written::Done if found.there.is_some() => {
                    self.after(id, &found, &change).await;
                    match command {
                        // The lease would end too early by as long as the process was suspended.
                        Command::Owner(_, OwnerAction::Renew(_)) => found = self.read(what, id).await?,
                        _ => return Ok(outcome),
                    }
                }
                // A record that begins in the past would end early.
                Written::Done => {
                    known.may_be_done = true;
                    found = self.take_back(what, id, &change).await?;
                    known.may_be_done = false;
                }
                Written::Changed(Some(item)) => {
                    known.has_other_run = is_of_another_run(&item, command, self.clock.now()?);
                    found = self.found(what, id, Some(item), sent).await?;
                }
                Written::Changed(None) => found = self.read(what, id).await?,
                Written::InTheWay(error) => {
                    tries = again(tries, error)?;
                    // Until the record is read, the transaction may be that of another run.
                    known.has_other_run |= matches!(command, Command::Acquire(_));
                    sleep(PAUSE * tries).await;
                    found = self.read(what, id).await?;
                }
                Written::Unanswered(error) => {
                    known.may_be_done = true;
                    // Sent once more, it could make a record after this one is gone. The engine watches for that.
                    if found.there.is_none() {
                        return Err(error);
                    }
                    tries = again(tries, error)?;
                    sleep(PAUSE * tries).await;
                    let now = self.read(what, id).await?;
                    if change.is_made(now.there) {
                        self.after(id, &found, &change).await;
                        return Ok(outcome);
                    }
                    found = now;
                }
            }
            if let Command::Acquire(request) = command {
                known.has_other_run = found.record().is_some_and(|record| record.owner != request.owner);
            }
        }
    }

    /// There is nothing, as far as is known.
    fn nothing(&self) -> Result<Found, StoreError> {
        Ok(Found { stored: None, there: None, now: self.clock.now()?, sent: self.clock.elapsed() })
    }

    /// Lets the state machine decide; `None` if the record has to be read once more before.
    ///
    /// For a record that another owner holds, time goes by only while this process sees its version unchanged, until its retention is
    /// over. If the service says that the lease is over, and this process has not seen that, another caller may just have replaced the
    /// record: it is read once more, unless it `is_sure`.
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
        let now = self.clock.elapsed();
        if !stored.is_leased_by_other(request.owner) || by_service.0.as_ref() == before {
            // Also when nothing changes, the version is seen.
            if stored.is_leased() {
                self.sightings.see(id, stored.version, found.sent, now);
            }
            return Some(by_service);
        }
        let unchanged_for = match self.sightings.see(id, stored.version, found.sent, now) {
            Sighting::Since(since) => now.saturating_sub(since),
            Sighting::First => 0,
            Sighting::Outdated => return None,
        };
        let changed_at = stored.record.updated_at.unix_micros().saturating_sub(CLOCK_ERROR_US);
        let by_sight = match stored.record.state {
            // Whatever the record says, its owner may have been suspended while it wrote that.
            State::InProgress { lease_until, .. } if unchanged_for < CLOCK_ERROR_US => {
                lease_until.unix_micros().saturating_sub(1)
            }
            _ => changed_at.saturating_add(unchanged_for),
        };
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
        if next.as_ref() == found.record() {
            return Ok(None);
        }
        let Some(next) = next else { return Ok(Some(Change::Remove)) };
        // Only an acquire makes a record, and it has the origin.
        let Some(origin) = found.stored.as_ref().map(|stored| &stored.origin).or(origin) else { return Ok(None) };
        let erased = matches!(outcome, Outcome::Erase(EraseOutcome::Erased)).then(|| without_principal(origin));
        let (version, flat) = (Version::random(), FlatRecord::from(&next));
        let cut = Cut::of(&flat)?;
        let parts = cut.as_ref().map(|cut| &cut.parts);
        let item = item::write(id, erased.as_ref().unwrap_or(origin), version, flat, parts);
        // Also a record that an acquire has settled: an older answer must not pass for a first sighting.
        let is_watched = item::is_leased(&next) || matches!(outcome, Outcome::Acquire(_));
        Ok(Some(Change::Put(Next { item, version, cut, is_watched })))
    }

    async fn write(&self, what: &str, id: &RecordId, found: &Found, change: &Change) -> Result<Written, StoreError> {
        let expected = found.there.map(|there| there.version);
        match change {
            Change::Put(next) => {
                if let Some(cut) = &next.cut {
                    self.parts().write(what, id, cut).await?;
                }
                let written = self.put(what, next, expected).await;
                if let (Ok(Written::Changed(_) | Written::InTheWay(_)), Some(cut)) = (&written, &next.cut) {
                    self.parts().remove_quietly(id, cut.parts).await;
                }
                written
            }
            Change::Remove => self.remove(what, id, expected).await,
        }
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
        match put.customize().config_override(once()).send().await {
            Ok(_) => Ok(Written::Done),
            Err(SdkError::ServiceError(service)) => match service.err() {
                PutItemError::ConditionalCheckFailedException(refused) => Ok(Written::Changed(refused.item.clone())),
                _ => not_written(what, SdkError::ServiceError(service)),
            },
            Err(error) => not_written(what, error),
        }
    }

    pub(crate) async fn remove(
        &self,
        what: &str,
        id: &RecordId,
        expected: Option<Version>,
    ) -> Result<Written, StoreError> {
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
        match remove.customize().config_override(once()).send().await {
            Ok(_) => Ok(Written::Done),
            Err(SdkError::ServiceError(service)) => match service.err() {
                DeleteItemError::ConditionalCheckFailedException(refused) => Ok(Written::Changed(refused.item.clone())),
                _ => not_written(what, SdkError::ServiceError(service)),
            },
            Err(error) => not_written(what, error),
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
        if let Some(parts) = found.there.and_then(|there| there.parts) {
            self.parts().remove_quietly(id, parts).await;
        }
    }

    /// Whether this time was not behind when a record was made with it.
    fn is_in_time(&self, used: Timestamp) -> Result<bool, StoreError> {
        Ok(self.clock.now()?.unix_micros().saturating_sub(used.unix_micros()) <= MOST_BEHIND_US)
    }

    /// Removes the record that this verb has made, if it is still there, and returns what there is then.
    async fn take_back(&self, what: &str, id: &RecordId, change: &Change) -> Result<Found, StoreError> {
        let mut tries = 0;
        loop {
            let found = self.read(what, id).await?;
            let Change::Put(next) = change else { return Ok(found) };
            if found.there.is_none_or(|there| there.version != next.version) {
                return Ok(found);
            }
            match self.remove(what, id, Some(next.version)).await? {
                Written::Done => return self.nothing(),
                Written::Changed(_) => {}
                Written::InTheWay(error) | Written::Unanswered(error) => {
                    tries = again(tries, error)?;
                    sleep(PAUSE * tries).await;
                }
            }
        }
    }
}

impl Change {
    /// Whether this is what there is now: nothing else makes its version.
    fn is_made(&self, there: Option<There>) -> bool {
        match self {
            Self::Put(next) => there.is_some_and(|there| there.version == next.version),
            Self::Remove => there.is_none(),
        }
    }
}

/// Counts a try, unless there were enough.
pub(crate) fn again(tries: u32, error: StoreError) -> Result<u32, StoreError> {
    if tries < MOST_TRIES { Ok(tries + 1) } else { Err(error) }
}

/// The client sends a write once. If it repeated one whose answer was lost, it would return the refusal of the second as if the first had
/// not been.
pub(crate) fn once() -> Builder {
    Builder::new().retry_config(RetryConfig::disabled())
}

/// What an error says about a write that was sent once.
pub(crate) fn not_written<E, R>(what: &str, error: SdkError<E, R>) -> Result<Written, StoreError>
where
    E: ProvideErrorMetadata + std::error::Error + Send + Sync + 'static,
    R: fmt::Debug + Send + Sync + 'static,
{
    let passes = error.as_service_error().and_then(ProvideErrorMetadata::code).is_some_and(passes);
    let error = failed(what, true, error);
    match error.is_indeterminate() {
        true => Ok(Written::Unanswered(error)),
        false if passes => Ok(Written::InTheWay(error)),
        false => Err(error),
    }
}

/// Whether an acquire has met a record of another run. An item that cannot be read counts as one.
fn is_of_another_run(item: &Item, command: Command<'_>, now: Timestamp) -> bool {
    let Command::Acquire(request) = command else { return false };
    let is_over = item::expires_at(item).is_ok_and(|expires_at| expires_at <= now);
    let is_own = bytes_of(item, "owner").is_ok_and(|owner| owner == Some(request.owner.as_bytes()));
    !is_over && !is_own
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
