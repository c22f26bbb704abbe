//! Hybrids of stores of many kinds.

mod lying;
mod memory;
mod servers;
mod world;

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use idem_core::memory::{ManualClock, MemoryStore};
use idem_core::{RecordId, SettlementListener, Timestamp};
use idem_hybrid::{HybridConfig, HybridStore};
use idem_testkit::Subject;

pub use lying::{Lie, LyingFast};
pub use memory::MemoryFast;
pub use servers::{Time, durable, fresh_prefix, servers, servers_at};
pub use world::{BrittleFast, FAILS, FINE, HANGS, IS_FULL, PUTS_LATE, PUTS_SLOWLY, SLOWLY, World};

/// The lowest rank of the copy of a settled record.
pub const SETTLED: u64 = 1 << 62;

/// Longer than any call takes on a loaded machine, so that no call times out.
pub const PATIENCE: Duration = Duration::from_secs(10);

pub fn patient() -> HybridConfig {
    HybridConfig::new().patience(PATIENCE)
}

/// Counts the settlements that it is told of.
#[derive(Debug, Default)]
pub struct Heard(pub AtomicU64);

impl SettlementListener for Heard {
    fn settled(&self, _: &RecordId) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// A hybrid in memory, and its parts.
pub struct InMemory {
    pub store: HybridStore<MemoryStore>,
    pub durable: Arc<MemoryStore>,
    pub clock: Arc<ManualClock>,
}

impl InMemory {
    pub fn new(config: HybridConfig) -> Self {
        let clock = Arc::new(ManualClock::new(Timestamp::from_unix_micros(1_767_225_600_000_000)));
        let durable = Arc::new(MemoryStore::with_clock(NonZeroUsize::new(100_000).unwrap(), clock.clone()));
        let fast = Arc::new(MemoryFast::new(clock.clone()));
        let store = HybridStore::new(durable.clone(), fast, config);
        Self { store, durable, clock }
    }

    pub fn subject(self) -> Subject {
        let Self { store, durable, clock } = self;
        Subject::new(Arc::new(store), durable, clock)
    }
}

/// Polls until `look` returns a value; fails the test if it never does.
pub async fn eventually<T, F: Future<Output = Option<T>>>(what: &str, mut look: impl FnMut() -> F) -> T {
    for _ in 0..1_000 {
        if let Some(seen) = look().await {
            return seen;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("never came: {what}");
}
