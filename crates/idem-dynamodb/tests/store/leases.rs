//! Takeovers by processes that have seen nothing of a record before.

use std::time::Duration;

use futures_util::future::join_all;
use idem_core::{AcquireOutcome, IdempotencyStore, OwnerOutcome, Takeover};
use idem_testkit::fixture::{KEPT, LEASE, RETENTION, checkpoint, completed, repeat_of, request};

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
            table.offset.advance(PRECISION * 3);
            let over = other.acquire(&again).await.unwrap();
            match over {
                AcquireOutcome::Acquired(lease) if is_known => assert_eq!(lease.attempt, 2),
                AcquireOutcome::Replay(_) if !is_known => {}
                other => panic!("{emulator:?}: {other:?}"),
            }
        }
    }
}

/// A renewal is another version. The service says that the lease is over, and this process has seen only the version before.
#[tokio::test]
async fn a_renewal_by_another_process_begins_the_wait_anew() {
    for emulator in BOTH {
        let table = Table::new(emulator).await;
        let (owner, other, request) = (table.store().await, table.store().await, request());
        let AcquireOutcome::Acquired(lease) = owner.acquire(&request).await.unwrap() else { panic!() };
        let again = repeat_of(&request);
        assert!(matches!(other.acquire(&again).await.unwrap(), AcquireOutcome::InProgress { .. }));
        table.offset.advance(LEASE / 2);
        owner.renew(&lease, request.term).await.unwrap();
        for _ in 0..2 {
            table.offset.advance(LEASE / 2 + PRECISION);
            let turned_away = other.acquire(&again).await.unwrap();
            assert!(matches!(turned_away, AcquireOutcome::InProgress { .. }), "{emulator:?}: {turned_away:?}");
        }
        owner.settle(&lease, &completed(), KEPT).await.unwrap();
        assert!(matches!(other.acquire(&again).await.unwrap(), AcquireOutcome::Replay(_)));
    }
}

/// The owner's clock was behind when it acquired, or it was suspended in a renewal, and its clock is right when it records a checkpoint:
/// the time of the last change is then after the end that the record gives to its lease.
#[tokio::test]
async fn a_checkpoint_ends_no_lease_early() {
    for emulator in BOTH {
        // More than the second that times are rounded by.
        for late in [Duration::from_millis(1_500), LEASE * 2] {
            let table = Table::new(emulator).await;
            let (owner, other, request) = (table.store().await, table.store().await, request());
            let AcquireOutcome::Acquired(lease) = owner.acquire(&request).await.unwrap() else { panic!() };
            table.offset.advance(LEASE + late);
            assert_eq!(owner.checkpoint(&lease, &checkpoint("charged")).await.unwrap(), OwnerOutcome::Applied);
            let again = repeat_of(&request);
            let turned_away = other.acquire(&again).await.unwrap();
            assert!(matches!(turned_away, AcquireOutcome::InProgress { .. }), "{emulator:?}: {turned_away:?}");
            table.offset.advance(LEASE + PRECISION);
            let taken = other.acquire(&again).await.unwrap();
            assert!(matches!(taken, AcquireOutcome::Acquired(_)), "{emulator:?}: {taken:?}");
        }
    }
}

/// A record that has expired counts as absent, also for a process that has never seen it.
#[tokio::test]
async fn an_abandoned_record_is_forgotten_by_a_new_process_too() {
    for emulator in BOTH {
        let table = Table::new(emulator).await;
        let request = request();
        let AcquireOutcome::Acquired(_) = table.store().await.acquire(&request).await.unwrap() else { panic!() };
        table.offset.advance(LEASE + RETENTION + PRECISION);
        let fresh = table.store().await.acquire(&repeat_of(&request)).await.unwrap();
        assert!(matches!(&fresh, AcquireOutcome::Acquired(lease) if lease.attempt == 1), "{emulator:?}: {fresh:?}");
    }
}

/// Each has its own sightings, as processes have.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_of_many_processes_takes_over() {
    for emulator in BOTH {
        let table = Table::new(emulator).await;
        let request = request();
        let AcquireOutcome::Acquired(_) = table.store().await.acquire(&request).await.unwrap() else { panic!() };
        let mut processes = Vec::new();
        for _ in 0..6 {
            let store = table.store().await;
            assert!(matches!(store.acquire(&repeat_of(&request)).await.unwrap(), AcquireOutcome::InProgress { .. }));
            processes.push(store);
        }
        for attempt in 2..5 {
            table.offset.advance(LEASE + PRECISION);
            let outcomes =
                join_all(processes.iter().map(|store| async { store.acquire(&repeat_of(&request)).await })).await;
            let taken = outcomes.into_iter().filter_map(|outcome| match outcome.unwrap() {
                AcquireOutcome::Acquired(lease) => Some(lease.attempt),
                AcquireOutcome::InProgress { .. } => None,
                other => panic!("{other:?}"),
            });
            assert_eq!(taken.collect::<Vec<_>>(), [attempt], "{emulator:?}");
            // All see the new version.
            for store in &processes {
                store.acquire(&repeat_of(&request)).await.unwrap();
            }
        }
    }
}
