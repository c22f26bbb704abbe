//! Takeovers by processes that have seen nothing of a record before.

use idem_core::{AcquireOutcome, IdempotencyStore, Takeover};
use idem_testkit::fixture::{KEPT, LEASE, completed, repeat_of, request};

use crate::support::{BOTH, PRECISION, Table};

/// The clock of the service says that the lease is over, but this process has not seen it last.
#[tokio::test]
async fn a_lease_is_over_for_a_new_process_only_when_it_has_seen_it_unchanged_for_its_length() {
    for emulator in BOTH {
        for (takeover, is_known) in [(Takeover::Rerun, true), (Takeover::Unknown, false)] {
            let table = Table::new(emulator).await;
            let request = idem_core::Acquire { takeover, ..request() };
            let AcquireOutcome::Acquired(_) = table.store().await.acquire(&request).await.unwrap() else { panic!() };
            table.offset.advance(LEASE + PRECISION);
            let other = table.store().await;
            let again = repeat_of(&request);
            let turned_away = other.acquire(&again).await.unwrap();
            assert!(matches!(turned_away, AcquireOutcome::InProgress { .. }), "{emulator:?}: {turned_away:?}");
            table.offset.advance(LEASE - PRECISION * 2);
            let turned_away = other.acquire(&again).await.unwrap();
            assert!(matches!(turned_away, AcquireOutcome::InProgress { .. }), "{emulator:?}: {turned_away:?}");
            table.offset.advance(PRECISION * 2);
            let over = other.acquire(&again).await.unwrap();
            match over {
                AcquireOutcome::Acquired(lease) if is_known => assert_eq!(lease.attempt, 2),
                AcquireOutcome::Replay(_) if !is_known => {}
                other => panic!("{emulator:?}: {other:?}"),
            }
        }
    }
}

/// A renewal is another version.
#[tokio::test]
async fn a_renewal_by_another_process_begins_the_wait_anew() {
    for emulator in BOTH {
        let table = Table::new(emulator).await;
        let (owner, other, request) = (table.store().await, table.store().await, request());
        let AcquireOutcome::Acquired(lease) = owner.acquire(&request).await.unwrap() else { panic!() };
        let again = repeat_of(&request);
        assert!(matches!(other.acquire(&again).await.unwrap(), AcquireOutcome::InProgress { .. }));
        for _ in 0..3 {
            table.offset.advance(LEASE / 2);
            owner.renew(&lease, request.term).await.unwrap();
            assert!(matches!(other.acquire(&again).await.unwrap(), AcquireOutcome::InProgress { .. }));
        }
        owner.settle(&lease, &completed(), KEPT).await.unwrap();
        assert!(matches!(other.acquire(&again).await.unwrap(), AcquireOutcome::Replay(_)));
    }
}
