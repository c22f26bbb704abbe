//! The task that removes expired records.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

use crate::record::OwnerToken;
use crate::store::{Purge, StoreErrorKind};

/// How a [`Purger`] removes expired records, each default with its reason.
#[derive(Debug, Clone)]
pub struct PurgerSettings {
    batch: NonZeroU32,
    shortest_pause: Duration,
    longest_pause: Duration,
}

impl Default for PurgerSettings {
    fn default() -> Self {
        Self {
            batch: NonZeroU32::new(500).unwrap_or(NonZeroU32::MIN),
            shortest_pause: Duration::from_millis(10),
            longest_pause: Duration::from_secs(60),
        }
    }
}

impl PurgerSettings {
    /// The default settings.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// How many records one statement removes. Default 500: a few milliseconds of work, so that other sessions do not wait
    /// long for a row or for the write-ahead log.
    #[must_use]
    pub fn batch(mut self, records: NonZeroU32) -> Self {
        self.batch = records;
        self
    }

    /// The longest pause between two batches when there is nothing to remove. Default 60 s: an empty batch costs one read of
    /// an index, and records that stay a minute longer do no harm.
    #[must_use]
    pub fn longest_pause(mut self, pause: Duration) -> Self {
        self.longest_pause = pause.max(self.shortest_pause);
        self
    }
}

/// A background task that removes expired records, by [`Purge::maintain`]: a store with partitions also makes the coming ones and
/// drops the past ones.
///
/// Many replicas may each run one: each skips the rows and partitions that another one works on. After a full batch it pauses
/// for between half and all of the time that the batch took, so it uses at most two thirds of one connection's time. When
/// there is nothing to remove, its pauses double up to [`longest_pause`](PurgerSettings::longest_pause). Errors are logged
/// and retried.
///
/// It ends when it is dropped, after the current batch.
#[derive(Debug)]
pub struct Purger {
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

impl Purger {
    /// Starts a purger with the default settings.
    #[must_use]
    pub fn start(store: Arc<dyn Purge>) -> Self {
        Self::start_with(store, PurgerSettings::new())
    }

    /// Starts a purger with `settings`.
    #[must_use]
    pub fn start_with(store: Arc<dyn Purge>, settings: PurgerSettings) -> Self {
        let (stop, mut stopped) = oneshot::channel();
        let task = tokio::spawn(async move {
            let (mut pause, mut batch) = (settings.shortest_pause, settings.batch);
            loop {
                let (store, settings) = (Arc::clone(&store), settings.clone());
                let longer = (pause * 2).min(settings.longest_pause);
                // In a separate task, because a batch may panic, for example in the application's tracing subscriber.
                let working = tokio::spawn(async move { work(&*store, &settings, batch, pause).await });
                (pause, batch) = working.await.unwrap_or((longer, batch));
                tokio::select! {
                    () = sleep(jittered(pause)) => {}
                    // Stopped, or dropped.
                    _ = &mut stopped => return,
                }
            }
        });
        Self { stop, task }
    }

    /// Ends the task after the current batch.
    pub async fn stop(self) {
        let Self { stop, task } = self;
        drop(stop);
        if let Err(error) = task.await {
            tracing::error!(error = &error as &dyn std::error::Error, "the purge ended early");
        }
    }
}

/// Removes at most `batch` records, and returns the pause after it and the next batch. `last` was the pause before it.
async fn work(
    store: &dyn Purge,
    settings: &PurgerSettings,
    batch: NonZeroU32,
    last: Duration,
) -> (Duration, NonZeroU32) {
    let longer = (last * 2).min(settings.longest_pause);
    let started = Instant::now();
    match store.maintain(batch).await {
        Ok(0) => (longer, settings.batch),
        Ok(purged) if purged == batch.get() => {
            (started.elapsed().max(settings.shortest_pause), batch.saturating_mul(TWO).min(settings.batch))
        }
        Ok(_) => (last.min(settings.longest_pause), settings.batch),
        Err(error) => {
            tracing::warn!(error = &error as &dyn std::error::Error, "expired records could not be removed");
            // Large answers may take longer to remove than a statement may last. The same batch would fail for ever.
            let is_too_long = error.kind() == StoreErrorKind::Timeout;
            (longer, if is_too_long { half(batch) } else { batch })
        }
    }
}

const TWO: NonZeroU32 = NonZeroU32::MIN.saturating_add(1);

/// Half of a batch, at least one record.
fn half(batch: NonZeroU32) -> NonZeroU32 {
    NonZeroU32::new(batch.get() / 2).unwrap_or(NonZeroU32::MIN)
}

/// Half to all of `pause`, at random (jitter), so that replicas that started together do not run in step.
fn jittered(pause: Duration) -> Duration {
    let random = u32::from(OwnerToken::random().as_bytes()[0]) + 1;
    pause / 2 + pause * random / 512
}
