//! The port of a store that is fast and is not believed.

use std::fmt;
use std::sync::Weak;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;

use super::{SettlementListener, StoreError};
use crate::record_id::RecordId;
use crate::timestamp::Timestamp;

/// A place for entries that spare a durable store work, and that may all be lost.
///
/// It keeps at most one entry per record, and knows nothing of what is in it. Nothing that it does wrong may harm: it may
/// forget, answer with older entries or with somebody else's, fail, or take its time. The one thing that is believed is
/// the pace of its clock. `idem-hybrid` puts such a store in front of a durable one.
///
/// # Cancellation safety
/// A verb whose future is dropped took effect, or will, or not at all.
#[async_trait]
pub trait FastStore: fmt::Debug + Send + Sync + 'static {
    /// The entry of a record, and the time. Where there is none, a claim is put in its place if `claim` says for how long: an
    /// entry of rank 0 and without bytes, by which others see that somebody is about to put one.
    ///
    /// # Errors
    /// [`StoreError`] when the store could not answer; the claim may be there.
    async fn get(&self, id: &RecordId, claim: Option<Duration>) -> Result<FastRead, StoreError>;

    /// Puts an entry in place, unless one of a higher rank is there or it is over, and says what time it is. It is
    /// forgotten at its end.
    ///
    /// # Errors
    /// [`StoreError`] when the store could not answer; the entry may be there, or come later.
    async fn put(&self, id: &RecordId, entry: &FastEntry) -> Result<Timestamp, StoreError>;

    /// Removes an entry if it has just this rank, tells whoever [listens](Self::on_settled), and says what time it is. Where
    /// there is none then, a claim is put in its place if `claim` says for how long.
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
    /// Whatever it says.
    pub bytes: Bytes,
    /// From when on it is forgotten, by the fast store's clock.
    pub until: Timestamp,
}

/// What a fast store says about a record.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "it is what it says, and no more")]
pub struct FastRead {
    /// The store's time.
    pub now: Timestamp,
    /// The bytes of the entry, if there was one: none, if it is a claim.
    pub bytes: Option<Bytes>,
}
