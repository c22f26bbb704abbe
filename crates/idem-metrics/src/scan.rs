//! Counts the records of a store without loading it.

use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

use idem_core::{CountPage, Inspect, PartSize, RecordCounts, ScanPosition, Timestamp};

use crate::store::StoreGauges;

/// The least pause between two parts.
const PAUSE: Duration = Duration::from_millis(100);

/// How many times as long as the last part the pause is at least, so that a count takes a fifth of one connection at most.
const PAUSES_PER_PART: u32 = 4;

/// How often a part is tried again, and the pause before: a failover takes less than a minute. Then the count begins again, because
/// the position may be void. Redis, for example, answers with the same kind of error if another server has taken over.
const RETRIES: u32 = 6;
const RETRY_PAUSE: Duration = Duration::from_secs(10);

/// After how many parts without an error the part grows. One timeout in ten parts is cheaper than small parts for ever.
const PARTS_UNTIL_GROWTH: u32 = 10;

/// Counts the records of a store part by part, and publishes each whole count.
///
/// The application calls [`step`](Self::step) in a loop, in a task that it can stop:
///
/// ```
/// # use std::sync::Arc;
/// # use idem_core::Inspect;
/// # use idem_metrics::{StoreGauges, StoreScan};
/// # fn start(store: Arc<dyn Inspect>) -> tokio::task::JoinHandle<()> {
/// let mut scan = StoreScan::new(store, StoreGauges::new("payments"));
/// tokio::spawn(async move {
///     loop {
///         tokio::time::sleep(scan.step().await).await;
///     }
/// })
/// # }
/// ```
///
/// # Cost
/// A part has 1,000 records, and fewer after timeouts. The pause after it is at least 100 ms, and at least four times as long as the
/// part took. So a count takes at most a fifth of one connection's time, and ten million records take 25 minutes if a part takes
/// 30 ms. Several processes may count one store, but one is enough.
#[derive(Debug)]
pub struct StoreScan {
    store: Arc<dyn Inspect>,
    gauges: StoreGauges,
    interval: Duration,
    count: Count,
    part: PartSize,
    /// Parts without an error since the part last changed.
    successes: u32,
    /// How often the part was tried again.
    retries: u32,
}

/// A count that has not reached the end.
#[derive(Debug)]
struct Count {
    counts: RecordCounts,
    from: Option<ScanPosition>,
    /// The store's time at the last part.
    now: Option<Timestamp>,
}

impl StoreScan {
    /// Counts `store` once a minute.
    #[must_use]
    pub fn new(store: Arc<dyn Inspect>, gauges: StoreGauges) -> Self {
        Self {
            store,
            gauges,
            interval: Duration::from_secs(60),
            count: Count::new(),
            part: PartSize::new(),
            successes: 0,
            retries: 0,
        }
    }

    /// The pause between the end of a count and the begin of the next.
    ///
    /// Default 1 minute: alarms need no more, and a small store is counted in one part.
    #[must_use]
    pub fn interval(mut self, interval: Duration) -> Self {
        self.interval = interval;
        self
    }

    /// Counts the next part, and returns how long to wait before the next call.
    ///
    /// After the last part, it publishes the whole count. After an error, it tries the same part again:
    ///
    /// - after a timeout with half as many records, after four times as long as it took;
    /// - after other errors that pass, every 10 seconds, 6 times.
    ///
    /// If that fails, or the error does not pass, it drops what it has counted and begins again after the interval. It logs each
    /// error, counts it in `idem_store_count_failures_total`, and leaves the gauges as they are:
    /// `idem_store_counted_timestamp_seconds` says how old they are.
    ///
    /// # Cancellation safety
    /// If the future is dropped, the next call counts the same part again.
    pub async fn step(&mut self) -> Duration {
        let began = Instant::now();
        let page = self.store.count(self.count.from.as_ref(), self.part.get()).await;
        let pause = PAUSE.max(began.elapsed() * PAUSES_PER_PART);
        match page {
            Ok(page) => {
                self.succeeded();
                self.count.add(&page);
                self.count.from = page.next;
                if self.count.from.is_some() {
                    return pause;
                }
                self.gauges.record(&self.count.counts, page.now);
            }
            Err(error) => {
                self.gauges.count_failure();
                let store = self.gauges.name();
                tracing::warn!(store, error = &error as &dyn Error, "could not count a part of the records");
                self.successes = 0;
                let Err(error) = self.part.shrink(error) else { return pause };
                if self.retries < RETRIES && error.is_retryable() {
                    self.retries += 1;
                    return pause.max(RETRY_PAUSE);
                }
            }
        }
        self.retries = 0;
        self.count = Count::new();
        self.interval
    }

    fn succeeded(&mut self) {
        self.retries = 0;
        self.successes += 1;
        if self.successes == PARTS_UNTIL_GROWTH {
            self.successes = 0;
            self.part.grow();
        }
    }
}

impl Count {
    fn new() -> Self {
        Self { counts: RecordCounts::default(), from: None, now: None }
    }

    fn add(&mut self, page: &CountPage) {
        // An age is what it was when the record was read: meanwhile the record may have ended.
        let passed = self.now.map_or(Duration::ZERO, |before| page.now.saturating_duration_since(before));
        for oldest in [&mut self.counts.oldest_in_progress, &mut self.counts.oldest_expired] {
            *oldest = oldest.map(|oldest| oldest.saturating_add(passed));
        }
        self.counts.merge(&page.counts);
        self.now = Some(page.now);
    }
}
