//! Queues decisions, or drops them.

use std::fmt;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::SystemTime;

use idem_core::engine::{Event, Observer};
use tokio::sync::mpsc;

use crate::entry::AuditEntry;
use crate::sink::AuditSink;
use crate::writer::{AuditWriter, Counts};

/// Queues each decision of an engine. Other events are not audited.
///
/// Give it to [`Settings::observer`](idem_core::engine::Settings::observer). If its queue is full, it drops the entry and counts
/// it: requests never wait for the sink. Clones share the queue and the counts.
#[derive(Clone)]
pub struct AuditObserver {
    queue: mpsc::Sender<AuditEntry>,
    counts: Arc<Counts>,
    principals: Option<Arc<MapPrincipal>>,
}

type MapPrincipal = dyn Fn(&str) -> Option<String> + Send + Sync;

impl AuditObserver {
    /// An observer, and the writer that stores what it queues.
    ///
    /// The queue holds `capacity` entries of some 200 bytes. 10,000 bridge a second of a busy service.
    #[must_use]
    pub fn with_writer(capacity: NonZeroUsize, sink: Arc<dyn AuditSink>) -> (Self, AuditWriter) {
        let (sender, queue) = mpsc::channel(capacity.get());
        let counts = Arc::new(Counts::default());
        let writer = AuditWriter::new(queue, sink, Arc::clone(&counts));
        (Self { queue: sender, counts, principals: None }, writer)
    }

    /// Writes what `map` makes of each principal, such as a keyed hash; no principal if it returns `None`.
    ///
    /// Default: principals are written as they are, also if the store hashes them. `map` is called in the request, so it must be
    /// quick. Call this before the observer is cloned.
    #[must_use]
    pub fn map_principals(mut self, map: impl Fn(&str) -> Option<String> + Send + Sync + 'static) -> Self {
        self.principals = Some(Arc::new(map));
        self
    }

    /// How many entries were stored.
    #[must_use]
    pub fn written(&self) -> u64 {
        self.counts.written.load(Ordering::Relaxed)
    }

    /// How many entries were dropped, because the queue was full or the sink failed for too long.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.counts.dropped.load(Ordering::Relaxed)
    }
}

impl Observer for AuditObserver {
    fn observe(&self, event: &Event<'_>) {
        if !event.kind.is_decision() {
            return;
        }
        // Under pressure, nothing is copied.
        let Ok(place) = self.queue.try_reserve() else {
            self.counts.dropped.fetch_add(1, Ordering::Relaxed);
            return;
        };
        place.send(AuditEntry {
            decided_at: SystemTime::now(),
            principal: event.principal.and_then(|principal| match &self.principals {
                Some(map) => map(principal),
                None => Some(principal.to_owned()),
            }),
            operation: event.operation.to_owned(),
            record: event.record.copied(),
            outcome: event.kind.name(),
            trace: event.trace,
        });
    }
}

impl fmt::Debug for AuditObserver {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("AuditObserver").field("counts", &self.counts).finish_non_exhaustive()
    }
}
