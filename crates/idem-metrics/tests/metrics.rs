//! What a recorder has after requests of each kind.
#![expect(clippy::unwrap_used, reason = "a test says what it expects by failing")]

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use idem_core::engine::{Conclusion, Context, Disposition, Event, Idempotency, Observer, Operation, Settings};
use idem_core::{Fingerprint, MemoryStore, Scope, StoredResponse, Writes};
use idem_metrics::{EngineGauges, MetricsObserver};
use idem_testkit::{Fault, FaultyStore, Verb};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle, PrometheusRecorder};
use tokio::sync::oneshot;

struct World {
    recorder: Arc<PrometheusRecorder>,
    page: PrometheusHandle,
    store: Arc<FaultyStore<MemoryStore>>,
}

impl World {
    fn new() -> Self {
        let recorder = PrometheusBuilder::new().set_buckets(&[0.01, 1.0]).unwrap().build_recorder();
        let page = recorder.handle();
        let store = MemoryStore::new(NonZeroUsize::new(1000).unwrap());
        Self { recorder: Arc::new(recorder), page, store: Arc::new(FaultyStore::new(Arc::new(store))) }
    }

    fn observer(&self) -> MetricsObserver {
        MetricsObserver::with_recorder(Arc::clone(&self.recorder) as _)
    }

    fn engine(&self, observer: MetricsObserver) -> Idempotency {
        Idempotency::at_most_once(self.store.clone(), Settings::new().observer(Arc::new(observer)))
    }

    /// The value of a time series; `None` if there is none.
    fn value(&self, series: &str) -> Option<f64> {
        let page = self.page.render();
        let line = page.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        line.map(|value| value.parse().unwrap())
    }

    fn requests(&self, operation: &str, outcome: &str) -> Option<f64> {
        let labels = format!(r#"{{operation="{operation}",contract="at-most-once",outcome="{outcome}"}}"#);
        self.value(&format!("idem_requests_total{labels}"))
    }

    fn events(&self, event: &str) -> Option<f64> {
        let labels = format!(r#"{{operation="POST /p",contract="at-most-once",event="{event}"}}"#);
        self.value(&format!("idem_events_total{labels}"))
    }

    fn samples(&self, histogram: &str) -> Option<f64> {
        self.value(&format!(r#"{histogram}_count{{operation="POST /p",contract="at-most-once"}}"#))
    }
}

fn operation(name: &str, key: &str, input: &[u8]) -> Operation {
    Operation::new(Scope::new("acme", name), key.parse().unwrap(), Fingerprint::of_bytes("", input))
}

fn done() -> Conclusion<()> {
    let response = StoredResponse::new(201, "");
    Conclusion { value: (), disposition: Disposition::Complete { response, writes: Writes::Keep }, retention: None }
}

async fn run(engine: &Idempotency, operation: Operation) {
    let _ = engine.execute(operation, |_: Context| async { done() }, done).await;
}

#[tokio::test]
async fn each_request_is_counted_once_by_its_outcome() {
    let world = World::new();
    let engine = world.engine(world.observer());
    for _ in 0..3 {
        run(&engine, operation("POST /p", "k1", b"1")).await;
    }
    run(&engine, operation("POST /p", "k1", b"2")).await;
    run(&engine, operation("POST /q", "k1", b"1")).await;
    world.store.next(Verb::Acquire, Fault::ErrorBefore);
    run(&engine, operation("POST /p", "k2", b"1")).await;
    engine.refused("POST /p", "key-missing");
    assert_eq!(world.requests("POST /p", "executed"), Some(2.0));
    assert_eq!(world.requests("POST /q", "executed"), Some(1.0));
    assert_eq!(world.requests("POST /p", "replayed"), Some(2.0));
    assert_eq!(world.requests("POST /p", "mismatch"), Some(1.0));
    assert_eq!(world.requests("POST /p", "key-missing"), Some(1.0));
    assert_eq!(world.requests("POST /p", "in-progress"), None);
    assert_eq!(world.events("acquired"), Some(2.0));
    assert_eq!(world.events("store-failed"), Some(1.0));
    assert_eq!(world.events("executed"), None, "a decision is no event on the way");
    assert_eq!(world.samples("idem_run_seconds"), Some(2.0), "what did not run has no sample");
    assert_eq!(world.samples("idem_store_seconds"), Some(5.0));
    assert_eq!(world.samples("idem_wait_seconds"), Some(0.0));
}

#[tokio::test]
async fn counters_that_alerts_watch_begin_at_zero_with_the_first_request() {
    let world = World::new();
    let engine = world.engine(world.observer());
    run(&engine, operation("POST /p", "k1", b"1")).await;
    for event in ["failed-open", "settlement-lost", "steps-not-undone"] {
        assert_eq!(world.events(event), Some(0.0), "{event}");
    }
    assert_eq!(world.requests("POST /p", "outcome-unknown"), Some(0.0));
}

#[tokio::test]
async fn operations_beyond_the_limit_share_a_label() {
    let world = World::new();
    let engine = world.engine(world.observer().most_operations(NonZeroUsize::new(2).unwrap()));
    for operation_name in ["POST /1", "POST /2", "POST /3", "POST /4", "POST /1"] {
        run(&engine, operation(operation_name, "k1", b"")).await;
    }
    assert_eq!(world.requests("POST /1", "executed"), Some(1.0));
    assert_eq!(world.requests("POST /1", "replayed"), Some(1.0));
    assert_eq!(world.requests("POST /2", "executed"), Some(1.0));
    assert_eq!(world.requests("other", "executed"), Some(2.0));
    assert_eq!(world.requests("POST /3", "executed"), None);
}

#[tokio::test]
async fn engines_of_two_contracts_can_share_an_observer() {
    let world = World::new();
    let settings = Settings::new().observer(Arc::new(world.observer().most_operations(NonZeroUsize::new(3).unwrap())));
    let once = Idempotency::at_most_once(world.store.clone(), settings.clone());
    let again = Idempotency::at_least_once(world.store.clone(), settings);
    // Each contract of an operation counts towards the limit.
    for (key, engine, operation_name) in [
        ("k1", &once, "POST /1"),
        ("k2", &again, "POST /1"),
        ("k3", &again, "POST /2"),
        ("k4", &again, "POST /3"),
        ("k5", &once, "POST /2"),
    ] {
        run(engine, operation(operation_name, key, b"")).await;
    }
    let page = world.page.render();
    let mut executed: Vec<_> = page.lines().filter(|line| line.contains(r#"outcome="executed""#)).collect();
    executed.sort_unstable();
    let counted = |operation: &str, contract: &str| {
        format!(r#"idem_requests_total{{operation="{operation}",contract="{contract}",outcome="executed"}} 1"#)
    };
    let expected = [
        counted("POST /1", "at-least-once"),
        counted("POST /1", "at-most-once"),
        counted("POST /2", "at-least-once"),
        counted("other", "at-least-once"),
        counted("other", "at-most-once"),
    ];
    assert_eq!(executed, expected);
}

#[tokio::test]
async fn gauges_follow_the_engine() {
    let world = World::new();
    let engine = world.engine(world.observer());
    let gauges = EngineGauges::with_recorder(Arc::clone(&world.recorder) as _, "payments", engine.clone());
    let (begun, has_begun) = oneshot::channel();
    let (end, ends) = oneshot::channel::<()>();
    let running = tokio::spawn(async move {
        let handler = |_: Context| async move {
            begun.send(()).unwrap();
            ends.await.unwrap();
            done()
        };
        engine.execute(operation("POST /p", "k1", b""), handler, done).await.map(drop)
    });
    has_begun.await.unwrap();
    gauges.record();
    assert_eq!(world.value(r#"idem_running{engine="payments"}"#), Some(1.0));
    end.send(()).unwrap();
    running.await.unwrap().unwrap();
    gauges.record();
    for gauge in ["running", "waiting", "settling", "observer_panics_total"] {
        assert_eq!(world.value(&format!(r#"idem_{gauge}{{engine="payments"}}"#)), Some(0.0), "{gauge}");
    }
    let page = world.page.render();
    assert!(page.contains("# HELP idem_running Operations that run now"), "{page}");
    assert!(page.contains("# TYPE idem_requests_total counter"), "{page}");
}

/// The events that it got, by name.
#[derive(Debug, Default)]
struct Names(Mutex<Vec<&'static str>>);

impl Observer for Names {
    fn observe(&self, event: &Event<'_>) {
        self.0.lock().unwrap().push(event.kind.name());
    }
}

#[tokio::test]
async fn another_observer_gets_each_event_too() {
    let world = World::new();
    let names = Arc::new(Names::default());
    let engine = world.engine(world.observer().and(names.clone()));
    run(&engine, operation("POST /p", "k1", b"")).await;
    assert_eq!(*names.0.lock().unwrap(), ["acquired", "executed"]);
    assert_eq!(world.requests("POST /p", "executed"), Some(1.0));
    engine.shutdown(Duration::from_secs(10)).await.unwrap();
}
