//! What the store asks of the database, and what it is answered.

use std::time::Duration;

use bytes::Bytes;
use idem_core::codec::{FlatRecord, encode_headers, state};
use idem_core::{
    Acquire, Checkpoint, OwnerAction, OwnerToken, Record, RecordId, Settlement, StoreError, StoredBody, StoredResponse,
    Term, Timestamp,
};

use crate::config::micros;

/// One item of a statement; `migrations/postgres/0002_verbs.sql` says what each does. What a `confirmed` look sees is on every
/// standby that commits wait for.
#[derive(Clone)]
pub(crate) enum Verb {
    Acquire { request: Acquire, lock: i64 },
    Look { id: RecordId, lock: Option<i64>, confirmed: bool },
    Renew { id: RecordId, owner: OwnerToken, term: Term },
    Checkpoint { id: RecordId, owner: OwnerToken, checkpoint: Checkpoint },
    Settle { id: RecordId, owner: OwnerToken, end: End },
    Release { id: RecordId, owner: OwnerToken },
    Replace { id: RecordId, lock: Option<i64>, version: i64, record: Box<FlatRecord> },
    Remove { id: RecordId, version: i64 },
}

impl Verb {
    /// The verb for what an owner does, when it is done in one step.
    pub(crate) fn of_owner(id: RecordId, owner: OwnerToken, action: OwnerAction<'_>) -> Self {
        match action {
            OwnerAction::Renew(term) => Self::Renew { id, owner, term },
            OwnerAction::Checkpoint(checkpoint) => Self::Checkpoint { id, owner, checkpoint: checkpoint.clone() },
            OwnerAction::Settle(settlement, retention) => match End::of(settlement, retention) {
                Some(end) => Self::Settle { id, owner, end },
                None => Self::Release { id, owner },
            },
        }
    }

    /// The record whose row it changes, if there is one already.
    pub(crate) fn changes(&self) -> Option<&RecordId> {
        match self {
            Self::Acquire { .. } | Self::Look { .. } => None,
            Self::Renew { id, .. }
            | Self::Checkpoint { id, .. }
            | Self::Settle { id, .. }
            | Self::Release { id, .. }
            | Self::Replace { id, .. }
            | Self::Remove { id, .. } => Some(id),
        }
    }

    pub(crate) fn family(&self) -> Family {
        match self {
            Self::Acquire { .. } | Self::Look { .. } => Family::Asks,
            _ => Family::Changes,
        }
    }

    /// About how many bytes it brings along.
    pub(crate) fn weight(&self) -> usize {
        match self {
            Self::Settle { end, .. } => end.headers.len() + end.body.as_ref().map_or(0, Bytes::len),
            Self::Checkpoint { checkpoint, .. } => checkpoint.data.len(),
            Self::Replace { record, .. } => {
                record.headers.as_ref().map_or(0, Vec::len) + record.body.as_ref().map_or(0, Bytes::len)
            }
            _ => 0,
        }
    }
}

/// Verbs that go together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Family {
    /// What is there? Makes a record at most.
    Asks,
    /// Changes one that is there.
    Changes,
}

impl Family {
    pub(crate) fn other(self) -> Self {
        match self {
            Self::Asks => Self::Changes,
            Self::Changes => Self::Asks,
        }
    }
}

/// How a run ends, in columns. Times count from when the database does it.
#[derive(Clone)]
pub(crate) struct End {
    pub(crate) state: i64,
    pub(crate) wait: Option<i64>,
    pub(crate) status: i64,
    pub(crate) headers: Vec<u8>,
    pub(crate) body: Option<Bytes>,
    pub(crate) retention: i64,
}

impl End {
    /// `None` when the settlement is a release, which leaves no answer.
    pub(crate) fn of(settlement: &Settlement, retention: Duration) -> Option<Self> {
        let unknown;
        let (state, response, wait): (_, &StoredResponse, _) = match settlement {
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
            wait,
            status: i64::from(response.status),
            headers: encode_headers(&response.headers),
            body,
            retention: micros(retention),
        })
    }
}

/// The answer to a [`Verb`].
#[derive(Clone)]
pub(crate) enum Answer {
    /// To `Acquire` and `Look`.
    Seen(Seen),
    /// To the verbs of owners: whether it was done. When not, nothing was.
    Applied(bool),
    /// To `Replace` and `Remove`.
    Placed(Placed),
}

/// What there was, and when.
#[derive(Clone)]
pub(crate) struct Seen {
    pub(crate) now: Timestamp,
    pub(crate) presence: Presence,
    pub(crate) row: Option<Box<Row>>,
}

/// What the database knows about an operation.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Presence {
    /// The record was made just now.
    Made,
    /// There is a row, and no transaction runs the operation as far as was looked.
    There,
    /// A transaction runs the operation; there may be a row from before.
    Held,
    /// There was nothing when it was looked for.
    Absent,
}

/// A row, expired or not.
#[derive(Clone)]
pub(crate) struct Row {
    /// Another one after every change.
    pub(crate) version: i64,
    pub(crate) record: Record,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Placed {
    Done,
    /// The row is not the one that was decided on.
    Changed,
    /// A transaction runs the operation.
    Held,
}

/// The database answered another verb than it was asked.
pub(crate) fn misanswered() -> StoreError {
    StoreError::new(idem_core::StoreErrorKind::Corrupt, "Postgres answered another verb than it was asked")
        .indeterminate()
}
