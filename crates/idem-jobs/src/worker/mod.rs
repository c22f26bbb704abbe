//! The worker: it claims jobs, runs each under its record, and reports.

mod report;
mod run;

use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::num::NonZeroU32;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use idem_core::StoredResponse;
use idem_core::engine::Context;
use tokio::sync::mpsc::channel;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep};

use self::report::{Ended, MOST_ENDS, Report, end_jobs, put_back};
pub use self::run::JobError;
use self::run::{Handler, run};
use crate::job::{Delivery, Job};
use crate::jobs::Jobs;

/// How soon a worker asks after a job was enqueued in its process: the transaction of the request has not committed yet.
const EAGER: [Duration; 5] = [
    Duration::from_millis(2),
    Duration::from_millis(8),
    Duration::from_millis(32),
    Duration::from_millis(128),
    Duration::from_millis(512),
];

/// How often jobs are purged that were kept long enough, and how many at once.
const PURGE_EVERY: Duration = Duration::from_secs(60);
const PURGE_BATCH: NonZeroU32 = NonZeroU32::new(500).unwrap();

/// Runs the jobs of a queue. Any number of workers, in any number of processes, share a queue. Workers of one process share one
/// [`Jobs`], so that they run one suspect at a time.
#[derive(Clone)]
pub struct Worker {
    jobs: Jobs,
    handlers: HashMap<String, Handler>,
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
        let mut running = JoinSet::new();
        let (ended, to_end) = channel(MOST_ENDS);
        running.spawn(end_jobs(worker.jobs.clone(), to_end));
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
            let claimed = worker.claim(slot, &slots).await;
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
    async fn claim(&self, slot: OwnedSemaphorePermit, slots: &Arc<Semaphore>) -> Vec<(OwnedSemaphorePermit, Delivery)> {
        let mut free = vec![slot];
        free.extend(std::iter::from_fn(|| Arc::clone(slots).try_acquire_owned().ok()));
        let most = u32::try_from(free.len()).ok().and_then(NonZeroU32::new).unwrap_or(NonZeroU32::MIN);
        let shared = &self.jobs.shared;
        let mut suspect = Arc::clone(&shared.suspect).try_acquire_owned().ok();
        match self.jobs.bounded(shared.queue.claim(most, suspect.is_some(), shared.settings.visibility_timeout)).await {
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
            report = run(&self.jobs, self.handlers.get(&delivery.job.name), &delivery, claimed_at) => match report {
                Report::Ended { is_parked } => {
                    let held_until = Instant::now() + self.jobs.shared.settings.visibility_timeout;
                    Some(Ended { id: delivery.job.id, is_parked, held_until })
                }
                Report::Again { after, counts } => {
                    put_back(&self.jobs, &delivery, after, counts.lost(delivery.lost)).await;
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
            if let Err(error) = self.jobs.bounded(self.jobs.shared.queue.hold(delivery, hold)).await {
                tracing::warn!(error = &error as &dyn std::error::Error, %job, "a job could not be held");
            }
        }
        sleep(hold).await;
    }

    async fn purge(&self) {
        loop {
            match self.jobs.bounded(self.jobs.shared.queue.purge(PURGE_BATCH)).await {
                Ok(purged) if purged == PURGE_BATCH.get() => {}
                Ok(_) => return,
                Err(error) => {
                    tracing::warn!(error = &error as &dyn std::error::Error, "old jobs could not be removed");
                    return;
                }
            }
        }
    }
}

impl fmt::Debug for Worker {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.handlers.keys().collect();
        formatter.debug_struct("Worker").field("jobs", &self.jobs).field("handlers", &names).finish()
    }
}
