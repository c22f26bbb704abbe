//! Every session of the store is terminated, again and again, while many tasks use it.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use idem_core::{AcquireOutcome, Begin, IdempotencyStore, OwnerOutcome, StoreError, TransactionalStore, Writes};
use idem_testkit::fixture::{KEPT, completed, request};

use crate::support::number;
use crate::world::{World, join_all, transactional};

const TASKS: usize = 16;
const RUNS: usize = 10;

/// How many runs end between two terminations, so that a slow machine makes progress too.
const BETWEEN: usize = 10;

/// Repeats a verb until it is answered. Every error on the way says that repeating it may help.
async fn insist<T>(errors: &AtomicUsize, mut verb: impl AsyncFnMut() -> Result<T, StoreError>) -> T {
    loop {
        match verb().await {
            Ok(answer) => return answer,
            Err(error) => {
                assert!(error.is_retryable(), "{error:?}");
                errors.fetch_add(1, Ordering::SeqCst);
            }
        }
    }
}

async fn leased(world: &World, errors: &AtomicUsize) {
    let request = request();
    let store = &world.store;
    let AcquireOutcome::Acquired(lease) = insist(errors, async || store.acquire(&request).await).await else {
        panic!("a lost answer made somebody else the owner")
    };
    assert_eq!(lease.attempt, 1);
    let settled = insist(errors, async || store.settle(&lease, &completed(), KEPT).await).await;
    assert_eq!(settled, OwnerOutcome::Applied, "a settlement was lost");
}

/// Repeats the run until a commit or a replay says that it is done.
async fn transacted(world: &World, errors: &AtomicUsize) {
    let request = transactional();
    loop {
        match insist(errors, async || world.store.begin(&request).await).await {
            Begin::Acquired { mut transaction, .. } => {
                if world.write(&mut *transaction, &request.id).await.is_err() {
                    continue;
                }
                match transaction.finish(&completed(), KEPT, Writes::Keep).await {
                    Ok(outcome) => {
                        assert_eq!(outcome, OwnerOutcome::Applied);
                        return;
                    }
                    Err(error) => assert!(error.is_retryable(), "{error:?}"),
                }
                errors.fetch_add(1, Ordering::SeqCst);
            }
            Begin::Answered(AcquireOutcome::InProgress { .. }) => tokio::task::yield_now().await,
            // An earlier commit had an unknown outcome, and the repeat finds its record.
            Begin::Answered(AcquireOutcome::Replay(_)) => return,
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn terminated_sessions_lose_nothing_that_was_acknowledged() {
    let world = World::shared().await;
    let (errors, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let task = async || {
        for _ in 0..RUNS {
            leased(&world, &errors).await;
            done.fetch_add(1, Ordering::SeqCst);
            transacted(&world, &errors).await;
            done.fetch_add(1, Ordering::SeqCst);
        }
    };
    let mut all = std::pin::pin!(join_all((0..TASKS).map(|_| task())));
    let mut beside = world.beside().await;
    let terminate = format!(
        "SELECT count(*) FILTER (WHERE pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = '{}'",
        world.name
    );
    let (mut terminated, mut next) = (0, 0);
    while tokio::time::timeout(Duration::from_millis(1), &mut all).await.is_err() {
        if done.load(Ordering::SeqCst) >= next {
            terminated += number(&mut beside, &terminate).await;
            next = done.load(Ordering::SeqCst) + BETWEEN;
        }
    }
    println!("{terminated} sessions were terminated, {} verbs failed", errors.load(Ordering::SeqCst));
    assert!(terminated > 20, "only {terminated} sessions were terminated");
    let runs = (TASKS * RUNS) as i64;
    assert_eq!(world.number("SELECT count(*) FROM $.idem_records WHERE state = 2").await, 2 * runs);
    assert_eq!(world.number("SELECT count(*) FROM $.effects").await, runs);
    world.writes_and_records_agree().await;
    world.quiet().await;
    world.is_whole().await;
}
