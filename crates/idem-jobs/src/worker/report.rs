//! Tells the queue what the deliveries came to: jobs that have ended, many at once, and jobs that are due again.

use std::panic::AssertUnwindSafe;
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::sync::mpsc::Receiver;
use tokio::time::{Instant, sleep, timeout};

use crate::job::{Delivery, JobId};
use crate::jobs::Jobs;

/// How long a worker pauses before it reports again to a queue that does not answer.
const REPORT_AGAIN: Duration = Duration::from_millis(200);

/// How many jobs are ended at once, at most. As many more may wait for that.
pub(super) const MOST_ENDS: usize = 256;

/// How a delivery ended.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Report {
    /// The record has the result.
    Ended { is_parked: bool },
    /// The job is due again.
    Again { after: Duration, counts: Counts },
    /// Another worker has it, or it has ended.
    Gone,
}

/// A job that has a result, and has to be ended.
pub(super) struct Ended {
    pub(super) id: JobId,
    pub(super) is_parked: bool,
    /// When other workers get it at the latest. It is not held any more.
    pub(super) held_until: Instant,
}

/// What a delivery means for the count of lost ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Counts {
    /// It did not run.
    Nothing,
    /// Its handler may have run, and left no trace in the record.
    Lost,
    /// It left an attempt in the record, which counts those.
    Recorded,
}

impl Counts {
    /// How many deliveries count as lost after this one.
    pub(super) fn lost(self, before: u32) -> u32 {
        match self {
            Self::Nothing => before,
            Self::Lost => before.saturating_add(1),
            Self::Recorded => 0,
        }
    }
}

/// Ends the jobs that are sent here, all at once that have come in meanwhile. Jobs that run need not wait for that.
pub(super) async fn end_jobs(queue: Jobs, mut ended: Receiver<Ended>) {
    let mut jobs = Vec::new();
    loop {
        let more = MOST_ENDS - jobs.len();
        if jobs.is_empty() {
            if ended.recv_many(&mut jobs, more).await == 0 {
                return;
            }
        } else if more == 0 || ended.is_closed() && ended.is_empty() {
            sleep(REPORT_AGAIN).await;
        } else {
            let _ = timeout(REPORT_AGAIN, ended.recv_many(&mut jobs, more)).await;
        }
        jobs = try_end(&queue, jobs).await;
    }
}

/// Ends these jobs. Returns those that have not ended, as long as no other worker gets them.
async fn try_end(queue: &Jobs, jobs: Vec<Ended>) -> Vec<Ended> {
    let shared = &queue.shared;
    let keep = shared.engine.settings().record_retention();
    let (parked, others): (Vec<_>, Vec<_>) = jobs.into_iter().partition(|job| job.is_parked);
    let mut open = Vec::new();
    for (mut jobs, is_parked) in [(others, false), (parked, true)] {
        if jobs.is_empty() {
            continue;
        }
        let ids: Vec<JobId> = jobs.iter().map(|job| job.id.clone()).collect();
        let end = queue.bounded(shared.queue.end(&ids, is_parked, keep));
        match AssertUnwindSafe(end).catch_unwind().await {
            Ok(Ok(locked)) => jobs.retain(|job| locked.contains(&job.id)),
            Ok(Err(error)) => {
                tracing::debug!(error = &error as &dyn std::error::Error, jobs = ids.len(), "jobs could not be ended");
            }
            // Without this task, the worker would never end a job again.
            Err(_) => tracing::error!(jobs = ids.len(), "the job queue panicked when jobs were to be ended"),
        }
        open.append(&mut jobs);
    }
    open.retain(|job| {
        let is_held = Instant::now() < job.held_until;
        if !is_held {
            tracing::warn!(job = %job.id, "a job was not ended, and will be delivered again");
        }
        is_held
    });
    open
}

/// Reports a job that is due again. If the queue does not answer, it tries again until another worker may have the job.
pub(super) async fn put_back(queue: &Jobs, delivery: &Delivery, after: Duration, lost: u32) {
    let shared = &queue.shared;
    let held_until = Instant::now() + shared.settings.visibility_timeout;
    let job = &delivery.job.id;
    while let Err(error) = queue.bounded(shared.queue.put_back(delivery, after, lost)).await {
        if Instant::now() >= held_until {
            tracing::warn!(error = &error as &dyn std::error::Error, %job, "a job was not reported, and will be delivered again");
            return;
        }
        tracing::debug!(error = &error as &dyn std::error::Error, %job, "a job could not be reported");
        sleep(REPORT_AGAIN).await;
    }
}
