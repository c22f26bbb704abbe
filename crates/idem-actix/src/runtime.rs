//! The default runtime, for engines whose settings name none.

use std::sync::OnceLock;

use idem_core::engine::Idempotency;
use tokio::runtime::{Builder, Runtime};

/// Engines mostly wait for stores and timers; the second thread works while the first is busy.
const THREADS: usize = 2;

/// Moves an engine off the workers, unless its settings name a runtime. All layers of a process share one runtime, which
/// starts at its first use and lasts as long as the process.
pub(crate) fn off_the_workers(engine: Idempotency) -> Idempotency {
    static RUNTIME: OnceLock<Option<Runtime>> = OnceLock::new();
    if engine.settings().has_runtime() {
        return engine;
    }
    let start = || {
        let runtime =
            Builder::new_multi_thread().worker_threads(THREADS).thread_name("idem-engine").enable_all().build();
        // Without these threads, the engine runs on the workers.
        runtime.inspect_err(|error| tracing::error!(%error, "could not start the threads of idempotent operations; they run on actix's workers")).ok()
    };
    match RUNTIME.get_or_init(start) {
        Some(runtime) => engine.default_runtime(runtime.handle().clone()),
        None => engine,
    }
}
