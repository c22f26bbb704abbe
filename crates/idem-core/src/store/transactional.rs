//! Stores that can commit the business writes and the record in one transaction.

use std::any::Any;
use std::fmt;
use std::time::Duration;

use async_trait::async_trait;

use super::{DurableStore, StoreError};
use crate::machine::{Acquire, AcquireOutcome, Lease, OwnerOutcome, Settlement};

/// A store whose database also holds the business data, so that both can commit together.
///
/// Only such a store can back the Transactional contract; a store that does not implement this trait does not compile
/// there.
#[async_trait]
pub trait TransactionalStore: DurableStore {
    /// Asks for the right to execute, and opens a transaction if the caller gets it.
    ///
    /// # Errors
    /// [`StoreError`] as from [`IdempotencyStore::acquire`](super::IdempotencyStore::acquire). It is also
    /// [indeterminate](StoreError::is_indeterminate) if only the transaction cannot be opened and the record may be
    /// held by `request.owner`. Then begin again with the same token, or settle the record as released.
    async fn begin(&self, request: &Acquire) -> Result<Begin, StoreError>;
}

/// How many handlers' transactions are in use: a gauge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "it is made by stores of other crates")]
pub struct TransactionSlots {
    /// How many there may be: the store's `max_transactions`.
    pub most: u32,
    /// How many are open, or are being opened or closed.
    pub in_use: u32,
    /// How many operations wait for one.
    pub waiting: u32,
}

/// The answer to [`TransactionalStore::begin`].
#[derive(Debug)]
#[expect(clippy::exhaustive_enums, reason = "callers must handle every outcome")]
pub enum Begin {
    /// Run it inside this transaction.
    Acquired {
        /// The right to execute.
        lease: Lease,
        /// Where the business writes belong.
        transaction: Box<dyn StoreTransaction>,
        /// Whether the lease has to be renewed while the operation runs. A store whose in-progress mark lives and dies
        /// with the transaction says no.
        renew: bool,
    },
    /// It must not run. The outcome is never `Acquired`.
    Answered(AcquireOutcome),
}

/// How long an engine waits for [`StoreTransaction::finish`]: longer than for a verb, as a commit may wait for other
/// writers. If a commit gets no answer, the store has to find out within this time how it ended.
pub const FINISH_TIMEOUT: Duration = Duration::from_secs(10);

/// An open transaction, in which a handler makes its business writes.
///
/// # Cancellation safety
/// Dropping it, or the future of `finish` before the commit was sent, rolls everything back; the record's key is then
/// free after one lease at the latest.
#[async_trait]
pub trait StoreTransaction: fmt::Debug + Send + 'static {
    /// Ends the transaction: settles the record and keeps or discards the business writes, in one commit.
    ///
    /// With `LeaseLost` everything is rolled back.
    ///
    /// # Errors
    /// [`StoreError`] when the end is not known to be committed. If it is
    /// [indeterminate](StoreError::is_indeterminate), read the record again before you answer any caller. If it is
    /// [`TransactionFailed`](crate::StoreErrorKind::TransactionFailed), nothing was committed.
    async fn finish(
        self: Box<Self>,
        settlement: &Settlement,
        retention: Duration,
        writes: Writes,
    ) -> Result<OwnerOutcome, StoreError>;

    /// The concrete transaction, for the handler.
    fn as_any_mut(&mut self) -> &mut (dyn Any + Send);
}

/// What becomes of the business writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "there is no third way")]
pub enum Writes {
    /// They commit with the record.
    Keep,
    /// They are rolled back; the record commits alone.
    Discard,
}
