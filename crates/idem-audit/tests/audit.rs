//! What is written of the decisions of an engine, and what is dropped.
#![expect(clippy::unwrap_used, reason = "a test says what it expects by failing")]

use std::error::Error;
use std::future::{pending, ready};
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use idem_audit::{AuditEntry, AuditObserver, AuditSink, AuditWriter};
use idem_core::engine::{Conclusion, Context, Disposition, Idempotency, Operation, Settings};
use idem_core::{Fingerprint, MemoryStore, Scope, StoredResponse, Writes};
use tokio::time::Instant;
use uuid::Uuid;

/// A sink that fails at first, and keeps what it got.
#[derive(Debug, Default)]
struct Kept {
    failures: Mutex<usize>,
    batches: Mutex<Vec<(Uuid, usize)>>,
}

impl Kept {
    fn after(failures: usize) -> Arc<Self> {
        Arc::new(Self { failures: Mutex::new(failures), batches: Mutex::default() })
    }

    fn sizes(&self) -> Vec<usize> {
        self.batches.lock().unwrap().iter().map(|(_, entries)| *entries).collect()
    }
}

#[async_trait]
impl AuditSink for Kept {
    async fn write(&self, batch: Uuid, entries: &[AuditEntry]) -> Result<(), Box<dyn Error + Send + Sync>> {
        self.batches.lock().unwrap().push((batch, entries.len()));
        let mut failures = self.failures.lock().unwrap();
        match failures.checked_sub(1) {
            Some(left) => {
                *failures = left;
                Err("away".into())
            }
            None => Ok(()),
        }
    }
}

/// An engine with this many decisions behind it.
fn decided(decisions: usize, capacity: usize, sink: Arc<dyn AuditSink>) -> (AuditObserver, AuditWriter) {
    let (audit, writer) = AuditObserver::with_writer(NonZeroUsize::new(capacity).unwrap(), sink);
    let store = Arc::new(MemoryStore::new(NonZeroUsize::new(1).unwrap()));
    let engine = Idempotency::at_least_once(store, Settings::new().observer(Arc::new(audit.clone())));
    (0..decisions).for_each(|_| engine.refused("POST /p", "key-missing"));
    (audit, writer)
}

#[tokio::test]
async fn a_full_queue_drops_decisions_and_counts_them() {
    let sink = Kept::after(0);
    let (audit, writer) = decided(5, 2, sink.clone());
    assert_eq!((audit.written(), audit.dropped()), (0, 3));
    writer.run_until(ready(())).await;
    assert_eq!((audit.written(), audit.dropped()), (2, 3));
}

#[tokio::test]
async fn what_is_queued_at_the_end_is_written_in_batches() {
    let sink = Kept::after(0);
    let (audit, writer) = decided(1_200, 2_000, sink.clone());
    writer.run_until(ready(())).await;
    assert_eq!(sink.sizes(), [500, 500, 200]);
    assert_eq!((audit.written(), audit.dropped()), (1_200, 0));
}

#[tokio::test(start_paused = true)]
async fn a_batch_that_failed_comes_again_with_its_id() {
    let sink = Kept::after(2);
    let (audit, writer) = decided(3, 10, sink.clone());
    let (begun, written) = (Instant::now(), audit.clone());
    let is_written = async move {
        while written.written() == 0 {
            tokio::task::yield_now().await;
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    writer.run_until(is_written).await;
    let batches = sink.batches.lock().unwrap();
    assert_eq!(batches.len(), 3);
    assert!(batches.iter().all(|batch| *batch == batches[0]), "{batches:?}");
    assert_eq!((audit.written(), audit.dropped(), begun.elapsed().as_secs()), (3, 0, 2));
}

#[tokio::test(start_paused = true)]
async fn a_batch_that_keeps_failing_is_dropped_and_counted() {
    let sink = Kept::after(usize::MAX);
    let (audit, writer) = decided(3, 10, sink.clone());
    let dropped = audit.clone();
    let is_dropped = async move {
        while dropped.dropped() == 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    writer.run_until(is_dropped).await;
    assert_eq!(sink.sizes(), [3; 30]);
    assert_eq!((audit.written(), audit.dropped()), (0, 3));
}

#[tokio::test(start_paused = true)]
async fn the_end_does_not_wait_for_a_sink_that_fails() {
    let sink = Kept::after(usize::MAX);
    let (audit, writer) = decided(600, 1_000, sink.clone());
    let begun = Instant::now();
    writer.run_until(ready(())).await;
    assert_eq!((sink.sizes(), begun.elapsed().as_secs()), (vec![500], 0), "the rest is not tried");
    assert_eq!((audit.written(), audit.dropped()), (0, 600));
}

/// A sink that never answers.
#[derive(Debug)]
struct Hangs;

#[async_trait]
impl AuditSink for Hangs {
    async fn write(&self, _: Uuid, _: &[AuditEntry]) -> Result<(), Box<dyn Error + Send + Sync>> {
        pending().await
    }
}

#[tokio::test(start_paused = true)]
async fn the_end_waits_ten_seconds_for_a_sink_that_hangs() {
    for shutdown_after in [0, 3] {
        let (audit, writer) = decided(1_200, 2_000, Arc::new(Hangs));
        let begun = Instant::now();
        // The second time, the sink hangs already when the shutdown begins.
        writer.run_until(tokio::time::sleep(Duration::from_secs(shutdown_after))).await;
        assert_eq!((audit.written(), audit.dropped()), (0, 1_200));
        assert_eq!(begun.elapsed().as_secs(), shutdown_after + 10);
    }
}

/// A sink that refuses the first batch for ever.
#[derive(Debug, Default)]
struct Refuses(Mutex<Vec<usize>>);

#[async_trait]
impl AuditSink for Refuses {
    async fn write(&self, _: Uuid, entries: &[AuditEntry]) -> Result<(), Box<dyn Error + Send + Sync>> {
        let mut sizes = self.0.lock().unwrap();
        sizes.push(entries.len());
        if sizes.len() == 1 { Err("refused".into()) } else { Ok(()) }
    }

    fn is_permanent(&self, error: &(dyn Error + Send + Sync + 'static)) -> bool {
        error.to_string() == "refused"
    }
}

#[tokio::test(start_paused = true)]
async fn a_batch_that_is_refused_for_ever_does_not_hold_up_the_next() {
    let sink = Arc::new(Refuses::default());
    let (audit, writer) = decided(700, 1_000, sink.clone());
    let begun = Instant::now();
    let watched = audit.clone();
    let is_written = async move {
        while watched.written() == 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    writer.run_until(is_written).await;
    assert_eq!((sink.0.lock().unwrap().clone(), begun.elapsed().as_secs()), (vec![500, 200], 0));
    assert_eq!((audit.written(), audit.dropped()), (200, 500));
}

/// Keeps the principals that it got.
#[derive(Debug, Default)]
struct Principals(Mutex<Vec<Option<String>>>);

#[async_trait]
impl AuditSink for Principals {
    async fn write(&self, _: Uuid, entries: &[AuditEntry]) -> Result<(), Box<dyn Error + Send + Sync>> {
        self.0.lock().unwrap().extend(entries.iter().map(|entry| entry.principal.clone()));
        Ok(())
    }
}

#[tokio::test]
async fn principals_are_written_as_the_application_maps_them() {
    let sink = Arc::new(Principals::default());
    let (audit, writer) = AuditObserver::with_writer(NonZeroUsize::new(10).unwrap(), sink.clone());
    let audit = audit.map_principals(|principal| (principal != "secret").then(|| format!("hash of {principal}")));
    let store = Arc::new(MemoryStore::new(NonZeroUsize::new(10).unwrap()));
    let engine = Idempotency::at_least_once(store, Settings::new().observer(Arc::new(audit)));
    for principal in ["acme", "secret"] {
        let done = || {
            let response = StoredResponse::new(201, "");
            Conclusion {
                value: (),
                disposition: Disposition::Complete { response, writes: Writes::Keep },
                retention: None,
            }
        };
        let scope = Scope::new(principal, "POST /p");
        let operation = Operation::new(scope, "key".parse().unwrap(), Fingerprint::of_bytes("", b""));
        engine.execute(operation, move |_: Context| async move { done() }, done).await.unwrap();
    }
    writer.run_until(ready(())).await;
    assert_eq!(*sink.0.lock().unwrap(), [Some("hash of acme".to_owned()), None]);
}
