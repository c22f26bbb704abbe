//! All connections of handlers are in use: repeats are still answered soon.

use std::time::{Duration, Instant};

use idem_core::{AcquireOutcome, Begin, IdempotencyStore, StoreErrorKind, TransactionalStore, Writes};
use idem_testkit::fixture::{KEPT, completed, repeat_of};

use crate::world::{World, transactional};

/// Long for an answer, even on a loaded machine.
const AT_ONCE: Duration = Duration::from_secs(2);

#[tokio::test]
async fn repeats_do_not_wait_for_a_connection_of_a_handler() {
    let world = World::shared().await;
    let settled = world.transact().await.unwrap();
    let settled = idem_core::Acquire { id: settled, ..transactional() };
    let requests = [transactional(), transactional()];
    let mut running = Vec::new();
    for request in &requests {
        let mut transaction = world.begin(request).await.unwrap();
        world.write(&mut *transaction, &request.id).await.unwrap();
        running.push(transaction);
    }
    for request in &requests {
        let start = Instant::now();
        let duplicate = world.store.begin(&repeat_of(request)).await.unwrap();
        assert!(matches!(duplicate, Begin::Answered(AcquireOutcome::InProgress { .. })), "{duplicate:?}");
        let leased = world.store.acquire(&repeat_of(request)).await.unwrap();
        assert!(matches!(leased, AcquireOutcome::InProgress { .. }), "{leased:?}");
        assert!(start.elapsed() < AT_ONCE, "a duplicate waited for {:?}", start.elapsed());
    }
    let start = Instant::now();
    let replay = world.store.begin(&repeat_of(&settled)).await.unwrap();
    assert!(matches!(replay, Begin::Answered(AcquireOutcome::Replay(_))), "{replay:?}");
    assert!(start.elapsed() < AT_ONCE, "a replay waited for {:?}", start.elapsed());
    // After the first one they do not wait at all for handlers that take long.
    let start = Instant::now();
    for _ in 0..20 {
        world.store.begin(&repeat_of(&settled)).await.unwrap();
    }
    assert!(start.elapsed() < Duration::from_secs(1), "20 replays took {:?}", start.elapsed());
    let start = Instant::now();
    let refused = world.store.begin(&transactional()).await.unwrap_err();
    assert_eq!(refused.kind(), StoreErrorKind::Busy, "{refused:?}");
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
    for transaction in running {
        transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap();
    }
    world.writes_and_records_agree().await;
    world.is_whole().await;
}

#[tokio::test]
async fn who_waits_for_a_connection_gets_the_first_that_is_free() {
    // Before and after it has looked whether it is a repeat.
    for after in [10, 200].map(Duration::from_millis) {
        let world = World::shared().await;
        let (first, second, third) = (transactional(), transactional(), transactional());
        let (first, _second) = (world.begin(&first).await.unwrap(), world.begin(&second).await.unwrap());
        let waiting = world.begin(&third);
        let finish = async {
            // `join!` polls the waiting caller first, so it waits before this sleep ends.
            tokio::time::sleep(after).await;
            first.finish(&completed(), KEPT, Writes::Keep).await.unwrap();
        };
        let (waiting, ()) = tokio::join!(waiting, finish);
        waiting.unwrap();
    }
}
