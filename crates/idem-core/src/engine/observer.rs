//! What an engine tells about itself, for metrics.

use std::fmt;

use crate::record::Acquisition;
use crate::store::StoreError;

/// Something that happened in an engine.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// An operation began to run.
    Acquired {
        /// How it came to run.
        acquisition: Acquisition,
        /// Which attempt it is.
        attempt: u32,
    },
    /// An operation that ran is settled.
    Settled,
    /// A repeat got the stored answer.
    Replayed,
    /// A repeat was turned away, because the operation runs now.
    InProgress,
    /// A repeat was turned away, because the operation failed and its next attempt has to wait.
    Backoff,
    /// The key belongs to another request.
    Mismatch,
    /// An operation ran *without protection*, because the store could not answer.
    FailedOpen,
    /// An operation panicked.
    Panicked,
    /// The store could not answer one verb; it may be asked again.
    StoreFailed(&'a StoreError),
    /// An operation lost its lease while it ran.
    LeaseLost,
    /// The store did not take a settlement in time: the caller has its answer, and the settlement goes on behind it.
    SettlementDelayed,
    /// A settlement was given up: the record is answered, or free, when its lease is over.
    SettlementLost,
}

/// Somebody who is told, such as a bridge to a metrics library. Called inline, so it must be quick and must not block.
pub trait Observer: fmt::Debug + Send + Sync + 'static {
    /// Something happened.
    fn observe(&self, event: &Event<'_>);
}
