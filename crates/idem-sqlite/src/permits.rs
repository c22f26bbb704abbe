//! Limits handlers' transactions: how many run, and how many wait.

use std::num::NonZeroU32;
use std::sync::Arc;

use idem_core::{StoreError, StoreErrorKind};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// How many handlers may wait for a transaction. Each has a client that waits too, so a longer queue would only add latency.
const WAITING: usize = 1024;

/// As many permits as there are connections for transactions.
#[derive(Debug, Clone)]
pub(crate) struct TransactionPermits {
    free: Arc<Semaphore>,
    waiting: Arc<Semaphore>,
    count: NonZeroU32,
}

/// A place in the queue, free again when this is dropped.
pub(crate) struct Waiting {
    free: Arc<Semaphore>,
    _place: OwnedSemaphorePermit,
}

/// The right to one transaction, until it is dropped.
pub(crate) type TransactionPermit = OwnedSemaphorePermit;

impl TransactionPermits {
    pub(crate) fn new(count: NonZeroU32) -> Self {
        let free = Arc::new(Semaphore::new(usize::try_from(count.get()).unwrap_or(Semaphore::MAX_PERMITS)));
        Self { free, waiting: Arc::new(Semaphore::new(WAITING)), count }
    }

    /// Enters the queue.
    ///
    /// # Errors
    /// [`StoreErrorKind::Busy`] when it is full.
    pub(crate) fn enter(&self) -> Result<Waiting, StoreError> {
        let place = Arc::clone(&self.waiting).try_acquire_owned().map_err(|_| {
            let message = format!(
                "could not begin a transaction: {} handlers have one, and {WAITING} wait; repeat later, or raise \
                 max_transactions",
                self.count
            );
            StoreError::new(StoreErrorKind::Busy, message)
        })?;
        Ok(Waiting { free: Arc::clone(&self.free), _place: place })
    }
}

impl Waiting {
    /// Waits for a permit, first come, first served.
    ///
    /// # Cancellation safety
    /// Dropping the returned future leaves the queue at once.
    pub(crate) async fn permit(self) -> Result<TransactionPermit, StoreError> {
        let closed = |_| StoreError::new(StoreErrorKind::Unavailable, "the SQLite store is closed");
        self.free.acquire_owned().await.map_err(closed)
    }
}
