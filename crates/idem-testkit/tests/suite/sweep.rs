//! The sweep drops a future at each of its awaits, once.

use std::cell::{Cell, RefCell};
use std::num::NonZeroUsize;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use idem_core::{IdempotencyStore, MemoryStore};
use idem_testkit::fixture::{completed, request};
use idem_testkit::{Fault, FaultyStore, Verb, drop_at_await, drop_at_every_await};

#[tokio::test]
async fn every_await_is_reached_once_and_dropped_there() {
    let reached = RefCell::new(Vec::new());
    let dropped = Rc::new(RefCell::new(Vec::new()));
    struct OnDrop(Rc<RefCell<Vec<usize>>>, Rc<Cell<usize>>);
    impl Drop for OnDrop {
        fn drop(&mut self) {
            self.0.borrow_mut().push(self.1.get());
        }
    }
    let report = drop_at_every_await(
        || {
            let progress = Rc::new(Cell::new(0));
            let guard = OnDrop(Rc::clone(&dropped), Rc::clone(&progress));
            async move {
                let _guard = guard;
                for step in 1..=3 {
                    progress.set(step);
                    tokio::task::yield_now().await;
                }
                progress.set(100);
            }
        },
        |awaits| {
            reached.borrow_mut().push(awaits);
            std::future::ready(())
        },
    )
    .await;
    assert_eq!(report.awaits, 3);
    assert_eq!(*reached.borrow(), [0, 1, 2, 3, 3]);
    assert_eq!(*dropped.borrow(), [0, 1, 2, 3, 100]);
}

#[tokio::test]
async fn a_future_that_never_waits_is_dropped_unpolled_and_then_completes() {
    let polled = Cell::new(0);
    let make = || async { polled.set(polled.get() + 1) };
    let report = drop_at_every_await(make, |_| std::future::ready(())).await;
    assert_eq!((report.awaits, polled.get()), (0, 1));
}

#[tokio::test(start_paused = true)]
async fn between_polls_the_future_waits_for_its_own_wake_up() {
    let start = tokio::time::Instant::now();
    let make = || async {
        for _ in 0..2 {
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    };
    let report = drop_at_every_await(make, |_| std::future::ready(())).await;
    assert_eq!(report.awaits, 2);
    // Dropped at the first await at once, at the second after one second, completed after two.
    assert_eq!(start.elapsed().as_secs(), 3);
}

#[tokio::test(start_paused = true)]
async fn the_check_after_each_sees_what_the_dropped_future_left() {
    let store = FaultyStore::new(Arc::new(MemoryStore::new(NonZeroUsize::MAX)));
    store.next(Verb::Settle, Fault::Delay(Duration::from_secs(1)));
    store.next(Verb::Settle, Fault::Delay(Duration::from_secs(1)));
    let current = RefCell::new(request());
    let settled = RefCell::new(Vec::new());
    let run = || async {
        let request = request();
        current.replace(request.clone());
        let idem_core::AcquireOutcome::Acquired(lease) = store.acquire(&request).await.unwrap() else { panic!() };
        store.settle(&lease, &completed(), Duration::from_secs(60)).await.unwrap();
    };
    let check = async |_| {
        let id = current.borrow().id;
        let record = store.inner().peek(&id).await.unwrap();
        settled.borrow_mut().push(record.is_some_and(|record| record.replay().is_some()));
    };
    let report = drop_at_every_await(run, check).await;
    assert_eq!(report.awaits, 1);
    assert_eq!(*settled.borrow(), [false, false, true]);
}

#[tokio::test]
#[should_panic(expected = "did not complete within")]
async fn a_future_that_never_ends_is_given_up() {
    let endless = || {
        std::future::poll_fn(|context| {
            context.waker().wake_by_ref();
            std::task::Poll::<()>::Pending
        })
    };
    drop_at_every_await(endless, |_| std::future::ready(())).await;
}

#[tokio::test]
async fn a_single_future_is_dropped_at_the_await_that_was_asked_for() {
    let progress = Cell::new(0);
    let steps = || async {
        for step in 1..=3 {
            progress.set(step);
            tokio::task::yield_now().await;
        }
        "done"
    };
    for awaits in 0..=3 {
        progress.set(0);
        assert_eq!(drop_at_await(awaits, steps()).await, None);
        assert_eq!(progress.get(), awaits);
    }
    assert_eq!(drop_at_await(4, steps()).await, Some("done"));
}
