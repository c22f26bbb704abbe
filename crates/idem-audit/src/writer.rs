//! Writes queued decisions in batches.

use std::error::Error;
use std::fmt;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::{Fuse, FusedFuture as _};
use tokio::sync::mpsc;
use uuid::Uuid;

use crate::entry::AuditEntry;
use crate::sink::AuditSink;

/// How many entries a batch has at most: enough for one statement to pay off, and little enough for its timeout.
const BATCH: usize = 500;

/// How often a batch is tried, and the pause between. A failover takes less than half a minute.
const ATTEMPTS: u32 = 30;
const PAUSE: Duration = Duration::from_secs(1);

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

impl AuditWriter {
    pub(crate) fn new(queue: mpsc::Receiver<AuditEntry>, sink: Arc<dyn AuditSink>, counts: Arc<Counts>) -> Self {
        Self { queue, sink, counts }
    }

    /// Writes entries until `shutdown` completes, and then what is in the queue.
    ///
    /// A batch has what was queued while the one before it was written, and 500 entries at most. If the sink fails, the batch is
    /// tried again every second, 30 times in all, and then dropped and counted. After `shutdown`, each batch is tried once more.
    /// Let `shutdown` complete after [`Idempotency::shutdown`](idem_core::engine::Idempotency::shutdown), so that the last
    /// decisions are written.
    ///
    /// # Cancellation safety
    /// If the future is dropped, the entries of its queue are lost.
    pub async fn run_until(mut self, shutdown: impl Future<Output = ()>) {
        let mut shutdown = pin!(shutdown.fuse());
        let mut entries = Vec::with_capacity(BATCH);
        loop {
            if shutdown.is_terminated() {
                self.queue.close();
            }
            tokio::select! {
                biased;
                () = &mut shutdown => continue,
                count = self.queue.recv_many(&mut entries, BATCH) => {
                    if count == 0 {
                        return;
                    }
                }
            }
            self.write(&entries, shutdown.as_mut()).await;
            entries.clear();
        }
    }

    async fn write(&self, entries: &[AuditEntry], mut shutdown: Pin<&mut Fuse<impl Future<Output = ()>>>) {
        let batch = Uuid::new_v4();
        for attempt in 1..=ATTEMPTS {
            let Err(error) = self.sink.write(batch, entries).await else {
                self.counts.written.fetch_add(entries.len() as u64, Ordering::Relaxed);
                return;
            };
            tracing::warn!(
                error = &*error as &dyn Error,
                entries = entries.len(),
                attempt,
                "could not write the audit"
            );
            if shutdown.is_terminated() {
                break;
            }
            tokio::select! {
                () = tokio::time::sleep(PAUSE) => {}
                () = &mut shutdown => {}
            }
        }
        self.counts.dropped.fetch_add(entries.len() as u64, Ordering::Relaxed);
    }
}

impl fmt::Debug for AuditWriter {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("AuditWriter").field("sink", &self.sink).finish_non_exhaustive()
    }
}
