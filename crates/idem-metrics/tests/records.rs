//! What a recorder has after counts of a store, and after messages were counted.
#![expect(clippy::unwrap_used, reason = "a test says what it expects by failing")]

use std::collections::VecDeque;
use std::num::{NonZeroU32, NonZeroUsize};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use idem_core::engine::{Conclusion, Context, Disposition, Idempotency, Operation, Settings};
use idem_core::{
    CountPage, Fingerprint, Inspect, Inspection, MemoryStore, RecordCounts, RecordFilter, RecordId, RecordPage,
    ScanPosition, Scope, StoreError, StoreErrorKind, StoredResponse, Timestamp, Writes,
};
use idem_metrics::{AuditCounters, InboxGauges, OutboxGauges, StoreGauges, StoreScan};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusRecorder};

const INTERVAL: Duration = Duration::from_secs(7);

struct World(Arc<PrometheusRecorder>);

impl World {
    fn new() -> Self {
        Self(Arc::new(PrometheusBuilder::new().build_recorder()))
    }

    fn scan(&self, store: Arc<dyn Inspect>) -> StoreScan {
        StoreScan::new(store, StoreGauges::with_recorder(self.0.clone(), "s")).interval(INTERVAL)
    }

    /// The value of a time series; `None` if there is none.
    fn value(&self, series: &str) -> Option<f64> {
        let page = self.0.handle().render();
        let line = page.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        line.map(|value| value.parse().unwrap())
    }

    fn records(&self, state: &str) -> Option<f64> {
        self.value(&format!(r#"idem_records{{store="s",state="{state}"}}"#))
    }

    fn of_store(&self, gauge: &str) -> Option<f64> {
        self.value(&format!(r#"{gauge}{{store="s"}}"#))
    }
}

/// A store whose answers are set in advance.
#[derive(Debug, Default)]
struct Answers {
    next: Mutex<VecDeque<Result<CountPage, StoreError>>>,
    asked: Mutex<Vec<(Option<u8>, u32)>>,
}

impl Answers {
    fn new(answers: impl IntoIterator<Item = Result<CountPage, StoreError>>) -> Arc<Self> {
        Arc::new(Self { next: Mutex::new(answers.into_iter().collect()), asked: Mutex::default() })
    }
}

#[async_trait]
impl Inspect for Answers {
    async fn inspect(&self, _: &RecordId) -> Result<Inspection, StoreError> {
        unreachable!("a scan counts")
    }

    async fn list(&self, _: &RecordFilter, _: Option<&ScanPosition>, _: NonZeroU32) -> Result<RecordPage, StoreError> {
        unreachable!("a scan counts")
    }

    async fn count(&self, from: Option<&ScanPosition>, limit: NonZeroU32) -> Result<CountPage, StoreError> {
        self.asked.lock().unwrap().push((from.map(|from| from.as_bytes()[0]), limit.get()));
        self.next.lock().unwrap().pop_front().unwrap()
    }
}

fn at(seconds: i64) -> Timestamp {
    Timestamp::from_unix_micros(seconds * 1_000_000)
}

fn part(counts: RecordCounts, next: Option<u8>, now: i64) -> Result<CountPage, StoreError> {
    Ok(CountPage { counts, next: next.map(|next| ScanPosition::from_bytes([next])), progress: None, now: at(now) })
}

fn completed(completed: u64) -> RecordCounts {
    RecordCounts { completed, ..RecordCounts::default() }
}

fn failure(kind: StoreErrorKind) -> Result<CountPage, StoreError> {
    Err(StoreError::new(kind, "away"))
}

#[tokio::test]
async fn each_part_of_a_store_is_counted_and_only_the_whole_is_published() {
    let store = Arc::new(MemoryStore::new(NonZeroUsize::new(10_000).unwrap()));
    let engine = Idempotency::at_least_once(store.clone(), Settings::new());
    for number in 0..2_500 {
        let scope = Scope::new("acme", "POST /p");
        let operation = Operation::new(scope, format!("k{number}").parse().unwrap(), Fingerprint::of_bytes("", b""));
        let done = || {
            let response = StoredResponse::new(201, "four");
            Conclusion {
                value: (),
                disposition: Disposition::Complete { response, writes: Writes::Keep },
                retention: None,
            }
        };
        engine.execute(operation, move |_: Context| async move { done() }, done).await.unwrap();
    }
    let world = World::new();
    let mut scan = world.scan(store);
    let mut steps = 1;
    while scan.step().await != INTERVAL {
        assert_eq!(world.records("completed"), None, "a part was published");
        steps += 1;
    }
    assert_eq!(steps, 3);
    assert_eq!(world.records("completed"), Some(2_500.0));
    assert_eq!(world.of_store("idem_store_body_bytes"), Some(10_000.0));
    assert_eq!(world.of_store("idem_oldest_in_progress_seconds"), Some(0.0));
    assert_eq!(world.of_store("idem_purge_lag_seconds"), Some(0.0));
    assert_eq!(world.of_store("idem_store_count_failures_total"), Some(0.0));
}

#[tokio::test]
async fn every_state_has_its_gauge() {
    let counts = RecordCounts {
        in_progress: 1,
        abandoned: 2,
        completed: 3,
        failed: 4,
        outcome_unknown: 5,
        retryable: 6,
        expired: 7,
        unreadable: 8,
        body_bytes: 9,
        oldest_in_progress: Some(at(90)),
        oldest_expired: Some(at(40)),
        ..RecordCounts::default()
    };
    let world = World::new();
    StoreGauges::with_recorder(world.0.clone(), "s").record(&counts, at(100));
    let states =
        ["in-progress", "abandoned", "completed", "failed", "outcome-unknown", "retryable", "expired", "unreadable"];
    assert_eq!(states.map(|state| world.records(state).unwrap()), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]);
    assert_eq!(world.of_store("idem_store_body_bytes"), Some(9.0));
    assert_eq!(world.of_store("idem_oldest_in_progress_seconds"), Some(10.0));
    assert_eq!(world.of_store("idem_purge_lag_seconds"), Some(60.0));
    assert_eq!(world.of_store("idem_store_counted_timestamp_seconds"), Some(100.0));
}

#[tokio::test]
async fn an_age_is_that_of_the_moment_when_the_record_was_read() {
    let running = RecordCounts { oldest_in_progress: Some(at(98)), in_progress: 1, ..RecordCounts::default() };
    let older = RecordCounts { oldest_in_progress: Some(at(895)), in_progress: 1, ..RecordCounts::default() };
    let store = Answers::new([part(running, Some(1), 100), part(older, Some(2), 900), part(completed(1), None, 2_000)]);
    let world = World::new();
    let mut scan = world.scan(store);
    while scan.step().await != INTERVAL {}
    assert_eq!(world.of_store("idem_oldest_in_progress_seconds"), Some(5.0));
    assert_eq!(world.of_store("idem_store_counted_timestamp_seconds"), Some(2_000.0));
}

const RETRY_PAUSE: Duration = Duration::from_secs(10);

#[tokio::test]
async fn after_an_error_that_passes_the_same_part_is_counted_again() {
    let store = Answers::new([
        part(completed(1), None, 100),
        part(completed(2), Some(1), 200),
        failure(StoreErrorKind::Unavailable),
        failure(StoreErrorKind::Busy),
        part(completed(3), None, 300),
    ]);
    let world = World::new();
    let mut scan = world.scan(store.clone());
    assert_eq!(scan.step().await, INTERVAL);
    scan.step().await;
    assert_eq!([scan.step().await, scan.step().await], [RETRY_PAUSE; 2], "it does not ask a failing store at once");
    assert_eq!(world.records("completed"), Some(1.0), "the last whole count stays");
    assert_eq!(world.of_store("idem_store_counted_timestamp_seconds"), Some(100.0));
    assert_eq!(world.of_store("idem_store_count_failures_total"), Some(2.0));
    assert_eq!(scan.step().await, INTERVAL);
    assert_eq!(world.records("completed"), Some(5.0), "what was counted before is kept");
    let asked = [(None, 1_000), (None, 1_000), (Some(1), 1_000), (Some(1), 1_000), (Some(1), 1_000)];
    assert_eq!(*store.asked.lock().unwrap(), asked);
}

#[tokio::test]
async fn a_count_begins_again_after_an_error_that_stays() {
    let begun = || part(completed(2), Some(1), 200);
    // Another server answers, which does not know the position.
    let mut answers = vec![begun()];
    answers.extend((0..7).map(|_| failure(StoreErrorKind::Unavailable)));
    answers.extend([begun(), failure(StoreErrorKind::Misconfigured), part(completed(3), None, 300)]);
    let world = World::new();
    let store = Answers::new(answers);
    let mut scan = world.scan(store.clone());
    scan.step().await;
    for _ in 0..6 {
        assert_eq!(scan.step().await, RETRY_PAUSE);
    }
    assert_eq!(scan.step().await, INTERVAL);
    scan.step().await;
    assert_eq!(scan.step().await, INTERVAL, "a retry is in vain");
    scan.step().await;
    assert_eq!(world.records("completed"), Some(3.0), "nothing is counted twice");
    let positions: Vec<_> = store.asked.lock().unwrap().iter().map(|(from, _)| *from).collect();
    assert_eq!(positions, [&[None][..], &[Some(1); 7], &[None, Some(1), None]].concat());
}

#[tokio::test]
async fn a_timeout_halves_the_part_and_successes_double_it() {
    let mut answers = vec![part(completed(1), Some(1), 100)];
    answers.extend((0..6).map(|_| failure(StoreErrorKind::Timeout)));
    answers.extend((0..21).map(|_| part(completed(1), Some(1), 100)));
    let world = World::new();
    let store = Answers::new(answers);
    let mut scan = world.scan(store.clone());
    for _ in 0..28 {
        assert_ne!(scan.step().await, INTERVAL, "the count goes on");
    }
    let mut sizes: Vec<_> = store.asked.lock().unwrap().iter().map(|(_, size)| *size).collect();
    sizes.dedup();
    assert_eq!(sizes, [1_000, 500, 250, 125, 62, 50, 25, 50, 100]);
    assert_eq!(world.of_store("idem_store_count_failures_total"), Some(6.0));
}

#[test]
fn messages_that_wait_are_gauges_and_audited_decisions_counters() {
    let world = World::new();
    InboxGauges::with_recorder(world.0.clone(), "billing").record(3);
    OutboxGauges::with_recorder(world.0.clone(), "orders").record(4, Duration::from_millis(1_500));
    let audit = AuditCounters::with_recorder(world.0.clone(), "trail");
    assert_eq!(world.value(r#"idem_audit_dropped_total{audit="trail"}"#), Some(0.0), "before the first decision");
    audit.record(5, 6);
    assert_eq!(world.value(r#"idem_audit_written_total{audit="trail"}"#), Some(5.0));
    assert_eq!(world.value(r#"idem_audit_dropped_total{audit="trail"}"#), Some(6.0));
    assert_eq!(world.value(r#"idem_inbox_parked{subscriber="billing"}"#), Some(3.0));
    assert_eq!(world.value(r#"idem_outbox_messages{outbox="orders"}"#), Some(4.0));
    assert_eq!(world.value(r#"idem_outbox_lag_seconds{outbox="orders"}"#), Some(1.5));
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs_f64();
    for observed in [
        "idem_inbox_observed_timestamp_seconds{subscriber=\"billing\"}",
        "idem_outbox_observed_timestamp_seconds{outbox=\"orders\"}",
    ] {
        let age = now - world.value(observed).unwrap();
        assert!((0.0..60.0).contains(&age), "{observed} is {age} s ago");
    }
}
