//! What an engine tells about itself, for metrics.

use std::fmt;

use crate::record::Acquisition;
use crate::store::StoreError;

/// Something that happened in an engine.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// An operation was acquired, and is about to run.
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
    /// An operation lost its lease while it ran, or did not run because its lease was not certain to hold.
    LeaseLost,
    /// The store did not take a settlement in time: the caller has its answer, and the settlement goes on behind it.
    SettlementDelayed,
    /// A settlement was given up: the record is answered, or free, when its lease is over.
    SettlementLost,
    /// A request was refused, because as many operations run as [may](super::Settings::max_running).
    Overloaded,
    /// An acquire without an answer may take a lease later, and too many such leases are waited for already: a repeat may be
    /// told that the outcome is unknown although nothing ran.
    AcquireForgotten,
}

/// Receives events, such as a bridge to a metrics library.
///
/// Called inline, so it must be quick and must not block. A panic is caught, logged and
/// [counted](super::Idempotency::observer_panics); the operation goes on.
pub trait Observer: fmt::Debug + Send + Sync + 'static {
    /// Something happened.
    fn observe(&self, event: &Event<'_>);
}
