//! The storage port: what a store must do, and nothing about how.

mod error;
mod fast;
mod offset;
mod self_test;
mod transactional;

use std::fmt;
use std::num::NonZeroU32;
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;

pub use error::{StoreError, StoreErrorKind};
pub use fast::{FastEntry, FastRead, FastStore};
pub use offset::TimeOffset;
pub use self_test::{SelfTestError, self_test};
pub use transactional::{Begin, FINISH_TIMEOUT, StoreTransaction, TransactionalStore, Writes};

use crate::machine::{Acquire, AcquireOutcome, Lease, OwnerOutcome, Settlement, Term};
use crate::record::{Checkpoint, Record};
use crate::record_id::RecordId;
use crate::timestamp::Timestamp;

/// A place where records live.
///
/// # Contract
/// Every verb is one atomic step of [`machine::transition`](crate::machine::transition) on one record, under the
/// *store's* clock: whatever two callers do at once has the result of one order of the two. A verb that answers has
/// taken effect as durably as [`Capabilities::durability`] says. Expected outcomes are values; an error means that the
/// store could not answer, and then [`StoreError::is_indeterminate`] says whether the step may have happened all the
/// same. Every verb may be repeated with the same owner token (law L8). `idem-testkit` has the conformance suite that
/// proves all of this for a store.
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

    /// Ends the run; the record is kept for `retention` from now (a retryable failure from the time of its next attempt),
    /// which has to outlast the caller's repeats of a settlement whose answer was lost.
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

    /// Tells `listener` of settlements, as far as this store's server tells the store of them; otherwise does nothing.
    ///
    /// It is called for settlements of any process, only while it is alive, and only for records whose running was seen
    /// by somebody who acquired: nobody else can wait for one. It is a hint that spares a waiter some time: it may be
    /// missing, late, repeated, or about a record that was settled otherwise since.
    fn on_settled(&self, listener: Weak<dyn SettlementListener>);

    /// A way for renewals that the current runtime drives, on a connection of its own; `None` when verbs are driven by threads of
    /// the store, or by no runtime at all.
    ///
    /// The engine renews from a thread of its own, and calls [`renew`](Self::renew) on the runtime of the operation. When that
    /// fails, or does not answer for a quarter of the engine's store timeout because an operation keeps the runtime busy, the
    /// engine tries this way beside it; the first success counts. It is asked for once. Making it does not wait: the connection
    /// is made when it is used.
    fn renewer(&self) -> Option<Arc<dyn LeaseRenewer>>;

    /// What this store can promise.
    fn capabilities(&self) -> Capabilities;
}

/// Renews leases on a connection of its own: [`IdempotencyStore::renewer`].
#[async_trait]
pub trait LeaseRenewer: fmt::Debug + Send + Sync + 'static {
    /// As [`IdempotencyStore::renew`].
    ///
    /// # Errors
    /// [`StoreError`] when the store could not answer; it is safe to repeat.
    async fn renew(&self, lease: &Lease, term: Term) -> Result<OwnerOutcome, StoreError>;
}

/// Whoever wants to know that a record was settled somewhere.
pub trait SettlementListener: Send + Sync {
    /// The record was settled, or released. Must not block.
    fn settled(&self, id: &RecordId);
}

/// A store that does not forget what it has acknowledged as long as its disk holds.
///
/// Only such a store can back the AtMostOnce contract: a record that is lost is an operation that runs again. Stores whose
/// failover loses acknowledged records, such as Redis, do not implement it by themselves.
#[diagnostic::on_unimplemented(
    message = "`{Self}` may forget what it has acknowledged, so it can back neither AtMostOnce nor Transactional",
    note = "where that is acceptable for AtMostOnce, such a store has a method `dangerous_accept_store_loss`"
)]
#[async_trait]
pub trait DurableStore: IdempotencyStore {
    /// The record as [`peek`](IdempotencyStore::peek) gives it, and how much of its life is left, for whoever keeps a copy.
    ///
    /// # Errors
    /// [`StoreError`] when the store could not answer.
    async fn live_record(&self, id: &RecordId) -> Result<Option<LiveRecord>, StoreError>;

    /// What tells this store's records from those of every other store: the same in all processes that share them. A copy
    /// that was made of another store's record is none of this one's.
    fn identity(&self) -> [u8; 16];
}

/// A record, and how long it is one.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "it is made by stores of other crates")]
pub struct LiveRecord {
    /// The record.
    pub record: Record,
    /// How long until it counts as absent, by the store's clock.
    pub remaining: Duration,
}

impl LiveRecord {
    /// What there is to see of `record` at `now`: nothing once it counts as absent.
    #[must_use]
    pub fn at(record: Record, now: Timestamp) -> Option<Self> {
        crate::machine::current(Some(&record), now)?;
        let remaining = record.expires_at.saturating_duration_since(now);
        Some(Self { record, remaining })
    }
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
    /// The loss of power, as far as the disk keeps its promises.
    Power,
}
