//! The task that removes expired records.

use std::collections::VecDeque;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use idem_core::engine::{Purger, PurgerSettings};
use idem_core::{Purge, StoreError, StoreErrorKind};

/// What becomes of a batch.
#[derive(Debug, Clone, Copy)]
enum Batch {
    Panics,
    TakesTooLong,
    IsFull,
    IsEmpty,
}

/// A store whose batches end as this says; later ones are empty.
#[derive(Debug, Default)]
struct Scripted {
    next: Mutex<VecDeque<Batch>>,
    sizes: Mutex<Vec<u32>>,
}

#[async_trait]
impl Purge for Scripted {
    async fn purge(&self, _: NonZeroU32) -> Result<u32, StoreError> {
        panic!("a task that runs all the time looks after partitions as well")
    }

    async fn maintain(&self, limit: NonZeroU32) -> Result<u32, StoreError> {
        self.sizes.lock().unwrap().push(limit.get());
        let next = self.next.lock().unwrap().pop_front();
        match next.unwrap_or(Batch::IsEmpty) {
            Batch::Panics => panic!("a batch panics"),
            Batch::TakesTooLong => Err(StoreError::new(StoreErrorKind::Timeout, "it takes too long")),
            Batch::IsFull => Ok(limit.get()),
            Batch::IsEmpty => Ok(0),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_batch_that_fails_is_tried_again_and_smaller_if_it_took_too_long() {
    let steps = [Batch::Panics, Batch::TakesTooLong, Batch::TakesTooLong, Batch::IsFull, Batch::IsFull, Batch::IsEmpty];
    let store = Arc::new(Scripted { next: Mutex::new(steps.into()), ..Scripted::default() });
    let purger = Purger::start(Arc::<Scripted>::clone(&store));
    while store.sizes.lock().unwrap().len() < 7 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    purger.stop().await;
    assert_eq!(store.sizes.lock().unwrap()[..7], [500, 500, 250, 125, 250, 500, 500]);
}

#[tokio::test(start_paused = true)]
async fn while_nothing_expires_the_pauses_grow_and_a_stop_ends_them() {
    let store = Arc::new(Scripted::default());
    let settings = PurgerSettings::new().longest_pause(Duration::from_secs(10));
    let purger = Purger::start_with(Arc::<Scripted>::clone(&store), settings);
    tokio::time::sleep(Duration::from_secs(600)).await;
    let asked = store.sizes.lock().unwrap().len();
    // About ten until the pause is the longest, and then each 5 to 10 s.
    assert!((60..=140).contains(&asked), "{asked}");
    let stopping = tokio::time::Instant::now();
    purger.stop().await;
    assert_eq!(stopping.elapsed(), Duration::ZERO);
}
