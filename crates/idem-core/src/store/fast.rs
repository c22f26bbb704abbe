//! The port of a cache in front of a durable store.

use std::fmt;
use std::sync::Weak;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;

use super::{SettlementListener, StoreError};
use crate::record_id::RecordId;
use crate::timestamp::Timestamp;

/// A cache: its entries spare a durable store work, and may all be lost.
///
/// It keeps at most one entry per record, and does not interpret it. None of its faults may do harm: it may lose
/// entries, return older entries or those of another record, fail, or be slow. Only the pace of its clock is trusted.
/// `idem-hybrid` puts such a store in front of a durable one.
///
/// # Cancellation safety
/// If a verb's future is dropped, the verb took effect, will take effect, or never does.
#[async_trait]
pub trait FastStore: fmt::Debug + Send + Sync + 'static {
    /// Returns the entry of a record, and the store's time.
    ///
    /// If there is no entry and `claim` is a duration, the store puts a claim for that long: an entry of rank 0 without
    /// bytes. It shows other processes that an entry is about to be put.
    ///
    /// # Errors
    /// [`StoreError`] when the store could not answer; the claim may be there.
    async fn get(&self, id: &RecordId, claim: Option<Duration>) -> Result<FastRead, StoreError>;

    /// Puts an entry, and returns the store's time.
    ///
    /// It does nothing if an entry of a higher rank is there, or if this one has expired. The store drops an entry when
    /// it expires.
    ///
    /// # Errors
    /// [`StoreError`] when the store could not answer; the entry may be there, or come later.
    async fn put(&self, id: &RecordId, entry: &FastEntry) -> Result<Timestamp, StoreError>;

    /// Removes an entry of exactly this rank, and returns the store's time.
    ///
    /// It notifies the [listeners](Self::on_settled), unless the rank is 0: no run ends with a claim, and waiters would ask
    /// again in vain.
    ///
    /// If there is no entry then and `claim` is a duration, the store puts a claim for that long.
    ///
    /// # Errors
    /// [`StoreError`] when the store could not answer.
    async fn remove(&self, id: &RecordId, rank: u64, claim: Option<Duration>) -> Result<Timestamp, StoreError>;

    /// Tells `listener` of removed entries, as
    /// [`IdempotencyStore::on_settled`](super::IdempotencyStore::on_settled) does.
    fn on_settled(&self, listener: Weak<dyn SettlementListener>);
}

/// What a fast store keeps for a record.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "a store that forgets a part must not compile")]
pub struct FastEntry {
    /// Entries replace those of the same or a lower rank.
    pub rank: u64,
    /// The content, which the store does not interpret.
    pub bytes: Bytes,
    /// When it expires, by the fast store's clock.
    pub until: Timestamp,
}

/// What a fast store says about a record.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "it is what it says, and no more")]
pub struct FastRead {
    /// The store's time.
    pub now: Timestamp,
    /// The bytes of the entry, if there is one. A claim has no bytes.
    pub bytes: Option<Bytes>,
}
