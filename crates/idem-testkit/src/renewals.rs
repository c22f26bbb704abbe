//! Proves that leases are renewed while an operation keeps its runtime busy.

use std::future::Future;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use idem_core::engine::{Answer, Conclusion, Context, Disposition, Idempotency, Operation, Settings};
use idem_core::{Fingerprint, IdempotencyStore, Scope, StoredResponse, Writes};
use tokio::runtime::{Builder, Runtime};

/// Long enough for a loaded machine: two renewals in a row may be late by a second.
const LEASE: Duration = Duration::from_secs(3);

/// When another process asks, and how long the operation blocks its runtime.
const ASKED_AFTER: Duration = Duration::from_secs(5);
const BUSY: Duration = Duration::from_secs(7);

/// Proves that an operation that never yields keeps its lease. It runs once on a runtime with one thread, and once on a
/// runtime with a single worker. It takes 7 s.
///
/// `open` opens the store on the runtime that awaits it, with the same records each time.
///
/// # Panics
/// When the lease is lost, or another process gets any answer but that the operation is in progress.
pub fn a_busy_runtime_keeps_its_leases<S, F>(open: impl Fn() -> F + Sync)
where
    S: IdempotencyStore,
    F: Future<Output = Arc<S>>,
{
    thread::scope(|scope| {
        scope.spawn(|| keeps_its_lease(&runtime(Builder::new_current_thread()), "one-thread", &open));
        let mut single_worker = Builder::new_multi_thread();
        single_worker.worker_threads(1);
        scope.spawn(|| keeps_its_lease(&runtime(single_worker), "one-worker", &open));
    });
}

fn runtime(mut builder: Builder) -> Runtime {
    builder.enable_all().build().expect("a runtime starts")
}

fn keeps_its_lease<S, F>(busy: &Runtime, key: &str, open: &impl Fn() -> F)
where
    S: IdempotencyStore,
    F: Future<Output = Arc<S>>,
{
    let (begun, begins) = mpsc::channel();
    let compute = move |context: Context| async move {
        begun.send(()).expect("the test waits");
        thread::sleep(BUSY);
        conclusion(tokio::time::timeout(Duration::ZERO, context.lease_lost()).await.is_ok())
    };
    let engine = busy.block_on(async { engine(open().await) });
    let computing = engine.execute(operation(key), compute, || conclusion(true));
    let answer = thread::scope(|scope| {
        let computed = scope.spawn(|| busy.block_on(async { tokio::spawn(computing).await }));
        begins.recv().expect("the operation begins");
        thread::sleep(ASKED_AFTER);
        let elsewhere = runtime(Builder::new_current_thread());
        let asked = elsewhere.block_on(async {
            let run = |_: Context| async { conclusion(true) };
            engine_of_another(open().await).execute(operation(key), run, || conclusion(true)).await
        });
        assert!(matches!(asked, Ok(Answer::InProgress { .. })), "{key}: another process gets {asked:?}");
        computed.join().expect("the runtime is well").expect("the task is well")
    });
    assert!(
        matches!(answer, Ok(Answer::Ran { value: false, attempt: 1, protected: true })),
        "{key}: {answer:?}; the value says whether the lease was lost"
    );
}

fn engine<S: IdempotencyStore>(store: Arc<S>) -> Idempotency {
    Idempotency::at_least_once(store, Settings::new().lease(LEASE).store_timeout(LEASE / 3))
}

/// With the default timeout of the store, because it only asks.
fn engine_of_another<S: IdempotencyStore>(store: Arc<S>) -> Idempotency {
    Idempotency::at_least_once(store, Settings::new().lease(LEASE))
}

fn operation(key: &str) -> Operation {
    let key = key.parse().expect("it is a key");
    Operation::new(Scope::single_tenant("renewals"), key, Fingerprint::of_bytes("renewals", b""))
}

fn conclusion(is_lost: bool) -> Conclusion<bool> {
    let disposition = Disposition::Complete { response: StoredResponse::new(200, ""), writes: Writes::Keep };
    Conclusion { value: is_lost, disposition, retention: None }
}
