//! The events that an engine reports, for metrics and logs.

use std::fmt;
use std::time::Duration;

use super::contract::Contract;
use super::probe::ProbeOutcome;
use super::steps::StandingStep;
use crate::machine::{Acquire, ReplayKind};
use crate::record::Acquisition;
use crate::record_id::RecordId;
use crate::scope::Scope;
use crate::store::StoreError;
use crate::trace::TraceParent;

/// Something that happened to one request.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Event<'a> {
    /// What happened.
    pub kind: EventKind<'a>,
    /// The operation of the request's [`Scope`], such as `POST /v1/payments`.
    pub operation: &'a str,
    /// The principal of the request's [`Scope`]. `None` when there is one tenant only, or when the request was refused before it
    /// had a scope.
    pub principal: Option<&'a str>,
    /// The contract of the engine.
    pub contract: Contract,
    /// Where the record is. `None` when the request was refused before it had one.
    pub record: Option<&'a RecordId>,
    /// Which attempt it is about. `None` when it is about no attempt.
    pub attempt: Option<u32>,
    /// The trace of the request, if its [`Operation`](super::Operation::trace) named one.
    pub trace: Option<TraceParent>,
    /// For a replay: the trace of the request whose run gave the answer.
    pub original_trace: Option<TraceParent>,
    /// How long each part of the request took, for a [decision](EventKind::is_decision); zero for every other event.
    pub durations: Durations,
}

/// How long each part of a request took. A part that did not happen has zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Durations {
    /// Asking the store whether the operation may run.
    pub store: Duration,
    /// Waiting for the end of another request's run, between two questions to the store.
    pub wait: Duration,
    /// The operation itself, or the probe before it.
    pub run: Duration,
    /// Settling the record.
    pub settle: Duration,
}

/// What happened to a request.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum EventKind<'a> {
    /// Decision: the operation ran, and its own answer holds.
    Executed,
    /// Decision: the operation ran before, and the request got its stored answer.
    Replayed(ReplayKind),
    /// Decision: the operation ran before, and its answer was not kept.
    Tombstone,
    /// Decision: the operation runs now, elsewhere.
    InProgress,
    /// Decision: the operation failed, and its next attempt has to wait.
    Backoff,
    /// Decision: the key belongs to another request.
    Mismatch,
    /// Decision: the operation ran, and it is not known how its record ended.
    CommitUnclear(&'a StoreError),
    /// Decision: the operation's transaction could not be committed because of what the operation did in it.
    TransactionFailed(&'a StoreError),
    /// Decision: the operation kept its transaction beyond its end, and was rolled back.
    TransactionHeld,
    /// Decision: the store could not say whether the operation may run, and it did not.
    StoreUnavailable(&'a StoreError),
    /// Decision: no transaction was free in time, and the operation did not run.
    Busy(&'a StoreError),
    /// Decision: the request was refused, and the store was not asked. The text names the reason, such as `overloaded` or
    /// `shutting-down`; integrations give theirs to
    /// [`Idempotency::refused`](super::Idempotency::refused).
    Refused(&'static str),
    /// Decision: the caller had gone while it waited, or the operation's task ended early.
    Interrupted,

    /// The operation may run; a decision follows when it has ended.
    Acquired(Acquisition),
    /// A probe has found out how an earlier run ended.
    Probed(&'a ProbeOutcome),
    /// The operation runs *without protection*, because the store could not answer.
    FailedOpen,
    /// The operation panicked.
    Panicked,
    /// The operation lost its lease while it ran, or does not run because its lease is not certain to hold.
    LeaseLost,
    /// The operation has failed for good, and these of its [steps](super::Context::steps) are not undone, the last one first. Those
    /// without an undo are among them, unless the undoing has passed them. If the process dies at this moment, the event is
    /// missing; the record has the steps until it expires ([`StandingStep::of`]).
    StepsNotUndone(&'a [StandingStep]),
    /// The store could not answer one verb; it may be asked again.
    StoreFailed(&'a StoreError),
    /// The store did not take a settlement in time: the caller is answered, and the settlement goes on.
    SettlementDelayed,
    /// The store took a delayed settlement.
    SettlementDone,
    /// A settlement was given up. The next repeat finds a lease that runs out.
    SettlementLost,
    /// An acquire without an answer may take a lease later, and the engine no longer watches for it. A repeat may then
    /// get an unknown outcome although nothing ran.
    AcquireForgotten,
}

impl EventKind<'_> {
    /// Whether this event is the answer to the request. Each request has exactly one decision.
    #[must_use]
    pub fn is_decision(&self) -> bool {
        match self {
            Self::Executed
            | Self::Replayed(_)
            | Self::Tombstone
            | Self::InProgress
            | Self::Backoff
            | Self::Mismatch
            | Self::CommitUnclear(_)
            | Self::TransactionFailed(_)
            | Self::TransactionHeld
            | Self::StoreUnavailable(_)
            | Self::Busy(_)
            | Self::Refused(_)
            | Self::Interrupted => true,
            Self::Acquired(_)
            | Self::Probed(_)
            | Self::FailedOpen
            | Self::Panicked
            | Self::LeaseLost
            | Self::StepsNotUndone(_)
            | Self::StoreFailed(_)
            | Self::SettlementDelayed
            | Self::SettlementDone
            | Self::SettlementLost
            | Self::AcquireForgotten => false,
        }
    }

    /// A name for metrics and logs, such as `replayed`. Names stay the same in later versions.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Executed => "executed",
            Self::Replayed(ReplayKind::Completed) => "replayed",
            Self::Replayed(ReplayKind::Failed) => "replayed-failure",
            Self::Replayed(ReplayKind::OutcomeUnknown) => "outcome-unknown",
            Self::Tombstone => "tombstone",
            Self::InProgress => "in-progress",
            Self::Backoff => "backoff",
            Self::Mismatch => "mismatch",
            Self::CommitUnclear(_) => "commit-unclear",
            Self::TransactionFailed(_) => "transaction-failed",
            Self::TransactionHeld => "transaction-held",
            Self::StoreUnavailable(_) => "store-unavailable",
            Self::Busy(_) => "busy",
            Self::Refused(reason) => reason,
            Self::Interrupted => "interrupted",
            Self::Acquired(Acquisition::Fresh) => "acquired",
            Self::Acquired(Acquisition::Takeover) => "takeover",
            Self::Acquired(Acquisition::Retry) => "retry",
            Self::Acquired(Acquisition::Probe) => "probe",
            Self::Probed(_) => "probed",
            Self::FailedOpen => "failed-open",
            Self::Panicked => "panicked",
            Self::LeaseLost => "lease-lost",
            Self::StepsNotUndone(_) => "steps-not-undone",
            Self::StoreFailed(_) => "store-failed",
            Self::SettlementDelayed => "settlement-delayed",
            Self::SettlementDone => "settlement-done",
            Self::SettlementLost => "settlement-lost",
            Self::AcquireForgotten => "acquire-forgotten",
        }
    }
}

/// Receives events, such as a bridge to a metrics library.
///
/// Called inline, so it must be quick and must not block. A panic is caught, logged and
/// [counted](super::Idempotency::observer_panics); the operation goes on.
pub trait Observer: fmt::Debug + Send + Sync + 'static {
    /// Something happened.
    fn observe(&self, event: &Event<'_>);
}

/// Which request an event is about.
#[derive(Clone)]
pub(super) struct Subject {
    pub(super) scope: Scope,
    pub(super) id: RecordId,
    /// The record that downstream keys are derived from.
    pub(super) downstream: RecordId,
    pub(super) trace: Option<TraceParent>,
}

impl Subject {
    pub(super) fn of(request: &Acquire) -> Self {
        let scope = request.origin.scope.clone();
        Self { scope, id: request.id, downstream: request.id, trace: request.trace }
    }
}
