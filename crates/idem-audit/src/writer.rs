//! Writes queued decisions in batches.

use std::error::Error;
use std::fmt;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::Fuse;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};
use uuid::Uuid;

use crate::entry::AuditEntry;
use crate::sink::AuditSink;

/// How many entries a batch has at most: enough for one statement to pay off, and little enough for its timeout.
const BATCH: usize = 500;

/// How often a batch is tried, and the pause between. A failover takes less than half a minute.
const ATTEMPTS: u32 = 30;
const PAUSE: Duration = Duration::from_secs(1);

/// How long after the shutdown entries are written. Orchestrators kill a process some 30 s after they have told it to end, and the
/// engine's shutdown comes first.
const LAST_WRITES: Duration = Duration::from_secs(10);

/// How many entries were stored, and how many were not.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) written: AtomicU64,
    pub(crate) dropped: AtomicU64,
}

/// Writes queued entries to a sink.
pub struct AuditWriter {
    queue: mpsc::Receiver<AuditEntry>,
    sink: Arc<dyn AuditSink>,
    counts: Arc<Counts>,
}

/// The shutdown of a writer.
struct Shutdown<'a, F: Future> {
    signal: Pin<&'a mut Fuse<F>>,
    /// Until when entries are written; `None` before the shutdown.
    deadline: Option<Instant>,
}

impl<F: Future<Output = ()>> Shutdown<'_, F> {
    /// Completes once, when the shutdown begins.
    async fn begins(&mut self) {
        self.signal.as_mut().await;
        self.deadline = Some(Instant::now() + LAST_WRITES);
    }

    /// The output of `work`; `None` if the deadline comes first.
    async fn limit<T>(&mut self, work: impl Future<Output = T>) -> Option<T> {
        let mut work = pin!(work);
        loop {
            if let Some(deadline) = self.deadline {
                return timeout_at(deadline, work).await.ok();
            }
            tokio::select! {
                biased;
                output = &mut work => return Some(output),
                () = self.begins() => {}
            }
        }
    }
}

impl AuditWriter {
    pub(crate) fn new(queue: mpsc::Receiver<AuditEntry>, sink: Arc<dyn AuditSink>, counts: Arc<Counts>) -> Self {
        Self { queue, sink, counts }
    }

    /// Writes entries until `shutdown` completes, and then what is in the queue.
    ///
    /// A batch has what was queued while the one before it was written, and 500 entries at most. If the sink fails, the batch is
    /// tried again every second, 30 times in all, and then dropped and counted. An error that is
    /// [permanent](AuditSink::is_permanent) drops the batch at once.
    ///
    /// After `shutdown`, the queue is written for 10 seconds at most. Only a batch that has failed before is tried again, once. At the
    /// first failure, the rest is dropped, counted and logged. Let `shutdown` complete after
    /// [`Idempotency::shutdown`](idem_core::engine::Idempotency::shutdown), so that the last decisions are written.
    ///
    /// # Cancellation safety
    /// If the future is dropped, the entries of its queue are lost.
    pub async fn run_until(mut self, shutdown: impl Future<Output = ()>) {
        let mut shutdown = Shutdown { signal: pin!(shutdown.fuse()), deadline: None };
        let mut entries = Vec::with_capacity(BATCH);
        loop {
            if shutdown.deadline.is_some() {
                self.queue.close();
            }
            tokio::select! {
                biased;
                () = shutdown.begins() => continue,
                count = self.queue.recv_many(&mut entries, BATCH) => {
                    if count == 0 {
                        return;
                    }
                }
            }
            let mut dropped = if self.write(&entries, &mut shutdown).await { 0 } else { entries.len() };
            entries.clear();
            if dropped > 0 {
                if shutdown.deadline.is_some() {
                    self.queue.close();
                    while self.queue.recv_many(&mut entries, BATCH).await > 0 {}
                    dropped += entries.len();
                    entries.clear();
                }
                self.counts.dropped.fetch_add(dropped as u64, Ordering::Relaxed);
                tracing::error!(dropped, "decisions are missing from the audit");
            }
        }
    }

    /// Whether the batch was stored.
    async fn write<F: Future<Output = ()>>(&self, entries: &[AuditEntry], shutdown: &mut Shutdown<'_, F>) -> bool {
        let batch = Uuid::new_v4();
        for attempt in 1..=ATTEMPTS {
            let Some(written) = shutdown.limit(self.sink.write(batch, entries)).await else {
                tracing::warn!(
                    entries = entries.len(),
                    "the audit did not take the last decisions within {LAST_WRITES:?}"
                );
                return false;
            };
            let Err(error) = written else {
                self.counts.written.fetch_add(entries.len() as u64, Ordering::Relaxed);
                return true;
            };
            tracing::warn!(
                error = &*error as &dyn Error,
                entries = entries.len(),
                attempt,
                "could not write the audit"
            );
            if shutdown.deadline.is_some() || self.sink.is_permanent(&*error) {
                return false;
            }
            tokio::select! {
                () = tokio::time::sleep(PAUSE) => {}
                () = shutdown.begins() => {}
            }
        }
        false
    }
}

impl fmt::Debug for AuditWriter {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("AuditWriter").field("sink", &self.sink).finish_non_exhaustive()
    }
}
