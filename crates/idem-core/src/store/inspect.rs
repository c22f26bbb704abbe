//! Reading records for operators: one by its id, or all of them part by part.

use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use super::{StoreError, StoreErrorKind};
use crate::machine::Origin;
use crate::record::{Acquisition, Failure, OwnerToken, Record, RecordVersion, State, StoredBody, Takeover};
use crate::record_id::RecordId;
use crate::timestamp::Timestamp;
use crate::trace::{TraceId, TraceParent};

/// Records for operators to read. No decision on an operation depends on it.
///
/// A store has no index by state or by age: an index on a column that changes would make each settlement dearer. So [`list`](Self::list)
/// and [`count`](Self::count) read all records, one bounded part after the other, in an order that a settlement does not change:
/// that of their ids, or on Postgres that of their places in the table.
#[async_trait]
pub trait Inspect: fmt::Debug + Send + Sync + 'static {
    /// The record with this id, where it came from, and whether its operation runs in a transaction now.
    ///
    /// # Errors
    /// [`StoreError`] when the store could not answer. The kind is `Corrupt` if the record cannot be read.
    async fn inspect(&self, id: &RecordId) -> Result<Inspection, StoreError>;

    /// Reads the next part of the records, at most `limit`, and returns those that `filter` selects.
    ///
    /// A page may have no record although more follow: go on from [`RecordPage::next`] until it is `None`. A record that is made or
    /// removed meanwhile may be missing. Every other one is returned once; by Redis at least once. On Postgres a record that changes
    /// meanwhile gets another place, so it may be missing or returned twice; after a statement that writes the table anew, such as
    /// `VACUUM FULL`, begin again.
    ///
    /// # Errors
    /// [`StoreError`] when the store could not answer.
    async fn list(
        &self,
        filter: &RecordFilter,
        from: Option<&ScanPosition>,
        limit: NonZeroU32,
    ) -> Result<RecordPage, StoreError>;

    /// Counts the next part of the records, at most `limit`.
    ///
    /// # Errors
    /// [`StoreError`] when the store could not answer.
    async fn count(&self, from: Option<&ScanPosition>, limit: NonZeroU32) -> Result<CountPage, StoreError>;
}

/// The answer of [`Inspect::inspect`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "it is made by stores of other crates")]
pub struct Inspection {
    /// The record; `None` if there is none, or its retention is over.
    pub record: Option<Record>,
    /// Where the record came from; `None` if there is no record, or the store does not keep it.
    pub origin: Option<Origin>,
    /// Whether a transaction runs the operation now. Its record comes, or changes, when the transaction commits.
    pub runs_in_transaction: bool,
    /// The store's time.
    pub now: Timestamp,
}

/// What an operator first wants to know of a record, without its answer.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RecordSummary {
    /// Which record.
    pub id: RecordId,
    /// Where it came from; `None` if the store does not keep that.
    pub origin: Option<Origin>,
    /// Its version, for a [`Resolve`](crate::Resolve).
    pub version: RecordVersion,
    /// Its state.
    pub state: RecordState,
    /// While it is in progress: what a crash of its owner means.
    pub takeover: Option<Takeover>,
    /// The number of its last run.
    pub attempt: u32,
    /// The name of its last checkpoint.
    pub checkpoint: Option<Arc<str>>,
    /// The status of its answer.
    pub status: Option<u16>,
    /// The length of the answer's body; `None` if there is no answer, or its body was too large to keep.
    pub body_bytes: Option<u64>,
    /// The trace of the run that gave its answer.
    pub trace: Option<TraceParent>,
    /// When it was made.
    pub created_at: Timestamp,
    /// When it last changed.
    pub updated_at: Timestamp,
    /// When it counts as absent.
    pub expires_at: Timestamp,
}

impl RecordSummary {
    /// The summary of `record`.
    #[must_use]
    pub fn new(id: RecordId, origin: Option<Origin>, record: &Record) -> Self {
        let (takeover, response) = match &record.state {
            State::InProgress { takeover, .. } => (Some(*takeover), None),
            State::Completed { response } | State::Failed { response, .. } => (None, Some(response)),
        };
        let body_bytes = response.and_then(|response| match &response.body {
            StoredBody::Retained(body) => Some(body.len() as u64),
            StoredBody::NotRetained => None,
        });
        Self {
            id,
            origin,
            version: record.version(),
            state: RecordState::of(record),
            takeover,
            attempt: record.attempt,
            checkpoint: record.checkpoint.as_ref().map(|checkpoint| Arc::clone(&checkpoint.name)),
            status: response.map(|response| response.status),
            body_bytes,
            trace: response.and_then(|response| response.trace),
            created_at: record.created_at,
            updated_at: record.updated_at,
            expires_at: record.expires_at,
        }
    }

    /// The same with this length of the body, for a store that has not read the body.
    #[must_use]
    pub fn with_body_bytes(self, body_bytes: Option<u64>) -> Self {
        Self { body_bytes, ..self }
    }

    /// Whether the lease of its owner is over, so that the operation waits for its next caller.
    #[must_use]
    pub fn is_abandoned(&self, now: Timestamp) -> bool {
        matches!(self.state, RecordState::InProgress { lease_until } if lease_until <= now)
    }

    /// Whether its retention is over, so that it counts as absent.
    #[must_use]
    pub fn is_expired(&self, now: Timestamp) -> bool {
        self.expires_at <= now
    }
}

/// The state of a record without its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "what shows records must show each state")]
pub enum RecordState {
    /// An owner runs it, or crashed while running it.
    InProgress {
        /// When the owner's lease ends.
        lease_until: Timestamp,
    },
    /// It took effect.
    Completed,
    /// It failed and never runs again.
    Failed,
    /// It is not known whether it took effect.
    OutcomeUnknown,
    /// It failed and may run again, or its owner has released it after an earlier run.
    Retryable {
        /// The earliest time of the next attempt.
        not_before: Timestamp,
    },
}

impl RecordState {
    /// The state of a record.
    #[must_use]
    pub fn of(record: &Record) -> Self {
        match &record.state {
            // A released probe has not found out whether the run before it took effect.
            State::InProgress { lease_until, acquisition, .. }
                if record.owner == OwnerToken::NOBODY && *acquisition != Acquisition::Probe =>
            {
                Self::Retryable { not_before: *lease_until }
            }
            State::InProgress { lease_until, .. } => Self::InProgress { lease_until: *lease_until },
            State::Completed { .. } => Self::Completed,
            State::Failed { failure: Failure::Terminal, .. } => Self::Failed,
            State::Failed { failure: Failure::OutcomeUnknown, .. } => Self::OutcomeUnknown,
            State::Failed { failure: Failure::Retryable { not_before }, .. } => {
                Self::Retryable { not_before: *not_before }
            }
        }
    }

    /// The name of the state.
    #[must_use]
    pub fn name(self) -> StateName {
        match self {
            Self::InProgress { .. } => StateName::InProgress,
            Self::Completed => StateName::Completed,
            Self::Failed => StateName::Failed,
            Self::OutcomeUnknown => StateName::OutcomeUnknown,
            Self::Retryable { .. } => StateName::Retryable,
        }
    }
}

/// A state by its name, as in `outcome-unknown`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[expect(clippy::exhaustive_enums, reason = "what shows records must show each state")]
pub enum StateName {
    /// `in-progress`
    InProgress,
    /// `completed`
    Completed,
    /// `failed`
    Failed,
    /// `outcome-unknown`
    OutcomeUnknown,
    /// `retryable`
    Retryable,
}

/// Text that names no state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a state is one of in-progress, completed, failed, outcome-unknown and retryable")]
#[non_exhaustive]
pub struct InvalidStateName;

impl StateName {
    /// All states.
    pub const ALL: [Self; 5] = [Self::InProgress, Self::Completed, Self::Failed, Self::OutcomeUnknown, Self::Retryable];

    /// The name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::InProgress => "in-progress",
            Self::Completed => "completed",
            Self::Failed => "failed",
            Self::OutcomeUnknown => "outcome-unknown",
            Self::Retryable => "retryable",
        }
    }

    /// Its number in the column `state`, as in [`codec::state`](crate::codec::state).
    #[must_use]
    pub const fn number(self) -> i64 {
        use crate::codec::state;
        match self {
            Self::InProgress => state::IN_PROGRESS,
            Self::Completed => state::COMPLETED,
            Self::Failed => state::FAILED_TERMINAL,
            Self::OutcomeUnknown => state::FAILED_OUTCOME_UNKNOWN,
            Self::Retryable => state::FAILED_RETRYABLE,
        }
    }
}

impl fmt::Display for StateName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.as_str())
    }
}

impl FromStr for StateName {
    type Err = InvalidStateName;

    fn from_str(text: &str) -> Result<Self, InvalidStateName> {
        Self::ALL.into_iter().find(|name| name.as_str() == text).ok_or(InvalidStateName)
    }
}

/// Which records to list: by default all that have not expired.
///
/// For a store that does not keep origins, a filter by namespace, principal or operation is an error.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "a store has to know each condition")]
pub struct RecordFilter {
    /// Only these states; empty: all.
    pub states: Vec<StateName>,
    /// Only records that were made at least this long ago.
    pub older_than: Option<Duration>,
    /// Only records in progress whose lease is over.
    pub abandoned: bool,
    /// Only those of this namespace.
    pub namespace: Option<String>,
    /// Only those of this principal.
    pub principal: Option<String>,
    /// Only those of this operation.
    pub operation: Option<String>,
    /// Only those whose answer was given in this trace: a request, its job, and what its messages made consumers do. A record in
    /// progress has no answer yet, so it is not among them.
    pub trace: Option<TraceId>,
}

impl RecordFilter {
    /// Whether `record` is selected.
    #[must_use]
    pub fn selects(&self, record: &RecordSummary, now: Timestamp) -> bool {
        let scope = record.origin.as_ref().map(|origin| &origin.scope);
        let is_wanted = |wanted: &Option<String>, found: Option<&str>| wanted.is_none() || wanted.as_deref() == found;
        !record.is_expired(now)
            && (self.states.is_empty() || self.states.contains(&record.state.name()))
            && self.made_before(now).is_none_or(|latest| record.created_at <= latest)
            && (!self.abandoned || record.is_abandoned(now))
            && is_wanted(&self.namespace, record.origin.as_ref().map(|origin| &*origin.namespace))
            && is_wanted(&self.principal, scope.and_then(|scope| scope.principal()))
            && is_wanted(&self.operation, scope.map(|scope| scope.operation()))
            && self.trace.is_none_or(|wanted| record.trace.is_some_and(|trace| trace.trace_id() == wanted))
    }

    /// Refuses conditions on the origin, for a store that does not keep it.
    ///
    /// # Errors
    /// [`StoreError`] of the kind `Misconfigured`, which names the `store`.
    pub fn expect_no_origin(&self, store: &str) -> Result<(), StoreError> {
        if self.namespace.is_none() && self.principal.is_none() && self.operation.is_none() {
            return Ok(());
        }
        let message = format!(
            "could not list records: the store {store} does not keep their namespace, principal and operation, so none can be \
             selected by them"
        );
        Err(StoreError::new(StoreErrorKind::Misconfigured, message))
    }

    /// The latest time at which a selected record was made; `None` if any will do.
    #[must_use]
    pub fn made_before(&self, now: Timestamp) -> Option<Timestamp> {
        let micros = |age: Duration| i64::try_from(age.as_micros()).unwrap_or(i64::MAX);
        self.older_than.map(|age| Timestamp::from_unix_micros(now.unix_micros().saturating_sub(micros(age))))
    }
}

/// Where the next part of a scan begins. Its bytes mean something to its store only.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScanPosition(Vec<u8>);

impl ScanPosition {
    /// A position from its bytes.
    #[must_use]
    pub fn from_bytes(bytes: impl Into<Vec<u8>>) -> Self {
        Self(bytes.into())
    }

    /// The position behind this record, for a store that scans in the order of ids.
    #[must_use]
    pub fn after(id: &RecordId) -> Self {
        Self(id.as_bytes().to_vec())
    }

    /// Its bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// How much of a scan in the order of ids is done, from 0 to 1. Ids are digests, so they are spread evenly.
    #[must_use]
    pub fn progress(&self) -> f64 {
        let mut first = [0; 8];
        first.iter_mut().zip(&self.0).for_each(|(to, from)| *to = *from);
        u64::from_be_bytes(first) as f64 / u64::MAX as f64
    }
}

/// A part of the records that were listed.
#[derive(Debug, Clone, PartialEq)]
#[expect(clippy::exhaustive_structs, reason = "it is made by stores of other crates")]
pub struct RecordPage {
    /// The selected records.
    pub records: Vec<RecordSummary>,
    /// How many records were read, selected or not.
    pub scanned: u64,
    /// How many of them cannot be read, perhaps because a newer version wrote them. The store has logged their ids.
    pub unreadable: u64,
    /// Where the next part begins; `None` at the end.
    pub next: Option<ScanPosition>,
    /// How much of the scan is done, from 0 to 1; `None` if the store cannot tell.
    pub progress: Option<f64>,
    /// The store's time.
    pub now: Timestamp,
}

/// A part of the records that were counted.
#[derive(Debug, Clone, PartialEq)]
#[expect(clippy::exhaustive_structs, reason = "it is made by stores of other crates")]
pub struct CountPage {
    /// The counts of this part.
    pub counts: RecordCounts,
    /// Where the next part begins; `None` at the end.
    pub next: Option<ScanPosition>,
    /// How much of the scan is done, from 0 to 1; `None` if the store cannot tell.
    pub progress: Option<f64>,
    /// The store's time.
    pub now: Timestamp,
}

/// Counts of records.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "it is made by stores of other crates")]
pub struct RecordCounts {
    /// In progress under a live lease.
    pub in_progress: u64,
    /// In progress, lease over.
    pub abandoned: u64,
    /// Completed.
    pub completed: u64,
    /// Failed and never to run again.
    pub failed: u64,
    /// With an unknown outcome.
    pub outcome_unknown: u64,
    /// Failed and to run again, or released after an earlier run.
    pub retryable: u64,
    /// Expired and not purged yet.
    pub expired: u64,
    /// Not readable.
    pub unreadable: u64,
    /// The bytes of all bodies.
    pub body_bytes: u64,
    /// When the oldest record in progress was made, its lease over or not.
    pub oldest_in_progress: Option<Timestamp>,
    /// When the record expired that has waited longest for the purge.
    pub oldest_expired: Option<Timestamp>,
    /// Made within the last hour, whatever their state: the rate of operations. Purged ones are missing.
    pub made_last_hour: u64,
    /// Of these: abandoned, failed, retryable or with an unknown outcome.
    pub unsuccessful_last_hour: u64,
}

impl RecordCounts {
    /// How many records were counted.
    #[must_use]
    pub fn scanned(&self) -> u64 {
        let settled = self.completed + self.failed + self.outcome_unknown + self.retryable;
        self.in_progress + self.abandoned + settled + self.expired + self.unreadable
    }

    /// Counts a record.
    pub fn add(&mut self, record: &RecordSummary, now: Timestamp) {
        self.body_bytes += record.body_bytes.unwrap_or(0);
        let is_recent = now.saturating_duration_since(record.created_at) < HOUR;
        self.made_last_hour += u64::from(is_recent);
        if record.is_expired(now) {
            self.expired += 1;
            self.oldest_expired = earlier(self.oldest_expired, Some(record.expires_at));
            return;
        }
        let is_successful = match record.state {
            RecordState::InProgress { .. } => !record.is_abandoned(now),
            RecordState::Completed => true,
            RecordState::Failed | RecordState::OutcomeUnknown | RecordState::Retryable { .. } => false,
        };
        self.unsuccessful_last_hour += u64::from(is_recent && !is_successful);
        match record.state {
            RecordState::InProgress { .. } => {
                let count = if record.is_abandoned(now) { &mut self.abandoned } else { &mut self.in_progress };
                *count += 1;
                self.oldest_in_progress = earlier(self.oldest_in_progress, Some(record.created_at));
            }
            RecordState::Completed => self.completed += 1,
            RecordState::Failed => self.failed += 1,
            RecordState::OutcomeUnknown => self.outcome_unknown += 1,
            RecordState::Retryable { .. } => self.retryable += 1,
        }
    }

    /// Adds the counts of another part.
    pub fn merge(&mut self, other: &Self) {
        for (count, more) in [
            (&mut self.in_progress, other.in_progress),
            (&mut self.abandoned, other.abandoned),
            (&mut self.completed, other.completed),
            (&mut self.failed, other.failed),
            (&mut self.outcome_unknown, other.outcome_unknown),
            (&mut self.retryable, other.retryable),
            (&mut self.expired, other.expired),
            (&mut self.unreadable, other.unreadable),
            (&mut self.body_bytes, other.body_bytes),
            (&mut self.made_last_hour, other.made_last_hour),
            (&mut self.unsuccessful_last_hour, other.unsuccessful_last_hour),
        ] {
            *count += more;
        }
        self.oldest_in_progress = earlier(self.oldest_in_progress, other.oldest_in_progress);
        self.oldest_expired = earlier(self.oldest_expired, other.oldest_expired);
    }
}

/// What counts as recent.
const HOUR: Duration = Duration::from_secs(3_600);

fn earlier(one: Option<Timestamp>, other: Option<Timestamp>) -> Option<Timestamp> {
    one.into_iter().chain(other).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_state_is_read_back_by_its_name() {
        for name in StateName::ALL {
            assert_eq!(name.to_string().parse(), Ok(name));
        }
        for text in ["", "in progress", "Completed"] {
            assert_eq!(text.parse::<StateName>(), Err(InvalidStateName), "{text}");
        }
    }

    #[test]
    fn progress_goes_from_nothing_to_all() {
        let at = |first: u8| ScanPosition::after(&RecordId::from_bytes([first; 32])).progress();
        assert!(at(0) < 0.001 && (at(128) - 0.5).abs() < 0.01 && at(255) > 0.999);
        assert!(ScanPosition::from_bytes([]).progress() < 0.001);
    }
}
