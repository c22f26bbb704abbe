//! The commands to the state machine, and their outcomes.

use std::fmt;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use crate::fingerprint::{Algorithm, Fingerprint};
use crate::record::{Acquisition, Checkpoint, OwnerToken, RecordVersion, StoredResponse, Takeover};
use crate::record_id::RecordId;
use crate::scope::Scope;
use crate::timestamp::Timestamp;
use crate::trace::TraceParent;

/// A command to the state machine.
#[derive(Debug, Clone, Copy)]
#[expect(clippy::exhaustive_enums, reason = "the machine is a total function of these")]
pub enum Command<'a> {
    /// Ask for the right to execute, or for the answer.
    Acquire(&'a Acquire),
    /// Do something that only the owner may do.
    Owner(OwnerToken, OwnerAction<'a>),
    /// Resolve an operation that ended without an answer.
    Resolve(&'a Resolve),
    /// Erase what a person left in a record.
    Erase(&'a Erase),
}

/// What only the owner of a record may do with it.
#[derive(Debug, Clone, Copy)]
#[expect(clippy::exhaustive_enums, reason = "the machine is a total function of these")]
pub enum OwnerAction<'a> {
    /// Extend the lease: it ends `term.lease` from now.
    Renew(Term),
    /// Record a recovery point; it replaces the one before.
    Checkpoint(&'a Checkpoint),
    /// End the run. The retention counts from now; for a retryable failure, from the time of its next attempt.
    Settle(&'a Settlement, Duration),
}

/// Asks for the right to execute.
#[derive(Debug, Clone)]
pub struct Acquire {
    /// Which record.
    pub id: RecordId,
    /// Where the id came from, kept readable in the record for operators; no decision depends on it.
    pub origin: Origin,
    /// The trace of the request; no decision depends on it.
    pub trace: Option<TraceParent>,
    /// Digest of the request.
    pub fingerprint: Fingerprint,
    /// The unique token of this acquire, never [`OwnerToken::NOBODY`]. If its answer was lost, repeating the acquire
    /// with the same token is safe.
    pub owner: OwnerToken,
    /// How long the lease and the record last.
    pub term: Term,
    /// What a crash under this lease means.
    pub takeover: Takeover,
    /// The most attempts of an operation that fails retryably. When they are used up, the failure becomes terminal.
    pub max_attempts: NonZeroU32,
    /// What to do when the stored fingerprint differs.
    pub on_mismatch: OnMismatch,
}

/// The namespace and scope that a record id was made from, for operators to read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Origin {
    /// The application's namespace.
    pub namespace: Arc<str>,
    /// Tenant and operation.
    pub scope: Scope,
}

/// How long a lease lasts, and how long a record outlives it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Term {
    /// How long the right to execute holds without renewal.
    pub lease: Duration,
    /// How long after the end of the lease an abandoned record is kept.
    pub retention: Duration,
}

/// What a request with another fingerprint gets under the same key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[expect(clippy::exhaustive_enums, reason = "a policy that is not translated must not compile")]
pub enum OnMismatch {
    /// [`AcquireOutcome::Mismatch`], always.
    Refuse,
    /// The stored response once there is one, [`AcquireOutcome::Mismatch`] before. It never runs.
    ReplayOriginal,
}

/// How an owner ends its run.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "a settlement that is not translated must not compile")]
pub enum Settlement {
    /// It took effect; every repeat gets this response.
    Completed(StoredResponse),
    /// It failed and never runs again; every repeat gets this response.
    FailedTerminal(StoredResponse),
    /// It failed and may run again.
    FailedRetryable {
        /// What repeats get once the attempts are used up.
        response: StoredResponse,
        /// How long until it may run again, counted by the store from the settlement.
        retry_after: Duration,
    },
    /// It is not known whether it took effect, and it cannot be found out; every repeat gets that answer.
    OutcomeUnknown,
    /// As if this run had never been: the record is removed. If an earlier run may have had effects, the record stays
    /// with its attempt and its checkpoint, and the next acquire takes it over at once.
    Released,
}

/// Resolves an operation that ended without an answer: its outcome is unknown, its owner has crashed, or it waits for its next attempt.
///
/// For operators, and for jobs that compare records with what really happened. First resolve a crashed run as
/// [`Resolution::OutcomeUnknown`], then look at what happened, then resolve that. In the other order, a run that had only stalled could
/// take effect after the look. What it has sent to other systems may still arrive.
///
/// Do not let an operation run again whose client may have used another key since.
#[derive(Debug, Clone)]
pub struct Resolve {
    /// Which record.
    pub id: RecordId,
    /// A new token for this action. If its answer was lost, repeating it with the same token is safe (law L8).
    pub action: OwnerToken,
    /// The [version](crate::Record::version) of the record that the decision is about. If it has changed since, nothing happens.
    pub seen: RecordVersion,
    /// How the operation ended.
    pub resolution: Resolution,
    /// How long the record is kept from now, at least 1 s, and not for less than before. For a retryable failure, the retention counts from
    /// the time of its next attempt.
    pub retention: Duration,
}

/// How an operation ended that gave no answer itself.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "a resolution that is not translated must not compile")]
pub enum Resolution {
    /// It took effect; every repeat gets this response.
    Completed(StoredResponse),
    /// It took no effect and never runs again; every repeat gets this response.
    FailedTerminal(StoredResponse),
    /// It took no effect and may run again, with its attempt and its checkpoint. If its attempts are used up, the next acquire
    /// fails it terminally.
    FailedRetryable {
        /// What repeats get once the attempts are used up.
        response: StoredResponse,
        /// How long until it may run again.
        retry_after: Duration,
    },
    /// It is not known whether it took effect. For a record whose owner has crashed.
    OutcomeUnknown,
}

/// The answer to a [`Resolve`]. Exhaustive on purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "callers must handle every outcome")]
pub enum ResolveOutcome {
    /// Done, or done before by the same action.
    Resolved,
    /// The record is not the one that was seen, or is gone. This call changed nothing: look again. An earlier try of the same action may
    /// have been applied, and another run have begun since.
    Changed,
    /// The record must not be resolved. Nothing changed.
    Refused(Refusal),
}

/// Why a record must not be resolved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "callers must handle every outcome")]
pub enum Refusal {
    /// An owner runs it under a live lease, or in a transaction of Postgres.
    Live,
    /// Its lease is over, but its owner may have stalled: resolve it as unknown first, look, and resolve it again.
    Unfenced,
    /// The action is no new token.
    Token,
    /// It has its final answer.
    Final,
}

/// Erases what a person left in a record: the answer but for its status, the checkpoint, and the principal.
///
/// What stays is a tombstone. A deletion would let the operation run again.
///
/// The id stays too. Without a [secret](crate::RecordIdentity::with_secret), a reader who guesses principal, operation and key can
/// recognize it. The fingerprint is a digest of the request.
#[derive(Clone)]
pub struct Erase {
    /// Which record.
    pub id: RecordId,
    /// A new token for this action. If its answer was lost, repeating it with the same token is safe (law L8).
    pub action: OwnerToken,
    /// The [version](crate::Record::version) of the record that the decision is about. If it has changed since, nothing happens.
    pub seen: RecordVersion,
    /// The principal. The store removes this text from the reasons of earlier repairs of the record. `None` leaves the reasons as they
    /// are.
    pub principal: Option<Arc<str>>,
}

/// Hides the principal.
impl fmt::Debug for Erase {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { id, action, seen, principal: _ } = self;
        formatter
            .debug_struct("Erase")
            .field("id", id)
            .field("action", action)
            .field("seen", seen)
            .finish_non_exhaustive()
    }
}

/// The answer to an [`Erase`]. Exhaustive on purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "callers must handle every outcome")]
pub enum EraseOutcome {
    /// Done, or done before by the same action.
    Erased,
    /// The record is not the one that was seen, or is gone. Nothing changed: look again.
    Changed,
    /// An owner runs the operation under a live lease. Nothing changed.
    Live,
    /// The operation has no final answer, so it may still run. Nothing changed: resolve it first.
    Unsettled,
    /// The action is no new token. Nothing changed.
    Token,
}

impl From<Resolution> for Settlement {
    fn from(resolution: Resolution) -> Self {
        match resolution {
            Resolution::Completed(response) => Self::Completed(response),
            Resolution::FailedTerminal(response) => Self::FailedTerminal(response),
            Resolution::FailedRetryable { response, retry_after } => Self::FailedRetryable { response, retry_after },
            Resolution::OutcomeUnknown => Self::OutcomeUnknown,
        }
    }
}

/// The answer of the state machine.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "callers must handle every outcome")]
pub enum Outcome {
    /// To [`Command::Acquire`].
    Acquire(AcquireOutcome),
    /// To [`Command::Owner`].
    Owner(OwnerOutcome),
    /// To [`Command::Resolve`].
    Resolve(ResolveOutcome),
    /// To [`Command::Erase`].
    Erase(EraseOutcome),
}

/// The answer to an acquire. Exhaustive on purpose: callers must handle every outcome.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "callers must handle every outcome")]
pub enum AcquireOutcome {
    /// Run it.
    Acquired(Lease),
    /// Another owner runs it now.
    InProgress {
        /// When the lease ends, if it is not renewed.
        lease_left: Duration,
        /// How long the record has existed, at least. Zero if a transaction runs it, or if the store does not know.
        age: Duration,
    },
    /// It is settled; this is the answer.
    Replay(Replay),
    /// It failed, and the next attempt has to wait.
    Backoff {
        /// How long.
        retry_after: Duration,
    },
    /// The key belongs to another request.
    Mismatch {
        /// The algorithm of the stored fingerprint. If the request used another one and the caller can compute this
        /// one, it should acquire again with it: then a new algorithm turns no live retries into mismatches.
        stored_algorithm: Algorithm,
    },
}

/// The answer to an owner's action. Exhaustive on purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "callers must handle every outcome")]
pub enum OwnerOutcome {
    /// Done, or done before by the same owner.
    Applied,
    /// Another owner has the record, it is settled differently, it has a later checkpoint, or it is gone. Nothing
    /// changed (law L3).
    LeaseLost,
}

/// The time-limited right to execute. The owner passes it to every later verb.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lease {
    /// Which record.
    pub id: RecordId,
    /// Digest of the request that acquired the record, which is that of the record.
    pub fingerprint: Fingerprint,
    /// Proof of ownership.
    pub owner: OwnerToken,
    /// Which attempt this is, from 1.
    pub attempt: u32,
    /// How the record was acquired.
    pub acquisition: Acquisition,
    /// The last checkpoint of an earlier attempt.
    pub checkpoint: Option<Checkpoint>,
}

/// A settled record's answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Replay {
    /// The stored response.
    pub response: StoredResponse,
    /// How the operation ended.
    pub kind: ReplayKind,
    /// Which attempt gave the response.
    pub attempt: u32,
    /// When it was settled, by the store's clock.
    pub settled_at: Timestamp,
}

/// How a replayed operation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[expect(clippy::exhaustive_enums, reason = "callers must tell an unknown outcome from an answer")]
pub enum ReplayKind {
    /// It took effect.
    Completed,
    /// It failed, and never runs again.
    Failed,
    /// It is not known whether it took effect. The response is [`StoredResponse::outcome_unknown`].
    OutcomeUnknown,
}
