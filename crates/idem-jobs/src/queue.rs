//! The port of a job queue.

use std::fmt;
use std::num::NonZeroU32;
use std::time::Duration;

use async_trait::async_trait;
use idem_core::engine::{Context, TransactionError};
use idem_core::{OwnerToken, StoreError};

use crate::job::{Delivery, EnqueuedBefore, Job, JobId, QueuedJob};

/// Keeps jobs until they have ended, and wakes workers.
///
/// A queue decides nothing about a job: the record of its operation does. So a job may be delivered too often, by two workers
/// at once, or after its end. It must be delivered at least once after it was enqueued.
///
/// Every method asks the clock of the queue's server. Callers limit how long they wait, drop the future then, and repeat
/// what they reported: the same report twice must count once.
#[async_trait]
pub trait JobQueue: fmt::Debug + Send + Sync + 'static {
    /// Adds a job, due at once, whose deadline is over after `deadline`. If there is a job with this id, that job is returned and
    /// stays, but `by` is noted as its last caller. A job that was kept for its time counts as absent.
    ///
    /// If `run` has a transaction of the queue's database, the job is added in it. `by` is the run's owner token.
    ///
    /// # Errors
    /// [`EnqueueError`].
    async fn enqueue(
        &self,
        run: &Context,
        job: &Job,
        by: OwnerToken,
        deadline: Duration,
    ) -> Result<Option<EnqueuedBefore>, EnqueueError>;

    /// Claims up to `most` jobs that are due, the oldest first. Each is due again after `hold`, unless it is held again, put
    /// back, or ended. The delivery counts as lost from now on. The count commits
    /// before the job runs.
    ///
    /// Suspects, which have [`SUSPECT_FROM`](crate::SUSPECT_FROM) lost deliveries or more, are not among them. With
    /// `with_suspect`, the oldest suspect that is due comes in addition. Its delivery does not count as lost yet.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn claim(&self, most: NonZeroU32, with_suspect: bool, hold: Duration) -> Result<Vec<Delivery>, StoreError>;

    /// Counts the delivery of a suspect as lost until it is reported: one more than `suspect.lost`. False if it was delivered
    /// again, reported, or has ended: it must not run then.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn begin(&self, suspect: &Delivery) -> Result<bool, StoreError>;

    /// Holds a claimed job for `hold` from now. False if it was delivered again, put back, or has ended.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn hold(&self, delivery: &Delivery, hold: Duration) -> Result<bool, StoreError>;

    /// Reports that a delivery did not end the job, which is due again after `delay`. From now on, `lost` deliveries count as
    /// lost. If the job was delivered again, put back or has ended, nothing changes.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn put_back(&self, delivery: &Delivery, delay: Duration, lost: u32) -> Result<(), StoreError>;

    /// Ends up to 256 jobs. They are never delivered again, and are kept for `keep`. The first end of a job counts. A job that is
    /// not in the queue is left out.
    ///
    /// Returns those that another session has locked. They have not ended yet, and the worker asks again. No job may make the others
    /// wait or fail.
    ///
    /// # Errors
    /// [`StoreError`]. Some of the jobs may have ended.
    async fn end(&self, ids: &[JobId], is_parked: bool, keep: Duration) -> Result<Vec<JobId>, StoreError>;

    /// Looks a job up. A job that was kept for its time counts as absent.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn find(&self, id: &JobId) -> Result<Option<QueuedJob>, StoreError>;

    /// Removes up to `most` jobs that were kept for their time, and returns how many. A queue whose server does that itself
    /// returns zero.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn purge(&self, most: NonZeroU32) -> Result<u32, StoreError>;
}

/// Why a job was not enqueued.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EnqueueError {
    /// The queue cannot be reached, or has refused. The request may be repeated.
    #[error("the job could not be added to its queue")]
    Queue(#[from] StoreError),
    /// The run's transaction is of another store, or is borrowed.
    #[error("the job could not be added in the transaction of its request")]
    Transaction(#[from] TransactionError),
    /// The request has another job: this run has enqueued it, or an earlier run has enqueued one of another name.
    #[error("the request has enqueued a job `{name}` already; a request has one, so let that job do the rest")]
    OtherJob {
        /// The name of the first one.
        name: String,
    },
    /// The name is not 1 to 64 ASCII letters, digits, `-`, `_` and `.`.
    #[error("`{name}` is no name of a job: it has 1 to 64 ASCII letters, digits, '-', '_' and '.'")]
    InvalidName {
        /// The name that was given.
        name: String,
    },
    /// The payload is too large.
    #[error("the payload has {bytes} bytes; at most 1048576 are queued, so keep it elsewhere and queue its address")]
    PayloadTooLarge {
        /// Its size.
        bytes: usize,
    },
    /// The payload cannot be written as JSON.
    #[error("the payload cannot be written as JSON")]
    Payload(#[from] serde_json::Error),
    /// The run is not protected, so that a repeat of its request would enqueue a second job.
    #[error("the request is not protected, because the store could not be asked; repeat it later")]
    NotProtected,
}

impl EnqueueError {
    /// Whether the same request may succeed later: answer 503 then, and 500 otherwise.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Queue(error) => error.is_retryable(),
            Self::NotProtected => true,
            Self::Transaction(_)
            | Self::OtherJob { .. }
            | Self::InvalidName { .. }
            | Self::PayloadTooLarge { .. }
            | Self::Payload(_) => false,
        }
    }
}
