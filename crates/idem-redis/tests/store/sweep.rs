//! Every verb dropped at every await: the record is as before or after, and the store still works.

use std::cell::RefCell;

use idem_core::{AcquireOutcome, IdempotencyStore as _, Settlement};
use idem_servers::{redis_cluster_url, redis_sentinel_url, redis_url};
use idem_testkit::drop_at_every_await;
use idem_testkit::fixture::{KEPT, checkpoint, repeat_of, request, retryable};

use crate::world::World;

/// Some replies arrive before they are awaited, so it takes many sweeps to meet every await.
const SWEEPS: usize = 10;

async fn sweep(world: World) {
    let store = &world.store;
    let current = RefCell::new(request());
    let make = || {
        let request = request();
        current.replace(request.clone());
        async move {
            let AcquireOutcome::Acquired(lease) = store.acquire(&request).await.unwrap() else { panic!() };
            store.renew(&lease, request.term).await.unwrap();
            store.checkpoint(&lease, &checkpoint("charged")).await.unwrap();
            store.peek(&lease.id).await.unwrap();
            store.settle(&lease, &retryable(), KEPT).await.unwrap();
        }
    };
    let mut awaits = 0;
    for _ in 0..SWEEPS {
        awaits += drop_at_every_await(make, |_| async {
            // Repeated with the same token, each verb does what it would have done.
            let request = current.borrow().clone();
            match store.acquire(&request).await.unwrap() {
                AcquireOutcome::Acquired(lease) => world.complete(&lease).await.unwrap(),
                AcquireOutcome::Backoff { .. } => return,
                other => panic!("{other:?}"),
            };
        })
        .await
        .awaits;
    }
    assert!(awaits >= 5 * SWEEPS, "each verb waits at least once: {awaits}");
    for _ in 0..1_000 {
        world.is_whole().await;
    }
}

#[tokio::test]
async fn verbs_dropped_at_every_await_leave_the_record_before_or_after() {
    sweep(World::shared().await).await;
}

#[tokio::test]
async fn verbs_dropped_at_every_await_leave_the_record_before_or_after_where_replicas_are_awaited() {
    sweep(World::with(&redis_sentinel_url(), 0, |config| config.min_replicas(1)).await).await;
}

#[tokio::test]
async fn verbs_dropped_at_every_await_leave_the_record_before_or_after_in_a_cluster() {
    sweep(World::at(&redis_cluster_url(), 0).await).await;
}

#[tokio::test]
async fn releases_dropped_at_every_await_leave_the_key_to_the_next() {
    let world = World::at(&redis_url(), 0).await;
    let store = &world.store;
    let current = RefCell::new(request());
    let make = || {
        let request = request();
        current.replace(request.clone());
        async move {
            let AcquireOutcome::Acquired(lease) = store.acquire(&request).await.unwrap() else { panic!() };
            store.settle(&lease, &Settlement::Released, KEPT).await.unwrap();
        }
    };
    for _ in 0..SWEEPS {
        drop_at_every_await(make, |_| async {
            let request = current.borrow().clone();
            let lease = world.lease(&request).await.unwrap();
            world.settle(&lease, &Settlement::Released).await.unwrap();
            let lease = world.lease(&repeat_of(&request)).await.unwrap();
            world.complete(&lease).await.unwrap();
        })
        .await;
    }
}
