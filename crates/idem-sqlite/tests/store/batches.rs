//! Verbs that share a commit: each has the outcome that it would have alone, after those before it.

use std::time::Duration;

use crate::support::Database;
use futures_util::future::join_all;
use idem_core::{AcquireOutcome, IdempotencyStore, Lease, OwnerOutcome, Settlement, StoreErrorKind};
use idem_testkit::fixture::{KEPT, checkpoint, completed, repeat_of, request};

const MANY: usize = 16;

async fn lease(database: &Database, request: &idem_core::Acquire) -> Lease {
    match database.store.acquire(request).await.unwrap() {
        AcquireOutcome::Acquired(lease) => lease,
        other => panic!("{other:?}"),
    }
}

// On one thread all verbs are in the queue before the writer looks into it.
#[tokio::test]
async fn one_of_many_takes_over_what_its_owner_may_give_back_at_the_same_time() {
    let database = Database::new().await;
    for gives_back in [false, true] {
        let first = request();
        let owned = lease(&database, &first).await;
        database.clock.advance(first.term.lease);
        let repeats: Vec<_> = std::iter::repeat_with(|| repeat_of(&first)).take(MANY).collect();
        let acquires = join_all(repeats.iter().map(|repeat| database.store.acquire(repeat)));
        let release = async {
            match gives_back {
                true => Some(database.store.settle(&owned, &Settlement::Released, KEPT).await.unwrap()),
                false => None,
            }
        };
        let (outcomes, released) = tokio::join!(acquires, release);
        let acquired: Vec<Lease> = outcomes
            .into_iter()
            .filter_map(|outcome| match outcome.unwrap() {
                AcquireOutcome::Acquired(lease) => Some(lease),
                AcquireOutcome::InProgress { .. } => None,
                other => panic!("{other:?}"),
            })
            .collect();
        let [winner] = &acquired[..] else { panic!("{acquired:?}") };
        // A record that was given back is gone, and the next one begins anew.
        let attempt = if released == Some(OwnerOutcome::Applied) { 1 } else { 2 };
        assert_eq!(winner.attempt, attempt, "{released:?}");
        let record = database.store.peek(&first.id).await.unwrap().unwrap();
        assert_eq!((record.owner, record.attempt), (winner.owner, attempt));
    }
}

#[tokio::test]
async fn verbs_of_one_owner_follow_each_other_in_one_commit() {
    let database = Database::new().await;
    let owned = lease(&database, &request()).await;
    let (recovery, done) = (checkpoint("charged"), completed());
    let (renewed, noted, settled, again, late) = tokio::join!(
        database.store.renew(&owned, request().term),
        database.store.checkpoint(&owned, &recovery),
        database.store.settle(&owned, &done, KEPT),
        database.store.settle(&owned, &done, KEPT),
        database.store.renew(&owned, request().term),
    );
    let outcomes = [renewed, noted, settled, again, late].map(Result::unwrap);
    assert_eq!(outcomes[..4], [OwnerOutcome::Applied; 4]);
    assert_eq!(outcomes[4], OwnerOutcome::LeaseLost);
    assert!(database.store.peek(&owned.id).await.unwrap().unwrap().replay().is_some());
}

#[tokio::test]
async fn a_record_that_cannot_be_read_is_an_error_of_its_own_verbs_only() {
    let database = Database::new().await;
    let requests: Vec<_> = std::iter::repeat_with(request).take(MANY).collect();
    let mut leases = Vec::new();
    for request in &requests {
        leases.push(lease(&database, request).await);
    }
    let damage = sqlx::query("UPDATE idem_records SET format = 9 WHERE id = ?");
    damage.bind(requests[3].id.as_bytes().as_slice()).execute(database.store.pool()).await.unwrap();
    let done = completed();
    let settled = join_all(leases.iter().map(|lease| database.store.settle(lease, &done, KEPT))).await;
    let read = join_all(requests.iter().map(|request| database.store.peek(&request.id))).await;
    for (number, (settled, read)) in settled.into_iter().zip(read).enumerate() {
        if number == 3 {
            assert_eq!(settled.unwrap_err().kind(), StoreErrorKind::Corrupt);
            assert_eq!(read.unwrap_err().kind(), StoreErrorKind::Corrupt);
        } else {
            assert_eq!(settled.unwrap(), OwnerOutcome::Applied);
            assert!(read.unwrap().unwrap().replay().is_some());
        }
    }
}

#[tokio::test]
async fn more_than_fits_into_one_commit_is_committed_all_the_same() {
    let database = Database::new().await;
    let requests: Vec<_> = std::iter::repeat_with(request).take(300).collect();
    let acquired = join_all(requests.iter().map(|request| lease(&database, request))).await;
    let large = || idem_core::StoredResponse::new(200, vec![b'x'; 1 << 20]);
    let settlements: Vec<_> = acquired.iter().map(|lease| (lease, Settlement::Completed(large()))).collect();
    // Bytes limit the commits of large answers, and the number of verbs limits the rest.
    let (some, most) = settlements.split_at(10);
    let settle_large = join_all(some.iter().map(|(lease, large)| database.store.settle(lease, large, KEPT)));
    let done = completed();
    let settle = join_all(most.iter().map(|(lease, _)| database.store.settle(lease, &done, KEPT)));
    let (large_ones, rest) = tokio::join!(settle_large, settle);
    assert!(large_ones.into_iter().chain(rest).all(|outcome| outcome.unwrap() == OwnerOutcome::Applied));
    let read = tokio::time::timeout(
        Duration::from_secs(60),
        join_all(requests.iter().map(|request| database.store.peek(&request.id))),
    );
    assert!(read.await.unwrap().into_iter().all(|record| record.unwrap().unwrap().replay().is_some()));
}
