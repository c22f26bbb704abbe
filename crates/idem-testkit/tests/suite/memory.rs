//! The memory store keeps the contract.

use std::num::{NonZeroU32, NonZeroUsize};
use std::sync::Arc;

use async_trait::async_trait;
use idem_core::memory::ManualClock;
use idem_core::{
    Erase, EraseOutcome, MemoryStore, Operate, OwnerToken, Repair, RepairNote, Resolution, Resolve, ResolveOutcome,
    StoreError, Timestamp, repair,
};
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

/// Resolves nothing, and says whether the repair was noted before.
#[derive(Debug)]
struct Noted(MemoryStore);

#[async_trait]
impl Operate for Noted {
    async fn resolve(&self, request: &Resolve) -> Result<ResolveOutcome, StoreError> {
        let [Repair { note, .. }] = &self.0.repairs(NonZeroU32::MAX).await?[..] else { panic!("it is not noted") };
        assert_eq!((note.action, &*note.reason, &note.outcome), (request.action, "why", &None));
        Ok(ResolveOutcome::Changed)
    }

    async fn erase(&self, request: &Erase) -> Result<EraseOutcome, StoreError> {
        let [Repair { note, .. }] = &self.0.repairs(NonZeroU32::MAX).await?[..] else { panic!("it is not noted") };
        assert_eq!((note.action, &*note.resolution, &note.outcome), (request.action, "erased", &None));
        Ok(EraseOutcome::Changed)
    }

    async fn note(&self, note: &RepairNote) -> Result<(), StoreError> {
        self.0.note(note).await
    }

    async fn repairs(&self, limit: NonZeroU32) -> Result<Vec<Repair>, StoreError> {
        self.0.repairs(limit).await
    }
}

#[tokio::test]
async fn a_repair_is_noted_before_it_is_made_and_its_outcome_after_that() {
    let store = Noted(MemoryStore::new(NonZeroUsize::MIN));
    let request = Resolve {
        id: idem_testkit::fixture::fresh_id(),
        action: OwnerToken::random(),
        seen: "0".repeat(32).parse().unwrap(),
        resolution: Resolution::OutcomeUnknown,
        retention: idem_testkit::fixture::KEPT,
    };
    assert_eq!(repair(&store, &request, "who", "why").await.unwrap(), ResolveOutcome::Changed);
    let [Repair { note, .. }] = &store.repairs(NonZeroU32::MAX).await.unwrap()[..] else { panic!("one note") };
    assert_eq!(
        (note.actor.as_str(), note.outcome.as_deref()),
        ("who", Some("changed meanwhile, or resolved by an earlier try"))
    );
    let store = Noted(MemoryStore::new(NonZeroUsize::MIN));
    let request = Erase { id: request.id, action: request.action, seen: request.seen, principal: None };
    assert_eq!(idem_core::erase(&store, &request, "who", "why").await.unwrap(), EraseOutcome::Changed);
    let [Repair { note, .. }] = &store.repairs(NonZeroU32::MAX).await.unwrap()[..] else { panic!("one note") };
    assert_eq!((note.reason.as_str(), note.outcome.as_deref()), ("why", Some("changed meanwhile")));
}
