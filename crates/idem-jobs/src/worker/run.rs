//! Runs a job under its record, and decides what its delivery came to.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use idem_core::engine::{Answer, Conclusion, Context, Contract, Disposition, ExecuteError, Operation};
use idem_core::{Acquisition, ReplayKind, StoredResponse, Writes};
use tokio::time::Instant;

use super::report::{Counts, Report};
use crate::job::{Delivery, Job};
use crate::jobs::{GiveUp, JobState, Jobs, problem};

/// How long a job waits after its worker could not ask the store, or knows no handler of its name.
const TRY_AGAIN: Duration = Duration::from_secs(1);
const NO_HANDLER: Duration = Duration::from_secs(10);

/// Why a run of a job failed. Every error becomes a [`Fault`](Self::Fault) by `?`.
#[derive(Debug)]
#[expect(clippy::exhaustive_enums, reason = "there is no fourth way to fail")]
pub enum JobError {
    /// A permanent failure: the response is the result.
    Fail(StoredResponse),
    /// It had no effect, and may run again.
    Retry {
        /// How long to wait; by default the engine's backoff.
        after: Option<Duration>,
        /// What went wrong, for the log. Clients do not see it.
        why: String,
    },
    /// An unexpected error. Under AtMostOnce the job has failed. Under the other contracts it runs again after the engine's
    /// backoff, up to its [`max_attempts`](idem_core::engine::Settings::max_attempts).
    Fault(Box<dyn std::error::Error + Send + Sync>),
}

impl<E: std::error::Error + Send + Sync + 'static> From<E> for JobError {
    fn from(error: E) -> Self {
        Self::Fault(error.into())
    }
}

pub(super) type Handler =
    Arc<dyn Fn(Context, Job) -> BoxFuture<'static, Result<StoredResponse, JobError>> + Send + Sync>;

/// What a run leaves: whether its record is final.
#[derive(Clone, Copy)]
enum Left {
    Result,
    AnotherAttempt { after: Option<Duration> },
}

/// Runs a claimed job with this handler, unless its record says otherwise.
pub(super) async fn run(jobs: &Jobs, handler: Option<&Handler>, delivery: &Delivery, claimed_at: Instant) -> Report {
    let Delivery { job, remaining, .. } = delivery;
    let remaining = *remaining;
    let operation = match job.operation() {
        Ok(operation) => operation,
        Err(error) => return again(job, &error, Counts::Nothing),
    };
    if jobs.may_be_forgotten(delivery.age) {
        match jobs.shared.engine.find(&operation).await {
            Ok(Some(_)) => {}
            Ok(None) => {
                tracing::error!(job = %job.id, name = job.name, "a job has no record any more, so it is unknown whether it ran; it is not run again");
                return Report::Ended { is_parked: false };
            }
            Err(error) => return again(job, &error, Counts::Nothing),
        }
    }
    if delivery.is_suspect {
        if delivery.lost >= jobs.max_lost_deliveries() {
            return park(jobs, job, operation).await;
        }
        match jobs.bounded(jobs.shared.queue.begin(delivery)).await {
            Ok(true) => {}
            Ok(false) => return Report::Gone,
            Err(error) => return again(job, &error, Counts::Nothing),
        }
    }
    let Some(handler) = handler.cloned() else {
        return without_handler(jobs, delivery, operation, claimed_at).await;
    };
    let contract = jobs.shared.engine.contract();
    let job_of_run = job.clone();
    let run = move |context: Context| async move {
        // What has started goes on, with further attempts. A run that was rolled back left no record.
        if claimed_at.elapsed() >= remaining && context.acquisition() == Acquisition::Fresh {
            return GiveUp::Overdue.conclusion(Left::Result);
        }
        let id = job_of_run.id.clone();
        concluded(contract, handler(context, job_of_run).await, |why| {
            tracing::warn!(job = %id, why, "a run of a job failed");
        })
    };
    match jobs.shared.engine.execute(operation.clone(), run, move || faulted(contract)).await {
        Ok(Answer::Replay(_)) => Report::Ended { is_parked: false },
        Ok(Answer::Ran { value: Left::Result, .. }) => confirm(jobs, job, &operation).await,
        Ok(Answer::Ran { value: Left::AnotherAttempt { after }, .. }) => {
            Report::Again { after: after.unwrap_or(TRY_AGAIN), counts: Counts::Recorded }
        }
        Ok(Answer::InProgress { retry_after } | Answer::Backoff { retry_after }) => {
            Report::Again { after: retry_after, counts: Counts::Nothing }
        }
        Ok(Answer::Mismatch) => {
            tracing::error!(job = %job.id, "the record of the job was made for another payload; the job is parked");
            Report::Ended { is_parked: true }
        }
        // The handler has run, and nothing of it is in the record.
        Err(
            error @ (ExecuteError::TransactionFailed(_) | ExecuteError::TransactionHeld | ExecuteError::Interrupted),
        ) => again(job, &error, Counts::Lost),
        // If it was committed after all, the next delivery finds the result.
        Err(error @ ExecuteError::CommitUnclear(_)) if contract == Contract::Transactional => {
            again(job, &error, Counts::Lost)
        }
        Err(error) => again(job, &error, Counts::Nothing),
    }
}

/// A run has concluded. Its settlement may still go on behind the answer, or may be another one: of a run whose steps have to be
/// undone first.
async fn confirm(jobs: &Jobs, job: &Job, operation: &Operation) -> Report {
    let engine = &jobs.shared.engine;
    if engine.contract() == Contract::Transactional {
        return Report::Ended { is_parked: false };
    }
    match engine.find(operation).await {
        Ok(Some(record)) if record.replay().is_some() => Report::Ended { is_parked: false },
        Ok(_) => Report::Again { after: TRY_AGAIN, counts: Counts::Recorded },
        Err(error) => again(job, &error, Counts::Nothing),
    }
}

async fn park(jobs: &Jobs, job: &Job, operation: Operation) -> Report {
    match jobs.give_up(operation, GiveUp::Parked).await {
        Ok(JobState::Ended(replay)) => {
            // The stored answer also has a trace.
            let parked = StoredResponse { trace: replay.response.trace, ..GiveUp::Parked.response() };
            let is_parked = replay.response == parked || replay.kind == ReplayKind::OutcomeUnknown;
            if is_parked {
                tracing::error!(job = %job.id, name = job.name, "a job was parked: its deliveries were lost, or its transaction could not be committed");
            }
            Report::Ended { is_parked }
        }
        Ok(JobState::Waiting { .. } | JobState::Running { .. }) => {
            Report::Again { after: TRY_AGAIN, counts: Counts::Nothing }
        }
        Err(error) => again(job, &error, Counts::Nothing),
    }
}

/// A job whose name this worker does not know waits for another worker. If it has not started by its deadline, it fails.
async fn without_handler(jobs: &Jobs, delivery: &Delivery, operation: Operation, claimed_at: Instant) -> Report {
    let job = &delivery.job;
    tracing::warn!(job = %job.id, name = job.name, "no handler of this worker has the name of the job");
    let waits = Report::Again { after: NO_HANDLER, counts: Counts::Nothing };
    if claimed_at.elapsed() < delivery.remaining {
        return waits;
    }
    match jobs.shared.engine.find(&operation).await {
        Ok(None) => {}
        // It has started, or has even ended.
        Ok(Some(record)) if record.replay().is_some() => return Report::Ended { is_parked: false },
        Ok(Some(_)) => return waits,
        Err(error) => return again(job, &error, Counts::Nothing),
    }
    match jobs.give_up(operation, GiveUp::Overdue).await {
        Ok(JobState::Ended(_)) => Report::Ended { is_parked: false },
        Ok(JobState::Waiting { .. } | JobState::Running { .. }) => waits,
        Err(error) => again(job, &error, Counts::Nothing),
    }
}

fn again(job: &Job, error: &(dyn std::error::Error + 'static), counts: Counts) -> Report {
    tracing::warn!(error, job = %job.id, "a job could not be run, and will be delivered again");
    Report::Again { after: TRY_AGAIN, counts }
}

/// What a run means for its record.
fn concluded(contract: Contract, result: Result<StoredResponse, JobError>, log: impl FnOnce(&str)) -> Conclusion<Left> {
    let (value, disposition) = match result {
        Ok(response) => (Left::Result, Disposition::Complete { response, writes: Writes::Keep }),
        Err(JobError::Fail(response)) => (Left::Result, Disposition::Fail { response }),
        Err(JobError::Retry { after, why }) => {
            log(&why);
            (Left::AnotherAttempt { after }, Disposition::Retry { response: failure(), after })
        }
        Err(JobError::Fault(error)) => {
            log(&error.to_string());
            return faulted(contract);
        }
    };
    Conclusion { value, disposition, retention: None }
}

/// A fault counts as an attempt under every contract but AtMostOnce: a transaction that is rolled back would leave no record, and
/// the job would run until its deadline.
fn faulted(contract: Contract) -> Conclusion<Left> {
    let response = failure();
    let (value, disposition) = match contract {
        Contract::AtMostOnce => (Left::Result, Disposition::Fault { response }),
        Contract::AtLeastOnce => (Left::AnotherAttempt { after: None }, Disposition::Fault { response }),
        Contract::Transactional => (Left::AnotherAttempt { after: None }, Disposition::Retry { response, after: None }),
    };
    Conclusion { value, disposition, retention: None }
}

/// The result of a job that has no attempt left. It does not say why: the text of an error may name what clients must not see. The
/// log has it.
fn failure() -> StoredResponse {
    problem("job-failed", "The job failed", 500)
}
