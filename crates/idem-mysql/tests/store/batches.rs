//! Verbs that share a transaction.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use idem_core::{
    Acquire, AcquireOutcome, IdempotencyStore, Lease, OwnerOutcome, Settlement, StoredBody, StoredResponse, Term,
};
use idem_mysql::MySqlStore;
use idem_testkit::fixture::{KEPT, LEASE, RETENTION, checkpoint, completed, repeat_of, request};

use crate::support::{Database, PRECISION, number, sql};

/// More than a batch takes.
const MANY: usize = 150;

async fn leases(store: &MySqlStore, requests: &[Acquire]) -> Vec<Lease> {
    let acquired = join_all(requests.iter().map(|request| store.acquire(request))).await;
    let leases = acquired.into_iter().zip(requests).map(|(outcome, request)| match outcome.unwrap() {
        AcquireOutcome::Acquired(lease) => {
            assert_eq!((lease.id, lease.owner, lease.attempt), (request.id, request.owner, 1));
            lease
        }
        other => panic!("{other:?}"),
    });
    leases.collect()
}

/// An answer that no other operation has.
fn answer(number: usize) -> StoredResponse {
    let body = format!("answer {number}").repeat(number % 7 + 1);
    StoredResponse { body: StoredBody::Retained(body.into()), ..StoredResponse::new(200 + number as u16 % 50, "") }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_verb_of_a_batch_changes_its_own_record_and_all_of_it() {
    let database = Database::new().await;
    let store = database.store().await;
    let requests: Vec<_> = (0..MANY).map(|_| request()).collect();
    let leases = leases(&store, &requests).await;
    database.offset.advance(LEASE / 2);
    // Checkpoints, some of them large, and longer leases.
    let marks = (0..MANY).map(|number| {
        let data = vec![number as u8; if number % 10 == 0 { 60_000 } else { number }];
        idem_core::Checkpoint { data: data.into(), ..checkpoint(&format!("step {number}")) }
    });
    let marks: Vec<_> = marks.collect();
    let marked = join_all(leases.iter().zip(&marks).map(|(lease, mark)| store.checkpoint(lease, mark))).await;
    assert!(marked.into_iter().all(|outcome| outcome.unwrap() == OwnerOutcome::Applied));
    let terms =
        (0..MANY).map(|number| Term { lease: LEASE + Duration::from_secs(60 * number as u64), retention: RETENTION });
    let terms: Vec<_> = terms.collect();
    let renewed = join_all(leases.iter().zip(&terms).map(|(lease, term)| store.renew(lease, *term))).await;
    assert!(renewed.into_iter().all(|outcome| outcome.unwrap() == OwnerOutcome::Applied));
    for ((lease, mark), term) in leases.iter().zip(&marks).zip(&terms) {
        let record = store.peek(&lease.id).await.unwrap().unwrap();
        assert_eq!(record.checkpoint.as_ref(), Some(mark));
        let idem_core::State::InProgress { lease_until, .. } = record.state else { panic!("{record:?}") };
        let left = lease_until.saturating_duration_since(record.created_at);
        assert!(left.abs_diff(LEASE / 2 + term.lease) <= PRECISION, "{left:?} and not {:?}", term.lease);
        assert_eq!(record.expires_at.saturating_duration_since(lease_until), RETENTION);
    }
    // Each has another answer and another retention; some fail and keep their checkpoint.
    let settled = join_all(leases.iter().enumerate().map(|(number, lease)| {
        let store = &store;
        async move {
            let settlement = match number % 3 {
                0 => Settlement::FailedTerminal(answer(number)),
                _ => Settlement::Completed(answer(number)),
            };
            store.settle(lease, &settlement, KEPT + Duration::from_secs(60 * number as u64)).await.unwrap()
        }
    }));
    assert!(settled.await.into_iter().all(|outcome| outcome == OwnerOutcome::Applied));
    let replays = join_all(requests.iter().map(|request| {
        let again = repeat_of(request);
        let store = &store;
        async move { store.acquire(&again).await.unwrap() }
    }));
    for (number, (replay, lease)) in replays.await.into_iter().zip(&leases).enumerate() {
        let AcquireOutcome::Replay(replay) = replay else { panic!("{number}: {replay:?}") };
        assert_eq!(replay.response, answer(number));
        let record = store.peek(&lease.id).await.unwrap().unwrap();
        assert_eq!(record.checkpoint.is_some(), number % 3 == 0, "{number}");
        let kept = record.expires_at.saturating_duration_since(record.updated_at);
        assert_eq!(kept, KEPT + Duration::from_secs(60 * number as u64));
    }
}

/// Both make the same new records at once, so that batches of one meet those of the other.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn two_processes_that_make_the_same_records_make_each_once() {
    let database = Database::new().await;
    let stores = [Arc::new(database.store().await), Arc::new(database.store().await)];
    for _ in 0..10 {
        let requests: Vec<_> = (0..64).map(|_| request()).collect();
        let acquires = [false, true].into_iter().flat_map(|is_other| {
            let mut repeats: Vec<_> = requests.iter().map(repeat_of).collect();
            if is_other {
                repeats.reverse();
            }
            let store = stores[usize::from(is_other)].clone();
            repeats.into_iter().map(move |repeat| {
                let store = store.clone();
                tokio::spawn(async move { (repeat.id, store.acquire(&repeat).await.unwrap()) })
            })
        });
        let mut owned = Vec::new();
        for acquire in acquires.collect::<Vec<_>>() {
            match acquire.await.unwrap() {
                (id, AcquireOutcome::Acquired(lease)) => {
                    assert_eq!(id, lease.id);
                    owned.push(id);
                }
                (_, AcquireOutcome::InProgress { .. }) => {}
                other => panic!("{other:?}"),
            }
        }
        owned.sort_unstable();
        let mut expected: Vec<_> = requests.iter().map(|request| request.id).collect();
        expected.sort_unstable();
        assert_eq!(owned, expected);
    }
}

/// A thousand repeats of one key are a few batches, and its settlement does not wait behind them for long.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_repeats_of_one_key_share_batches() {
    let database = Database::new().await;
    let store = Arc::new(database.store().await);
    let request = request();
    let AcquireOutcome::Acquired(lease) = store.acquire(&request).await.unwrap() else { panic!() };
    let repeats = (0..1_000).map(|_| {
        let (store, repeat) = (store.clone(), repeat_of(&request));
        tokio::spawn(async move { store.acquire(&repeat).await.unwrap() })
    });
    let repeats: Vec<_> = repeats.collect();
    assert_eq!(store.settle(&lease, &completed(), KEPT).await.unwrap(), OwnerOutcome::Applied);
    for repeat in repeats {
        let outcome = repeat.await.unwrap();
        assert!(matches!(outcome, AcquireOutcome::InProgress { .. } | AcquireOutcome::Replay(_)), "{outcome:?}");
    }
}

/// The lock of a backup lets reads pass, and no commit.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repeat_is_answered_while_commits_stall() {
    let database = Database::on(Box::leak(Box::new(idem_servers::MariaDb::start().unwrap()))).await;
    let store = Arc::new(database.store().await);
    let done = request();
    let AcquireOutcome::Acquired(lease) = store.acquire(&done).await.unwrap() else { panic!() };
    store.settle(&lease, &completed(), KEPT).await.unwrap();
    let mut backup = database.connection().await;
    sql(&mut backup, "FLUSH TABLES WITH READ LOCK").await;
    let stalled: Vec<_> = (0..100)
        .map(|_| {
            let store = store.clone();
            tokio::spawn(async move { store.acquire(&request()).await })
        })
        .collect();
    // The sessions of batches that wait for the lock of the backup.
    let waiting = "SELECT COUNT(*) FROM information_schema.processlist WHERE state LIKE '%backup%lock%'";
    let began = Instant::now();
    while number(&mut backup, waiting).await < 3 {
        assert!(began.elapsed() < PRECISION, "the lock stalls no commits");
    }
    for _ in 0..3 {
        let began = Instant::now();
        let outcome = store.acquire(&repeat_of(&done)).await.unwrap();
        assert!(matches!(outcome, AcquireOutcome::Replay(_)), "{outcome:?}");
        assert!(began.elapsed() < Duration::from_secs(1), "it took {:?}", began.elapsed());
    }
    sql(&mut backup, "UNLOCK TABLES").await;
    for stalled in stalled {
        // Either it was done after the lock, or it waited for too long and failed.
        let _ = stalled.await.unwrap();
    }
}

/// A batch does not wait for a locked row.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_locked_record_does_not_hold_up_the_others() {
    let database = Database::new().await;
    let store = database.store().await;
    let requests: Vec<_> = (0..40).map(|_| request()).collect();
    let leases = leases(&store, &requests).await;
    let (locked, others) = leases.split_first().unwrap();
    let mut other = database.connection().await;
    let id: String = locked.id.as_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    sql(&mut other, format!("START TRANSACTION; SELECT * FROM idem_records WHERE id = x'{id}' FOR UPDATE")).await;
    let settled = join_all(others.iter().map(|lease| {
        let store = &store;
        async move {
            let began = Instant::now();
            assert_eq!(store.settle(lease, &completed(), KEPT).await.unwrap(), OwnerOutcome::Applied);
            began.elapsed()
        }
    }));
    let settlement = completed();
    let (slow, quick) = futures_util::future::join(store.settle(locked, &settlement, KEPT), settled).await;
    assert!(slow.is_err(), "{slow:?}");
    // Less than it waits for a lock.
    assert!(quick.iter().all(|took| *took < Duration::from_millis(900)), "{quick:?}");
    sql(&mut other, "ROLLBACK").await;
    assert_eq!(store.settle(locked, &completed(), KEPT).await.unwrap(), OwnerOutcome::Applied);
}
