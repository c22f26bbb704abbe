//! Steps: kept results, undoing, and crashes at every point of both.

mod ended;
mod failed;
mod killed;
mod rules;

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::FutureExt as _;
use idem_core::engine::{
    CheckpointError, Conclusion, Context, Disposition, ErrorMeaning, Event, EventKind, ExecuteError, Idempotency,
    Observer, Ran, RunError, Settings, StandingStep, StepError, StepToUndo,
};
use idem_core::{StoreErrorKind, StoredResponse, Writes};
use idem_testkit::{Fault, Verb};
use tokio::runtime::{Builder, Handle};

use crate::support::{World, done, operation, panicked};

type Outcome = Result<Ran<String>, RunError<StepError>>;

/// Runs `run` in a process that ends at once: killed if it is not done by then. The next process finds its lease over.
fn in_a_process<F, R>(world: &World, settings: impl FnOnce(Settings) -> Settings, run: F) -> Option<Outcome>
where
    F: FnOnce(Context) -> R + Send + 'static,
    R: Future<Output = Result<String, StepError>> + Send + 'static,
{
    let runtime = Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    let outcome = runtime.block_on(async {
        let engine = Idempotency::at_least_once(world.store.clone(), settings(world.settings()));
        let running = engine.run_classified(operation(), StepError::meaning, run);
        tokio::time::timeout(Duration::from_millis(1), running).await.ok()
    });
    drop(runtime);
    world.store.heal();
    world.clock.advance(Duration::from_secs(100));
    outcome
}

fn attempts(limit: u32) -> impl Fn(Settings) -> Settings {
    move |settings| settings.max_attempts(NonZeroU32::new(limit).unwrap())
}
