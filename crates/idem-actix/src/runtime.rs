//! Where engines run that were told nothing else.

use std::sync::OnceLock;

use idem_core::engine::Idempotency;
use tokio::runtime::{Builder, Runtime};

/// Engines wait for stores and timers most of the time; a second thread is there for when one is busy.
const THREADS: usize = 2;

/// The engine, off the workers unless it was told where to run. All layers of a process share the runtime, which is made when
/// it is needed first and lasts as long as the process.
pub(crate) fn off_the_workers(engine: Idempotency) -> Idempotency {
    static RUNTIME: OnceLock<Option<Runtime>> = OnceLock::new();
    if engine.settings().has_runtime() {
        return engine;
    }
    let start = || {
        let runtime =
            Builder::new_multi_thread().worker_threads(THREADS).thread_name("idem-engine").enable_all().build();
        // Then it runs on the workers, as far as they let it.
        runtime.inspect_err(|error| tracing::error!(%error, "no threads for idempotent operations")).ok()
    };
    match RUNTIME.get_or_init(start) {
        Some(runtime) => engine.default_runtime(runtime.handle().clone()),
        None => engine,
    }
}
