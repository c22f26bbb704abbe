//! Renewals by the store's usual verb and by its separate renewer.

use std::collections::HashSet;
use std::num::NonZeroUsize;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use idem_core::engine::{Answer, Conclusion, Context, Idempotency};
use idem_core::{
    Acquire, AcquireOutcome, Capabilities, Checkpoint, IdempotencyStore, Lease, LeaseRenewer, MemoryStore,
    OwnerOutcome, Record, RecordId, Settlement, SettlementListener, StoreError, StoreErrorKind, Term,
};
use tokio::runtime::{self, Handle};
use tokio::sync::Notify;

use crate::support::{World, assert_ran, done, operation, panicked};

/// What happens to the renewals of one renewer.
#[derive(Debug, Clone, Copy)]
enum Way {
    Works,
    WorksAfter(Duration),
    Fails,
    Hangs,
}

/// A renewer that behaves in one way.
#[derive(Debug)]
struct Renewals {
    memory: Arc<MemoryStore>,
    way: Way,
    asked: AtomicU64,
    /// The runtimes that drove the renewals.
    runtimes: Mutex<HashSet<runtime::Id>>,
    renewed: Notify,
}

impl Renewals {
    fn new(memory: &Arc<MemoryStore>, way: Way) -> Arc<Self> {
        let (memory, asked, runtimes, renewed) =
            (Arc::clone(memory), AtomicU64::new(0), Mutex::default(), Notify::new());
        Arc::new(Self { memory, way, asked, runtimes, renewed })
    }

    fn asked(&self) -> u64 {
        self.asked.load(Ordering::SeqCst)
    }

    fn runtimes(&self) -> Vec<runtime::Id> {
        self.runtimes.lock().unwrap().iter().copied().collect()
    }
}

#[async_trait::async_trait]
impl LeaseRenewer for Renewals {
    async fn renew(&self, lease: &Lease, term: Term) -> Result<OwnerOutcome, StoreError> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        self.runtimes.lock().unwrap().insert(Handle::current().id());
        match self.way {
            Way::Works => {}
            Way::WorksAfter(pause) => tokio::time::sleep(pause).await,
            Way::Fails => return Err(StoreError::new(StoreErrorKind::Unavailable, "no connection is left")),
            Way::Hangs => std::future::pending().await,
        }
        let outcome = self.memory.renew(lease, term).await;
        self.renewed.notify_one();
        outcome
    }
}

/// A store with a separate renewer.
#[derive(Debug)]
struct TwoWays {
    memory: Arc<MemoryStore>,
    usual: Arc<Renewals>,
    beside: Arc<Renewals>,
}

impl TwoWays {
    fn new(usual: Way, beside: Way) -> Arc<Self> {
        let memory = Arc::new(MemoryStore::new(NonZeroUsize::MAX));
        let (usual, beside) = (Renewals::new(&memory, usual), Renewals::new(&memory, beside));
        Arc::new(Self { memory, usual, beside })
    }
}

#[async_trait::async_trait]
impl IdempotencyStore for TwoWays {
    async fn acquire(&self, request: &Acquire) -> Result<AcquireOutcome, StoreError> {
        self.memory.acquire(request).await
    }

    async fn renew(&self, lease: &Lease, term: Term) -> Result<OwnerOutcome, StoreError> {
        self.usual.renew(lease, term).await
    }

    async fn checkpoint(&self, lease: &Lease, checkpoint: &Checkpoint) -> Result<OwnerOutcome, StoreError> {
        self.memory.checkpoint(lease, checkpoint).await
    }

    async fn settle(&self, lease: &Lease, end: &Settlement, keep: Duration) -> Result<OwnerOutcome, StoreError> {
        self.memory.settle(lease, end, keep).await
    }

    async fn peek(&self, id: &RecordId) -> Result<Option<Record>, StoreError> {
        self.memory.peek(id).await
    }

    fn on_settled(&self, _: Weak<dyn SettlementListener>) {}

    fn renewer(&self) -> Option<Arc<dyn LeaseRenewer>> {
        Some(Arc::clone(&self.beside) as Arc<dyn LeaseRenewer>)
    }

    fn capabilities(&self) -> Capabilities {
        self.memory.capabilities()
    }
}

#[tokio::test(start_paused = true)]
async fn a_lease_is_lost_only_when_both_ways_fail() {
    // Between a quarter of the store timeout and all of it.
    let slow = Way::WorksAfter(Duration::from_secs(1));
    let ways = [Way::Works, slow, Way::Fails, Way::Hangs];
    for (usual, beside) in ways.iter().flat_map(|usual| ways.iter().map(move |beside| (*usual, *beside))) {
        let (world, store) = (World::new(), TwoWays::new(usual, beside));
        let settings = world.settings().store_timeout(Duration::from_secs(2));
        let engine = Idempotency::at_least_once(store.clone(), settings);
        let answer = world.run(&engine, Duration::from_secs(29), done()).await;
        let works = |way| matches!(way, Way::Works | Way::WorksAfter(_));
        let is_lost = world.events.count("lease-lost") > 0;
        assert_eq!(is_lost, !works(usual) && !works(beside), "{usual:?}, {beside:?}: {answer:?}");
        assert_eq!(store.beside.asked() == 0, matches!(usual, Way::Works), "{usual:?}, {beside:?}");
    }
}

#[test]
fn the_usual_way_is_driven_by_the_runtime_of_the_operation_and_the_other_one_by_the_renewals_own() {
    let home = runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    for usual in [Way::Works, Way::Fails] {
        let store = TwoWays::new(usual, Way::Works);
        let renewed = Arc::clone(if matches!(usual, Way::Works) { &store.usual } else { &store.beside });
        let settings = World::new().settings().lease(Duration::from_millis(300));
        let engine = Idempotency::at_least_once(store.clone(), settings);
        let run = move |_: Context| async move {
            renewed.renewed.notified().await;
            Conclusion { value: "ran", disposition: done(), retention: None }
        };
        assert_ran(&home.block_on(engine.execute(operation(), run, panicked)));
        assert_eq!(store.usual.runtimes(), [home.handle().id()]);
        assert!(!store.beside.runtimes().contains(&home.handle().id()), "after {usual:?}");
    }
}

/// Set for the process in which no thread can start.
const NO_THREADS: &str = "IDEM_TEST_NO_THREADS";

/// A thread whose stack is larger than the address space does not start. The test runner then runs its test on the main thread.
#[test]
fn an_operation_runs_and_is_renewed_where_no_thread_can_start() {
    if std::env::var_os(NO_THREADS).is_none() {
        let own_name = "renewals::an_operation_runs_and_is_renewed_where_no_thread_can_start";
        let mut process = Command::new(std::env::current_exe().unwrap());
        process
            .args(["--exact", own_name, "--nocapture"])
            .env(NO_THREADS, "")
            .env("RUST_MIN_STACK", (1_u64 << 60).to_string());
        let output = process.output().unwrap();
        let said = [output.stdout, output.stderr].concat();
        let said = String::from_utf8_lossy(&said);
        assert!(output.status.success() && said.contains("1 passed"), "{said}");
        return;
    }
    assert!(std::thread::Builder::new().spawn(|| ()).is_err(), "this process has threads");
    let store = TwoWays::new(Way::Works, Way::Works);
    let engine = Idempotency::at_least_once(store.clone(), World::new().settings().lease(Duration::from_millis(300)));
    let run = move |_: Context| async move {
        store.usual.renewed.notified().await;
        Conclusion { value: "ran", disposition: done(), retention: None }
    };
    let home = runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let answer = home.block_on(engine.execute(operation(), run, panicked));
    assert!(matches!(answer, Ok(Answer::Ran { attempt: 1, .. })), "{answer:?}");
}
