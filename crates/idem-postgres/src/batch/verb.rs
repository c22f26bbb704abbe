//! Verbs, which the store asks the database to do, and their outcomes.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use idem_core::codec::{FlatRecord, encode_checkpoint, encode_headers, state};
use idem_core::{
    Acquire, OwnerAction, OwnerToken, Record, RecordId, Settlement, StoreError, StoredBody, StoredResponse, Term,
    Timestamp,
};

use crate::sql::micros;

/// One item of a statement; `migrations/postgres/0002_verbs.sql` says what each does. What a `confirmed` lookup finds is on
/// every standby that commits wait for.
#[derive(Clone)]
pub(crate) enum Verb {
    Acquire { request: Acquire, lock: i64 },
    Lookup { id: RecordId, lock: Option<i64>, confirmed: bool },
    Renew { id: RecordId, owner: OwnerToken, term: Term },
    Checkpoint { id: RecordId, owner: OwnerToken, name: Arc<str>, data: Vec<u8> },
    Settle { id: RecordId, owner: OwnerToken, settlement: FlatSettlement },
    Release { id: RecordId, owner: OwnerToken },
    Replace { id: RecordId, lock: Option<i64>, version: i64, record: Box<FlatRecord> },
    Remove { id: RecordId, version: i64 },
}

impl Verb {
    /// The verb for what an owner does, when it is done in one step.
    pub(crate) fn of_owner(id: RecordId, owner: OwnerToken, action: OwnerAction<'_>) -> Self {
        match action {
            OwnerAction::Renew(term) => Self::Renew { id, owner, term },
            OwnerAction::Checkpoint(checkpoint) => {
                Self::Checkpoint { id, owner, name: checkpoint.name.clone(), data: encode_checkpoint(checkpoint) }
            }
            OwnerAction::Settle(settlement, retention) => match FlatSettlement::of(settlement, retention) {
                Some(settlement) => Self::Settle { id, owner, settlement },
                None => Self::Release { id, owner },
            },
        }
    }

    /// The record whose row it changes; `None` if it reads or creates the row.
    pub(crate) fn changes(&self) -> Option<&RecordId> {
        match self {
            Self::Acquire { .. } | Self::Lookup { .. } => None,
            Self::Renew { id, .. }
            | Self::Checkpoint { id, .. }
            | Self::Settle { id, .. }
            | Self::Release { id, .. }
            | Self::Replace { id, .. }
            | Self::Remove { id, .. } => Some(id),
        }
    }

    pub(crate) fn group(&self) -> VerbGroup {
        match self {
            Self::Acquire { .. } | Self::Lookup { .. } => VerbGroup::Lookups,
            _ => VerbGroup::Updates,
        }
    }

    /// Whether its transaction may write.
    pub(crate) fn may_write(&self) -> bool {
        !matches!(self, Self::Lookup { confirmed: false, .. })
    }

    /// Whether it is of no use without a write. An acquire can find the answer to a repeat.
    pub(crate) fn always_writes(&self) -> bool {
        self.may_write() && !matches!(self, Self::Acquire { .. })
    }

    /// About how many bytes of stored data it carries.
    pub(crate) fn payload_bytes(&self) -> usize {
        match self {
            Self::Settle { settlement, .. } => {
                settlement.headers.len() + settlement.body.as_ref().map_or(0, Bytes::len)
            }
            Self::Checkpoint { data, .. } => data.len(),
            Self::Replace { record, .. } => {
                record.headers.as_ref().map_or(0, Vec::len) + record.body.as_ref().map_or(0, Bytes::len)
            }
            _ => 0,
        }
    }
}

/// The verbs that may share a statement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum VerbGroup {
    /// Acquires and lookups: they read a record, or create it.
    Lookups,
    /// All others: they change an existing record.
    Updates,
}

impl VerbGroup {
    pub(crate) fn other(self) -> Self {
        match self {
            Self::Lookups => Self::Updates,
            Self::Updates => Self::Lookups,
        }
    }
}

/// A settlement in columns. Durations count from when the database writes it.
#[derive(Clone)]
pub(crate) struct FlatSettlement {
    pub(crate) state: i64,
    pub(crate) retry_after: Option<i64>,
    pub(crate) status: i64,
    pub(crate) headers: Vec<u8>,
    pub(crate) body: Option<Bytes>,
    pub(crate) retention: i64,
}

impl FlatSettlement {
    /// `None` when the settlement is a release, which leaves no answer.
    pub(crate) fn of(settlement: &Settlement, retention: Duration) -> Option<Self> {
        let unknown;
        let (state, response, retry_after): (_, &StoredResponse, _) = match settlement {
            Settlement::Completed(response) => (state::COMPLETED, response, None),
            Settlement::FailedTerminal(response) => (state::FAILED_TERMINAL, response, None),
            Settlement::FailedRetryable { response, retry_after } => {
                (state::FAILED_RETRYABLE, response, Some(micros(*retry_after)))
            }
            Settlement::OutcomeUnknown => {
                unknown = StoredResponse::outcome_unknown();
                (state::FAILED_OUTCOME_UNKNOWN, &unknown, None)
            }
            Settlement::Released => return None,
        };
        let body = match &response.body {
            StoredBody::Retained(body) => Some(body.clone()),
            StoredBody::NotRetained => None,
        };
        Some(Self {
            state,
            retry_after,
            status: i64::from(response.status),
            headers: encode_headers(&response.headers, response.trace.as_ref()),
            body,
            retention: micros(retention),
        })
    }
}

/// The outcome of a [`Verb`].
#[derive(Clone)]
pub(crate) enum VerbOutcome {
    /// Of `Acquire` and `Lookup`.
    Found(Lookup),
    /// Of the verbs of owners: whether it was done.
    Applied(bool),
    /// Of `Replace` and `Remove`.
    Replaced(ReplaceOutcome),
}

/// What was found, and the time of the server.
#[derive(Clone)]
pub(crate) struct Lookup {
    pub(crate) now: Timestamp,
    pub(crate) presence: Presence,
    pub(crate) row: Option<Box<VersionedRecord>>,
}

/// Whether an operation has a record, or runs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Presence {
    /// The record was created by this verb.
    Created,
    /// There is a row. If the lock was tried, no transaction runs the operation.
    Present,
    /// A transaction runs the operation; there may be a row from before.
    Running,
    /// There is no row.
    Absent,
}

/// A record with the version of its row, expired or not.
#[derive(Clone)]
pub(crate) struct VersionedRecord {
    /// Changes with every write.
    pub(crate) version: i64,
    pub(crate) record: Record,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReplaceOutcome {
    Done,
    /// The row has another version.
    Changed,
    /// A transaction runs the operation.
    Running,
}

/// The error of an answer that does not fit its verb.
pub(crate) fn unexpected_answer() -> StoreError {
    StoreError::new(idem_core::StoreErrorKind::Corrupt, "Postgres answered another verb than it was asked")
        .indeterminate()
}
