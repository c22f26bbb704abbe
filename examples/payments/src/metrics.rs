//! What the service counts and measures, as a page for Prometheus.

use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use idem_core::Inspect;
use idem_core::engine::{Idempotency, Settings};
use idem_metrics::{EngineGauges, HybridGauges, MetricsObserver, StoreGauges, StoreScan};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};

use crate::store::Store;

/// The bounds of durations in seconds: from an answer out of memory to a store that hardly answers.
const BUCKETS: [f64; 13] = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0];

/// How often samples are put into their buckets between two scrapes.
const UPKEEP_EVERY: Duration = Duration::from_secs(5);

/// The name of the engine and of its store in the labels.
const NAME: &str = "payments";

/// The recorder of this process.
pub(crate) struct Recorder(PrometheusHandle);

/// The page of metrics.
pub(crate) struct Metrics {
    page: PrometheusHandle,
    engine: EngineGauges,
    hybrid: HybridGauges,
}

impl Recorder {
    /// Records from now on.
    pub(crate) fn install() -> Result<Self, Box<dyn Error + Send + Sync>> {
        Ok(Self(PrometheusBuilder::new().set_buckets(&BUCKETS)?.install_recorder()?))
    }

    /// Settings of an engine whose events are counted.
    pub(crate) fn observing(settings: Settings) -> Settings {
        settings.observer(Arc::new(MetricsObserver::new()))
    }

    /// The page of an engine and its store.
    pub(crate) fn metrics(self, engine: Idempotency) -> Metrics {
        let page = self.0.clone();
        tokio::spawn(async move {
            let mut due = tokio::time::interval(UPKEEP_EVERY);
            loop {
                due.tick().await;
                page.run_upkeep();
            }
        });
        Metrics { page: self.0, engine: EngineGauges::new(NAME, engine), hybrid: HybridGauges::new(NAME) }
    }
}

/// Counts the records from now on, until the runtime ends.
pub(crate) fn start_counting(records: Arc<dyn Inspect>, interval: Duration) {
    let mut scan = StoreScan::new(records, StoreGauges::new(NAME)).interval(interval);
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(scan.step().await).await;
        }
    });
}

impl Metrics {
    pub(crate) fn page(&self, store: &Store) -> String {
        self.engine.record();
        if let Store::Cached(_, store) = store {
            self.hybrid.record(&store.metrics());
        }
        self.page.render()
    }
}

impl fmt::Debug for Metrics {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Metrics").field("engine", &self.engine).finish_non_exhaustive()
    }
}
