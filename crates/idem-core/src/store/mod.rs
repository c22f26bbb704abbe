//! The storage port: what a store must do, and nothing about how.

mod error;
mod explain;
mod fast;
mod inspect;
mod note;
mod offset;
mod part;
mod privilege;
mod repair;
mod resolution;
mod self_test;
mod transactional;

use std::fmt;
use std::num::NonZeroU32;
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;

pub use error::{StoreError, StoreErrorKind};
pub use fast::{FastEntry, FastRead, FastStore};
pub use inspect::{
    CountPage, Inspect, Inspection, InvalidStateName, RecordCounts, RecordFilter, RecordPage, RecordState,
    RecordSummary, ScanPosition, StateName,
};
pub use note::{Repair, RepairNote};
pub use offset::TimeOffset;
pub use part::PartSize;
pub use privilege::MissingPrivilege;
pub use repair::{erase, repair};
pub use resolution::InvalidResolution;
pub use self_test::{SelfTestError, self_test};
pub use transactional::{Begin, FINISH_TIMEOUT, StoreTransaction, TransactionSlots, TransactionalStore, Writes};

use crate::machine::{
    Acquire, AcquireOutcome, Erase, EraseOutcome, Lease, OwnerOutcome, Resolve, ResolveOutcome, Settlement, Term,
};
use crate::record::{Checkpoint, Record};
use crate::record_id::RecordId;
use crate::timestamp::Timestamp;

/// A store of idempotency records.
///
/// # Contract
/// - Every verb is one atomic step of [`machine::transition`](crate::machine::transition) on one record, under the
///   *store's* clock. Concurrent verbs have the result of one order of them.
/// - A verb that answers has taken effect as durably as [`Capabilities::durability`] says.
/// - Expected outcomes are values. An error means that the store could not answer; [`StoreError::is_indeterminate`]
///   says whether the step may have happened.
/// - Every verb may be repeated with the same owner token (law L8).
///
/// The conformance suite of `idem-testkit` proves all of this for a store.
///
/// # Cancellation safety
/// Dropping a verb's future leaves the store usable and the record in the state before or after the step, never in
/// between. Whether the step happened is then unknown; repeat it with the same owner token.
///
/// # Wrappers
/// There are no default bodies, so that a wrapper that forgets to forward a verb does not compile.
#[async_trait]
pub trait IdempotencyStore: fmt::Debug + Send + Sync + 'static {
    /// Asks for the right to execute, or for the answer.
    ///
    /// # Errors
    /// [`StoreError`] when the store could not answer. After an indeterminate one the record may be held by
    /// `request.owner`: acquire again with the same token, or settle it as released.
    async fn acquire(&self, request: &Acquire) -> Result<AcquireOutcome, StoreError>;

    /// Extends the lease to `term.lease` from now.
    ///
    /// # Errors
    /// [`StoreError`] when the store could not answer; it is safe to repeat.
    async fn renew(&self, lease: &Lease, term: Term) -> Result<OwnerOutcome, StoreError>;

    /// Records a recovery point in place of the one before.
    ///
    /// # Errors
    /// [`StoreError`] when the store could not answer; it is safe to repeat.
    async fn checkpoint(&self, lease: &Lease, checkpoint: &Checkpoint) -> Result<OwnerOutcome, StoreError>;

    /// Ends the run, and keeps the record for `retention` from now. For a retryable failure, the retention counts from
    /// the time of its next attempt.
    ///
    /// The retention must outlast the caller's repeats of a settlement whose answer was lost.
    ///
    /// # Errors
    /// [`StoreError`] when the store could not answer; it is safe to repeat.
    async fn settle(
        &self,
        lease: &Lease,
        settlement: &Settlement,
        retention: Duration,
    ) -> Result<OwnerOutcome, StoreError>;

    /// The record as it stands, `None` when there is none or its retention is over. Changes nothing.
    ///
    /// # Errors
    /// [`StoreError`] when the store could not answer.
    async fn peek(&self, id: &RecordId) -> Result<Option<Record>, StoreError>;

    /// Calls `listener` on settlements that the store's server announces. Without announcements it does nothing.
    ///
    /// The calls cover settlements by any process. They come only while `listener` is alive, and only for records that
    /// an acquire has seen running: no caller waits for any other record. A call is a hint that saves a waiter some
    /// time. It may be missing, late or repeated, or the record may have been settled differently since.
    fn on_settled(&self, listener: Weak<dyn SettlementListener>);

    /// A renewer with a separate connection, which the current runtime drives.
    ///
    /// `None` when threads of the store drive its verbs, or when the verbs need no runtime.
    ///
    /// The engine times renewals on a dedicated thread, and calls [`renew`](Self::renew) on the runtime of the
    /// operation. If that fails, or does not answer within a quarter of the engine's store timeout because an operation
    /// keeps the runtime busy, the engine also calls this renewer. The first success counts. The engine asks for the
    /// renewer once. Making it does not wait: it connects on first use.
    fn renewer(&self) -> Option<Arc<dyn LeaseRenewer>>;

    /// What this store can promise.
    fn capabilities(&self) -> Capabilities;
}

/// Renews leases on a separate connection: [`IdempotencyStore::renewer`].
#[async_trait]
pub trait LeaseRenewer: fmt::Debug + Send + Sync + 'static {
    /// As [`IdempotencyStore::renew`].
    ///
    /// # Errors
    /// [`StoreError`] when the store could not answer; it is safe to repeat.
    async fn renew(&self, lease: &Lease, term: Term) -> Result<OwnerOutcome, StoreError>;
}

/// Receives the settlements of records, also by other processes.
pub trait SettlementListener: Send + Sync {
    /// The record was settled, or released. Must not block.
    fn settled(&self, id: &RecordId);
}

/// A store that keeps what it has acknowledged as long as its disk holds.
///
/// Only such a store can back the AtMostOnce contract: if a record is lost, its operation runs again. Stores whose
/// failover loses acknowledged records, such as Redis, do not implement it, unless the application accepts the loss.
#[diagnostic::on_unimplemented(
    message = "`{Self}` may forget what it has acknowledged, so it can back neither AtMostOnce nor Transactional",
    note = "where that is acceptable for AtMostOnce, such a store has a method `dangerous_accept_store_loss`"
)]
#[async_trait]
pub trait DurableStore: IdempotencyStore {
    /// The record as [`peek`](IdempotencyStore::peek) returns it, and its remaining time to live, for callers that
    /// cache it.
    ///
    /// # Errors
    /// [`StoreError`] when the store could not answer.
    async fn live_record(&self, id: &RecordId) -> Result<Option<LiveRecord>, StoreError>;

    /// Identifies this store's records among those of all stores: the same in all processes that share them. A cached
    /// copy that was made under another identity is not valid here.
    fn identity(&self) -> [u8; 16];

    /// Whether a cache may copy records to another place as this store returns them.
    ///
    /// `false` for a store that decrypts what it reads: the copies would be plaintext. A wrapper that does not change records answers
    /// as the store that it wraps.
    fn may_be_copied(&self) -> bool;
}

/// A record, and its remaining time to live.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "it is made by stores of other crates")]
pub struct LiveRecord {
    /// The record.
    pub record: Record,
    /// How long until it counts as absent, by the store's clock.
    pub remaining: Duration,
}

impl LiveRecord {
    /// The live record at `now`; `None` once it counts as absent.
    #[must_use]
    pub fn at(record: Record, now: Timestamp) -> Option<Self> {
        crate::machine::current(Some(&record), now)?;
        let remaining = record.expires_at.saturating_duration_since(now);
        Some(Self { record, remaining })
    }
}

/// Repairs of records by operators, and by jobs that compare records with what really happened.
///
/// As for verbs, a repair is one atomic step of the state machine, may be repeated, and an error means that the store could not answer.
#[async_trait]
pub trait Operate: fmt::Debug + Send + Sync + 'static {
    /// Resolves an operation that ended without an answer: [`machine::resolve`](crate::machine::resolve).
    ///
    /// # Errors
    /// [`StoreError`] when the store could not answer; it is safe to repeat.
    async fn resolve(&self, request: &Resolve) -> Result<ResolveOutcome, StoreError>;

    /// Erases what a person left in a record: [`machine::erase`](crate::machine::erase).
    ///
    /// A store that keeps origins also replaces the principal by the empty text, in the same step. It removes [`Erase::principal`] from
    /// the reasons of earlier repairs of the record. A store with a cache erases the copy first, and leaves the record as it is if that
    /// fails.
    ///
    /// # Errors
    /// [`StoreError`] when the store could not answer; it is safe to repeat.
    async fn erase(&self, request: &Erase) -> Result<EraseOutcome, StoreError>;

    /// Keeps a note of a repair. A further note of the same action only adds its [outcome](RepairNote::outcome_after).
    ///
    /// # Errors
    /// [`StoreError`] when the store could not answer; it is safe to repeat. Of the kind `Misconfigured` if the action belongs to
    /// [another repair](RepairNote::action_is_taken). Redis keeps both notes instead.
    async fn note(&self, note: &RepairNote) -> Result<(), StoreError>;

    /// The repairs that were noted last, the newest first.
    ///
    /// # Errors
    /// [`StoreError`] when the store could not answer.
    async fn repairs(&self, limit: NonZeroU32) -> Result<Vec<Repair>, StoreError>;
}

/// Removal of records whose retention is over.
#[async_trait]
pub trait Purge: fmt::Debug + Send + Sync + 'static {
    /// Removes at most `limit` expired records and says how many it removed; fewer than `limit` means that there are
    /// no more for now. A record under a live lease is never removed (law L10). Safe to run in many processes at once.
    ///
    /// # Errors
    /// [`StoreError`] when the store could not answer; nothing is half removed.
    async fn purge(&self, limit: NonZeroU32) -> Result<u32, StoreError>;

    /// The part of a task that runs all the time, as `idem_core::engine::Purger`. Without partitions it is the same as
    /// [`purge`](Self::purge). In partitions it makes the coming ones and drops the past ones, whose records do not count. Expired
    /// records in a partition that still holds living ones stay until it is dropped, which costs less than removing each.
    ///
    /// # Errors
    /// [`StoreError`] when the store could not answer.
    async fn maintain(&self, limit: NonZeroU32) -> Result<u32, StoreError>;
}

/// What a store can promise.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// The store's name, as in `sqlite`.
    pub name: &'static str,
    /// What an answered verb survives.
    pub durability: Durability,
    /// Whether other processes see the same records.
    pub shared: bool,
}

impl Capabilities {
    /// The capabilities of a store called `name`.
    #[must_use]
    pub const fn new(name: &'static str, durability: Durability, shared: bool) -> Self {
        Self { name, durability, shared }
    }
}

/// What an answered verb survives, from weakest to strongest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Durability {
    /// Nothing: records live in the memory of the process.
    Process,
    /// The death of any process, but not the loss of power or of the primary: acknowledged records can be lost.
    Crash,
    /// The loss of power, if the disk keeps its promises.
    Power,
}
