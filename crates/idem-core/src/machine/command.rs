//! What can be asked of a record, and what can be answered.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use crate::fingerprint::{Algorithm, Fingerprint};
use crate::record::{Acquisition, Checkpoint, OwnerToken, StoredResponse, Takeover};
use crate::record_id::RecordId;
use crate::scope::Scope;
use crate::timestamp::Timestamp;

/// A command to the state machine.
#[derive(Debug, Clone, Copy)]
#[expect(clippy::exhaustive_enums, reason = "the machine is a total function of these")]
pub enum Command<'a> {
    /// Ask for the right to execute, or for the answer.
    Acquire(&'a Acquire),
    /// Do something that only the owner may do.
    Owner(OwnerToken, OwnerAction<'a>),
}

/// What only the owner of a record may do with it.
#[derive(Debug, Clone, Copy)]
#[expect(clippy::exhaustive_enums, reason = "the machine is a total function of these")]
pub enum OwnerAction<'a> {
    /// Extend the lease: it ends `term.lease` from now.
    Renew(Term),
    /// Record a recovery point; it replaces the one before.
    Checkpoint(&'a Checkpoint),
    /// End the run. The retention counts from now, for a retryable failure from the time of its next attempt.
    Settle(&'a Settlement, Duration),
}

/// Asks for the right to execute.
#[derive(Debug, Clone)]
pub struct Acquire {
    /// Which record.
    pub id: RecordId,
    /// Where the id came from, kept readable in the record for operators; no decision looks at it.
    pub origin: Origin,
    /// Digest of the request.
    pub fingerprint: Fingerprint,
    /// A token of this acquire's own, never [`OwnerToken::NOBODY`]. Repeating the acquire with the same token, because
    /// its answer was lost, is safe.
    pub owner: OwnerToken,
    /// For how long.
    pub term: Term,
    /// What a crash under this lease shall mean.
    pub takeover: Takeover,
    /// How often a retryable failure may run in all. The last of them becomes terminal.
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

/// How long a lease and what comes after it last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Term {
    /// How long the right to execute holds without renewal.
    pub lease: Duration,
    /// How long after the end of the lease an abandoned record is kept.
    pub retention: Duration,
}

/// What a different fingerprint under the same key gets.
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
    /// It failed for good; every repeat gets this response.
    FailedTerminal(StoredResponse),
    /// It failed and may run again.
    FailedRetryable {
        /// What repeats get once the attempts are used up.
        response: StoredResponse,
        /// How long until it may run again, counted by the store from the settlement.
        retry_after: Duration,
    },
    /// Nobody knows whether it took effect, and there is no more to be found out; every repeat is told so.
    OutcomeUnknown,
    /// As if this run had never been: the record is removed. Only when an earlier run may have had effects does it stay,
    /// with its attempts and its checkpoint, for the next acquire to take over at once.
    Released,
}

/// The answer of the state machine.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "callers must handle every outcome")]
pub enum Outcome {
    /// To [`Command::Acquire`].
    Acquire(AcquireOutcome),
    /// To [`Command::Owner`].
    Owner(OwnerOutcome),
}

/// The answer to an acquire. Exhaustive on purpose: callers must handle every outcome.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "callers must handle every outcome")]
pub enum AcquireOutcome {
    /// Run it.
    Acquired(Lease),
    /// Somebody runs it now.
    InProgress {
        /// When the lease ends, if it is not renewed.
        lease_left: Duration,
        /// For how long the operation has had a record, at least; zero where a transaction runs it, or a store does not know.
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
        /// The algorithm of the stored fingerprint. When it is not the one that was sent, a caller that can compute
        /// it should acquire again with it: a new algorithm never turns live retries into mismatches.
        stored_algorithm: Algorithm,
    },
}

/// The answer to an owner's action. Exhaustive on purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "callers must handle every outcome")]
pub enum OwnerOutcome {
    /// Done, or done before by the same owner.
    Applied,
    /// Somebody else owns the record, or it is settled otherwise, or it is gone. Nothing changed (law L3).
    LeaseLost,
}

/// The time-limited right to execute; passed back to every owner's verb.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lease {
    /// Which record.
    pub id: RecordId,
    /// Proof of ownership.
    pub owner: OwnerToken,
    /// Which attempt this is, from 1.
    pub attempt: u32,
    /// How it came about.
    pub acquisition: Acquisition,
    /// Where a predecessor got to.
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
    /// It failed for good.
    Failed,
    /// Nobody knows: its owner disappeared. The response is [`StoredResponse::outcome_unknown`].
    OutcomeUnknown,
}
