//! Limits handlers' transactions: how many run, and how many wait.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use idem_core::{StoreError, StoreErrorKind, TransactionSlots};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout_at};

/// How many handlers may wait for a transaction. Each has a client that waits too, so a longer queue would only add latency.
const WAITING: usize = 1024;

/// As many permits as there may be transactions.
#[derive(Debug, Clone)]
pub(crate) struct TransactionPermits {
    free: Arc<Semaphore>,
    waiting: Arc<Semaphore>,
    count: NonZeroU32,
    wait: Duration,
}

/// A place in the queue, free again when this is dropped.
pub(crate) struct Waiting {
    free: Arc<Semaphore>,
    count: NonZeroU32,
    wait: Duration,
    _place: OwnedSemaphorePermit,
}

/// The right to one transaction, until it is dropped.
pub(crate) type TransactionPermit = OwnedSemaphorePermit;

/// A permit that was granted.
pub(crate) struct Granted {
    pub(crate) permit: TransactionPermit,
    /// The end of the wait, by which a connection must be there as well.
    pub(crate) deadline: Instant,
    pub(crate) has_waited: bool,
}

impl TransactionPermits {
    pub(crate) fn new(count: NonZeroU32, wait: Duration) -> Self {
        let free = Arc::new(Semaphore::new(usize::try_from(count.get()).unwrap_or(Semaphore::MAX_PERMITS)));
        Self { free, waiting: Arc::new(Semaphore::new(WAITING)), count, wait }
    }

    pub(crate) fn slots(&self) -> TransactionSlots {
        let number = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        let most = self.count.get();
        let in_use = most.saturating_sub(number(self.free.available_permits()));
        TransactionSlots { most, in_use, waiting: number(WAITING.saturating_sub(self.waiting.available_permits())) }
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
        Ok(Waiting { free: Arc::clone(&self.free), count: self.count, wait: self.wait, _place: place })
    }
}

impl Waiting {
    /// Waits for a permit, first come, first served.
    ///
    /// # Errors
    /// [`StoreErrorKind::Busy`] when none becomes free in time.
    ///
    /// # Cancellation safety
    /// Dropping the returned future leaves the queue at once.
    pub(crate) async fn permit(self) -> Result<Granted, StoreError> {
        let deadline = Instant::now() + self.wait;
        if let Ok(permit) = Arc::clone(&self.free).try_acquire_owned() {
            return Ok(Granted { permit, deadline, has_waited: false });
        }
        match timeout_at(deadline, self.free.acquire_owned()).await {
            Ok(Ok(permit)) => Ok(Granted { permit, deadline, has_waited: true }),
            Ok(Err(_)) => Err(StoreError::new(StoreErrorKind::Unavailable, "the SQLite store is closed")),
            Err(_) => {
                let (wait, count) = (self.wait, self.count);
                let message = format!(
                    "no transaction was free within {wait:?}: handlers have all {count} that max_transactions allows"
                );
                Err(StoreError::new(StoreErrorKind::Busy, message))
            }
        }
    }
}
