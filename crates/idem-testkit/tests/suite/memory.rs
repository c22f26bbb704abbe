//! The memory store keeps the contract.

use std::num::NonZeroUsize;
use std::sync::Arc;

use idem_core::memory::ManualClock;
use idem_core::{MemoryStore, Timestamp};
use idem_testkit::Subject;

async fn memory() -> Subject {
    // 2026-01-01, far enough from the machine's clock that a mix-up shows.
    let clock = Arc::new(ManualClock::new(Timestamp::from_unix_micros(1_767_225_600_000_000)));
    let store = Arc::new(MemoryStore::with_clock(NonZeroUsize::MAX, clock.clone()));
    Subject::new(store.clone(), store.clone(), clock).operated_by(store.clone()).inspected_by(store).without_origins()
}

idem_testkit::conformance!(memory);
idem_testkit::resolve_conformance!(resolving, memory);
idem_testkit::inspect_conformance!(inspecting, memory);
idem_testkit::state_machine!(memory);
