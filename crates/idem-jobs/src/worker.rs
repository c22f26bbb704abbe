//! The worker: it claims jobs, runs each under its record, and reports.

use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::num::NonZeroU32;
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use idem_core::engine::{Answer, Conclusion, Context, Contract, Disposition, ExecuteError, Operation};
use idem_core::{Acquisition, ReplayKind, StoreError, StoredResponse, Writes};
use tokio::sync::mpsc::{Receiver, channel};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};

use crate::job::{Delivery, Job, JobId};
use crate::jobs::{GiveUp, JobState, Jobs, problem};

/// How long a job waits after its worker could not ask the store, or knows no handler of its name.
const TRY_AGAIN: Duration = Duration::from_secs(1);
const NO_HANDLER: Duration = Duration::from_secs(10);

/// How soon a worker asks after a job was enqueued in its process: the transaction of the request has not committed yet.
const EAGER: [Duration; 5] = [
    Duration::from_millis(2),
    Duration::from_millis(8),
    Duration::from_millis(32),
    Duration::from_millis(128),
    Duration::from_millis(512),
];

/// How long a worker pauses before it reports again to a queue that does not answer.
const REPORT_AGAIN: Duration = Duration::from_millis(200);

/// How many jobs are ended at once, at most. As many more may wait for that.
const MOST_ENDS: usize = 256;

/// How often jobs are purged that were kept long enough, and how many at once.
const PURGE_EVERY: Duration = Duration::from_secs(60);
const PURGE_BATCH: NonZeroU32 = NonZeroU32::new(500).unwrap();

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

type Handler = Arc<dyn Fn(Context, Job) -> BoxFuture<'static, Result<StoredResponse, JobError>> + Send + Sync>;

/// Runs the jobs of a queue. Any number of workers, in any number of processes, share a queue.
#[derive(Clone)]
pub struct Worker {
    jobs: Jobs,
    handlers: HashMap<String, Handler>,
}

/// How a delivery ended.
#[derive(Debug, PartialEq, Eq)]
enum Report {
    /// The record has the result.
    Ended { is_parked: bool },
    /// The job is due again.
    Again { after: Duration, counts: Counts },
    /// Another worker has it, or it has ended.
    Gone,
}

/// A job that has a result, and has to be ended.
struct Ended {
    id: JobId,
    is_parked: bool,
    /// When other workers get it at the latest. It is not held any more.
    held_until: Instant,
}

/// What a delivery means for the count of lost ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Counts {
    /// It did not run.
    Nothing,
    /// Its handler may have run, and left no trace in the record.
    Lost,
    /// It left an attempt in the record, which counts those.
    Recorded,
}

impl Counts {
    /// How many deliveries count as lost after this one.
    fn lost(self, before: u32) -> u32 {
        match self {
            Self::Nothing => before,
            Self::Lost => before.saturating_add(1),
            Self::Recorded => 0,
        }
    }
}

/// What a run leaves: whether its record is final.
#[derive(Clone, Copy)]
enum Left {
    Result,
    AnotherAttempt { after: Option<Duration> },
}

impl Worker {
    /// A worker without handlers.
    #[must_use]
    pub fn new(jobs: Jobs) -> Self {
        Self { jobs, handlers: HashMap::new() }
    }

    /// Sets the handler of the jobs with this name. Jobs of a name that no worker knows wait until one does, or fail at their
    /// deadline.
    ///
    /// `handler` gets the context of the run, with its transaction, steps and downstream keys, and the job. It returns the
    /// result, which is the final answer to the request: a status, header fields and a body.
    #[must_use]
    pub fn handle<F, R>(mut self, name: &str, handler: F) -> Self
    where
        F: Fn(Context, Job) -> R + Send + Sync + 'static,
        R: Future<Output = Result<StoredResponse, JobError>> + Send + 'static,
    {
        let handler: Handler = Arc::new(move |context, job| handler(context, job).boxed());
        self.handlers.insert(name.to_owned(), handler);
        self
    }

    /// Works until `shutdown` completes, and then until the jobs that run have ended and are reported.
    ///
    /// To limit the second part, put it into a `select!` with a timer, and call
    /// [`Idempotency::shutdown`](idem_core::engine::Idempotency::shutdown) after it: it waits for the runs and their settlements.
    ///
    /// # Cancellation safety
    /// If the future is dropped, the engine still settles jobs that run. Those that run, and those whose end was not reported yet, are
    /// delivered once more. That delivery finds the result.
    pub async fn run_until(self, shutdown: impl Future<Output = ()> + Send) {
        let mut shutdown = pin!(shutdown);
        let settings = self.jobs.shared.settings.clone();
        let worker = Arc::new(self);
        let slots = Arc::new(Semaphore::new(settings.concurrency.get() as usize));
        let mut eager = [].iter();
        // One suspect at a time, besides the others.
        let suspect = Arc::new(Semaphore::new(1));
        let mut running = JoinSet::new();
        let (ended, to_end) = channel(MOST_ENDS);
        running.spawn(Arc::clone(&worker).end(to_end));
        let mut purge = interval(PURGE_EVERY);
        purge.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let slot = tokio::select! {
                biased;
                () = &mut shutdown => break,
                _ = purge.tick() => {
                    let worker = Arc::clone(&worker);
                    running.spawn(async move { worker.purge().await });
                    continue;
                }
                Ok(slot) = Arc::clone(&slots).acquire_owned() => slot,
            };
            while running.try_join_next().is_some() {}
            let enqueued = worker.jobs.shared.enqueued.notified();
            let claimed_at = Instant::now();
            let claimed = worker.claim(slot, &slots, &suspect).await;
            if claimed.is_empty() {
                let pause = eager.next().copied().unwrap_or(settings.poll_interval).min(settings.poll_interval);
                tokio::select! {
                    () = &mut shutdown => break,
                    () = enqueued => eager = EAGER.iter(),
                    () = sleep(pause) => {}
                }
            }
            for (slot, delivery) in claimed {
                let (worker, ended) = (Arc::clone(&worker), ended.clone());
                running.spawn(async move {
                    let is_suspect = delivery.is_suspect;
                    if let Some(job) = worker.deliver(delivery, claimed_at).await {
                        // Waits if the queue ends no jobs, and then no more are claimed. The receiver goes last.
                        let _ = ended.send(job).await;
                    }
                    drop(slot);
                    if is_suspect {
                        worker.jobs.shared.enqueued.notify_one();
                    }
                });
            }
        }
        drop(ended);
        while running.join_next().await.is_some() {}
    }

    /// Claims a job for each free slot, and a suspect if none runs here.
    async fn claim(
        &self,
        slot: OwnedSemaphorePermit,
        slots: &Arc<Semaphore>,
        suspect: &Arc<Semaphore>,
    ) -> Vec<(OwnedSemaphorePermit, Delivery)> {
        let mut free = vec![slot];
        free.extend(std::iter::from_fn(|| Arc::clone(slots).try_acquire_owned().ok()));
        let most = u32::try_from(free.len()).ok().and_then(NonZeroU32::new).unwrap_or(NonZeroU32::MIN);
        let mut suspect = Arc::clone(suspect).try_acquire_owned().ok();
        let shared = &self.jobs.shared;
        match self.bounded(shared.queue.claim(most, suspect.is_some(), shared.settings.visibility_timeout)).await {
            Ok(claimed) => {
                let slotted = claimed.into_iter().map(|delivery| {
                    let slot = if delivery.is_suspect { suspect.take() } else { free.pop() };
                    slot.map(|slot| (slot, delivery))
                });
                slotted.flatten().collect()
            }
            Err(error) => {
                tracing::warn!(error = &error as &dyn std::error::Error, "no jobs could be claimed");
                Vec::new()
            }
        }
    }

    /// Runs a claimed job, and holds it meanwhile. Returns it if it has to be ended.
    async fn deliver(&self, delivery: Delivery, claimed_at: Instant) -> Option<Ended> {
        tokio::select! {
            report = self.run(&delivery, claimed_at) => match report {
                Report::Ended { is_parked } => {
                    let held_until = Instant::now() + self.jobs.shared.settings.visibility_timeout;
                    Some(Ended { id: delivery.job.id, is_parked, held_until })
                }
                Report::Again { after, counts } => {
                    self.put_back(&delivery, after, counts.lost(delivery.lost)).await;
                    None
                }
                Report::Gone => None,
            },
            () = self.hold(&delivery, claimed_at) => {
                let (job, name) = (&delivery.job.id, &delivery.job.name);
                tracing::error!(%job, name, "a job runs for longer than the engine's renewal_limit; its worker goes on without it");
                None
            }
        }
    }

    /// Holds a job. Returns when it has run for so long that its lease is not renewed any more, and other workers may have it: from
    /// then on it must not take a slot.
    async fn hold(&self, delivery: &Delivery, claimed_at: Instant) {
        let hold = self.jobs.shared.settings.visibility_timeout;
        let held_until = claimed_at + self.jobs.shared.engine.settings().longest_lease();
        while Instant::now() < held_until {
            sleep(hold / 3).await;
            let job = &delivery.job.id;
            if let Err(error) = self.bounded(self.jobs.shared.queue.hold(delivery, hold)).await {
                tracing::warn!(error = &error as &dyn std::error::Error, %job, "a job could not be held");
            }
        }
        sleep(hold).await;
    }

    async fn run(&self, delivery: &Delivery, claimed_at: Instant) -> Report {
        let Delivery { job, remaining, .. } = delivery;
        let remaining = *remaining;
        let operation = match job.operation() {
            Ok(operation) => operation,
            Err(error) => return again(job, &error, Counts::Nothing),
        };
        if self.jobs.may_be_forgotten(delivery.age) {
            match self.jobs.shared.engine.find(&operation).await {
                Ok(Some(_)) => {}
                Ok(None) => {
                    tracing::error!(job = %job.id, name = job.name, "a job has no record any more, so it is unknown whether it ran; it is not run again");
                    return Report::Ended { is_parked: false };
                }
                Err(error) => return again(job, &error, Counts::Nothing),
            }
        }
        if delivery.is_suspect {
            if delivery.lost >= self.jobs.max_lost_deliveries() {
                return self.park(job, operation).await;
            }
            match self.bounded(self.jobs.shared.queue.begin(delivery)).await {
                Ok(true) => {}
                Ok(false) => return Report::Gone,
                Err(error) => return again(job, &error, Counts::Nothing),
            }
        }
        let Some(handler) = self.handlers.get(&job.name).cloned() else {
            return self.without_handler(delivery, operation, claimed_at).await;
        };
        let contract = self.jobs.shared.engine.contract();
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
        match self.jobs.shared.engine.execute(operation.clone(), run, move || faulted(contract)).await {
            Ok(Answer::Replay(_)) => Report::Ended { is_parked: false },
            Ok(Answer::Ran { value: Left::Result, .. }) => self.confirm(job, &operation).await,
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
                error
                @ (ExecuteError::TransactionFailed(_) | ExecuteError::TransactionHeld | ExecuteError::Interrupted),
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
    async fn confirm(&self, job: &Job, operation: &Operation) -> Report {
        let engine = &self.jobs.shared.engine;
        if engine.contract() == Contract::Transactional {
            return Report::Ended { is_parked: false };
        }
        match engine.find(operation).await {
            Ok(Some(record)) if record.replay().is_some() => Report::Ended { is_parked: false },
            Ok(_) => Report::Again { after: TRY_AGAIN, counts: Counts::Recorded },
            Err(error) => again(job, &error, Counts::Nothing),
        }
    }

    async fn park(&self, job: &Job, operation: Operation) -> Report {
        match self.jobs.give_up(operation, GiveUp::Parked).await {
            Ok(JobState::Ended(replay)) => {
                let is_parked =
                    replay.response == GiveUp::Parked.response() || replay.kind == ReplayKind::OutcomeUnknown;
                if is_parked {
                    tracing::error!(job = %job.id, name = job.name, "a job was parked: its deliveries were lost");
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
    async fn without_handler(&self, delivery: &Delivery, operation: Operation, claimed_at: Instant) -> Report {
        let job = &delivery.job;
        tracing::warn!(job = %job.id, name = job.name, "no handler of this worker has the name of the job");
        let waits = Report::Again { after: NO_HANDLER, counts: Counts::Nothing };
        if claimed_at.elapsed() < delivery.remaining {
            return waits;
        }
        match self.jobs.shared.engine.find(&operation).await {
            Ok(None) => {}
            // It has started, or has even ended.
            Ok(Some(record)) if record.replay().is_some() => return Report::Ended { is_parked: false },
            Ok(Some(_)) => return waits,
            Err(error) => return again(job, &error, Counts::Nothing),
        }
        match self.jobs.give_up(operation, GiveUp::Overdue).await {
            Ok(JobState::Ended(_)) => Report::Ended { is_parked: false },
            Ok(JobState::Waiting { .. } | JobState::Running { .. }) => waits,
            Err(error) => again(job, &error, Counts::Nothing),
        }
    }

    /// Ends the jobs that are sent here, all at once that have come in meanwhile. Jobs that run need not wait for that.
    async fn end(self: Arc<Self>, mut ended: Receiver<Ended>) {
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
            jobs = self.try_end(jobs).await;
        }
    }

    /// Ends these jobs. Returns those that have not ended, as long as no other worker gets them.
    async fn try_end(&self, jobs: Vec<Ended>) -> Vec<Ended> {
        let shared = &self.jobs.shared;
        let keep = shared.engine.settings().record_retention();
        let (parked, others): (Vec<_>, Vec<_>) = jobs.into_iter().partition(|job| job.is_parked);
        let mut open = Vec::new();
        for (mut jobs, is_parked) in [(others, false), (parked, true)] {
            if jobs.is_empty() {
                continue;
            }
            let ids: Vec<JobId> = jobs.iter().map(|job| job.id.clone()).collect();
            let end = self.bounded(shared.queue.end(&ids, is_parked, keep));
            match AssertUnwindSafe(end).catch_unwind().await {
                Ok(Ok(locked)) => jobs.retain(|job| locked.contains(&job.id)),
                Ok(Err(error)) => {
                    tracing::debug!(
                        error = &error as &dyn std::error::Error,
                        jobs = ids.len(),
                        "jobs could not be ended"
                    );
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
    async fn put_back(&self, delivery: &Delivery, after: Duration, lost: u32) {
        let shared = &self.jobs.shared;
        let held_until = Instant::now() + shared.settings.visibility_timeout;
        let job = &delivery.job.id;
        while let Err(error) = self.bounded(shared.queue.put_back(delivery, after, lost)).await {
            if Instant::now() >= held_until {
                tracing::warn!(error = &error as &dyn std::error::Error, %job, "a job was not reported, and will be delivered again");
                return;
            }
            tracing::debug!(error = &error as &dyn std::error::Error, %job, "a job could not be reported");
            sleep(REPORT_AGAIN).await;
        }
    }

    async fn purge(&self) {
        loop {
            match self.bounded(self.jobs.shared.queue.purge(PURGE_BATCH)).await {
                Ok(purged) if purged == PURGE_BATCH.get() => {}
                Ok(_) => return,
                Err(error) => {
                    tracing::warn!(error = &error as &dyn std::error::Error, "old jobs could not be removed");
                    return;
                }
            }
        }
    }

    async fn bounded<T>(&self, verb: impl Future<Output = Result<T, StoreError>>) -> Result<T, StoreError> {
        timeout(self.jobs.shared.settings.queue_timeout, verb).await.unwrap_or_else(|_| Err(self.jobs.late()))
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

impl fmt::Debug for Worker {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.handlers.keys().collect();
        formatter.debug_struct("Worker").field("jobs", &self.jobs).field("handlers", &names).finish()
    }
}
